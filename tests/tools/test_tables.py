"""The tables and pictures of README.md and docs show what the program does and what was last measured."""

import json
import re
import sys

import pytest

import rocm_ext
from rocm_ext.model.families import _FAMILIES
from rocm_ext.model.weights.llama_cpp_models import ROWS
from tests.kit import hf_models, multimodal_models
from tools import pictures, tables
from tools.benchmarks import __main__ as command
from tools.benchmarks import peers
from tools.benchmarks.protocol import Failed
from tools.benchmarks.table import table

MADE = {page: parts for page, parts in tables.PAGES.items() if "plans" not in parts}
MODELS = (tables.ROOT / "docs" / "models.md").read_text()


@pytest.mark.parametrize("page", MADE)
def test_the_page_is_as_the_command_writes_it(page):
    text = (tables.ROOT / page).read_text()
    assert tables.filled(text, MADE[page]) == text, "run make tables"
    emptied = re.sub(
        r"(made by tools/tables.py -->\n\n).*?(?=<!-- end -->)", r"\1", text, flags=re.DOTALL
    )
    assert len(emptied) < len(text) - 150
    assert tables.filled(emptied, MADE[page]) == text


@pytest.mark.wide(always=1)
@pytest.mark.usefixtures("as_configured")
@pytest.mark.parametrize("config", tables.PLANS)
def test_the_table_of_plans_is_what_plan_computes(config):
    assert (
        tables.plan_line(config)
        in (tables.ROOT / "docs" / "plan-and-bench.md").read_text().splitlines()
    )


def test_the_newest_figures_are_of_todays_peers():
    """So whoever pins another peer, changes the version or adds a comparison measures anew."""
    machine, rows = next(iter(tables.measured().items()))
    for row in rows:
        assert row["pins"] == peers.pins_of(row["peer"]), (machine, row["peer"])
        assert row["version"] == rocm_ext.__version__, (machine, row["peer"])
    found = {
        (row["work"], row.get("shape"), row["vocab"], row["dtype"], row["peer"]) for row in rows
    }
    asked = {
        (task.work, task.shape, task.vocab, task.dtype, peer)
        for task in command.SMALL_SET
        for peer in task.peers
    }
    assert asked <= found


def test_comparisons_are_written_as_they_end(tmp_path, monkeypatch, capsys):
    """The second one fails, and the user stops the third one."""
    rows = next(iter(tables.measured().values()))
    file = tmp_path / "figures.json"

    def stop(folder):
        assert json.loads(file.read_text())["rows"][0]["speedup"] == rows[0]["speedup"]
        raise KeyboardInterrupt

    def fail(folder):
        raise Failed("no peer")

    parts = [("first", lambda folder: [rows[0]]), ("second", fail), ("third", stop)]
    monkeypatch.setattr(command, "comparisons", lambda args: iter(parts))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        command.main()
    printed = capsys.readouterr()
    assert ended.value.code == 1
    line = table([rows[0]]).splitlines()[-1]
    assert line in printed.out
    assert printed.err.index(line) < printed.err.index("failed: no peer")


def test_the_picture_of_the_rooms_is_not_old():
    """The same rooms in the same order, each within a tenth of its lines."""
    then, now = (re.findall(r">([^<>]+) <tspan class=.more.>([\d,]+)<", text) for text in (
        (pictures.PICTURES / "rooms.svg").read_text(), pictures.rooms()))  # fmt: skip
    assert [name for name, _ in then] == [name for name, _ in now], "run python tools/pictures.py"
    for (name, old), (_, new) in zip(then, now, strict=True):
        old, new = (int(each.replace(",", "")) for each in (old, new))
        assert new == pytest.approx(old, rel=0.1, abs=30), f"{name}: run python tools/pictures.py"


def test_this_library_s_own_decoders_are_named():
    own, _ = MODELS.split("## Other architectures")
    assert set(re.findall(r"^\| `(\w+ForCausalLM)`", own, re.MULTILINE)) == _FAMILIES.keys()


def test_each_layout_of_llama_cpp_has_a_model_that_the_tests_ask():
    text = {hf_models.MODELS[name][0] for name in hf_models.GGUF}
    assert (
        text | {multimodal_models.MODELS[name][1] for name in multimodal_models.GGUF} == ROWS.keys()
    )
