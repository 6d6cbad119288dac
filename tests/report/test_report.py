"""`rocm-ext report`: the page's content; test_web.py opens one in a browser."""

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rocm_ext.report as report_package
from rocm_ext.cli import main
from rocm_ext.report import charts
from rocm_ext.report.charts import visible
from tests.kit.lines import one_line_has
from tests.kit.run_folders import (
    append_jsonl,
    curve,
    hardware,
    raft,
    sft,
    write_jsonl,
)

RIGHT = [[True] * 3 + [False] * 7, [True] * 5 + [False] * 5, [True] * 8 + [False] * 2]
CHARTS = ("Loss", "Learning rate", "Gradient norm", "Speed", "Peak memory")


def report(*folders: Path, output: Path | None = None) -> str:
    """Write the report and return the page's text."""
    assert main(["report", *map(str, folders), *(["-o", str(output)] if output else [])]) == 0
    return (output or folders[0] / "report.html").read_text()


def figures(html: str) -> list[str]:
    return re.findall(r"<figcaption><b>([^<]*)</b>", html)


def figure(html: str, title: str) -> dict[str, Any]:
    part = html.split(f"<figcaption><b>{title}</b>")[1].split("</figure>")[0]
    return json.loads(part.split('<script type="application/json">')[1].split("</script>")[0])


def words(html: str) -> str:
    """Return the text between tags, without scripts."""
    html = re.sub(r"<script.*?</script>", " ", html.partition("</style>")[2], flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return hardware(sft(tmp_path / "run", curve(120), validation={40: 1.4, 80: 1.2, 120: 1.1}))


@pytest.fixture
def raft_run(tmp_path: Path) -> Path:
    return raft(tmp_path / "raft", RIGHT, drawn=4)


def test_a_run_of_sft(run, capsys):
    html = report(run)
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert {"Loss", "Validation loss", "GPU load"} <= {*figures(html)}
    text = words(html)
    for fact in (
        "Qwen2.5-7B-Instruct · lora_qwen2_5_7b_base", "Steps 120, epoch 1", "1.1 at step 120", "State finished",
        "a.jsonl: 3,000 rows · b.jsonl: 12 rows", "optimizer.lr 0.0002",
    ):  # fmt: skip
        assert fact in text, fact
    assert str(run / "adapter") in text


def test_a_run_of_sft_with_evaluations(tmp_path):
    out = sft(tmp_path / "run", curve(20), right=dict(zip((0, 10, 20), RIGHT, strict=True)))
    html = report(out)
    assert figure(html, "Held-out pass@1")["data"][0]["x"] == [0, 10, 20]
    text = words(html)
    assert "30.0 % (10.8 – 60.3) → 80.0 % (49.0 – 94.3)" in text
    assert "step 10 0 5 of 10 50.0 % 23.7 – 76.3" in text
    assert "4 answers of the evaluations after steps 0 and 20, one of each kind" in text
    assert "Step 20: all wrong" in text
    both = report(out, raft(tmp_path / "raft", RIGHT), output=tmp_path / "both.html")
    assert both.count("<b>Held-out pass@1</b>") == 2  # by cycle and by step


def test_a_run_of_raft(raft_run):
    html = report(raft_run)
    text = words(html)
    assert (
        "30.0 % (10.8 – 60.3) → 80.0 % (49.0 – 94.3)" in text
    )  # Wilson's intervals of 3 and 8 of 10
    assert "cycle 2 48 8 of 10 80.0 % 49.0 – 94.3" in text  # after 24 answers in each of two cycles
    assert "groups of cycles 1 and 2, one of each kind" in text
    for verdict in ("CORRECT", "WRONG", "UNPARSED", "TIMEOUT", "ERROR"):
        assert f">{verdict}</span>" in html
    lines = (raft_run / "samples.jsonl").read_text().splitlines(keepends=True)
    (raft_run / "samples.jsonl").write_text("".join(reversed(lines)))
    assert report(raft_run) == html


def test_several_runs(run, raft_run, tmp_path, monkeypatch):
    other = sft(tmp_path / "b" / "run", curve(90) * 1.1, seed=5, finished=False)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(run), str(raft_run), str(other), str(run)]) == 0
    html = (tmp_path / "report.html").read_text()
    assert not (run / "report.html").exists()
    text = words(html)
    assert "3 runs" in text  # one was named twice
    assert "raft b/run" in text  # two have the same name: in the legend, not in a path
    assert "seed 0 0 5" in text
    differing = text.split("Settings that differ")[1].split(" Settings ")[0]
    assert "seed" in differing
    assert "output_dir" not in differing  # nor what is below it
    assert "State not finished, last line of 20" in text
    drawn = [
        trace["line"]["color"]
        for trace in figure(html, "Loss")["data"]
        if trace.get("hoverinfo") != "skip"
    ]
    assert drawn == ["var(--c0)", "var(--c1)", "var(--c2)"]


def prompts(folder: Path) -> dict[str, Any]:
    """The setting ``prompts`` of a run, whose file is written into a folder."""
    rows = [
        {"id": f"prompt{i}", "prompt": f"What is {i} and {i}?", "answer": "7"} for i in range(6)
    ]
    data = write_jsonl(folder / "prompts.jsonl", rows)
    return {"_component_": "rocm_ext.data.prompt_dataset", "source": str(data)}


def test_prompts_come_from_the_runs_own_file(tmp_path):
    node = prompts(tmp_path)
    assert "What is 1 and 1?" in report(raft(tmp_path / "run", RIGHT, prompts=node))
    Path(node["source"]).unlink()
    shutil.rmtree(tmp_path / "run")
    assert "What is" not in report(raft(tmp_path / "run", RIGHT, prompts=node))


def test_hardware_of_several_gpus_and_a_pause(tmp_path):
    html = report(hardware(sft(tmp_path / "run", curve(30)), gpus=3, pause_at=60))
    load = figure(html, "GPU load")
    assert [trace["name"] for trace in load["data"]] == ["GPU 0", "GPU 1", "GPU 2"]
    assert [mark["label"]["text"] for mark in load["layout"]["shapes"]] == ["resumed"]
    assert [trace["y"].index(None) for trace in load["data"]] == [
        60
    ] * 3  # two strokes, and none across
    assert "9m55s, resumed 1 time" in words(html)  # the pause in between does not count


def test_runs_with_few_steps(tmp_path):
    text = words(report(sft(tmp_path / "none", [], lines=[], finished=False)))
    assert "The run has recorded no step yet" in text
    assert "Qwen2.5-7B-Instruct" in text
    html = report(sft(tmp_path / "one", curve(1), finished=False))
    traces = [trace for title in CHARTS for trace in figure(html, title)["data"]]
    assert [(trace["x"], trace["mode"]) for trace in traces] == [([1], "lines+markers")] * len(
        CHARTS
    )
    html = report(sft(tmp_path / "three", [2.5, 2.0, 1.5]))
    assert (
        'aria-label="Loss, nats per token: loss goes from 2.5 at step 1 to 1.5 at step 3"' in html
    )
    html = report(
        raft(tmp_path / "raft", RIGHT[:1], finished=False)
    )  # the evaluation before training
    assert figures(html) == ["Held-out pass@1"]
    assert "cycle 0 0 3 of 10 30.0 % 10.8 – 60.3" in words(html)


def test_losses_that_are_not_finite_and_spikes(tmp_path):
    losses = curve(60)
    losses[[20, 40]] = np.nan, np.inf
    html = report(sft(tmp_path / "run", losses))
    (lost,) = [
        trace for trace in figure(html, "Loss")["data"] if trace["name"].endswith("not finite")
    ]
    assert lost["x"] == [21, 41]
    (_, lost) = figure(report(sft(tmp_path / "all", [np.nan] * 30)), "Loss")["data"]
    assert len(lost["x"]) == 30
    losses = curve(300)
    losses[150] = 1e6  # does not flatten the rest
    html = report(sft(tmp_path / "spike", losses))
    loss = figure(html, "Loss")
    assert 2 < loss["layout"]["yaxis"]["range"][1] < 20
    assert (
        max(value for trace in loss["data"] for value in trace["y"]) == 1e6
    )  # a reader can zoom out
    assert "without spikes" in words(html)


def test_files_that_are_torn_or_may_not_be_read(run, monkeypatch):
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n{"step": 121, "lo')
    real = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "config.yaml":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    text = words(report(run))
    assert "metrics.jsonl: skipped 1 line that is not a JSON object" in text
    assert "Steps 120" in text
    assert "config.yaml cannot be read: Permission denied" in text


@pytest.mark.parametrize("files", [
    None, {}, "text", {"config.yaml": b"site_name: docs\n"},
    {"metrics.jsonl": bytes(range(256)), "config.yaml": b"\x00\xff"},
])  # fmt: skip
def test_no_run(tmp_path, capsys, files):
    folder = tmp_path / "no run"
    if files == "text":
        folder.write_text("text")
    elif files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(folder)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert str(folder) in err
    if isinstance(files, dict):
        assert one_line_has(
            err, "output_dir", "lora_finetune_rocm", "raft_rocm", "grpo_rocm", "dpo_rocm"
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_page_that_cannot_be_written(run, tmp_path, capsys, monkeypatch):
    (rows := tmp_path / "rows.jsonl").write_text("precious")
    for output in (tmp_path, rows / "r.html", rows):
        assert main(["report", str(run), "-o", str(output)]) in (1, 2)
        assert capsys.readouterr().err.startswith("error: ")
    charts.library.cache_clear()
    report_package._library.cache_clear()
    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    assert main(["report", str(run)]) == 1
    assert "pip install 'plotly" in capsys.readouterr().err


JUNK = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just(10**400)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
KEYS = [
    "step",
    "loss",
    "val_loss",
    "val_loss/target",
    "warnings",
    "lr",
    "tokens",
    "seconds",
    "peak_memory",
    "time",
    "gpus",
    "host",
    "cycle",
    "phase",
    "cycles",
    "prompts",
    "correct",
    "pass_at_k",
    "reward",
    "verdict",
    "sample",
    "prompt_id",
    "logprobs",
    "messages",
    "tools",
    "given",
    "parts",
    "detail",
    "answers",
    "flat",
    "eval",
    "text",
    "stopped",
    "steps",
    "sample_seconds",
    "reward/form",
]


@pytest.mark.wide
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_values_in_its_files(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("wild")
    run, other = (
        hardware(raft(folder / name, RIGHT[:2], answers=4, drawn=1), lines=4) for name in "ab"
    )
    files = sorted(path for path in run.rglob("*.json*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=3, unique=True)):
        lines = path.read_text().splitlines()
        value = json.loads(data.draw(st.sampled_from(lines))) if path.suffix == ".jsonl" else {}
        value |= data.draw(st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4))
        line, junk = (
            json.dumps(value).encode(),
            data.draw(st.binary(max_size=60) | st.just(b"[" * 9000)),
        )
        with path.open("ab" if path.suffix == ".jsonl" else "wb") as file:
            file.write(
                b"\n".join([line, junk, b""])
                if path.suffix == ".jsonl"
                else data.draw(st.sampled_from([line, junk]))
            )
    assert "</html>" in report(run)
    for how in ([], ["--json"]):
        assert main(["compare", str(other), str(run), *how]) in (0, 1, 2, 3)
    assert main(["monitor", "--count", "1", "--root", str(folder), "--run", str(run)]) == 0


def test_commands_that_read_runs_need_no_torch(run, tmp_path):
    samples = raft(tmp_path / "raft", RIGHT, prompts=prompts(tmp_path))
    page, other = tmp_path / "page.html", sft(tmp_path / "other", curve(120), speed=2000)
    code = f"""import sys
from rocm_ext.cli import main
assert main(["report", {str(run)!r}, {str(samples)!r}, "-o", {str(page)!r}]) == 0
assert main(["compare", {str(run)!r}, {str(other)!r}]) == 0
assert main(["monitor", "--count", "1", "--run", {str(run)!r}, "--log", {str(tmp_path / "log")!r}]) == 0
import rocm_ext.machine.counters
sys.exit("torch" in sys.modules)"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert "What is 1 and 1?" in page.read_text()


def test_a_long_run_makes_a_small_file(tmp_path):
    losses = 1 + np.random.default_rng(0).normal(size=30000) * 0.1
    losses[[12345, 23456]] = 0.2, 1.9
    html = report(sft(tmp_path / "run", losses))
    assert len(html) < 2_300_000  # 2.0 MB of them are plotly.js
    faint = figure(html, "Loss")["data"][0]
    assert len(faint["y"]) < 1100
    assert (min(faint["y"]), max(faint["y"])) == (0.2, 1.9)


NASTY = (
    "<script>window.pwned=1</script><img src=x onerror='window.pwned=2'>]]>--></title></style></pre></svg>"
    "\"'`&lt;&#60;{{7*7}}{% raw %}\u202eright to left\u2066\x00\x1b[31m\x7f\u2028\ud800 \ufeff"
    + "W"
    * 5000
)


def hostile(folder: Path) -> Path:
    """Write a run in which every text is an attack."""
    texts = dict.fromkeys(("CORRECT", "WRONG", "UNPARSED", "TIMEOUT", "ERROR", "detail"), NASTY)
    run = raft(folder / "<script>window.pwned=3<\\script> \u202e\"'&", RIGHT, texts=texts)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {"model": {"_component_": NASTY, NASTY: NASTY}, "hardware": NASTY, "dtype": NASTY}
    (run / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    scope = {"step": 2, "phase": "sample", "prompt_id": NASTY}
    lines = [
        {**scope, "sample": i, "verdict": NASTY[:60], "reward": 0.5, "detail": NASTY}
        for i in range(3)
    ]
    calls = [
        {"id": NASTY, "function": {"name": NASTY, "arguments": {NASTY: NASTY}}, "problem": NASTY}
    ]
    said = {
        "role": NASTY,
        "name": NASTY,
        "content": NASTY,
        "reasoning_content": NASTY,
        "tool_calls": calls,
    }
    parameters = {"properties": {NASTY: {"type": NASTY, "description": NASTY}}}
    tool = {"function": {"name": NASTY, "description": NASTY, "parameters": parameters}}
    told = {"messages": [said, {**said, "role": "system"}], "tools": [tool]}
    samples = [{**line, **told, "text": NASTY, "tokens": [1], "logprobs": [-1.0]} for line in lines]
    for name, more in (("verdicts", lines), ("samples", samples)):
        append_jsonl(run / f"{name}.jsonl", more)
    append_jsonl(
        run / "metrics.jsonl", [{"step": 1, "reward": 0.5, "machine": NASTY, NASTY: NASTY}]
    )
    gpus = [{"id": NASTY, "name": NASTY, "busy": 5}, {"id": "b", "busy": 6}]
    write_jsonl(run / "hardware.jsonl", [{"time": 5 * i, "gpus": gpus} for i in range(5)])
    return run


def test_hostile_text_is_only_text(tmp_path):
    html = report(hostile(tmp_path), output=tmp_path / "r.html")
    assert html.isascii()
    assert set(re.findall("<script[^>]*>", html)) == {
        "<script>", '<script type="application/json">', '<script type="application/gzip" id="library">'
    }  # fmt: skip
    assert html.count("<script>") == 1
    assert "<img" not in html
    assert "&#8238;" not in html  # the character that reverses direction, as a reference
    assert "\\u202eright to left" in html
    assert "&#9216;" in html  # the symbol for NUL
    assert "\\ud800" in html
    assert "characters left out" in html
    assert "{{7*7}}" in html  # not evaluated


def test_visible():
    assert visible("a\r\nb\tc", 99) == "a\nb\tc"
    assert visible("\x00\x1b\x7f\u202e\ud83d", 99) == "\u2400\u241b\\u007f\\u202e\\ud83d"
    assert visible("नि\u200dत्य é 中文 👩\u200d💻", 99) == "नि\u200dत्य é 中文 👩\u200d💻"
    clipped = visible("a" * 50 + "b" * 50, limit=40)
    assert clipped == "a" * 30 + "\n[ 60 characters left out ]\n" + "b" * 10
