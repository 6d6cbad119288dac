"""`rocm-ext compare`: pairs that differ and pairs that do not."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rocm_ext.cli import main
from rocm_ext.runs.compare import compare
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import mcnemar, paired_gain, relative_difference
from tests.kit.lines import one_line_has
from tests.kit.run_folders import curve, raft, remove_lines, sft, step_lines, write_jsonl
from tests.kit.tiny import write_yaml


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
    verdict = out.splitlines()[-1]
    assert verdict.startswith("verdict: B is 1.83x as fast (1.8")
    assert verdict.endswith("%: take it")
    assert "compile" in out
    assert "output_dir" not in out  # folder names are not settings
    content = document(capsys, base, fast)
    assert content["answer"] == "take"
    assert content["speed"]["low"] == pytest.approx(1.83) == content["speed"]["high"]
    assert content["measured"]["peak memory, MiB"] == [40 << 10, 20 << 10]
    assert content["difference"]["low"] < 0.002
    assert content["settings"] == {"compile": [False, True]}


def test_faster_but_worse(base, tmp_path, capsys):
    bad = sft(tmp_path / "bad", curve(STEPS) * EQUAL * 1.031, speed=1500)
    assert run(base, bad) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert "its loss is 3.1 % higher" in verdict
    assert verdict.endswith("do not take it")
    assert run(base, bad, "--tolerance", "5") == 0  # for a user who accepts that


def test_one_direction_is_not_the_other(base, tmp_path):
    """If a mere speed setting lowers the loss by as much, the run trains on something else."""
    lower = sft(tmp_path / "lower", curve(STEPS) * EQUAL / 1.031, speed=1500)
    assert run(base, lower) == 3


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


@pytest.mark.parametrize("steps", [0, 1, 5, 15])
def test_hardly_any_steps(tmp_path, capsys, steps):
    a = sft(tmp_path / "a", curve(max(steps, 1)))
    b = sft(tmp_path / "b", curve(max(steps, 1))[:steps], finished=False)
    assert run(a, b) == 3
    out = capsys.readouterr().out
    assert f"{steps} common steps are too few" in out
    assert "B has not finished" in out


def test_runs_of_other_lengths(base, tmp_path, capsys):
    longer = sft(tmp_path / "longer", curve(400)[:STEPS].tolist() + [9.0] * 50, finished=False)
    assert run(base, longer) == 0  # values that A lacks are not compared
    assert "loss, last 100 of 200 common steps" in capsys.readouterr().out


def test_slower(base, tmp_path, capsys):
    assert run(base, sft(tmp_path / "slow", curve(STEPS), speed=800)) == 1
    assert "saves no memory" in capsys.readouterr().out
    assert run(base, sft(tmp_path / "small", curve(STEPS), speed=800, memory=10 << 30)) == 1
    assert "unless for its 0.25x of A's memory" in capsys.readouterr().out


# ---- what may be compared


def test_other_rows(base, tmp_path, capsys):
    lines = step_lines(curve(STEPS, 3))
    for line in lines:
        line["tokens"] += 7
    assert run(base, sft(tmp_path / "b", [], lines=lines, data_seed=1)) == 3
    assert "from step 1 on the runs see different rows (different data_seed)" in capsys.readouterr().out


def test_other_learning_rate(tmp_path, capsys):
    """Training losses are not comparable then, but both runs have losses on the same held-out rows."""
    lines = step_lines(curve(STEPS) * 0.9)
    for line in lines:
        line["lr"] *= 2
    rate = {"_component_": "torch.optim.AdamW", "lr": 4e-4}
    a = sft(tmp_path / "a", curve(STEPS), validation={100: 1.2, 200: 1.0})
    worse = sft(tmp_path / "worse", [], lines=lines, optimizer=rate, validation={100: 1.2, 200: 1.1})
    assert run(a, worse) == 1
    assert "the learning rates differ (2e-05 and 4e-05)" in capsys.readouterr().out
    assert run(a, sft(tmp_path / "good", [], lines=lines, optimizer=rate, validation={200: 0.9})) == 0
    assert run(a, sft(tmp_path / "blind", [], lines=lines, optimizer=rate)) == 3
    part = sft(tmp_path / "part", [], lines=lines, optimizer=rate, validation={100: 1.2}, finished=False)
    assert run(a, part) == 3  # its best may come later


def test_data_that_moved_is_the_same_data(base, tmp_path):
    dataset = {"_component_": "rocm_ext.data.sft_dataset", "source": "/other/place.jsonl", "train_on_input": False}
    assert run(base, sft(tmp_path / "b", curve(STEPS), dataset=dataset)) == 0


def test_other_labels_on_the_same_rows(base, tmp_path, capsys):
    dataset = {"_component_": "rocm_ext.data.sft_dataset", "source": "train.jsonl", "train_on_input": True}
    assert run(base, sft(tmp_path / "b", curve(STEPS), dataset=dataset)) == 3
    assert "different dataset.train_on_input" in capsys.readouterr().out


def test_other_seeds(base, tmp_path, capsys):
    assert run(base, sft(tmp_path / "same", curve(STEPS) * EQUAL, seed=1)) == 0
    assert "the seeds differ" in capsys.readouterr().out
    assert run(base, sft(tmp_path / "worse", curve(STEPS) * EQUAL * 1.03, seed=1)) == 3


# ---- stability


def test_losses_that_are_not_finite(tmp_path, capsys):
    broken = curve(STEPS)
    broken[150] = np.nan
    a, b = sft(tmp_path / "a", curve(STEPS)), sft(tmp_path / "b", broken)
    assert run(a, b) == 1
    assert "1 losses of B are not finite" in capsys.readouterr().out
    assert run(b, a) == 0  # problems of the baseline do not count against B


def test_steps_that_fp16_skips_are_no_harm(base, tmp_path):
    lines = step_lines(curve(STEPS))
    for line in lines[:6]:
        line["grad_norm"] = np.inf
    assert run(base, sft(tmp_path / "b", [], lines=lines, dtype="fp16")) == 0


def test_resumed_runs_are_told(base, tmp_path, capsys):
    b = sft(tmp_path / "b", curve(STEPS))
    write_jsonl(b / "hardware.jsonl", [{"time": 1e9 + 5 * i + 9000 * (i >= 20) + 500 * (i >= 30)} for i in range(40)])
    assert document(capsys, base, b)["measured"]["times resumed"] == [0, 2]


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
    ("phi", "steps", "least"), [(0.0, 50, 0.93), (0.5, 50, 0.9), (0.9, 500, 0.92), (0.9, 50, 0.75)]
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
        (60, 10, 1, "is worse, -12.5 points"),
        (40, 30, 3, "prompts are needed"),
        (0, 60, 0, "+15.0 points"),
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


def test_raft_on_other_prompts(tmp_path, capsys):
    a = raft(tmp_path / "a", [passing(0.3, 1), passing(0.5, 2)])
    b = raft(tmp_path / "b", [passing(0.3, 1, 200), passing(0.5, 2, 200)])
    assert run(a, b) == 3
    out = capsys.readouterr().out
    assert "cannot be compared: they are of different prompts" in out
    assert document(capsys, a, b)["p"] is None


def test_raft_with_other_verifiers(tmp_path, capsys):
    right = [passing(0.3, 1), passing(0.5, 2)]
    a = raft(tmp_path / "a", right, verifier={"_component_": "rocm_ext.verifiers.MathAnswer"})
    b = raft(tmp_path / "b", right, verifier={"_component_": "rocm_ext.verifiers.ExactAnswer"})
    assert run(a, b) == 3
    assert "different verifiers judged (different verifier._component_)" in capsys.readouterr().out


def test_raft_without_verdicts_by_prompt(tmp_path, capsys):
    right = [passing(0.3, 1), passing(0.5, 2)]
    a, b = raft(tmp_path / "a", right), raft(tmp_path / "b", right)
    remove_lines(b / "verdicts.jsonl", 1, "eval")
    assert run(a, b) == 3
    assert "cannot be compared: verdicts.jsonl lacks verdicts" in capsys.readouterr().out


def test_fewer_answers_are_no_speed(tmp_path, capsys):
    """Half the answers in half the time is the same speed."""
    before, after = passing(0.3, 1, 200), passing(0.5, 2, 200)
    a, b = raft(tmp_path / "a", [before, after]), raft(tmp_path / "b", [before, after])
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {key: line[key] / 2 for key in ("tokens", "seconds") if key in line}
    (b / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert document(capsys, a, b)["speed"]["value"] == pytest.approx(1, abs=0.01)


def test_terminal_commands_of_a_config_are_not_obeyed(tmp_path, capsys):
    a, b = raft(tmp_path / "a", [passing(0.3, 1)]), raft(tmp_path / "b", [passing(0.3, 1)], note="\x1b]0;mine\x07\n")
    run(a, b)
    assert "\x1b" not in capsys.readouterr().out


def test_raft_in_its_first_cycle(tmp_path, capsys):
    a = raft(tmp_path / "a", [passing(0.3, 1)], finished=False)
    b = raft(tmp_path / "b", [passing(0.3, 1)], finished=False)
    assert run(a, b) == 3
    assert "no trained cycle of both runs has held-out scores yet" in capsys.readouterr().out


def test_a_shorter_runs_adapter_is_not_the_end(tmp_path):
    folder = raft(tmp_path / "run", [passing(0.3, 1), passing(0.5, 2)])
    assert RunFolder(folder).finished
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("cycles: 1", "cycles: 2"))
    assert not RunFolder(folder).finished


def test_speed_that_differs_as_equal_runs_do(base, tmp_path, capsys):
    assert run(base, sft(tmp_path / "b", curve(STEPS), speed=880)) == 3
    assert "repeat the runs" in capsys.readouterr().out


def test_a_baseline_without_finite_losses(tmp_path, capsys):
    a = sft(tmp_path / "a", [np.nan] * STEPS)
    assert run(a, sft(tmp_path / "b", curve(STEPS), speed=800)) == 2
    assert one_line_has(capsys.readouterr().err, "losses", "not finite")


def test_score_statistics():
    assert mcnemar(0, 0) == 1
    assert mcnemar(0, 6) == pytest.approx(2 / 64)
    assert mcnemar(3, 9) == mcnemar(9, 3)
    gain = paired_gain(10, 30, 400)
    assert gain.value == pytest.approx(0.05)
    assert 0 < gain.low < 0.05 < gain.high


# ---- what users give it


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "other recipe", "other model", "itself"])
def test_nothing_to_compare(base, tmp_path, capsys, kind):
    other = tmp_path / "other"
    if kind == "empty":
        other.mkdir()
    elif kind == "file":
        other.write_text("no folder")
    elif kind == "other recipe":
        raft(other, [passing(0.3, 1)])
    elif kind == "other model":
        model = {"_component_": "x", "checkpoint_dir": "/models/Qwen2.5-0.5B-Instruct"}
        config = sft(other, curve(STEPS)) / "config.yaml"
        write_yaml(config, {**yaml.safe_load(config.read_text()), "checkpointer": model})
    elif kind == "itself":
        other = base
    assert run(base, other) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    assert str(other) in err


def test_a_model_is_known_by_its_weights(base, tmp_path, capsys):
    """Its folder may have moved, and two models may be in folders of one name."""
    moved = {"_component_": "x", "checkpoint_dir": "/moved/model"}
    other, same = sft(tmp_path / "other", curve(STEPS)), sft(tmp_path / "same", curve(STEPS), checkpointer=moved)
    for folder, weights in ((base, "1f"), (other, "2e"), (same, "1f")):
        summary = folder / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"base_model": weights}))
    assert run(base, same) == 0
    assert run(base, other) == 2
    assert "another one" in capsys.readouterr().err
    built = sft(tmp_path / "built", curve(STEPS), model={"_component_": "another.builder"})
    summary = json.loads((built / "summary.json").read_text())
    (built / "summary.json").write_text(json.dumps(summary | {"base_model": "3f"}))
    assert run(base, built) == 0  # each builder has its own hash of one model


@pytest.mark.parametrize("value", ["0", "-1", "nan", "100", "much"])
def test_tolerance_is_a_percentage(base, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(base, base, "--tolerance", value)


def test_broken_lines_are_told_and_passed_over(base, tmp_path, capsys):
    b = sft(tmp_path / "b", curve(STEPS))
    path = b / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(b"\xff\x00junk\n[1]\n" + content + b'{"step": 3, "loss": "text"}\n{"step": 201, "lo')
    assert run(base, b) == 1  # step 3 now has no number
    out = capsys.readouterr().out
    assert "skipped 2 lines that are not JSON objects" in out


JUNK = st.one_of(
    st.binary(max_size=60),
    st.sampled_from([b"", b"null", b"[]", b"{}", b'{"cycles": 3}', b'{"cycles": [{"cycle": []}]}', b"[" * 9000]),
    st.builds(
        lambda key, value: json.dumps({"step": 1, "loss": 1.0, key: value}).encode() + b"\n",
        st.sampled_from(
            ["step", "loss", "lr", "tokens", "cycle", "phase", "seconds", "prompts", "correct", "prompt_id"]
        ),
        st.one_of(st.none(), st.text(max_size=3), st.integers(), st.floats(), st.lists(st.integers(), max_size=2)),
    ),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(["config.yaml", "metrics.jsonl", "summary.json", "hardware.jsonl"]), junk=JUNK)
def test_junk_in_files_of_sft(tmp_path_factory, capsys, name, junk):
    folder = tmp_path_factory.mktemp("junk")
    a, b = sft(folder / "a", curve(20)), sft(folder / "b", curve(20))
    (b / name).write_bytes(junk)
    assert run(a, b) in (0, 1, 2, 3)
    run(b, a, "--json")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(
        [
            "metrics.jsonl", "summary.json", "verdicts.jsonl", "cycle_1/eval.json", "cycle_1/metrics.jsonl",
            "cycle_1/summary.json",
        ]
    ),
    junk=JUNK,
)  # fmt: skip
def test_junk_in_files_of_raft(tmp_path_factory, capsys, name, junk):
    folder = tmp_path_factory.mktemp("junk")
    right = [passing(0.3, 1, 10), passing(0.5, 2, 10)]
    a, b = raft(folder / "a", right, answers=4), raft(folder / "b", right, answers=4)
    (b / name).write_bytes(junk)
    assert run(a, b) in (0, 1, 2, 3)
    run(b, a, "--json")


def test_it_starts_without_torch(base, tmp_path):
    """Importing torch takes ten times as long as everything else."""
    other = sft(tmp_path / "other", curve(STEPS) * EQUAL)
    code = "import sys; from rocm_ext.cli import main; sys.exit(main(sys.argv[1:]) or 9 * ('torch' in sys.modules))"
    args = [sys.executable, "-c", code, "compare", str(base), str(other)]
    assert subprocess.run(args, capture_output=True).returncode == 0
