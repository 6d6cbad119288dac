"""RAFT end to end: its files, its recovery from kills, and the same results on any number of ranks."""

import hashlib
import json
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rocm_ext.recipes.raft_rocm import RAFT, RAFTTrainer, main
from safetensors.torch import load_file

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE, render_prompt
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.evaluate.answers import evaluate
from rocm_ext.model.sampler import MIN_ROWS
from rocm_ext.rl.records import PhaseRecords, Records
from rocm_ext.runs.intervals import mcnemar
from rocm_ext.sampling.slots import SlotBatch
from tests.kit import forks
from tests.kit.forks import RESUME, forked, several_ranks, signal_at, succeed
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import (
    WEIGHTS,
    assert_equal,
    cycle_line,
    held_out,
    loaded,
    records,
    trained,
)
from tests.kit.tiny import read_records
from tests.recipes.test_resume import tree

resource = pytest.importorskip("resource", reason="forks, POSIX signals and limits")
load = partial(loaded, RAFT)


def test_every_arrow_is_a_file(reference):
    text = (reference / "summary.json").read_text()
    summary = json.loads(text)
    assert text == json.dumps(summary, indent=2) + "\n"
    assert summary["steps"] == 2
    assert [line["step"] for line in summary["evaluations"]] == [0, 1, 2]
    for cycle in (1, 2):
        folder = reference / f"cycle_{cycle}"
        samples, verdicts = (records(reference, cycle, name) for name in ("samples", "verdicts"))
        kept = read_records(folder / "kept.jsonl")
        keys = {(r["prompt_id"], r["sample"]) for r in samples}
        assert len(samples) == len(keys) == 12 * 4
        assert {(r["prompt_id"], r["sample"]) for r in verdicts} == keys
        right = {(r["prompt_id"], r["sample"]) for r in verdicts if r["verdict"] == "CORRECT"}
        assert {(r["prompt_id"], r["sample"]) for r in kept} <= right
        assert (folder / WEIGHTS).exists()
        line = cycle_line(reference, cycle)
        assert (line["answers"], line["kept"]) == (48, len(kept))
        assert line["verdicts"] == {"CORRECT": len(right), "WRONG": 48 - len(right)}
        assert line["updates"] == 2 * -(-len(kept) // 8)
        assert line["sample_seconds"] > 0
    for record in samples:
        assert len(record["tokens"]) == len(record["logprobs"]) <= 12
        assert record["finish_reason"] == ("length" if len(record["tokens"]) == 12 else "stop")
        assert all(value <= 0 for value in record["logprobs"])
        seed = f"1\0{2}\0{record['prompt_id']}\0{record['sample']}".encode()
        assert record["seed"] == int.from_bytes(hashlib.sha256(seed).digest()[:8], "little") >> 1
    # what the metric logger got: the phases, steps that count on over the cycles, and scores
    lines = [line.partition(" | ") for line in (reference / "log").read_text().splitlines()]
    values = [dict(item.split(":") for item in text.split()) for *_, text in lines]
    scores = [float(line["eval_correct"]) for line in values if "eval_correct" in line]
    assert scores == [line["pass_at_1"] for line in summary["evaluations"]]
    assert sum("sampled_tokens" in line for line in values) == 2
    updates = [
        int(head.split()[1])
        for (head, *_), line in zip(lines, values, strict=True)
        if "loss" in line and "answers" not in line
    ]
    assert updates == list(range(1, len(updates) + 1))
    assert OmegaConf.load(reference / "torchtune_config.yaml").samples_per_prompt == 4


def test_samples_are_those_of_the_model_of_the_cycle_before(reference, make, tmp_path):
    raft = load(
        make(tmp_path / "out"),
        f"checkpointer.adapter_checkpoint={reference / 'cycle_1' / 'adapter'}",
    )
    raft.setup()
    decoder = raft.learner.decoder.eval()
    for record in records(reference, 2, "samples")[:12]:
        prompt = raft.prompts.tokens[record["prompt_id"]]
        with torch.no_grad():
            logits = decoder(torch.tensor([prompt + record["tokens"]]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(record["tokens"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record["logprobs"]), expected, rtol=0, atol=1e-4)
    prompt = raft.prompts.training[3]
    assert raft.prompts.tokens[prompt.id] == render_prompt(
        raft.learner.tokenizer, prompt.messages
    ), "as for SFT"
    raft.cleanup()


def test_what_is_trained_on_is_what_was_sampled(reference, make, tmp_path):
    """The first cycle's adapter equals the SFT recipe's on the kept token ids with masked prompts."""
    kept = read_records(reference / "cycle_1" / "kept.jsonl")
    seen = []

    class Watched(RAFTTrainer):
        def train_on(self, rows, groups):
            seen.append(rows)
            return super().train_on(rows, groups)

    raft = trained(partial(RAFT, trainer=Watched), make(tmp_path / "out"))
    for record in kept:
        assert record["prompt_tokens"] == raft.prompts.tokens[record["prompt_id"]]
    for record, tokens, labels in zip(kept, seen[0].tokens, seen[0].labels, strict=True):
        prompt = record["prompt_tokens"]
        assert tokens.tolist() == prompt + record["tokens"]
        assert labels.tolist() == [IGNORE] * len(prompt) + record["tokens"]
    assert_equal(tmp_path / "out", reference)


def test_an_evaluation_has_the_scores_of_the_run(reference, make, tmp_path, monkeypatch):
    whole, stopped = (
        config.load("raft_rocm", str(make(tmp_path / name))) for name in ("whole", "stopped")
    )
    adapter = reference / "cycle_2" / "adapter"
    assert evaluate(whole, adapter)[0].scores == held_out(reference)[2]
    monkeypatch.setattr(PhaseRecords, "append", PhaseRecords.append)  # it comes back after the test
    signal_at(PhaseRecords, "append", lambda *_: True, signal.SIGTERM)()
    with pytest.raises(SystemExit) as stop:
        evaluate(stopped, adapter)
    assert stop.value.code == 128 + signal.SIGTERM


def test_a_run_goes_on_from_an_older_checkpoint(reference, make, tmp_path):
    """It writes the outputs of its cycles again, and reads of them the measurements in ``metrics.jsonl`` alone.

    At the end it says how likely the choice of its best cycle is by chance.
    """
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    *_, last = sorted((out / "checkpoints").iterdir())
    shutil.rmtree(last)
    shutil.rmtree(out / "cycle_2" / "adapter")
    (out / "cycle_2" / "kept.jsonl").unlink()
    messages = succeed(main, make(out), RESUME)
    assert_equal(out, reference)
    right = [
        {r["prompt_id"] for r in records(out, n, "verdicts", "eval") if r["reward"]}
        for n in range(3)
    ]
    chosen = 2 if len(right[2]) > len(right[1]) else 1
    gained, lost = len(right[chosen] - right[0]), len(right[0] - right[chosen])
    p = mcnemar(lost, gained)
    facts = (
        f"{gained} of 6 held-out",
        f"{lost} lost",
        f"p = {p:.2g} (McNemar)",
        f"{min(1, 2 * p):.2g} as the best of 2",
    )
    assert one_line_has(messages, f"cycle {chosen} against the initial model", *facts)


def assert_same_answers(out: Path, reference: Path) -> None:
    for cycle in (1, 2):
        found, expected = (
            {
                (r["prompt_id"], r["sample"]): (r["tokens"], r["seed"])
                for r in records(top, cycle, "samples")
            }
            for top in (out, reference)
        )
        assert found == expected
    torch.testing.assert_close(
        load_file(out / WEIGHTS), load_file(reference / WEIGHTS), rtol=0, atol=1e-6
    )
    assert not list(out.rglob("*.rank*"))


@pytest.mark.wide
@several_ranks
def test_two_ranks_sample_and_train_what_one_does(reference, make, tmp_path):
    out = tmp_path / "two"
    forks.succeed_on_ranks(main, make(out))
    assert_same_answers(out, reference)


@pytest.mark.wide
@several_ranks
def test_a_slow_rank_takes_fewer_prompts_and_may_die(reference, make, tmp_path):
    """Rank 1 is slow, and killed after 6 answers; rank 0 takes all other prompts, and a resumed run the rest."""
    out = tmp_path / "two"
    slots, part = f"engine.slots={MIN_ROWS}", out / "samples.rank1.jsonl"
    step, append = SlotBatch.step, PhaseRecords.append

    def prepare(rank: int) -> None:
        def paced(self):
            while rank == 0 and not part.exists():  # else it may take all before rank 1 takes any
                time.sleep(0.01)
            time.sleep(0.1 * rank)
            return step(self)

        def killed(self, record):
            append(self, record)
            if (
                self.file.part == part
                and sum(line["phase"] == "sample" for line in read_records(part)) == 6
            ):
                os.kill(os.getpid(), signal.SIGKILL)

        SlotBatch.step, PhaseRecords.append = paced, killed

    (code, messages), killed = forks.forked_ranks(main, make(out), slots, prepare=prepare)
    assert (code > 0, killed[0]) == (True, -signal.SIGKILL), messages + killed[1]
    asked = [[line["prompt_id"] for line in read_records(out / name) if line["phase"] == "sample"]
             for name in ("samples.jsonl", part.name)]  # fmt: skip
    assert len(asked[1]) == 6
    assert len(asked[0]) >= 4 * (
        12 - 6
    )  # rank 1 had begun four prompts, and one more for each four answers
    assert not set(asked[0]) & set(asked[1])
    forks.succeed_on_ranks(main, make(out), slots, RESUME)
    assert_same_answers(out, reference)


def test_raft_plus_plus_starts_at_a_ratio_of_one(make, tmp_path):
    out = tmp_path / "out"
    messages = succeed(main, make(out, objective="raft++", start_from="base", cycles=1, epochs=3))
    losses = [
        json.loads(line)["loss"]
        for line in (out / "cycle_1" / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] == pytest.approx(-1, abs=1e-4)  # the sampler's log-probs equal the trainer's
    assert losses[-1] < -1.01
    assert min(losses) >= -1.28
    assert one_line_has(messages, "replayed answers", "older adapters"), (
        "later cycles would train on them"
    )


@pytest.mark.wide
@pytest.mark.parametrize("counts", [
    (2, 46),
    pytest.param(range(4, 120, 9), marks=pytest.mark.wide),
    pytest.param(range(1, 120, 3), marks=pytest.mark.nightly),
])  # fmt: skip
def test_killed_while_writing(make, reference, tmp_path, counts):
    out = tmp_path / "out"
    codes = [
        forked(main, make(out), RESUME, prepare=forks.kill_before(count))[0] for count in counts
    ]
    assert set(codes) <= {-signal.SIGKILL, 0}
    assert -signal.SIGKILL in codes
    succeed(main, make(out), RESUME)
    assert "all 2 cycles are done already" in succeed(main, make(out), RESUME)
    assert_equal(out, reference)


@pytest.mark.nightly
def test_killed_at_random_moments(make, reference, tmp_path):
    rng, out = random.Random(0), tmp_path / "out"
    for _ in range(25):
        forked(main, make(out), RESUME, kill_after=rng.uniform(0.5, 6))
    succeed(main, make(out), RESUME)
    assert_equal(out, reference)


@pytest.mark.wide
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.wide), -1])
def test_sigterm_while_training(make, reference, tmp_path, step):
    """This includes the last step, after which no step checks for the signal."""
    stop = signal_at(
        RAFTTrainer,
        "save_checkpoint",
        lambda self: self.step == 1 if step < 0 else self.done == step,
        signal.SIGTERM,
    )
    out = tmp_path / "out"
    code, messages = forked(main, make(out), prepare=stop)
    assert code == 143, messages
    assert "all saved; continue with resume_from_checkpoint=True" in messages
    succeed(main, make(out), RESUME)
    assert_equal(out, reference)


@pytest.mark.wide
def test_full_disk_while_sampling(make, reference, tmp_path):
    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))

    out = tmp_path / "out"
    assert "no space left to write" in forks.refused(main, make(out), prepare=prepare)
    succeed(main, make(out), RESUME)
    assert_equal(out, reference)


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_recorded(tmp_path_factory, text):
    folder, alone = tmp_path_factory.mktemp("records"), Ranks(torch.device("cpu"), 0, 1, None)
    samples, *_ = Records(folder, alone, 0, -1).phase(1, "sample")
    written = [{"prompt_id": text, "sample": index, "text": text} for index in range(2)]
    for record in written:
        samples.append(record)
    assert [record | {"step": 1, "phase": "sample"} for record in written] == read_records(
        folder / "samples.jsonl"
    )
    assert list(Records(folder, alone, 0, -1).phase(1, "sample")[0].records.values()) == written


@pytest.mark.wide(always=3)
@pytest.mark.parametrize(("override", "message"), [
    ("checkpointer.adapter_checkpoint=ANOTHER", "first adapter changed"),
    ("prompts.limit=7", "prompts changed"),
    ("replay_cycles=1", "replay_cycles: was None, is 1"),
    ("eval_prompts.limit=3", "eval prompts changed"),
    ("reward_threshold=0.6", "reward_threshold: was"),
])  # fmt: skip
def test_another_run_in_the_same_folder_is_refused(reference, make, override, message):
    before = tree(reference)
    override = override.replace("ANOTHER", str(reference / "cycle_1" / "adapter"))
    with pytest.raises(UserError, match=f"belongs to another run: .*{message}"):
        load(make(reference), RESUME, override).setup()
    assert tree(reference) == before


def test_pass_at_k_is_measured_and_each_answer_is_judged_once(make, tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    verifier = {"_component_": "tests.kit.judges.Coin", "log": str(log)}
    succeed(main, make(out, "llama", cycles=1, eval_samples=4, verifier=verifier))
    scores = held_out(out)[1]
    assert list(scores["pass_at_k"]) == ["1", "2", "4"]
    verdicts = records(out, 1, "verdicts", "eval")
    right = [r["verdict"] == "CORRECT" for r in verdicts if r["sample"] >= 0]
    assert len(right) == 24
    assert scores["pass_at_k"]["1"]["pass"] == pytest.approx(sum(right) / 24)
    solved = {r["prompt_id"] for r in verdicts if r["sample"] >= 0 and r["verdict"] == "CORRECT"}
    assert scores["pass_at_k"]["4"]["pass"] == pytest.approx(len(solved) / 6)
    assert cycle_line(out, 1)["kept"] > 0
    judged, trial = len(log.read_text().splitlines()), 1
    assert judged == len(read_records(out / "verdicts.jsonl")) + trial


@pytest.mark.parametrize(("changes", "message"), [
    ({"temperature": 0}, "temperature 0 gives the same answer 4 times"),
    ({"recipe": "raft_rocm", "loss": {"_component_": "rocm_ext.losses.Preference"}}, "reference_logprobs"),
    ({"verifier": {"_component_": "rocm_ext.verifiers.PythonTests"}}, "prompts.jsonl:1"),
    ({"verifier": {"_component_": "tests.kit.judges.Dies"}}, "exited with 3"),
    ({"optimizer_state": "run", "start_from": "base"}, "optimizer_state=run keeps the moments of other weights"),
    ({"engine": {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": ["http://127.0.0.1:9/v1"]}},
     "http://127.0.0.1:9 cannot be reached"),
])  # fmt: skip
def test_bad_input_is_refused_in_one_line(make, tmp_path, changes, message):
    with pytest.raises(UserError) as refused:
        load(make(tmp_path / "out", **changes)).check()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.code == (
        75 if "cannot be reached" in message else 1
    )  # 75: the command may succeed later


@pytest.mark.wide
def test_training_that_changes_nothing_is_an_error(make, tmp_path):
    warm_up = {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 9,
    }
    changes = {"lr_scheduler": warm_up, "sequences_per_step": 64, "epochs": 1, "eval_prompts": None}
    out = tmp_path / "out"
    for resume in ("False", "True"):
        line = forks.refused(main, make(out, **changes), f"resume_from_checkpoint={resume}")
        assert one_line_has(line, "cycle 1", "changed nothing, bit for bit")


def test_held_out_prompts_must_not_be_trained_on(make, folder, tmp_path):
    overlap = tmp_path / "overlap.jsonl"
    overlap.write_text((folder / "prompts.jsonl").read_text().splitlines()[4] + "\n")
    with pytest.raises(UserError, match=r"overlap.jsonl:1.*prompts.jsonl:5"):
        load(make(tmp_path / "out"), f"eval_prompts.source={overlap}").check()


@pytest.mark.wide
def test_a_mended_verifier_judges_again_without_sampling_again(make, tmp_path):
    out = tmp_path / "out"
    broken = {"_component_": "tests.kit.judges.Broken"}
    assert "max_error_share" in forks.refused(main, make(out, verifier=broken, eval_prompts=None))
    samples = (out / "samples.jsonl").read_bytes()
    assert "ERROR" not in (out / "verdicts.jsonl").read_text()
    # the resumed run has the same verifier in its config, but accepts its errors
    succeed(main, make(out, verifier=broken, eval_prompts=None), RESUME, "max_error_share=1")
    assert records(out, 1, "samples") == [json.loads(line) for line in samples.splitlines()]
