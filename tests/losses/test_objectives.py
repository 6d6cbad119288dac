"""Objectives equal plain autograd, and the rows' columns reach them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import Layout, StepLoader, Steps, collate
from rocm_ext.data.render import IGNORE
from rocm_ext.data.rows import Rows
from rocm_ext.losses import CrossEntropy, Objective, PolicyGradient
from rocm_ext.losses.objective import sum_over_sequences
from tests.kit.tiny import metrics, run_config, write_model, write_rows, write_yaml

WORDS, WIDTH = 50, 16
WEIGHTS = {"two": [2], "different": [0.5, None, "3", 2.5, 1e-3]}  # a cell of a table is text


class SequenceRatio(Objective):
    """GSPO's ratio (arXiv:2507.18071) without clipping: exp of a sequence's mean log-ratio, once per label."""

    columns = ("old_logprobs",)
    whole_sequences = True

    def terms(self, nll, columns, sequence):
        lengths = sum_over_sequences(torch.ones_like(nll), sequence)
        ratio = (sum_over_sequences(-nll - columns["old_logprobs"], sequence) / lengths).exp()
        # the NLL of a label changes every value of its sequence with the factor 1/length
        return -ratio, ratio


def problem(labels: int = 40, seed: int = 0):
    """Return hidden states, targets, columns with old log-probs, and the sequence of each label, 0 to 4."""
    torch.manual_seed(seed)
    hidden = torch.randn(labels, WIDTH, requires_grad=True)
    targets = torch.randint(0, WORDS, (labels,))
    sequence = torch.tensor([0] * 3 + [1] * 1 + [2] * 17 + [3] * 9 + [4] * (labels - 30))
    columns = {"old_logprobs": -4 + 0.3 * torch.randn(labels), "advantages": torch.ones(labels)}
    return hidden, targets, columns, sequence


def expected(objective: str, logits, targets, columns, sequence):
    """Return each label's value [n], computed by the formula in plain torch."""
    logprobs = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    if objective == "cross_entropy":
        return -logprobs
    ratio = (logprobs - columns["old_logprobs"]).exp()
    if objective == "clipped":
        return -torch.minimum(ratio, ratio.clamp(max=1.28))
    means = torch.stack(
        [(logprobs - columns["old_logprobs"])[sequence == s].mean() for s in range(5)]
    )
    return -means.exp()[sequence]


OBJECTIVES = {
    "cross_entropy": CrossEntropy,
    "clipped": lambda **rest: PolicyGradient("dapo", clip_high=0.28, on_policy=False, **rest),
    "sequences": SequenceRatio,
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 7, None])
@pytest.mark.parametrize("normalize", ["tokens", "sequences", 64])
@pytest.mark.parametrize("weights", [None, (0.5, 2, 1e-3, 7, 1), (2,) * 5])
def test_value_and_gradients_equal_autograd(name, chunk, normalize, weights):
    hidden, targets, columns, sequence = problem()
    head = torch.nn.Linear(WIDTH, WORDS)
    each = expected(name, head(hidden), targets, columns, sequence)
    w = torch.tensor(weights or (1,) * 5, dtype=torch.float32)
    if weights:
        columns["weight"] = w[sequence]
    if normalize == "tokens":
        whole = (each * w[sequence]).sum() / w[sequence].sum()
    elif normalize == "sequences":
        whole = (torch.stack([each[sequence == s].mean() for s in range(5)]) * w).sum() / w.sum()
    else:
        whole = (each * w[sequence]).sum() / 64 / w.sum()
    parameters = [hidden, head.weight, head.bias]
    gradients = torch.autograd.grad(whole, parameters)
    objective = OBJECTIVES[name](normalize=normalize, chunk_tokens=chunk)
    summed = objective(head, hidden, targets, columns, sequence)
    found = summed / objective.denominator(w[sequence].sum().item(), w.sum().item())
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(found, parameters), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert objective(head, hidden, targets, columns, sequence) == pytest.approx(
            summed.item(), rel=1e-6
        )


def test_both_passes_draw_the_same_dropout():
    hidden, targets, columns, sequence = problem()
    head = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(WIDTH, WORDS))
    torch.manual_seed(3)
    whole = expected("sequences", head(hidden), targets, columns, sequence).sum()
    (gradient,) = torch.autograd.grad(whole, hidden)
    torch.manual_seed(3)
    found = SequenceRatio()(head, hidden, targets, columns, sequence)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(found, hidden)[0], gradient, rtol=1e-4, atol=1e-6
    )


@pytest.mark.wide(always=1)
@pytest.mark.parametrize("lengths", [(999, 1), (1000,)])
def test_long_sequences_keep_their_gradient_in_fp16(lengths):
    """Weights of 1/length are multiplied in after the gradient has left fp16."""
    torch.manual_seed(0)
    labels, words = 1000, 40_000
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    hidden, targets = torch.randn(labels, WIDTH), torch.zeros(labels, dtype=torch.long)
    weight = 1 + 0.1 * torch.randn(words, WIDTH)
    weight[0] = (
        0  # the label's own row, so that only the probabilities of the others count: 1/40,000/1,000 each
    )
    gradients = []
    for dtype in (torch.float32, torch.float16):
        states = hidden.to(dtype, copy=True).requires_grad_()
        rows = weight.to(dtype)
        objective = CrossEntropy(normalize="sequences")
        loss = objective(lambda h, rows=rows: h @ rows.T, states, targets, {}, sequence)
        (65536 * loss).backward()  # the scale that torch's GradScaler begins with
        gradients.append(states.grad[: lengths[0]].float())
    assert (gradients[1] - gradients[0]).norm() < 0.05 * gradients[0].norm()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_labels(name):
    """A rank without rows still takes part in the step."""
    hidden, targets, columns, sequence = problem()
    columns = {key: column[:0] for key, column in columns.items()}
    objective, head = OBJECTIVES[name](normalize="sequences"), torch.nn.Linear(WIDTH, WORDS)
    value = objective(head, hidden[:0], targets[:0], columns, sequence[:0])
    assert value.item() == 0
    assert not torch.autograd.grad(value, hidden, allow_unused=True)[0].any()


@pytest.mark.parametrize("normalize", [0, True, "rows", None])
def test_other_normalisations_are_refused(normalize):
    with pytest.raises(
        UserError, match=r"loss.normalize is .*expected tokens or sequences, or a number above 0"
    ):
        CrossEntropy(normalize=normalize)


# ---- columns


def carrying(lengths: list[tuple[int, ...]], seed: int = 0, alike: int = 0) -> Rows:
    """Return rows whose columns identify the token: ``old`` has its id, ``ref`` the negated id.

    The first ``alike`` tokens of all sequences are the same.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(1, 1000, sum(each)).astype(np.int32) for each in lengths]
    for ids, each in zip(tokens, lengths, strict=True):
        for start in np.cumsum((0, *each[:-1])):
            ids[start : start + alike] = np.arange(1, alike + 1)
    labels = [np.where(rng.random(len(ids)) < 0.3, IGNORE, ids).astype(np.int32) for ids in tokens]
    columns = {
        name: [sign * ids.astype(np.float32) for ids in tokens]
        for name, sign in (("old", 1), ("ref", -1))
    }
    return Rows(tokens, labels, lengths, {}, columns)


packs = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple), min_size=2, max_size=12
)


@settings(max_examples=60, deadline=None)
@given(packs, st.sampled_from([(False, False), (True, False), (True, True)]), st.integers(1, 5))
def test_columns_and_sequences_stay_with_their_labels(lengths, layout, multiple):
    packed, share = layout
    rows = carrying(
        [tuple(20 + n for n in each) for each in lengths] if share else lengths, alike=20 * share
    )
    batch = collate(
        rows, list(range(len(lengths))), packed, pad_id=0, multiple=multiple, share=share
    )
    if share:
        assert batch.tokens.numel() < 20 * len(lengths) + sum(map(sum, lengths)) + multiple
    assert batch.columns.keys() == {"old", "ref"}
    assert torch.equal(batch.columns["old"].long(), batch.targets)
    assert torch.equal(batch.columns["ref"].long(), -batch.targets)
    assert torch.equal(batch.to(torch.device("cpu")).columns["old"], batch.columns["old"])
    update = StepLoader(rows, Steps(len(rows), len(rows)), Layout(0, 1, 9, packed, pad_id=0))[0]
    assert (update.labels, update.sequences) == (len(batch.targets), batch.sequences)
    labelled = [
        int((labels[1:] != IGNORE).sum())
        for row, each in zip(rows.labels, rows.lengths, strict=True)
        for labels in np.split(row, np.cumsum(each)[:-1])
    ]
    expected = [number for number, count in enumerate(filter(None, labelled)) for _ in range(count)]
    assert batch.sequence.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(packs, st.floats(0.1, 0.6), st.integers(0, 5))
def test_a_split_carries_columns(lengths, fraction, seed):
    rows = carrying(lengths)
    if max(1, round(len(rows) * fraction)) >= len(rows):
        return
    for part in rows.split(fraction, seed):
        assert len(part.columns["old"]) == len(part.columns["ref"]) == len(part)
        for tokens, old, ref in zip(
            part.tokens, part.columns["old"], part.columns["ref"], strict=True
        ):
            assert tokens.tolist() == old.tolist() == (-ref).tolist()
    other = Rows(
        rows.tokens, rows.labels, rows.lengths, {}, {**rows.columns, "old": rows.columns["ref"]}
    )
    assert other.fingerprint() != rows.fingerprint()


# ---- through a recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("objectives")
    write_model(root / "base")
    rows = [
        json.loads(line) for line in write_rows(root / "rows.jsonl", 24).read_text().splitlines()
    ]
    table = [
        row | {f"weight_{name}": w[i % len(w)] for name, w in WEIGHTS.items()}
        for i, row in enumerate(rows)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    return root


def finetune(folder, out, loss: dict, weights: str = "", **changes) -> LoRAFinetune:
    """Run the recipe for two steps over 24 rows and return it."""
    cfg = run_config(
        folder / "base", folder / "rows.jsonl", out, loss=loss, sequences_per_step=12, **changes
    )
    if weights:
        cfg["dataset"]["column_map"]["weight"] = f"weight_{weights}"
    recipe = LoRAFinetune(
        config.load("lora_finetune_rocm", str(write_yaml(out.with_suffix(".yaml"), cfg)))
    )
    recipe.setup()
    recipe.train()
    recipe.cleanup()
    return recipe


@pytest.mark.wide(always=1)
@pytest.mark.parametrize(
    ("normalize", "weights"),
    [("sequences", "different"), (50.0, ""), ("tokens", "different"), ("sequences", "")],
)
def test_normalisation_is_exact_over_micro_batches(folder, tmp_path, normalize, weights):
    loss = {"_component_": "rocm_ext.losses.CrossEntropy", "normalize": normalize}
    curves = []
    for batch_size in (1, 3, 12):
        out = tmp_path / str(batch_size)
        recipe = finetune(
            folder, out, loss, weights, batch_size=batch_size, validation_fraction=0.25
        )
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        curves.append(
            [
                line[key]
                for line in lines
                for key in ("loss", "grad_norm", "val_loss")
                if key in line
            ]
        )
        assert any("val_loss" in line for line in lines)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)
    # the validation loss from its definition; validation takes one step
    model, sums, divisor = recipe.learner.model.eval(), [], 0.0
    trainer = recipe.trainer
    rows = trainer.validation_rows
    (update,) = StepLoader(rows, Steps(len(rows), len(rows)), trainer.learner.layout).range(0, 1)
    plain = CrossEntropy()
    for batch in update.batches:
        with torch.no_grad():
            for s in range(batch.sequences):
                chosen = batch.sequence == s
                model.objective = plain
                part = type(batch)(
                    **vars(batch) | {"index": batch.index[chosen], "targets": batch.targets[chosen],
                                     "sequence": batch.sequence[chosen], "columns": {}}
                )  # fmt: skip
                weight = batch.columns["weight"][chosen][0].item() if weights else 1.0
                labels = int(chosen.sum())
                sums.append(
                    weight
                    * model(part).item()
                    / {"tokens": 1, "sequences": labels}.get(normalize, normalize)
                )
                divisor += weight * (labels if normalize == "tokens" else 1)
    assert sum(sums) / divisor == pytest.approx(curves[2][-1], rel=1e-5)


def test_only_ratios_of_weights_matter(folder, tmp_path):
    loss = {"_component_": "rocm_ext.losses.CrossEntropy"}
    plain, twos, different = (
        finetune(folder, tmp_path / (w or "plain"), loss, w) for w in ("", "two", "different")
    )
    of_plain, of_twos, others = (
        metrics(recipe.trainer.folder.path) for recipe in (plain, twos, different)
    )
    assert of_twos == of_plain
    assert metrics(tmp_path / "two", "grad_norm") == metrics(tmp_path / "plain", "grad_norm")
    assert others[0] != of_plain[0]


def test_missing_columns_are_named(folder, tmp_path):
    loss = {"_component_": "rocm_ext.losses.PolicyGradient", "loss": "dapo", "on_policy": False}
    with pytest.raises(UserError, match=r"PolicyGradient .* columns advantages, old_logprobs"):
        finetune(folder, tmp_path / "out", loss)
    assert not list((tmp_path / "out").iterdir())
