"""Named sets of held-out prompts: each is scored as if it were alone, and the training does not depend on them."""

import json
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rocm_ext.recipes import distil_rocm, lora_finetune_rocm, raft_rocm
from rocm_ext.recipes.grpo_rocm import GRPO, main
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext.base.errors import UserError
from rocm_ext.cli import main as rocm_ext
from rocm_ext.config.components import check_from_folder
from rocm_ext.data import prompt_dataset
from rocm_ext.data.prompts import Prompt
from rocm_ext.export.push import card
from rocm_ext.export.source import open_source
from rocm_ext.report.samples import prompts_of
from rocm_ext.rl.evaluation import judge
from rocm_ext.rl.rollout import Answers
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.records import GREEDY
from rocm_ext.train.forgetting import Forgetting, Scored
from rocm_ext.train.trainer import Trainer
from rocm_ext.verifiers import Result, Verdict
from tests.kit import forks, raft_runs
from tests.kit.forks import RESUME, forked, hook, refused, signal_at, succeed
from tests.kit.grpo_runs import TIMING, assert_equal, lines, write_run
from tests.kit.raft_runs import WEIGHTS, loaded, prompts_in
from tests.kit.tiny import run_config, write_yaml

pytest.importorskip("resource", reason="forks and POSIX signals")
TRUST = "--trust-config"  # the verifiers are no public ones
KEPT = {"_component_": "tests.kit.judges.Coin", "share": 0.8}


@pytest.fixture(scope="session")
def sets(folder) -> dict[str, dict]:
    """Three sets of prompts: the second has a verifier of its own, the third repeats prompts of the first."""
    return {
        "math": prompts_in(folder / "heldout.jsonl"),
        "code": prompts_in(folder / "others.jsonl", verifier=KEPT),
        "again": prompts_in(folder / "heldout.jsonl", limit=3),
    }


@pytest.fixture(scope="session")
def make(folder, sets) -> Callable[..., Path]:
    """Write the YAML of a run of GRPO: 4 steps, evaluated on the sets after 0, 2 and 4.

    By itself a run with longer held-out prompts plans other micro-batches, which round differently.
    """
    return partial(write_run, folder, eval_prompts=sets, eval_samples=2, tokens_per_micro_batch=330)


@pytest.fixture(scope="session")
def named(make, folder) -> Path:
    out = folder / "named_scores"
    messages = succeed(main, make(out))
    assert "step 4: held-out math " in messages
    assert "step 4 against the initial model" in messages or "step 2 against the" in messages
    return out


def scores(out: Path, name: str = "") -> dict[int, dict]:
    """Return the scores of a set by step."""
    column = f"eval/{name}" if name else "eval"
    return {line["step"]: line[column] for line in lines(out / "metrics.jsonl") if column in line}


def answers(out: Path, name: str = "") -> list[dict]:
    """Return the answers to a set, and their verdicts, without the set's name."""
    beginning = f"{name}/" if name else ""
    found = []
    for file in ("samples", "verdicts"):
        for line in lines(out / f"{file}.jsonl"):
            prompt = line["prompt_id"]
            if line["phase"] == "eval" and prompt.startswith(beginning):
                found.append({**line, "prompt_id": prompt.removeprefix(beginning)})
    return sorted(found, key=json.dumps)


def steps(out: Path) -> list[dict]:
    """Return the lines of steps without times."""
    found = [line for line in lines(out / "metrics.jsonl") if "reward" in line]
    return [{key: line[key] for key in line if key not in TIMING} for line in found]


@pytest.mark.parametrize("name", ["math", "code", "again"])
def test_each_set_is_scored_as_if_alone(make, sets, named, tmp_path, name):
    """Also without a name, if the set has no verifier of its own."""
    has_own = name == "code"
    alone: Any = {name: sets[name]} if has_own else sets[name]
    succeed(main, make(tmp_path / "alone", eval_prompts=alone))
    shown = name if has_own else ""
    assert list(scores(named, name)) == [0, 2, 4]
    assert scores(named, name) == scores(tmp_path / "alone", shown)
    assert answers(named, name) == answers(tmp_path / "alone", shown)
    assert steps(named) == steps(tmp_path / "alone")
    assert (named / WEIGHTS).read_bytes() == (tmp_path / "alone" / WEIGHTS).read_bytes()


def test_scores_are_of_the_verdicts(named):
    """The second set's own verifier finds more answers right."""
    for name, prompts in (("math", 6), ("code", 12), ("again", 3)):
        for step, score in scores(named, name).items():
            verdicts = [
                line["verdict"] == "CORRECT"
                for line in answers(named, name)
                if line["step"] == step and line["sample"] == -1 and "verdict" in line
            ]
            assert (score["correct"], score["prompts"]) == (sum(verdicts), prompts)
    reward_hashes = [
        line["parts"]["hash"] for line in answers(named, "code") if line.get("verdict") == "CORRECT"
    ]
    assert max(reward_hashes) > 0.5


@pytest.mark.parametrize("method", ["finish_evaluation", "finish_step"])
def test_killed_and_resumed(make, sets, named, tmp_path, method):
    out = tmp_path / "out"
    kill = signal_at(PolicyTrainer, method, lambda self, *_: self.step >= 2)
    assert forked(main, make(out), prepare=kill)[0] == -signal.SIGKILL
    turned = dict(reversed(sets.items()))
    assert "eval prompts" in refused(main, make(out, eval_prompts=turned), RESUME)
    line = refused(main, make(out), RESUME, "eval_prompts.code.verifier.share=0.7")
    assert "eval prompts" in line
    succeed(main, make(out), RESUME)
    assert_equal(out, named)
    assert (
        json.loads((out / "summary.json").read_text())["best_step"]
        == (json.loads((named / "summary.json").read_text())["best_step"])
    )


@forks.several_ranks
@pytest.mark.wide
def test_two_ranks_equal_one(make, tmp_path):
    """In few steps, because rounding may change an answer."""
    for name, start in (("one", succeed), ("two", forks.succeed_on_ranks)):
        start(main, make(tmp_path / name, steps=2))
    for name in ("math", "code", "again"):
        assert scores(tmp_path / "two", name) == scores(tmp_path / "one", name)


def test_where_a_reader_finds_them(make, named, folder, capsys):
    summary = json.loads((named / "summary.json").read_text())
    of_step = {line["step"]: line for line in summary["evaluations"]}
    right = {step: score["correct"] for step, score in scores(named, "math").items()}
    for name in ("math", "code"):
        expected = scores(named, name)
        assert {step: of_step[step][f"eval/{name}"]["correct"] for step in of_step} == {
            step: score["correct"] for step, score in expected.items()
        }
    assert right[summary["best_step"]] == max(right[2], right[4]), "of the first set"
    assert rocm_ext(["report", str(named)]) == 0
    page = (named / "report.html").read_text()
    for name in ("math", "code"):
        assert f"<dt>Held-out pass@1 of {name}</dt>" in page
        assert f"Held-out pass@1 of {name}, %, greedy" in page
    assert "code, step 4" in page
    assert "validation.code: 12 of 12" in page
    rocm_ext(["monitor", "--count", "1", "--root", str(folder), str(named)])
    share = scores(named, "code")[4]["pass_at_1"]
    assert f"held-out of code {100 * share:.1f} %" in capsys.readouterr().out
    config = str(make(folder / "x"))
    rocm_ext(["rows", "--config", config, "--set", "code", "--json"])
    assert json.loads(capsys.readouterr().out)["dataset"]["kept"] == 12
    source = open_source(named)
    assert "pass@1 of code, step 4" in card(source, merged=False)


def test_eval_measures_one_set(named, capsys):
    for name in ("math", "code"):
        assert rocm_ext(["eval", str(named), "--set", name, "--base", "--json", TRUST]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["base"] == scores(named, name)[0]
        assert found["correct"] in [score["correct"] for score in scores(named, name).values()]
    strict = [TRUST, "--verifier", "tests.kit.judges.Broken", "max_error_share=1"]
    assert rocm_ext(["eval", str(named), "--set", "code", "--json", *strict]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert verdicts.get("ERROR", 0) > 0, "the command line's verifier judges"
    assert rocm_ext(["eval", str(named), TRUST]) == 1
    expected = "eval_prompts has several data sets; choose one: --set math or code or again"
    assert expected in capsys.readouterr().err
    assert rocm_ext(["eval", str(named), "--set", "maths", TRUST]) == 1
    assert "expected a name in eval_prompts; did you mean math" in capsys.readouterr().err


def as_tuple(**arguments: Any) -> tuple:
    return tuple(prompt_dataset(**arguments))


def test_one_named_set_needs_no_choice(folder, named, tmp_path, capsys):
    """Its own verifier judges; a component may return a tuple."""
    code = prompts_in(folder / "others.jsonl", verifier=KEPT)
    code["_component_"] = "tests.recipes.test_named_scores.as_tuple"
    config = str(write_run(folder, tmp_path / "out", eval_prompts={"code": code}))
    adapter = ["--adapter", str(named / "adapter")]
    assert rocm_ext(["eval", "--config", config, *adapter, "--base", "--json", TRUST]) == 0
    found = json.loads(capsys.readouterr().out)["base"]
    assert found["correct"] == scores(named, "code")[0]["correct"]


def test_compare_looks_at_each_set(make, sets, named, tmp_path, capsys):
    out = tmp_path / "other"
    succeed(main, make(out, seed=3))
    rocm_ext(["compare", str(named), str(out), "--json"])
    measured = json.loads(capsys.readouterr().out)["measured"]
    for name in ("math", "code", "again"):
        shares = [scores(o, name)[4]["pass_at_1"] for o in (named, out)]
        assert measured[f"held-out pass@1 of {name}, step 4"] == shares


def test_compare_rejects_what_loses_another_set(named, tmp_path, capsys):
    """The other run has the same answers, and at its end those to the second set are wrong."""
    out = shutil.copytree(named, tmp_path / "out")
    for file, change in (("verdicts", {"verdict": "WRONG"}), ("metrics", {})):
        changed = []
        for line in lines(out / f"{file}.jsonl"):
            if line["step"] == 4 and line.get("prompt_id", "").startswith("code/"):
                line |= change
            if line["step"] == 4 and "eval/code" in line:
                line["eval/code"]["correct"] = 0
            changed.append(json.dumps(line) + "\n")
        (out / f"{file}.jsonl").write_text("".join(changed))
    rocm_ext(["compare", str(named), str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == "reject"
    assert "its held-out pass@1 of code after step 4 is worse" in found["text"]


def test_raft_and_the_best_of_the_first_set(folder, sets, tmp_path):
    out = tmp_path / "out"
    path = raft_runs.write_run(folder, out, eval_prompts=sets)
    messages = succeed(raft_rocm.main, path)
    for step, score in scores(out, "math").items():
        assert f"cycle {step}: held-out math {100 * score['pass_at_1']:.1f} %" in messages
        (row,) = [line for line in messages.splitlines() if line.split()[:1] == [str(step)]]
        assert f"{score['pass_at_1']:.1%}" in row
    best = json.loads((out / "summary.json").read_text())["best_step"]
    assert (out / f"cycle_{best}" / WEIGHTS).read_bytes() == (out / WEIGHTS).read_bytes()


def sft(folder: Path, out: Path, **changes) -> Path:
    """Write the YAML of a run of SFT: 6 steps, evaluated after each."""
    cfg = run_config(folder / "base", folder / "prompts.jsonl", out, epochs=2, sequences_per_step=4)
    sampling = raft_runs.sampling_config(folder, out, "base")
    for key in ("verifier", "verify_workers", "max_new_tokens"):
        cfg[key] = sampling[key]
    cfg["optimizer"]["lr"] = 1e-2
    return write_yaml(out.with_suffix(".yaml"), cfg | {"eval_every_n_steps": 1, **changes})


def test_sft_stops_by_a_named_set(folder, sets, tmp_path, capsys):
    out = tmp_path / "out"
    stop = {"early_stopping_metric": "eval_correct/code", "early_stopping_patience": 2}
    path = sft(folder, out, eval_prompts=sets, **stop)
    messages = succeed(lora_finetune_rocm.main, path)
    summary = json.loads((out / "summary.json").read_text())
    shares = {step: score["pass_at_1"] for step, score in scores(out, "code").items() if step}
    best = max(shares, key=shares.__getitem__)
    assert summary["best_validation"] == {"step": best, "eval_correct/code": shares[best]}
    assert summary["adapter_is"] == "best by eval_correct/code"
    assert summary["steps"] == min(best + 2, 6)
    assert [line["step"] for line in summary["evaluations"]] == list(scores(out, "math"))
    assert "of 12 held-out prompts gained" in messages
    assert rocm_ext(["report", str(out)]) == 0
    assert "Held-out pass@1 of again" in (out / "report.html").read_text()
    shown = prompts_of(RunFolder(out))
    answered = {line["prompt_id"] for line in lines(out / "samples.jsonl")}
    assert shown.keys() == answered
    capsys.readouterr()
    assert rocm_ext(["eval", str(out), "--set", "code", "--base", "--json", TRUST]) == 0
    found = json.loads(capsys.readouterr().out)
    measured = [found["base"]["correct"], found["correct"]]
    assert measured == [scores(out, "code")[step]["correct"] for step in (0, best)]
    assert rocm_ext(["rows", "--config", str(path), "--set", "code", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dataset"]["kept"] == 12


@pytest.mark.parametrize("family", ["grpo", "sft"])
def test_a_run_warns_when_another_set_gets_worse(folder, tmp_path, family):
    """From step 2 on the answers to the target are right, and those to the other set are wrong."""
    out, end = tmp_path / "out", tmp_path / "end"
    before = {"_component_": "tests.kit.judges.Until", "end": str(end), "share": 1.0}
    after = {"_component_": "tests.kit.judges.After", "end": str(end)}
    sets = {
        "target": prompts_in(folder / "heldout.jsonl", verifier=after),
        "other": prompts_in(folder / "others.jsonl", verifier=before),
    }
    recipe, path = main, write_run(folder, out, eval_prompts=sets, steps=2, eval_every_n_steps=1)
    if family == "sft":
        recipe = lora_finetune_rocm.main
        path = sft(folder, out, eval_prompts=sets, max_steps_per_epoch=1)
    touch = hook(PolicyTrainer, "finish_step", lambda self, *_: self.step == 2 and end.touch())
    if family == "sft":
        touch = hook(
            Trainer,
            "train_step",
            lambda self, *_: self.step == 1 and end.touch(),
        )
    messages = succeed(recipe, path, prepare=touch)
    (line,) = [line for line in lines(out / "metrics.jsonl") if "warnings" in line]
    (warning,) = line["warnings"]
    expected = "step 2: the share of wrong held-out answers of other has risen to 1.0000, from 0.0000 at step 0"
    assert expected in warning
    assert expected in messages
    rocm_ext(["report", str(out)])
    assert expected in (out / "report.html").read_text()


def test_own_verifiers_are_enough(folder, sets, tmp_path):
    """If every set has one, SFT and distillation need no other; distillation leaves its training answers unjudged."""
    own = {name: {**sets[name], "verifier": KEPT} for name in ("math", "code")}
    of_sft = {"verifier": None, "eval_prompts": own, "max_steps_per_epoch": 1}
    succeed(lora_finetune_rocm.main, sft(folder, tmp_path / "sft", **of_sft))
    distil = {"recipe": "distil_rocm", "teacher": str(folder / "llama"), "steps": 1}
    path = write_run(folder, tmp_path / "out", **distil, verifier=None, eval_prompts=own)
    cfg = yaml.safe_load(path.read_text())
    succeed(distil_rocm.main, write_yaml(path, {k: cfg[k] for k in cfg if k != "truncated"}))
    for name in own:
        assert scores(tmp_path / "out", name)[0] == scores(tmp_path / "sft", name)[0]
    assert {line["phase"] for line in lines(tmp_path / "out" / "verdicts.jsonl")} == {"eval"}
    with pytest.raises(UserError, match="nothing judges the answers"):
        loaded(LoRAFinetune, sft(folder, tmp_path / "x", **of_sft | {"eval_prompts": sets}))


def test_no_pool_for_a_verifier_that_judges_nothing(folder, sets, tmp_path):
    path = sft(folder, tmp_path / "out", eval_prompts={"code": sets["code"]})
    recipe = loaded(LoRAFinetune, path)
    recipe.setup()
    assert list(recipe.trainer.evaluation.verifiers) == ["code"]
    recipe.cleanup()


@pytest.mark.parametrize(("changes", "message"), [
    (["eval_prompts.a+b.source=x"], r"eval_prompts.a\+b: a data set's name has letters, digits, _ and - only"),
    (["eval_prompts.math=null"], "eval_prompts.math is None; expected a _component_ and its arguments"),
    (["eval_prompts.math.sorce=x"], "unknown key eval_prompts.math.sorce .*did you mean source"),
    (["eval_prompts.math.source=no.jsonl"], "no.jsonl"),
    (["eval_prompts.code.verifier.shar=1"], "unknown key eval_prompts.code.verifier.shar .*did you mean share"),
    (["eval_prompts.code.verifier=Coin"], "eval_prompts.code.verifier is 'Coin'; expected a _component_"),
    (["eval_prompts.again.verifier._component_=rocm_ext.verifiers.PythonTests"], "heldout.jsonl:1: .*tests"),
])  # fmt: skip
def test_bad_input(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        loaded(GRPO, make(tmp_path / "out"), *changes).check()
    assert "\n" not in str(caught.value)


def test_an_override_replaces_named_sets(make, folder, tmp_path):
    plain = f"{{_component_: rocm_ext.data.prompt_dataset, source: {folder / 'others.jsonl'}}}"
    path = make(tmp_path / "out")
    assert list(loaded(GRPO, path, f"eval_prompts={plain}").cfg.eval_prompts) == [
        "_component_",
        "source",
    ]
    assert list(loaded(GRPO, path, f"eval_prompts={{new: {plain}}}").cfg.eval_prompts) == ["new"]
    assert list(loaded(GRPO, path, "eval_prompts.math.limit=2").cfg.eval_prompts) == [
        "math",
        "code",
        "again",
    ]


@pytest.mark.parametrize(("changes", "message"), [
    ({"eval_prompts": {}}, "eval_prompts is {}; expected a _component_ and its arguments"),
    ({"environment": {"_component_": "tests.kit.judges.Coin"}, "verifier": None}, 
     "code.verifier and environment"),
])  # fmt: skip
def test_bad_mappings(make, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        loaded(GRPO, make(tmp_path / "out", **changes)).check()


def test_metrics_of_unknown_sets(folder, sets, tmp_path):
    path = sft(
        folder, tmp_path / "out", eval_prompts=sets, early_stopping_metric="eval_correct/mth"
    )
    with pytest.raises(
        UserError, match=r"eval_correct/mth is unknown .*did you mean eval_correct/math"
    ):
        loaded(LoRAFinetune, path).check()


def judged(right: np.ndarray) -> Scored:
    correct = {"pass_at_1": float(right.mean())}
    return Scored(correct, 1.0 - right)  # type: ignore[arg-type]


def test_what_counts_as_forgetting():
    """Prompts that are lost count, less those that are gained; few of them are chance."""
    watch = Forgetting("target")
    found = {}
    start = np.arange(100) < 60
    for step, (target, lost, gained) in enumerate([(10, 0, 0), (20, 10, 0), (30, 20, 0), (40, 22, 0), (35, 50, 0),
                                                   (40, 55, 5)]):  # fmt: skip
        right = start.copy()
        right[:lost] = False
        right[60 : 60 + gained] = True
        results = {"target": judged(np.arange(100) < target), "other": judged(right.astype(float))}
        found[step] = watch.take(step, results)
    # 1: ten may be chance; 3: no worse than at the warning; 4: the target is not at its best, as at 3 and 5
    assert [step for step, warnings in found.items() if warnings] == [2, 5]
    assert "of other has risen to 0.6000, from 0.4000 at step 0" in found[2][0]


def test_the_order_of_prompts_changes_no_pair():
    """A resumed run may read the prompts in another order."""
    prompts = [Prompt(name, (), {}, "") for name in "abc"]
    results = {(name, GREEDY): Result(Verdict.WRONG, 0.0) for name in "abc"}
    results["a", GREEDY] = Result(Verdict.CORRECT, 1.0)
    for order in (prompts, prompts[::-1]):
        answers = Answers({}, {(p.id, GREEDY): results[p.id, GREEDY] for p in order}, {})
        assert judge(answers, {"": order}, 0)[""].sums.tolist() == [0, 1, 1]


def test_noise_is_no_forgetting():
    """Of 40 runs of 20 evaluations, in which a third of the answers change by chance, at most one warns."""
    random = np.random.default_rng(0)
    warned = 0
    for _ in range(40):
        watch = Forgetting("target")
        chances = random.beta(1, 1, 100)
        warnings = []
        for step in range(20):
            right = (random.random(100) < chances).astype(float)
            target = judged((np.arange(100) < 10 + step).astype(float))
            warnings += watch.take(step, {"target": target, "other": judged(right)})
        warned += bool(warnings)
    assert warned <= 1


def test_equal_ids_of_training_and_held_out_prompts(folder, tmp_path):
    """A name makes them different; without it, a training prompt would get the tokens of a held-out one."""
    parts = {}
    for key, number in (("prompts", 1), ("eval_prompts", 2)):
        rows = [{"id": i, "prompt": f"{number} + {i}?", "answer": "3"} for i in range(4)]
        path = tmp_path / f"{key}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        parts[key] = {"_component_": "rocm_ext.data.prompt_dataset", "source": str(path)}
    message = (
        r"eval_prompts.jsonl:1 has the id '0' of .*prompts.jsonl:1; change it, or give the held-out"
    )
    with pytest.raises(UserError, match=message):
        loaded(GRPO, write_run(folder, tmp_path / "out", **parts)).check()
    rows = (tmp_path / "prompts.jsonl").read_text().replace('"id": 0', '"id": "sums/0"')
    (tmp_path / "taken.jsonl").write_text(rows)
    taken = {**parts["prompts"], "source": str(tmp_path / "taken.jsonl")}
    named = {"prompts": taken, "eval_prompts": {"sums": parts["eval_prompts"]}}
    with pytest.raises(UserError, match=r"has the id 'sums/0' of .*taken.jsonl:1; change it$"):
        loaded(GRPO, write_run(folder, tmp_path / "taken", **named)).check()
    named["prompts"] = parts["prompts"]
    recipe = loaded(GRPO, write_run(folder, tmp_path / "named", **named))
    recipe.check()
    assert recipe.prompts["0"].row["prompt"] == "1 + 0?"
    assert recipe.prompts["sums/0"].row["prompt"] == "2 + 0?"


def test_a_config_in_a_folder_may_have_our_verifiers():
    """Of a run or an adapter from anybody; other components need --trust-config."""

    def content(component: str) -> dict:
        both = {"_component_": "rocm_ext.verifiers.All", "verifiers": [{"_component_": component}]}
        prompts = {"_component_": "rocm_ext.data.prompt_dataset", "source": "x", "verifier": both}
        return {"eval_prompts": {"code": prompts}}

    check_from_folder(content("rocm_ext.verifiers.MathAnswer"), Path("config.yaml"))
    with pytest.raises(
        UserError, match=r"eval_prompts.code.verifier.verifiers._component_ is 'os.x'"
    ):
        check_from_folder(content("os.x"), Path("config.yaml"))
