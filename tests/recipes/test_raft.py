"""RAFT end to end: its files, its recovery from kills, and the same results on any number of ranks."""

import hashlib
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rocm_ext.recipes.raft_rocm import RAFT, main
from safetensors.torch import load_file

from rocm_ext import cli, config
from rocm_ext.base.errors import UserError
from rocm_ext.data.render import IGNORE, render_prompt
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.evaluate.answers import evaluate
from rocm_ext.losses import CrossEntropy, PolicyGradient
from rocm_ext.model.sampler import MIN_ROWS
from rocm_ext.rl.cycles import CycleTrainer
from rocm_ext.rl.records import PhaseRecords, Records, read_records
from rocm_ext.sampling.slots import SlotBatch
from tests.kit.forks import forked, forked_ranks, kill_before, several_ranks
from tests.kit.lines import one_line_has
from tests.kit.raft_runs import WEIGHTS, assert_equal, cycle_row, outcome, records

resource = pytest.importorskip("resource", reason="forks, POSIX signals and limits")


def load(path: Path, *overrides: str) -> RAFT:
    return RAFT(config.load("raft_rocm", str(path), list(overrides)))


# ---- what a run writes


def test_summary_is_plain_json(reference):
    text = (reference / "summary.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    assert [row["cycle"] for row in json.loads(text)["cycles"]] == [0, 1, 2]


def test_metric_logger_gets_config_phases_steps_and_scores(reference):
    rows = json.loads((reference / "summary.json").read_text())["cycles"]
    lines = [line.partition(" | ") for line in (reference / "log").read_text().splitlines()]
    values = [dict(item.split(":") for item in text.split()) for *_, text in lines]
    scores = [float(line["eval_correct"]) for line in values if "eval_correct" in line]
    assert scores == [row["held_out"]["correct"] / row["held_out"]["prompts"] for row in rows]
    assert sum("sample_tokens" in line for line in values) == 2
    steps = [int(head.split()[1]) for (head, *_), line in zip(lines, values, strict=True) if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))  # they count on over the cycles
    assert OmegaConf.load(reference / "torchtune_config.yaml").samples_per_prompt == 4


def test_every_arrow_is_a_file(reference):
    assert (reference / "cycle_0" / "eval.json").exists()
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
        row = cycle_row(reference, cycle)
        assert (row["samples"], row["kept"]) == (48, len(kept))
        assert row["verdicts"] == {"CORRECT": len(right), "WRONG": 48 - len(right)}
        assert row["steps"] == 2 * -(-len(kept) // 8)
        assert row["held_out"] == json.loads((folder / "eval.json").read_text())
        assert row["seconds"]["sample"] > 0
    for record in samples:
        assert len(record["tokens"]) == len(record["logprobs"]) <= 12
        assert record["finish_reason"] == ("length" if len(record["tokens"]) == 12 else "stop")
        assert all(value <= 0 for value in record["logprobs"])


def test_samples_are_those_of_the_model_of_the_cycle_before(reference, make, tmp_path):
    raft = load(make(tmp_path / "out", checkpointer={
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(reference.parent / "base"), "checkpoint_files": ["model.safetensors"],
        "model_type": "QWEN2", "output_dir": str(tmp_path),
        "adapter_checkpoint": str(reference / "cycle_1" / "adapter"),
    }))  # fmt: skip
    raft.setup()
    decoder = raft.learner.decoder.eval()
    for record in records(reference, 2, "samples")[:12]:
        prompt = raft.prompts.tokens[record["prompt_id"]]
        with torch.no_grad():
            logits = decoder(torch.tensor([prompt + record["tokens"]]))[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(record["tokens"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(record["logprobs"]), expected, rtol=0, atol=1e-4)


def test_what_is_trained_on_is_what_was_sampled(reference, make, tmp_path):
    """The first cycle's adapter equals the SFT recipe's on the kept token ids with masked prompts."""
    kept = read_records(reference / "cycle_1" / "kept.jsonl")
    seen = []

    class Watched(CycleTrainer):
        def train_on(self, rows, groups):
            seen.append(rows)
            return super().train_on(rows, groups)

    raft = RAFT(config.load("raft_rocm", str(make(tmp_path / "out")), ["seed=1"]), trainer=Watched)
    raft.setup()
    raft.train()
    raft.cleanup()
    for record in kept:
        assert record["prompt_tokens"] == raft.prompts.tokens[record["prompt_id"]]
    for record, tokens, labels in zip(kept, seen[0].tokens, seen[0].labels, strict=True):
        prompt = record["prompt_tokens"]
        assert tokens.tolist() == prompt + record["tokens"]
        assert labels.tolist() == [IGNORE] * len(prompt) + record["tokens"]
    assert_equal(tmp_path / "out", reference)


def test_prompts_are_rendered_as_for_sft(reference, make, tmp_path):
    raft = load(make(tmp_path / "out"))
    raft.setup()
    prompt = raft.prompts.training[3]
    assert raft.prompts.tokens[prompt.id] == render_prompt(raft.learner.tokenizer, prompt.messages)
    raft.cleanup()


def test_evaluation_of_any_adapter(reference, make, tmp_path):
    path = make(tmp_path / "out")
    for cycle, adapter in ((0, None), (2, reference / "cycle_2" / "adapter")):
        cfg = config.load("raft_rocm", str(path), [f"output_dir={tmp_path / str(cycle)}"])
        scores = json.loads((reference / f"cycle_{cycle}" / "eval.json").read_text())
        assert evaluate(cfg, adapter)[0].scores == scores


def test_an_evaluation_that_is_stopped(make, tmp_path, monkeypatch):
    original = PhaseRecords.append

    def append(self, record):
        original(self, record)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(PhaseRecords, "append", append)
    cfg = config.load("raft_rocm", str(make(tmp_path / "unused")), [f"output_dir={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as stop:
        evaluate(cfg, None)
    assert stop.value.code == 128 + signal.SIGTERM


def test_a_run_goes_on_from_an_older_checkpoint(reference, make, tmp_path):
    """It writes the outputs of its cycles again, and reads of them the measurements in ``metrics.jsonl`` alone."""
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    *_, last = sorted((out / "checkpoints").iterdir())
    shutil.rmtree(last)
    shutil.rmtree(out / "cycle_2" / "adapter")
    for name in ("kept.jsonl", "summary.json", "selection.json", "eval.json"):
        (out / "cycle_2" / name).unlink()
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)
    found, expected = (json.loads((each / "summary.json").read_text())["cycles"] for each in (out, reference))
    assert [row["cycle"] for row in found] == [0, 1, 2]
    assert [row["held_out"] for row in found] == [row["held_out"] for row in expected]


class NeedsReference(CrossEntropy):
    """An objective with a column that RAFT's rows do not have."""

    columns = ("reference_logprobs",)


def test_columns_that_no_sample_has_are_refused_early(make, tmp_path):
    loss = {"_component_": "tests.recipes.test_raft.NeedsReference"}
    code, messages = forked(main, make(tmp_path / "out", loss=loss))
    assert code == 1
    assert one_line_has(messages, "NeedsReference", "columns reference_logprobs")
    assert not (tmp_path / "out" / "cycle_0").exists()


# ---- ranks


def assert_same_answers(out: Path, reference: Path) -> None:
    for cycle in (1, 2):
        found, expected = (
            {(r["prompt_id"], r["sample"]): (r["tokens"], r["seed"]) for r in records(top, cycle, "samples")}
            for top in (out, reference)
        )
        assert found == expected
    torch.testing.assert_close(load_file(out / WEIGHTS), load_file(reference / WEIGHTS), rtol=0, atol=1e-6)
    assert not list(out.rglob("*.rank*"))


@several_ranks
def test_two_ranks_sample_and_train_what_one_does(reference, make, tmp_path):
    out = tmp_path / "two"
    for code, messages in forked_ranks(main, make(out)):
        assert code == 0, messages
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
            if self.file.part == part and sum(line["phase"] == "sample" for line in read_records(part)) == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        SlotBatch.step, PhaseRecords.append = paced, killed

    (code, messages), killed = forked_ranks(main, make(out), slots, prepare=prepare)
    assert (code > 0, killed[0]) == (True, -signal.SIGKILL), messages + killed[1]
    asked = [[line["prompt_id"] for line in read_records(out / name) if line["phase"] == "sample"]
             for name in ("samples.jsonl", part.name)]  # fmt: skip
    assert len(asked[1]) == 6
    assert len(asked[0]) >= 4 * (12 - 6)  # rank 1 had begun four prompts, and one more for each four answers
    assert not set(asked[0]) & set(asked[1])
    for code, messages in forked_ranks(main, make(out), slots, "resume_from_checkpoint=True"):
        assert code == 0, messages
    assert_same_answers(out, reference)


# ---- objectives


def test_raft_plus_plus_equals_its_formula():
    torch.manual_seed(0)
    head, hidden = torch.nn.Linear(16, 50, bias=False), torch.randn(40, 16, requires_grad=True)
    targets = torch.randint(0, 50, (40,))
    with torch.no_grad():
        old = head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0] + 0.5 * torch.randn(40)
    ratio = (head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0] - old).exp()
    expected = -torch.minimum(ratio, ratio.clamp(1 - 0.2, 1 + 0.28)).sum()
    (grad,) = torch.autograd.grad(expected, hidden)
    columns = {"old_logprobs": old, "advantages": torch.ones_like(old)}
    objective = PolicyGradient("dapo", clip_high=0.28, on_policy=False, chunk_tokens=7)
    loss = objective(head, hidden, targets, columns, torch.zeros_like(targets))
    (found,) = torch.autograd.grad(loss, hidden)
    assert 5 < (ratio > 1.28).sum() < 35  # some ratios are clipped and some are not
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, grad, rtol=1e-4, atol=1e-6)


def test_raft_plus_plus_starts_at_a_ratio_of_one(make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, objective="raft++", cycles=1, epochs=3))
    assert code == 0, messages
    losses = [json.loads(line)["loss"] for line in (out / "cycle_1" / "metrics.jsonl").read_text().splitlines()]
    assert losses[0] == pytest.approx(-1, abs=1e-4)  # the sampler's log-probs equal the trainer's
    assert losses[-1] < -1.01
    assert min(losses) >= -1.28


# ---- killed and resumed


@pytest.mark.parametrize("counts", [(2, 46), pytest.param(range(1, 120, 3), marks=pytest.mark.nightly)])
def test_killed_while_writing(make, reference, tmp_path, counts):
    out, codes = tmp_path / "out", []
    for count in counts:
        codes.append(forked(main, make(out), "resume_from_checkpoint=True", prepare=kill_before(count))[0])
    assert set(codes) <= {-signal.SIGKILL, 0}
    assert -signal.SIGKILL in codes
    for _ in range(2):
        code, messages = forked(main, make(out), "resume_from_checkpoint=True")
        assert code == 0, messages
    assert "all 2 cycles are done already" in messages
    assert_equal(out, reference)


def kill_at_record(name: str, count: int):
    """Patch the records so that writing record ``count`` kills the process halfway through the record."""

    def prepare() -> None:
        original = PhaseRecords.append

        def append(self, record):
            if self.file.part.name == name:
                prepare.count += 1  # type: ignore[attr-defined]
            if prepare.count == count:  # type: ignore[attr-defined]
                text = json.dumps(record, ensure_ascii=False).encode()
                with self.file.part.open("ab") as file:
                    file.write(text[: len(text) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, record)

        prepare.count = 0  # type: ignore[attr-defined]
        PhaseRecords.append = append  # type: ignore[method-assign]

    return prepare


@pytest.mark.wide  # the loop is GRPO's, whose test is fast
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("samples.jsonl", 3),
        ("samples.jsonl", 40),
        ("verdicts.jsonl", 20),
        ("samples.jsonl", 58),
    ],
)
def test_killed_while_sampling_and_verifying(make, reference, tmp_path, name, count):
    out = tmp_path / "out"
    assert forked(main, make(out), prepare=kill_at_record(name, count))[0] == -signal.SIGKILL
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)


@pytest.mark.nightly
def test_killed_at_random_moments(make, reference, tmp_path):
    rng, out = random.Random(0), tmp_path / "out"
    for _ in range(25):
        forked(main, make(out), "resume_from_checkpoint=True", kill_after=rng.uniform(0.5, 6))
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)


@pytest.mark.wide  # test_killed_while_writing kills before some of them
@pytest.mark.parametrize("written", ["kept.jsonl", "eval.json", "summary.json", "adapter"])
def test_killed_before_a_file_appears(make, reference, tmp_path, written):
    def prepare() -> None:
        for name in ("replace", "rename"):
            setattr(Path, name, killing(getattr(Path, name)))

    def killing(function):
        def call(self, target):
            if Path(target).name == written:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(self, target)

        return call

    out = tmp_path / "out"
    assert forked(main, make(out), prepare=prepare)[0] == -signal.SIGKILL
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)


@pytest.mark.wide
@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.wide), -1])
def test_sigterm_while_training(make, reference, tmp_path, step):
    """This includes the last step, after which no step checks for the signal."""

    def prepare() -> None:
        original = CycleTrainer.save_checkpoint

        def save_checkpoint(self):
            original(self)
            if self.done == step or (step < 0 and self.step == 1):
                os.kill(os.getpid(), signal.SIGTERM)

        CycleTrainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]

    out = tmp_path / "out"
    code, messages = forked(main, make(out), prepare=prepare)
    assert code == 143, messages
    assert "all saved; continue with resume_from_checkpoint=True" in messages
    assert forked(main, make(out), "resume_from_checkpoint=True")[0] == 0
    assert_equal(out, reference)


def test_full_disk_while_sampling(make, reference, tmp_path):
    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))

    out = tmp_path / "out"
    code, messages = forked(main, make(out), prepare=prepare)
    assert code == 1
    assert "no space left to write" in messages
    assert "Traceback" not in messages
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_recorded(tmp_path_factory, text):
    folder, alone = tmp_path_factory.mktemp("records"), Ranks(torch.device("cpu"), 0, 1, None)
    samples, *_ = Records.open(folder, alone, 0, -1).phase(1, "sample")
    written = [{"prompt_id": text, "sample": index, "text": text} for index in range(2)]
    for record in written:
        samples.append(record)
    assert [record | {"step": 1, "phase": "sample"} for record in written] == read_records(folder / "samples.jsonl")
    assert list(Records.open(folder, alone, 0, -1).phase(1, "sample")[0].records.values()) == written


@pytest.mark.wide  # the loop is GRPO's, whose test is fast
def test_ctrl_c_while_sampling(make, reference, tmp_path):
    def prepare() -> None:
        original = PhaseRecords.append

        def append(self, record):
            original(self, record)
            if self.file.part.name == "samples.jsonl" and len(self.records) == 9:
                os.kill(os.getpid(), signal.SIGINT)

        PhaseRecords.append = append  # type: ignore[method-assign]

    out = tmp_path / "out"
    code, messages = forked(main, make(out, eval_prompts=None), prepare=prepare)
    assert code == 130, messages
    assert one_line_has(messages, "stopped in cycle 1", "all saved", "resume_from_checkpoint=True")
    assert "Traceback" not in messages
    recorded = records(out, 1, "samples")
    assert 9 <= len(recorded) < 48
    assert forked(main, make(out, eval_prompts=None), "resume_from_checkpoint=True")[0] == 0
    assert records(out, 1, "samples")[: len(recorded)] == recorded
    assert (out / "cycle_2" / WEIGHTS).read_bytes() == (reference / "cycle_2" / WEIGHTS).read_bytes()


def test_resuming_a_finished_run_changes_nothing(reference, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    code, messages = forked(main, make(out), "resume_from_checkpoint=True")
    assert code == 0, messages
    assert_equal(out, reference)


def test_more_cycles_go_on_from_the_last(reference, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    code, messages = forked(main, make(out), "resume_from_checkpoint=True", "cycles=3")
    assert code == 0, messages
    assert cycle_row(out, 3)["steps"] > 0
    assert (out / "cycle_2" / WEIGHTS).read_bytes() == (reference / "cycle_2" / WEIGHTS).read_bytes()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("checkpointer.adapter_checkpoint=ANOTHER", "first adapter changed"),
        *(
            pytest.param(*case, marks=pytest.mark.wide)
            for case in (
                ("temperature=0.7", "temperature: was 1.0, is 0.7"),
                ("prompts.limit=7", "prompts changed"),
                ("best_fraction=0.9", "best_fraction: was 1.0, is 0.9"),
                ("replay_cycles=1", "replay_cycles: was None, is 1"),
                ("optimizer_state=cycle", "optimizer_state: was run, is cycle"),
                ("eval_prompts.limit=3", "eval prompts changed"),
                ("model.lora_rank=5", "model.lora_rank: was 4, is 5"),
                ("max_per_prompt=1", "max_per_prompt: was 4, is 1"),
                ("seed=2", "seed: was 1, is 2"),
                ("sequences_per_step=16", "rows per step: was 8, is 16"),
            )
        ),
    ],
)
def test_another_run_in_the_same_folder_is_refused(reference, make, tmp_path, override, message):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    before = outcome(out)
    override = override.replace("ANOTHER", str(reference / "cycle_1" / "adapter"))
    code, messages = forked(main, make(out), "resume_from_checkpoint=True", override)
    assert code == 1
    assert message in messages
    assert "Traceback" not in messages
    assert outcome(out) == before


def test_a_used_folder_is_refused(reference, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    code, messages = forked(main, make(out))
    assert code == 1
    assert "resume_from_checkpoint=True continues it" in messages
    assert outcome(out) == outcome(reference)


@pytest.mark.wide
def test_overwriting_starts_afresh(reference, make, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(reference, out)
    (out / "cycle_7").mkdir()
    shutil.copy(out / "samples.jsonl", out / "samples.rank1.jsonl")  # as a killed run of two ranks leaves it
    code, messages = forked(main, make(out), "overwrite_output_dir=True")
    assert code == 0, messages
    assert_equal(out, reference)
    assert not list(out.rglob("*.rank*"))


# ---- settings that change what happens


def test_base_starts_each_cycle_from_the_first_adapter(reference, make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, start_from="base"))
    assert code == 0, messages
    assert (out / "cycle_1" / WEIGHTS).read_bytes() == (reference / "cycle_1" / WEIGHTS).read_bytes()
    # cycle 1 of both runs has the same adapter
    tokens = [{(r["prompt_id"], *r["tokens"]) for r in records(run, 2, "samples")} for run in (out, reference)]
    assert tokens[0] == tokens[1]
    assert (out / "cycle_2" / WEIGHTS).read_bytes() != (reference / "cycle_2" / WEIGHTS).read_bytes()


@pytest.mark.wide
def test_learning_rates_decay_to_their_floor(make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, cycles=3, lr_decay=0.5, lr_floor=2e-3, eval_prompts=None, epochs=1))
    assert code == 0, messages
    assert [cycle_row(out, cycle)["lr"] for cycle in (1, 2, 3)] == pytest.approx([5e-3, 2.5e-3, 2e-3])


def test_pass_at_k_is_measured(make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, cycles=1, eval_samples=4))
    assert code == 0, messages
    scores = json.loads((out / "cycle_1" / "eval.json").read_text())
    assert list(scores["pass_at_k"]) == ["1", "2", "4"]
    verdicts = records(out, 1, "verdicts", "eval")
    right = [r["verdict"] == "CORRECT" for r in verdicts if r["sample"] >= 0]
    assert len(right) == 24
    assert scores["pass_at_k"]["1"]["pass"] == pytest.approx(sum(right) / 24)
    solved = {r["prompt_id"] for r in verdicts if r["sample"] >= 0 and r["verdict"] == "CORRECT"}
    assert scores["pass_at_k"]["4"]["pass"] == pytest.approx(len(solved) / 6)


@pytest.mark.wide
def test_the_entropy_floor_stops(make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, min_entropy=50.0))
    assert code == 0, messages
    assert "below min_entropy 50" in messages
    assert not (out / "cycle_2").exists()
    assert (out / WEIGHTS).exists()


@pytest.mark.wide
def test_llama_on_the_same_road(make, tmp_path):
    out = tmp_path / "out"
    code, messages = forked(main, make(out, "llama", cycles=1))
    assert code == 0, messages
    assert cycle_row(out, 1)["kept"] > 0


# ---- bad input, and verifiers that fail


@pytest.mark.wide(always=6)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0}, "temperature 0 gives the same answer 4 times"),
        ({"max_per_prompt": 0}, "max_per_prompt is 0; expected a whole number from 1 to "),
        ({"best_fraction": 0}, "best_fraction is 0; expected a share above 0"),
        ({"objective": "grpo"}, "objective is 'grpo'; expected raft or raft++"),
        ({"reward_threshold": 0}, "reward_threshold is 0"),
        ({"keep": "best"}, "keep is 'best'; expected correct or rewarded"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"stop_strings": "stop"}, "stop_strings is 'stop'; expected a list"),
        ({"max_new_tokens": 500}, "more than the 512 that the model takes"),
        ({"samples_per_promt": 3}, "unknown key samples_per_promt; did you mean samples_per_prompt?"),
        ({"dataset": {"_component_": "rocm_ext.data.sft_dataset"}}, "unknown key dataset"),
        ({"verifier": {"_component_": "rocm_ext.verifiers.MathAnser"}}, "MathAnser"),
        ({"verifier": {"_component_": "tests.kit.judges.Coin", "heads": 1}}, "heads"),
        ({"verifier": {"_component_": "rocm_ext.verifiers.PythonTests"}}, "prompts.jsonl:1"),
        ({"stop_after_no_gain": 1, "eval_prompts": None}, "stop_after_no_gain needs held-out prompts"),
        ({"verifier": {"_component_": "tests.kit.judges.Coin", "share": 0.0}}, "nothing to train on. 48 answers: 48 W"),
        ({"replay_cycles": -1}, "replay_cycles is -1; expected a whole number from 0 to "),
        ({"optimizer_state": "run", "start_from": "base"}, "optimizer_state=run keeps the moments of other weights"),
        ({"optimizer_state": "always"}, "optimizer_state is 'always'; expected run or cycle"),
        ({"max_empty_cycles": 0}, "max_empty_cycles is 0; expected a whole number from 1 to"),
        ({"verifier": {"_component_": "tests.kit.judges.Broken"}}, "the judge is ill"),
        ({"verifier": {"_component_": "tests.kit.judges.Dies"}}, "exited with 3"),
        ({"engine": {"_component_": "rocm_ext.sampling.LocalEngine", "slots": 0}}, "engine.slots is 0"),
        ({"engine": {"_component_": "rocm_ext.sampling.OpenAIEngine", "urls": ["http://127.0.0.1:9/v1"]}},
         "http://127.0.0.1:9 cannot be reached"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(make, tmp_path, changes, message):
    code, messages = forked(main, make(tmp_path / "out", **changes))
    assert code == (75 if "cannot be reached" in message else 1)  # 75: the same command may succeed later
    assert message in messages
    assert len([line for line in messages.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in messages


@pytest.mark.wide
def test_training_that_changes_nothing_is_an_error(make, tmp_path):
    warm_up = {"_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 9}
    changes = {"lr_scheduler": warm_up, "sequences_per_step": 64, "epochs": 1, "eval_prompts": None}
    out = tmp_path / "out"
    for resume in ("False", "True"):
        code, messages = forked(main, make(out, **changes), f"resume_from_checkpoint={resume}")
        assert code == 1
        assert "cycle 1: 1 optimiser steps changed nothing, bit for bit" in messages


@pytest.mark.wide
def test_eval_of_other_rows_needs_nothing_of_the_configs(reference, make, folder, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()[:5]]
    rows.write_text("".join(json.dumps({"prompt": x["question"], "answer": x["answer"]}) + "\n" for x in lines))
    hub = {"_component_": "rocm_ext.data.prompt_dataset", "source": "no/such", "name": "main", "split": "test[:9]"}
    path = make(tmp_path / "out", prompts=hub, eval_prompts=hub)
    adapter = reference / "adapter"
    assert cli.main(["eval", "--config", str(path), "--adapter", str(adapter), "--data", str(rows), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == 5
    assert not (tmp_path / "out").exists()


def test_held_out_prompts_must_not_be_trained_on(make, folder, tmp_path):
    rows = folder / "prompts.jsonl"
    overlap = tmp_path / "overlap.jsonl"
    overlap.write_text(rows.read_text().splitlines()[4] + "\n")
    code, messages = forked(main, make(tmp_path / "out"), f"eval_prompts.source={overlap}")
    assert code == 1
    assert "overlap.jsonl:1" in messages
    assert "prompts.jsonl:5" in messages


@pytest.mark.wide
def test_a_mended_verifier_judges_again_without_sampling_again(make, tmp_path):
    out = tmp_path / "out"
    broken = {"_component_": "tests.kit.judges.Broken"}
    code, messages = forked(main, make(out, verifier=broken, eval_prompts=None))
    assert code == 1
    assert "max_error_share" in messages
    samples = (out / "samples.jsonl").read_bytes()
    assert "ERROR" not in (out / "verdicts.jsonl").read_text()
    # the resumed run has the same verifier in its config, but accepts its errors
    code, messages = forked(
        main, make(out, verifier=broken, eval_prompts=None), "resume_from_checkpoint=True", "max_error_share=1",
    )  # fmt: skip
    assert code == 0, messages
    assert records(out, 1, "samples") == [json.loads(line) for line in samples.splitlines()]


def test_a_verification_is_done_once(make, tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    verifier = {"_component_": "tests.kit.judges.Coin", "log": str(log)}
    assert forked(main, make(out, verifier=verifier, cycles=1, eval_prompts=None))[0] == 0
    assert len(log.read_text().splitlines()) == 48 + 1, "and one before the run samples"


def test_seeds_are_hashes_of_run_cycle_prompt_and_index(reference):
    record = records(reference, 2, "samples")[5]
    text = f"1\0{2}\0{record['prompt_id']}\0{record['sample']}".encode()
    assert record["seed"] == int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def test_no_file_of_another_run_is_touched(make, tmp_path):
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="holds an earlier run"):
        load(make(out)).setup()
