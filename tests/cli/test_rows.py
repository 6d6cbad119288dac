"""`rocm-ext rows`: what it says of the data is what the recipe trains on."""

import json
from pathlib import Path
from statistics import median_low

import numpy as np
import pytest
from rocm_ext.recipes.grpo_rocm import GRPO
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import cli, config
from rocm_ext.base import registry
from rocm_ext.data.rows import labelled
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.rl.prompts import PromptSet
from tests.kit import grpo_runs, raft_runs
from tests.kit.families import CHATML
from tests.kit.lines import one_line_has
from tests.kit.tiny import TEXT, run_config, write_model, write_rows, write_yaml

SFT, PAIRS = "rocm_ext.data.sft_dataset", "rocm_ext.data.preference_dataset"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    top = tmp_path_factory.mktemp("rows")
    write_model(top / "base")
    (top / "base/chat_template.jinja").write_text(CHATML)
    write_rows(top / "prompts.jsonl", 12)
    write_rows(top / "heldout.jsonl", 4, start=100)
    return top


def write(path: Path, rows: list[dict]) -> dict:
    """Write rows as JSON lines; return an SFT dataset of them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"_component_": SFT, "source": str(path)}


def chat(*turns: str) -> dict:
    """A conversation; user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


@pytest.fixture
def rows(folder, tmp_path, capsys):
    """``rows(*options, **changes)``: exit code, stdout and stderr of the command with a run's config."""

    def rows(*options: str, **changes) -> tuple[int, str, str]:
        path = tmp_path / "run.yaml"
        write_yaml(
            path, run_config(folder / "base", folder / "prompts.jsonl", tmp_path / "out", **changes)
        )
        code = cli.main(["rows", "--config", str(path), *options])
        said = capsys.readouterr()
        return code, said.out, said.err

    return rows


def as_json(said: tuple[int, str, str]) -> dict:
    code, out, err = said
    assert code == 0, err
    return json.loads(out)


def of_recipe(kind: type[LoRAFinetune], path: Path, *overrides: str) -> LoRAFinetune:
    """The recipe after its own checks, with the rows that it would train on."""
    recipe = kind(
        config.load(registry.find(kind.__module__.rpartition(".")[2]), str(path), list(overrides))
    )
    recipe.check()
    recipe.cleanup()
    return recipe


def trained_texts(rows, number: int, decode) -> list[str]:
    """The text of each run of labels of a row that a token of its sequence predicts."""
    tokens, mask = rows.tokens[number], labelled(rows.labels[number], rows.lengths[number])
    edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0))
    return [decode(tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def marked(sequence: dict) -> list[str]:
    return [sequence["text"][start:end] for start, end in sequence["trained"]]


def test_numbers_and_spans_are_those_of_the_recipe(rows, folder, tmp_path):
    data = write(
        tmp_path / "rows.jsonl",
        [
            chat("a", "b", "c c", "It is 12. naïve 🎉"),
            chat("a", "b " * 200),
            chat("a", "", "c"),
            chat("q", "r"),
            chat("q", "r"),
            {"text": "plain text 你好"},
            {"prompt": "q", "completion": "another"},
            {"prompt": "q"},
        ],
    )
    held_out = write(tmp_path / "val.jsonl", [chat("q", "r"), chat("q", "unseen"), chat("z", "z")])
    changes = {"dataset": data, "dataset_val": held_out, "too_long": "drop", "bad_rows": "drop"}
    found = as_json(rows("--json", "--show", "9", **changes))
    recipe = of_recipe(LoRAFinetune, tmp_path / "run.yaml")
    trained, of, decode = recipe.rows, found["dataset"], recipe.learner.tokenizer.renderer.text
    assert (
        of["counts"]
        == trained.counts
        == {**trained.counts, "rows": 8, "dropped_too_long": 1, "bad_rows": 2}
    )
    assert of["first"] == {
        "dropped_too_long": f"{data['source']}:2",
        "bad_rows": f"{data['source']}:3",
    }
    assert of["kept"] == len(trained) == len(found["shown"]) == 5
    lengths = [len(tokens) for tokens in trained.tokens]
    spread = of["tokens"]["row"]
    assert (spread["min"], spread["max"], spread["total"]) == (
        min(lengths),
        max(lengths),
        sum(lengths),
    )
    assert spread["median"] == median_low(lengths)
    assert sum(count for *_, count in spread["histogram"]) == 5
    labels = sum(
        int(labelled(*row).sum()) for row in zip(trained.labels, trained.lengths, strict=True)
    )
    assert of["tokens"]["trained"]["total"] == labels
    assert of["trained_share"] == labels / sum(lengths)
    for number, row in enumerate(found["shown"]):
        (sequence,) = row["sequences"]
        assert sequence["text"] == decode(trained.tokens[number])
        assert marked(sequence) == trained_texts(trained, number, decode)
    assert [row["origin"].rpartition(":")[2] for row in found["shown"]] == ["1", "4", "5", "6", "7"]
    assert marked(found["shown"][0]["sequences"][0]) == [
        "b<|im_end|>",
        "It is 12. naïve 🎉<|im_end|>",
    ]
    assert (of["repeated"], of["first_repeated"]) == (
        1,
        [[f"{data['source']}:5", f"{data['source']}:4"]],
    )
    validation = found["validation"]
    assert (validation["kept"], validation["trained_on"], validation["prompt_trained_on"]) == (
        3,
        1,
        2,
    )
    assert validation["first_trained_on"] == [[f"{held_out['source']}:1", f"{data['source']}:4"]]
    assert (found["steps_per_epoch"], found["rows_per_step"]) == (1, 8)


def test_a_run_writes_them_and_its_report_shows_them(rows, folder, tmp_path, capsys, messages):
    data = write(
        tmp_path / "rows.jsonl",
        [chat("<b>a", "b & c") | {"weight": 2.5}, chat("a", "b " * 40), {"prompt": "q"}],
    )
    found = as_json(rows("--json", dataset=data, bad_rows="drop"))
    recipe = LoRAFinetune(
        config.load(registry.find("lora_finetune_rocm"), str(tmp_path / "run.yaml"), [])
    )
    recipe.setup()
    recipe.cleanup()
    written = json.loads((tmp_path / "out/rows.json").read_text())
    assert [row.pop("origin") for row in written["shown"]] == ["row 0", "row 1"]
    assert [row.pop("origin").rpartition(":")[2] for row in found["shown"]] == ["1", "2"]
    assert {"recipe": "lora_finetune_rocm", **written} == found
    assert written["dataset"]["weights"] == [1, 2.5]
    assert [
        said
        for said in messages
        if said.startswith("dataset: its column weight") and said.endswith("1 to 2.5")
    ]
    grpo = grpo_runs.write_run(folder, tmp_path / "grpo")
    found = as_json((cli.main(["rows", "--json", "--config", str(grpo)]), *capsys.readouterr()))
    recipe = GRPO(config.load(registry.find("grpo_rocm"), str(grpo), []))
    recipe.setup()
    recipe.cleanup()
    assert {"recipe": "grpo_rocm", **json.loads((tmp_path / "grpo/rows.json").read_text())} == found
    assert (
        cli.main(
            [
                "report",
                str(tmp_path / "out"),
                str(tmp_path / "grpo"),
                "-o",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    page = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;a" in page
    assert "<mark>b &amp; c&lt;|im_end|&gt;</mark>" in page
    assert "bad rows: 1, first" in page
    assert page.count("<b>Lengths</b>") == 2


@pytest.mark.parametrize("write_run", [raft_runs.write_run, grpo_runs.write_run])
def test_prompts(folder, tmp_path, capsys, write_run):
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join([*lines, lines[2], json.dumps({"question": "word " * 500})]))
    path, override = str(write_run(folder, tmp_path / "out")), f"prompts.source={source}"
    assert cli.main(["rows", "--json", "--config", path, override]) == 1, "the run would end, too"
    said = capsys.readouterr()
    assert one_line_has(said.err, f"error: {source}:14: ", "more than the 512 that the model takes")
    found = json.loads(said.out)
    cfg = config.load(config.recipe_of(path, []), path, [override])
    prompts = PromptSet(cfg)
    prompts.render(open_tokenizer(cfg))
    of = found["dataset"]
    assert of["counts"] == {"rows": 14, "dropped_repeated": 1, "too_long_for_the_model": 1}
    assert of["first"] == {
        "dropped_repeated": f"{source}:13",
        "too_long_for_the_model": f"{source}:14",
    }
    assert of["kept"] == 13
    assert of["tokens"]["prompt"]["total"] == sum(
        len(prompts.tokens[prompt.id]) for prompt in prompts.training
    )
    assert found["validation"]["kept"] == len(prompts.held_out)
    assert found["shown"][-1]["row"] == 12
    (first,) = found["shown"][0]["sequences"]
    assert first["text"].endswith("<|im_start|>assistant\n")
    assert first["trained"] == []
    assert cli.main(["rows", "--config", path, "prompts=null"]) == 1
    assert one_line_has(capsys.readouterr().err, "error: ", "prompts must be set")


def test_what_rows_hold_does_not_reach_the_terminal_raw(rows, tmp_path, monkeypatch):
    evil = "\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202e \r"
    data = write(tmp_path / "rows.jsonl", [chat(evil, evil + "end"), chat("long", TEXT[0] * 9000)])
    code, out, _ = rows("tokenizer.max_seq_len=null", "too_long=truncate", dataset=data)
    assert code == 0
    assert not {"\x1b", "\x07", "\r", "\u202e"} & set(out)
    assert r"⟦\x1b[31mred\x1b[0m \x1b]0;title\x07 \u202e \rend<|im_end|>⟧" in out
    assert " characters … " in out
    assert len(out) < 5000
    shown = as_json(rows("--json", "--row", "0", dataset=data))["shown"]
    assert evil + "end<|im_end|>" in marked(shown[0]["sequences"][0])
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    for no_color, expected in (("", "\x1b[30;42mr<|im_end|>\x1b[0m"), ("1", "⟦r<|im_end|>⟧")):
        monkeypatch.setenv("NO_COLOR", no_color)
        assert expected in rows(dataset=write(tmp_path / "rows.jsonl", [chat("q", "r")]))[1]


@pytest.mark.parametrize(("options", "code", "facts"), [
    (["dataset.source=none.jsonl"], 1, ["none.jsonl: no such file"]),
    (["dataset.column_map=null"], 1, ["12 rows are bad", "prompts.jsonl:1", "['question', 'answer']"]),
    (["dataset.source={empty}"], 1, ["empty.jsonl has no rows"]),
    (["tokenizer.max_seq_len=30", "too_long=error"], 1, ["prompts.jsonl:", "max_seq_len is 30"]),
    (["--row", "12"], 2, ["there is no row 12", "0 to 11"]),
])  # fmt: skip
def test_bad_input_is_one_line(rows, tmp_path, options, code, facts):
    (tmp_path / "empty.jsonl").write_text("")
    options = [option.replace("{empty}", str(tmp_path / "empty.jsonl")) for option in options]
    found, out, err = rows(*options)
    assert (found, out) == (code, "")
    assert one_line_has(err, "error: ", *facts)
