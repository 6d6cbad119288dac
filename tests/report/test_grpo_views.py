"""Runs of ``grpo_rocm`` in ``rocm-ext report``, ``compare`` and ``monitor``."""

import json
import os
import re
from pathlib import Path

import pytest

from rocm_ext.cli import main
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import mcnemar
from tests.kit.run_folders import grpo, policy_answers, raft, write_jsonl
from tests.report.test_report import figure, figures, report, words
from tests.runs.test_compare import document, flip, passing

RIGHT = {0: [True] * 3 + [False] * 7, 10: [True] * 5 + [False] * 5, 20: [True] * 8 + [False] * 2}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return grpo(tmp_path / "run", RIGHT)


def groups(html: str) -> list[tuple[str, str, int]]:
    """Return step, kind and number of shown answers of the groups on a page."""
    found = []
    for part in html.split("<h3><b>Step ")[1:]:
        step, kind = re.match(r"(\d+): ([^<]*)</b>", part).groups()  # type: ignore[union-attr]
        found.append((int(step), kind, part.partition("</article>")[0].count('class="one"')))
    return found


def test_the_page_of_a_run(run):
    html = report(run)
    assert "Agreement with the teacher" not in figures(html), "the run has no teacher"
    text = words(html)
    for fact in (
        "State finished", "Steps 20 ",
        "30.0 % (10.8 – 60.3) → 80.0 % (49.0 – 94.3)",  # Wilson's intervals of 3 and 8 of 10
        "Groups 28.7 % flat, 15.0 % all right, 10.0 % all wrong",
        "10 160 5 of 10 50.0 % 23.7 – 76.3",  # the evaluation after step 10 and its 160 answers
    ):  # fmt: skip
        assert fact in text, fact
    for title, names in {
        "Parts of the reward": {"form", "sum"},
        "Pass@k": {"k = 1", "k = 2"},
    }.items():
        assert {line["name"] for line in figure(html, title)["data"]} == names
    assert "not finite" not in text  # step 4 made no update, so it has no loss
    assert 4 not in figure(html, "Loss")["data"][0]["x"]


def test_groups_to_read(run, tmp_path):
    kinds = ["unequal rewards", "all wrong", "all right", "with an ERROR"]
    html = report(run)
    assert groups(html) == [(step, kind, 4) for step in (1, 20) for kind in kinds]
    text = words(html)
    assert "2 groups" not in text
    assert "8 groups of steps 1 and 20" in text
    assert "CORRECT reward 1, 25 tokens step 1: 0 and 1 found 0" in text
    assert "WRONG reward 0, 25 tokens, cut off step 20: 2 and 1 found 2" in text
    samples = run / "samples.jsonl"
    for path in (
        run / "verdicts.jsonl",
        samples,
    ):  # the order of the lines does not matter, nor do damaged ones
        lines = path.read_text().splitlines(keepends=True)
        path.write_bytes(
            "".join(reversed(lines)).encode()
            + b'{"step": 1, junk}\n\xff\n{"step": 1, "phase": "sam'
        )
    html = report(run)
    assert groups(html) == [(step, kind, 4) for step in (1, 20) for kind in kinds]
    for name in ("verdicts", "samples"):
        assert f"{name}.jsonl: skipped 2 lines that are not JSON objects" in words(html)
    samples.write_text("".join(line for line in reversed(lines) if json.loads(line)["step"] >= 18))
    assert {step for step, _, _ in groups(report(run))} == {
        18,
        20,
    }  # the last steps' answers alone are kept
    html = report(grpo(tmp_path / "many", {}, steps=1, samples=20))
    assert {shown for _, _, shown in groups(html)} == {8}
    assert "8 of 20 answers" in words(html)


SYSTEM = {"role": "system", "content": "Look each item up." + " Then say a number." * 20}
STOCK = {"type": "function", "function": {"name": "in_stock", "description": "Count an item.", "parameters": {
    "type": "object", "properties": {"item": {"type": "string", "description": "Its name."}}}}}  # fmt: skip
CODE = "for n in (61, 24):\n    print(n)"


def call(number: int, name: str, problem: str = "", **arguments) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function, "problem": problem}


def conversation(run: Path, said: list[dict]) -> str:
    """Let the answers to a prompt be conversations, and return the report's text from them on."""
    asked = [SYSTEM, {"role": "user", "content": "How many limes?"}]
    key = "0123456789abcdef"
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    verdicts = [json.loads(line) for line in (run / "verdicts.jsonl").read_text().splitlines()]
    for line, verdict in zip(lines, verdicts, strict=True):
        if line["prompt_id"] == "prompt0":
            line |= {"messages": asked + said, "tools": [STOCK]}
            line["prompt_id"] = verdict["prompt_id"] = key
    for name, records in (("samples", lines), ("verdicts", verdicts)):
        write_jsonl(run / f"{name}.jsonl", records)
    html = report(run)
    (sample,) = re.findall(r'<article class="sample talks">.*?</article>', html, re.DOTALL)
    assert words("</style>" + sample).count(key) == 0, "a hash tells a reader nothing"
    return words("</style>" + sample)


def test_a_conversation_to_read(tmp_path):
    said = [
        {"role": "assistant", "content": "<think>\nTwo items.\n</think>\n\nI look.", "tool_calls": [
            call(0, "in_stock", item="lime"), call(1, "python", code=CODE, lines=2), call(2, "", "no JSON")]},
        {"role": "tool", "tool_call_id": "call00000", "content": "24 limes"},
        {"role": "tool", "tool_call_id": "call00001", "content": "61\n24"},
        {"role": "assistant", "content": "We have 24.", "reasoning_content": "So 24."},
    ]  # fmt: skip
    text = conversation(grpo(tmp_path / "run", {}, steps=1, samples=2), said)
    asked, first, second = re.split("WRONG reward 0, 20 tokens|CORRECT reward 1, 25 tokens", text)
    opening = (
        "1 tool: in_stock in_stock Count an item. item string Its name. system Look each item up."
    )
    assert opening in asked
    assert asked.endswith("user How many limes? "), "once for all answers"
    assert first.split() == second.split() == (
        "assistant reasoning Two items. Two items. I look. calls in_stock item lime "
        f"calls python code {CODE} lines 2 calls ? The call cannot be read: no JSON "
        "tool in_stock 24 limes tool python 61 24 assistant reasoning So 24. So 24. We have 24. found 0"
    ).split()  # fmt: skip


def test_answers_of_several_ranks(run, tmp_path):
    """While a phase goes on, each rank has files of its own; a kill may leave lines twice."""
    whole = words(report(run, output=tmp_path / "whole.html"))
    for name in ("samples", "verdicts"):
        lines = (run / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (run / f"{name}.jsonl").write_text("".join(lines[::2]))
        (run / f"{name}.rank1.jsonl").write_text("".join(lines[1::2] + lines[:10]))
    assert words(report(run, output=tmp_path / "parts.html")) == whole


def test_other_states(tmp_path):
    killed = grpo(tmp_path / "killed", {0: RIGHT[0]}, steps=5, planned=20, finished=False)
    text = words(report(killed))
    assert "State not finished" in text
    assert "Steps 5 of 20" in text
    sampling = grpo(tmp_path / "sampling", {}, steps=1, planned=20, finished=False)
    (sampling / "metrics.jsonl").unlink()
    assert {step for step, _, _ in groups(report(sampling))} == {1}
    scores = dict.fromkeys(range(61), RIGHT[0]) | {
        30: RIGHT[20]
    }  # more evaluations than a table shows
    text = words(report(grpo(tmp_path / "long", scores, steps=60)))
    assert "Best held-out pass@1 80.0 % after step 30" in text
    assert 0 < len(re.findall(r" 3 of 10 30.0 %| 8 of 10 80.0 %", text)) < 61


def test_beside_a_run_of_raft(run, tmp_path):
    html = report(
        run, raft(tmp_path / "raft", [RIGHT[0], RIGHT[20]]), output=tmp_path / "both.html"
    )
    drawn = html.split("<b>Held-out pass@1 by answers</b>")[1].split("</figure>")[0]
    assert "raft goes from 30 at answers sampled 0 to 80 at answers sampled 24" in drawn


@pytest.mark.parametrize(
    ("worse", "better", "code", "says"),
    [(5, 6, 0, "take it"), (60, 10, 1, "is worse, -12.5 points")],
)
def test_two_runs_by_held_out_scores(tmp_path, capsys, worse, better, code, says):
    before, middle, after = passing(0.3, 1), passing(0.4, 3), passing(0.5, 2)
    a = grpo(tmp_path / "a", {0: before, 10: middle, 20: after}, steps=24, seconds=20)
    b = grpo(
        tmp_path / "b",
        {0: before, 5: middle, 20: flip(after, worse, better)},
        steps=24,
        seconds=10,
        clip_low=0.1,
    )
    assert main(["compare", str(a), str(b)]) == code
    out = capsys.readouterr().out
    assert says in out.splitlines()[-1]
    assert "B is 2.00x as fast (2.00-2.00)" in out
    assert "held-out pass@1 after step 20" in out
    assert "clip_low" in out
    found = document(capsys, a, b)
    assert found["p"] == pytest.approx(mcnemar(worse, better))
    of_a, of_b = found["measured"]["held-out pass@1, step 20"]
    assert of_b - of_a == pytest.approx((better - worse) / 400)
    assert found["measured"]["losses not finite"] == [0, 0]  # step 4 made no update
    assert main(["compare", str(a), str(raft(tmp_path / "raft", [before]))]) == 2


def test_evaluations_with_configs_of_both_recipes(tmp_path, capsys):
    """`rocm-ext eval` writes the same records with either; older versions wrote the scores to a file of the cycle."""
    a = raft(tmp_path / "a", [passing(0.3, 1)], finished=False, prompts=None)
    b = raft(
        tmp_path / "b",
        [flip(passing(0.3, 1), 0, 60)],
        finished=False,
        prompts=None,
        recipe="grpo_rocm",
        steps=10,
    )
    assert RunFolder(b).is_evaluation
    assert RunFolder(b).finished
    assert main(["compare", str(a), str(b)]) == 0
    assert "held-out pass@1 +15.0 points" in " ".join(capsys.readouterr().out.split())
    (b / "cycle_0").mkdir()
    (b / "cycle_0" / "eval.json").write_text(
        json.dumps(json.loads((b / "metrics.jsonl").read_text())["eval"])
    )
    (b / "metrics.jsonl").write_text("")
    assert RunFolder(b).finished
    assert main(["compare", str(a), str(b)]) == 3  # an unknown speed
    assert "held-out pass@1 +15.0 points" in " ".join(capsys.readouterr().out.split())


def told(capsys, out: Path) -> dict:
    capsys.readouterr()
    assert (
        main(["monitor", "--json", "--count", "1", "--root", str(out.parent), "--run", str(out)])
        == 0
    )
    return json.loads(capsys.readouterr().out)["run"]


def test_progress_of_a_running_run(tmp_path, capsys):
    out = grpo(tmp_path / "run", {0: RIGHT[0], 4: RIGHT[10]}, steps=5, planned=20, finished=False)
    config = out / "config.yaml"
    config.write_text(config.read_text() + "eval_every_n_steps: 4\n")
    answers = policy_answers(6, 4, 4)

    def verdicts(count: int, phase: str = "sample") -> None:
        lines = [
            json.dumps({"step": 6, "phase": phase, **verdict}) + "\n"
            for _, verdict in answers[:count]
        ]
        with (out / "verdicts.jsonl").open("a") as file:
            file.write("".join(lines))
        os.utime(out / "metrics.jsonl", (1e9, 1e9))

    verdicts(6)
    run = told(capsys, out)
    assert run.pop("seconds_ago") < 60
    assert run == {
        "phase": "sampling", "step": 5, "steps": 20, "reward": 0.35, "flat": 0.25, "entropy": pytest.approx(0.55),
        "held_out": 0.5, "seconds": 10.0, "seconds_left": 15 * 10 + 4 * 3.0, "finished": False,
    }  # fmt: skip
    verdicts(16)
    assert told(capsys, out)["phase"] == "training"
    verdicts(3, "eval")
    assert told(capsys, out)["phase"] == "evaluating"
    assert main(["monitor", "--count", "1", "--root", str(tmp_path), "--run", str(out)]) == 0
    line = "run: evaluating, step 5 of 20, reward 0.350, held-out 50.0 %, 25 % of groups flat, entropy 0.55, "
    assert line + "10 s a step, 2m42s left, " in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["my_policy", None])
def test_the_records_tell_the_family_and_the_end(run, recipe):
    config = run / "config.yaml"
    whole = config.read_text().replace(
        "recipe: grpo_rocm\n", f"recipe: {recipe}\n" if recipe else ""
    )
    summary = json.loads((run / "summary.json").read_text())
    for planned, stopped, finished in (
        (20, None, True),
        (30, None, False),
        (30, "no better held-out score", True),
    ):
        config.write_text(whole.replace("\nsteps: 20", f"\nsteps: {planned}"))
        (run / "summary.json").write_text(json.dumps({**summary, "stopped": stopped}))
        assert (RunFolder(run).family, RunFolder(run).finished) == ("grpo_rocm", finished)
    (run / "samples.jsonl").unlink()
    assert len(RunFolder(run).evaluations["eval"]) == 3
