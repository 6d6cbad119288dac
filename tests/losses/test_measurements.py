"""What a policy gradient measures beside the loss equals plain computations, on one rank and two."""

import pickle
import sys

import numpy as np
import pytest
import torch
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.data.batches import count_labels
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import PolicyGradient, Tally
from rocm_ext.train.scoring import score
from tests.kit.forks import forked_ranks, several_ranks
from tests.kit.grpo_runs import lines
from tests.kit.tiny import run_config, write_model, write_rows, write_yaml
from tests.losses.test_policy_gradient import LENGTHS, SEQUENCE, given, logprobs, problem

ONE = Ranks(torch.device("cpu"))


def expected(
    loss: str, now, columns, sequence, on_policy: bool, low=0.2, high=0.28, dual=1.6
) -> dict[str, float]:
    """Return the measurements of labels with the log-probs ``now`` by their definitions."""
    advantages = columns["advantages"]
    gradient = abs(advantages) * (1 - np.exp(now))
    down = (advantages < 0) & (np.exp(now) < 0.5)
    found = {
        "token_gradient": gradient.mean(),
        "improbable_share": (gradient**2)[down].sum() / (gradient**2).sum(),
    }
    old = now if on_policy else columns["old_logprobs"]
    if not on_policy:
        log_ratio = now - old
        if loss == "gspo":
            log_ratio = np.array([log_ratio[sequence == s].mean() for s in sequence])
        ratio = np.exp(log_ratio)
        found |= {"ratio_mean": ratio.mean(), "ratio_max": ratio.max()}
        if loss == "cispo":
            found["clipped_high"] = (ratio > 1 + high).mean()
        else:
            found["clipped_low"] = ((ratio < 1 - low) & (advantages < 0)).mean()
            found["clipped_high"] = ((ratio > 1 + high) & (advantages > 0)).mean()
        if loss == "grpo":
            found["clipped_dual"] = ((ratio > dual) & (advantages < 0)).mean()
    if "sampler_logprobs" in columns:
        gap = old - columns["sampler_logprobs"]
        found |= {"mismatch_mean": abs(gap).mean(), "mismatch_max": abs(gap).max()}
        found["mismatch_kl"] = (np.exp(gap) - gap - 1).mean()
    if "reference_logprobs" in columns:
        gap = columns["reference_logprobs"] - now
        found["kl"] = (np.exp(gap) - gap - 1).mean()
    return found


def measured(objective, head, hidden, targets, columns, parts) -> dict[str, float]:
    """Return the measurements over micro-batches, which are slices of labels."""
    objective.tally = Tally()
    for part in parts:
        numbers = SEQUENCE[part] - SEQUENCE[part][0] if len(SEQUENCE[part]) else SEQUENCE[part]
        each = {name: column[part] for name, column in columns.items()}
        objective(head, hidden[part], targets[part], each, numbers)
    return objective.tally.result(ONE)


@pytest.mark.parametrize("mismatch", ["none", "mask"])
@pytest.mark.parametrize(
    ("loss", "on_policy"),
    [
        ("grpo", False),
        ("grpo", True),
        ("gspo", False),
        ("gspo", True),
        ("cispo", False),
        ("reinforce", True),
    ],
)
def test_measurements_equal_their_definitions(loss, on_policy, mismatch):
    head, hidden, targets, columns = problem(spread=0.6)
    first, second = sum(LENGTHS[:2]), sum(LENGTHS[:3])
    parts = [slice(0, first), slice(first, second), slice(second, None), slice(0, 0)]
    now = logprobs(head, hidden, targets, 0.7).detach().numpy()
    plain = {name: column.numpy() for name, column in columns.items()}
    limits = {
        "grpo": {"clip_high": 0.28, "clip_dual": 1.6}, "gspo": {"clip_low": 0.2, "clip_high": 0.28},
        "cispo": {"clip_high": 0.28}, "reinforce": {},
    }  # fmt: skip
    objective = PolicyGradient(
        loss,
        on_policy=on_policy,
        mismatch=mismatch,
        temperature=0.7,
        chunk_tokens=7,
        **limits[loss],
        **given(loss),
    )
    for without in ((), ("sampler_logprobs",) * (mismatch == "none"), ("reference_logprobs",)):
        kept = {name: column for name, column in columns.items() if name not in without}
        found = measured(objective, head, hidden, targets, kept, parts)
        wanted = expected(
            loss, now, {name: plain[name] for name in kept}, SEQUENCE.numpy(), on_policy
        )
        if mismatch == "mask":
            gap = (now if on_policy else plain["old_logprobs"]) - plain["sampler_logprobs"]
            wanted["mismatch_limited"] = ((np.exp(gap) < 0.5) | (np.exp(gap) > 5)).mean()
            assert wanted["mismatch_limited"] > 0
        assert found == pytest.approx(wanted, rel=1e-4)
    if not on_policy:
        assert found.get("clipped_low", 0) + found["clipped_high"] > 0


def test_a_measurement_changes_no_gradient():
    head, hidden, targets, columns = problem()
    objective = PolicyGradient("grpo", on_policy=False, kl_coef=0.1, chunk_tokens=7)
    without = torch.autograd.grad(objective(head, hidden, targets, columns, SEQUENCE), hidden)[0]
    objective.tally = Tally()
    value = objective(head, hidden, targets, columns, SEQUENCE)
    assert torch.equal(torch.autograd.grad(value, hidden)[0], without)


@several_ranks
def test_ranks_are_combined_exactly(tmp_path):
    shares = [[1.0, 2.0, 6.0], [5.0]]

    def main():
        ranks = Ranks.from_env(torch.device("cpu"))
        both, one = Tally(), Tally()
        for value in shares[ranks.rank]:
            both.mean("mean", torch.tensor([value]))
            both.highest("highest", torch.tensor([value]))
            if ranks.rank:
                one.mean("mean", torch.tensor([value, 1.0]))
        found = [both.result(ranks), one.result(ranks)]
        (tmp_path / f"{ranks.rank}").write_bytes(pickle.dumps(found))
        ranks.close()
        sys.exit(0)

    for code, messages in forked_ranks(main, tmp_path):
        assert code == 0, messages
    for rank in ("0", "1"):
        assert pickle.loads((tmp_path / rank).read_bytes()) == [
            {"mean": 3.5, "highest": 6.0},
            {"mean": 3.0},
        ]


# ---- through a recipe


class Sampled(LoRAFinetune):
    """Gives the rows the columns of sampled answers."""

    def setup_data(self, tokenizer):
        rows, _ = super().setup_data(tokenizer)
        rng = np.random.default_rng(0)
        for name in ("old_logprobs", "sampler_logprobs", "reference_logprobs"):
            rows.columns[name] = [
                rng.normal(-5.9, 0.2, len(ids)).astype(np.float32) for ids in rows.tokens
            ]
        rows.columns["advantages"] = [
            np.full(len(ids), rng.normal(), np.float32) for ids in rows.tokens
        ]
        return rows, None


def set_up(path) -> Sampled:
    recipe = Sampled(config.load("lora_finetune_rocm", str(path)))
    recipe.setup()
    return recipe


@pytest.mark.wide(always=1)
@several_ranks
@pytest.mark.parametrize("loss", ["grpo", "gspo"])
def test_a_step_measures_all_its_labels(tmp_path, loss):
    write_model(tmp_path / "base")
    write_rows(tmp_path / "rows.jsonl", 17)  # the third step has one row for two ranks
    component = {"_component_": "rocm_ext.losses.PolicyGradient", "loss": loss, "on_policy": False}
    cfg = run_config(
        tmp_path / "base",
        tmp_path / "rows.jsonl",
        tmp_path / "one",
        loss=component,
        tokens_per_micro_batch=100,
    )
    one = set_up(write_yaml(tmp_path / "one.yaml", cfg))
    rows, steps = one.trainer.rows, one.trainer.steps
    now = score(one.learner, rows)
    one.train()
    assert one.learner.objective.tally is None
    one.cleanup()

    def main():
        two = set_up(tmp_path / "two.yaml")
        two.train()
        two.cleanup()
        sys.exit(0)

    path = write_yaml(tmp_path / "two.yaml", {**cfg, "output_dir": str(tmp_path / "two")})
    for code, messages in forked_ranks(main, path):
        assert code == 0, messages

    counts = [count_labels(*row)[0] for row in zip(rows.labels, rows.lengths, strict=True)]
    chosen = steps[0]
    columns = {
        name: np.concatenate([each[i][len(each[i]) - counts[i] :] for i in chosen])
        for name, each in rows.columns.items()
    }
    sequence = np.concatenate([np.full(counts[i], i) for i in chosen])
    limits = {"grpo": (0.2, 0.2, 3.0), "gspo": (3e-4, 4e-4)}[loss]
    wanted = expected(
        loss, np.concatenate([now[i] for i in chosen]), columns, sequence, False, *limits
    )
    found = lines(tmp_path / "one/metrics.jsonl")
    assert {name: found[0][name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert len(found) == 3
    for ours, theirs in zip(lines(tmp_path / "two/metrics.jsonl"), found, strict=True):
        assert ours.keys() == theirs.keys()
        for name in wanted:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
