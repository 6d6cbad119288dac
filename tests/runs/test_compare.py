"""`rocm-ext compare`: pairs that differ and pairs that do not."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from rocm_ext.cli import main
from rocm_ext.runs.compare import compare
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import mcnemar, paired_gain, relative_difference
from tests.kit.lines import one_line_has
from tests.kit.run_folders import CONFIG, curve, raft, remove_lines, sft, step_lines, write_jsonl


def wander(steps: int, seed: int, phi: float = 0.8) -> np.ndarray:
    """Return [steps] autocorrelated noise of variance 1, like the effect of slightly different weights on the loss."""
    draws = np.random.default_rng(seed).normal(size=steps)
    noise = np.empty(steps)
    noise[0] = draws[0]
    for i in range(1, steps):
        noise[i] = phi * noise[i - 1] + np.sqrt(1 - phi**2) * draws[i]
    return noise


STEPS = 200
EQUAL = 1 + 0.002 * wander(STEPS, 1)


def run(*args: object) -> int:
    return main(["compare", *map(str, args)])


def document(capsys: pytest.CaptureFixture[str], *args: object) -> dict:
    """Parse the output of --json; NaN and Infinity are not valid JSON."""
    capsys.readouterr()
    run(*args, "--json")
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return sft(tmp_path / "base", curve(STEPS))


# ---- what a user sees


def test_faster_and_the_same(base, tmp_path, capsys):
    fast = sft(tmp_path / "fast", curve(STEPS) * EQUAL, speed=1830, memory=20 << 30, compile=True)
    assert run(base, fast) == 0
    out = capsys.readouterr().out
    assert re.match(r"verdict: B is 1.83x as fast \(1.8.*%: take it$", out.splitlines()[-1])
    assert "compile" in out
    assert "output_dir" not in out  # folder names are not settings
    resumed = [{"time": 1e9 + 5 * i + 9000 * (i >= 20) + 500 * (i >= 30)} for i in range(40)]
    write_jsonl(fast / "hardware.jsonl", resumed)
    content = document(capsys, base, fast)
    assert content["answer"] == "take"
    assert content["speed"]["low"] == pytest.approx(1.83) == content["speed"]["high"]
    assert content["measured"]["peak memory, MiB"] == [40 << 10, 20 << 10]
    assert content["measured"]["times resumed"] == [0, 2]
    assert content["difference"]["low"] < 0.002
    assert content["settings"] == {"compile": [False, True]}


WORSE, SAME = curve(STEPS) * EQUAL * 1.031, curve(STEPS)
ROWS = {
    "_component_": "rocm_ext.data.sft_dataset",
    "source": "train.jsonl",
    "train_on_input": False,
}
MOVED, ON_INPUT = {**ROWS, "source": "/other/place.jsonl"}, {**ROWS, "train_on_input": True}


def changed(**changes):
    """Lines of steps of the same losses, but for some values."""
    return [
        {**line, **{key: change(line) for key, change in changes.items()}}
        for line in step_lines(curve(STEPS))
    ]


@pytest.mark.parametrize(
    ("b", "arguments", "code", "says"),
    [
        ({"losses": WORSE, "speed": 1500}, (), 1, "its loss is 3.1 % higher|do not take it"),
        # if a mere speed setting lowers the loss by as much, the run trains on something else
        ({"losses": SAME * EQUAL / 1.031, "speed": 1500}, (), 3, ""),
        ({"losses": SAME, "speed": 800}, (), 1, "saves no memory"),
        ({"losses": SAME, "speed": 880}, (), 3, "repeat the runs"),  # as those of equal runs do
        # values that A lacks are not compared
        ({"losses": [*curve(400)[:STEPS], *[9.0] * 50], "finished": False}, (), 0, "last 100 of 200 common steps"),
        ({"losses": [], "lines": changed(tokens=lambda line: line["tokens"] + 7), "data_seed": 1}, (), 3,
         "from step 1 on the runs see different rows (different data_seed)"),
        ({"losses": SAME, "dataset": MOVED}, (), 0, ""),
        ({"losses": SAME, "dataset": ON_INPUT}, (), 3, "different dataset.train_on_input"),
        ({"losses": SAME, "loss": {"_component_": "mine.Squared"}}, (), 3, "different losses (loss._component_)"),
        ({"losses": SAME * EQUAL, "seed": 1}, (), 0, "the seeds differ"),
        # steps that fp16 skips are no harm
        ({"losses": [], "lines": changed(grad_norm=lambda line: np.inf if line["step"] < 7 else 1.0), "dtype": "fp16"},
         (), 0, ""),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_runs_that_differ(base, tmp_path, capsys, b, arguments, code, says):
    assert run(base, sft(tmp_path / "b", **b), *arguments) == code
    out = capsys.readouterr().out
    assert all(part in out for part in says.split("|"))


@pytest.mark.parametrize(("b", "code"), [(0.93, 0), (1.0, 0), (1.04, 1)])
def test_held_out_losses_have_a_say(tmp_path, capsys, b, code):
    a = sft(tmp_path / "a", curve(STEPS), validation={100: 1.2, 200: 1.0})
    losses = curve(STEPS) * EQUAL * (0.96 if b < 0.95 else 1)
    assert run(a, sft(tmp_path / "b", losses, speed=1500, validation={100: 1.2, 200: b})) == code
    assert "validation loss at step 200" in capsys.readouterr().out


def test_too_few_steps_says_how_many_more(tmp_path, capsys):
    def pair(steps: int) -> tuple[Path, Path]:
        noise = 1 + 0.03 * wander(steps, 5, phi=0.3)
        folder = tmp_path / str(steps)
        return sft(folder / "a", curve(steps)), sft(folder / "b", curve(steps) * noise, speed=1500)

    content = document(capsys, *pair(60))
    assert content["exit_code"] == 3
    text = content["text"]
    more = int(text.split("about ")[1].split()[0].replace(",", ""))
    assert 20 < more < 2000
    assert run(*pair(60 + 2 * more)) == 0  # twice as many, because the number itself is an estimate


@pytest.mark.parametrize("steps", [0, 1, 15])
def test_hardly_any_steps(tmp_path, capsys, steps):
    a = sft(tmp_path / "a", curve(max(steps, 1)))
    b = sft(tmp_path / "b", curve(max(steps, 1))[:steps], finished=False)
    assert run(a, b) == 3
    out = capsys.readouterr().out
    assert f"{steps} common steps are too few" in out
    assert "B has not finished" in out


# ---- what may be compared


def test_other_learning_rate(tmp_path, capsys):
    """Training losses are not comparable then, but both runs have losses on the same held-out rows."""
    lines = step_lines(curve(STEPS) * 0.9)
    for line in lines:
        line["lr"] *= 2
    rate = {"_component_": "torch.optim.AdamW", "lr": 4e-4}
    a = sft(tmp_path / "a", curve(STEPS), validation={100: 1.2, 200: 1.0})

    def b(name, **more):
        return sft(tmp_path / name, [], lines=lines, optimizer=rate, **more)

    assert run(a, b("worse", validation={100: 1.2, 200: 1.1})) == 1
    assert "the learning rates differ (2e-05 and 4e-05)" in capsys.readouterr().out
    assert run(a, b("good", validation={200: 0.9})) == 0
    assert run(a, b("blind")) == 3
    assert run(a, b("part", validation={100: 1.2}, finished=False)) == 3  # its best may come later


# ---- stability


def test_losses_that_are_not_finite(tmp_path, capsys):
    broken = curve(STEPS)
    broken[150] = np.nan
    a, b = sft(tmp_path / "a", curve(STEPS)), sft(tmp_path / "b", broken)
    assert run(a, b) == 1
    assert "1 losses of B are not finite" in capsys.readouterr().out
    assert run(b, a) == 0  # problems of the baseline do not count against B
    assert run(sft(tmp_path / "none", [np.nan] * STEPS), a) == 2
    assert one_line_has(capsys.readouterr().err, "losses", "not finite")


# ---- error rates


def answers(folder: Path, offset: float, pairs: int = 60) -> dict[str, float]:
    """Return the shares of answers over pairs with the same rows, autocorrelated differences of 0.7 % and an offset."""
    told: Counter[str] = Counter()
    for seed in range(pairs):
        losses = curve(300, seed)
        noise = 0.005 * wander(300, 1000 + seed) + 0.005 * wander(300, 2000 + seed, phi=0)
        a = sft(folder / f"a{seed}", losses)
        b = sft(folder / f"b{seed}", losses * (1 + offset + noise), speed=1500)
        told[compare(RunFolder(a), RunFolder(b), 0.01, 0.05).answer] += 1
    return {answer: told[answer] / pairs for answer in ("take", "reject", "unknown")}


@pytest.mark.wide
def test_rates_of_false_alarm_and_detection(tmp_path):
    equal = answers(tmp_path / "equal", 0.0)
    assert equal["reject"] == 0
    assert equal["take"] >= 0.95
    worse = answers(tmp_path / "worse", 0.03)
    assert worse["take"] == 0
    assert worse["reject"] >= 0.95
    # at the tolerance of 1 % the result is open; in 2.5 % of cases the whole 95 % interval is within it
    assert answers(tmp_path / "margin", 0.01)["take"] <= 0.1


@pytest.mark.parametrize(
    ("phi", "steps", "least"),
    [(0.0, 50, 0.93), (0.9, 500, 0.92), (0.9, 50, 0.79)],
)
def test_intervals_cover_the_truth(phi, steps, least):
    """relative_difference's docstring gives these numbers; a plain standard error covers 40 % at correlation 0.9."""
    covered = 0
    for seed in range(300):
        a = curve(steps, seed)
        found = relative_difference(a, a + 0.01 * wander(steps, 5000 + seed, phi))
        covered += found.low <= 0 <= found.high
    assert least <= covered / 300 <= 0.995


# ---- RAFT


def passing(share: float, seed: int, prompts: int = 400) -> list[bool]:
    return (np.random.default_rng(seed).random(prompts) < share).tolist()


def flip(right: list[bool], worse: int, better: int) -> list[bool]:
    """Return ``right`` with the given numbers of right answers made wrong and wrong ones made right."""
    out = list(right)
    for i in [i for i, ok in enumerate(right) if ok][:worse]:
        out[i] = False
    for i in [i for i, ok in enumerate(right) if not ok][:better]:
        out[i] = True
    return out


@pytest.mark.parametrize(
    ("worse", "better", "code", "says"),
    [
        (5, 6, 0, "take it"),
        (40, 30, 3, "prompts are needed"),
    ],
)
def test_raft_by_held_out_scores(tmp_path, capsys, worse, better, code, says):
    before, after = passing(0.3, 1), passing(0.5, 2)
    a = raft(tmp_path / "a", [before, after], seconds=200)
    b = raft(tmp_path / "b", [before, flip(after, worse, better)], seconds=100)
    assert run(a, b) == code
    out = capsys.readouterr().out
    assert says in out.splitlines()[-1]
    assert "B is 2.00x as fast" in out
    found = document(capsys, a, b)
    assert found["p"] == pytest.approx(mcnemar(worse, better))
    of_a, of_b = found["measured"]["held-out pass@1, cycle 1"]
    assert of_b - of_a == pytest.approx((better - worse) / 400)


@pytest.mark.parametrize(
    ("worse", "code", "says"), [(5, 0, "held-out pass@1 after step 120"), (60, 1, "is worse")]
)
def test_sft_on_other_rows_by_held_out_scores(tmp_path, capsys, worse, code, says):
    before, after = passing(0.3, 1), passing(0.5, 2)
    a = sft(tmp_path / "a", curve(120), right={0: before, 120: after})
    rows = {**CONFIG["dataset"], "train_on_input": True}
    b = sft(
        tmp_path / "b",
        curve(120),
        speed=2000,
        right={0: before, 120: flip(after, worse, 6)},
        dataset=rows,
    )
    assert run(a, b) == code
    out = capsys.readouterr().out
    assert says in out.splitlines()[-1]
    assert "training losses cannot be compared: the runs see different rows" in out


FIRST, LAST = passing(0.3, 1), passing(0.5, 2)


@pytest.mark.parametrize(("kind", "says"), [
    ("prompts", "cannot be compared: they are of different prompts"),
    ("verdicts", "cannot be compared: verdicts.jsonl lacks verdicts"),
    ("first cycle", "no trained cycle of both runs has held-out scores yet"),
])  # fmt: skip
def test_raft_that_cannot_be_compared(tmp_path, capsys, kind, says):
    scores = [FIRST] if kind == "first cycle" else [FIRST, LAST]
    of_b = [passing(0.3, 1, 200), passing(0.5, 2, 200)] if kind == "prompts" else scores
    names = ("MathAnswer", "ExactAnswer" if kind == "verifiers" else "MathAnswer")
    a, b = (
        raft(
            tmp_path / name,
            right,
            finished=len(right) > 1,
            verifier={"_component_": f"rocm_ext.verifiers.{judge}"},
        )
        for name, right, judge in zip("ab", (scores, of_b), names, strict=True)
    )
    if kind == "verdicts":
        remove_lines(b / "verdicts.jsonl", 1, "eval")
    assert run(a, b) == 3
    assert says in capsys.readouterr().out
    assert document(capsys, a, b)["p"] is None


def named(folder: Path, sets: dict[str, list], **settings) -> Path:
    """Write a run of RAFT that has the right answers of each cycle by named set of prompts."""
    content: dict[str, list] = {"metrics": [], "verdicts": []}
    for name, right in sets.items():
        out = raft(folder / name, right, **settings)
        for file, found in content.items():
            for line in map(json.loads, (out / f"{file}.jsonl").read_text().splitlines()):
                if "eval" in line:
                    line[f"eval/{name}"] = line.pop("eval")
                if line.get("phase") == "eval":
                    line["prompt_id"] = f"{name}/{line['prompt_id']}"
                found.append(line)
    for file, found in content.items():
        write_jsonl(out / f"{file}.jsonl", found)
    return out


def of_set(verifier: str, **arguments) -> dict:
    return {"_component_": "x", "verifier": {"_component_": verifier}, **arguments}


BOTH = [FIRST, LAST]


@pytest.mark.parametrize(("sets", "prompts", "verifier", "answer", "says"), [
    (["math", "code"], {"code": of_set("w")}, "v", "unknown",
     "asked or judged differently (different eval_prompts.code.verifier._component_)"),
    (["math"], {"math": of_set("v", limit=5), "code": of_set("w")}, "v", "unknown", "eval_prompts.math.limit)"),
    (["math"], {"math": of_set("v"), "code": of_set("w")}, "v", "take", "take it"),
    (["math"], {"math": of_set("v"), "code": of_set("v")}, "w", "take", "take it"),
    (["math"], {"math": of_set("v"), "code": of_set("v")}, None, "take", "take it"),
])  # fmt: skip
def test_settings_of_a_set_hold_back_that_set(
    tmp_path, capsys, sets, prompts, verifier, answer, says
):
    of_a = {"math": of_set("v"), "code": of_set("v")}
    a = named(
        tmp_path / "a",
        {"math": BOTH, "code": BOTH},
        eval_prompts=of_a,
        verifier={"_component_": "v"},
    )
    own = {
        "eval_prompts": of_a | prompts,
        "verifier": {"_component_": verifier} if verifier else None,
    }
    found = document(capsys, a, named(tmp_path / "b", dict.fromkeys(sets, BOTH), **own))
    assert found["answer"] == answer
    assert says in found["text"]
    assert ("only A has held-out scores of code" in found["notes"]) == (sets == ["math"])


def test_sets_of_other_names(tmp_path, capsys):
    found = document(capsys, raft(tmp_path / "a", BOTH), named(tmp_path / "b", {"math": BOTH}))
    assert found["answer"] == "unknown"
    assert "cannot be compared: the sets of prompts have other names" in found["text"]
    assert "only B has held-out scores of math" in found["notes"]
    assert "only A has held-out scores of a set without a name" in found["notes"]


def test_of_equal_answers_the_worst_counts(tmp_path, capsys):
    a = named(tmp_path / "a", dict.fromkeys(("math", "code"), BOTH))
    worse = [FIRST, flip(LAST, 90, 0)]
    b = named(tmp_path / "b", {"math": [FIRST, flip(LAST, 60, 0)], "code": worse})
    assert "held-out pass@1 of code after cycle 1 is worse, -22.5" in document(capsys, a, b)["text"]


def test_fewer_answers_are_no_speed(tmp_path, capsys):
    """Half the answers in half the time is the same speed."""
    before, after = passing(0.3, 1, 200), passing(0.5, 2, 200)
    a, b = raft(tmp_path / "a", [before, after]), raft(tmp_path / "b", [before, after])
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {key: line[key] / 2 for key in ("sampled_tokens", "seconds") if key in line}
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert document(capsys, a, b)["speed"]["value"] == pytest.approx(1, abs=0.01)


def test_terminal_commands_of_a_config_are_not_obeyed(tmp_path, capsys):
    run(raft(tmp_path / "a", [FIRST]), raft(tmp_path / "b", [FIRST], note="\x1b]0;mine\x07\n"))
    assert "\x1b" not in capsys.readouterr().out


def test_score_statistics():
    assert mcnemar(0, 0) == 1
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(3, 9) == mcnemar(9, 3)
    gain = paired_gain(10, 30, 400)
    assert gain.value == pytest.approx(0.05)
    assert 0 < gain.low < 0.05 < gain.high


# ---- what users give it


@pytest.mark.parametrize("kind", ["missing", "empty", "other recipe", "itself"])
def test_nothing_to_compare(base, tmp_path, capsys, kind):
    other = tmp_path / "other"
    if kind == "empty":
        other.mkdir()
    elif kind == "file":
        other.write_text("no folder")
    elif kind == "other recipe":
        raft(other, [passing(0.3, 1)])
    elif kind == "other model":
        sft(
            other,
            curve(STEPS),
            checkpointer={"_component_": "x", "checkpoint_dir": "/models/Qwen2.5-0.5B-Instruct"},
        )
    elif kind == "itself":
        other = base
    assert run(base, other) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert str(other) in line


def test_a_model_is_known_by_its_weights(base, tmp_path, capsys):
    """Its folder may have moved, and two models may be in folders of one name."""

    def of_weights(folder, weights):
        summary = folder / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"base_model": weights}))
        return folder

    of_weights(base, "1f")
    moved = {"_component_": "x", "checkpoint_dir": "/moved/model"}
    assert (
        run(base, of_weights(sft(tmp_path / "same", curve(STEPS), checkpointer=moved), "1f")) == 0
    )
    assert run(base, of_weights(sft(tmp_path / "other", curve(STEPS)), "2e")) == 2
    assert "another one" in capsys.readouterr().err
    built = sft(tmp_path / "built", curve(STEPS), model={"_component_": "another.builder"})
    assert run(base, of_weights(built, "3f")) == 0  # each builder has its own hash of one model
