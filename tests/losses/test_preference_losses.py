"""Losses of pairs equal autograd on whole logits, torchtune's and TRL's."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torchtune.rlhf.loss import DPOLoss, RSOLoss

from rocm_ext.base.errors import UserError
from rocm_ext.losses import Preference, Tally, UnpairedPreference, objective_of
from rocm_ext.losses.preference import LOSSES
from tests.losses.test_policy_gradient import assert_equal, found, layer, logprobs

LENGTHS = (3, 8, 17, 1, 10, 10)  # chosen, rejected, chosen, ...
LABELS = sum(LENGTHS)
SEQUENCE = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
SIDE = torch.where(SEQUENCE % 2 == 0, 1.0, -1.0)


def problem():
    """Return an output layer, hidden states, targets and the columns of three pairs."""
    head, hidden, targets = layer(LABELS)
    with torch.no_grad():
        reference = logprobs(head, hidden, targets) + 0.3 * torch.randn(LABELS)
    return head, hidden, targets, {"side": SIDE, "reference_logprobs": reference}


def each_sequence(values, mean=False):
    """Return the sum or mean of each chosen answer, and of each rejected one: [3] and [3]."""
    parts = [
        values[s == SEQUENCE].mean() if mean else values[s == SEQUENCE].sum()
        for s in range(len(LENGTHS))
    ]
    return torch.stack(parts[::2]), torch.stack(parts[1::2])


def by_autograd(loss, now, reference, *, beta=0.1, smoothing=0.0, gamma=None, rpo=0.0, mean=False):
    """Return each pair's loss [3] by the papers' formulas."""
    chosen, rejected = each_sequence(now if loss in ("simpo", "orpo") else now - reference, mean)
    margin = chosen - rejected
    if loss in ("sigmoid", "simpo"):
        u = beta * margin - ((beta / 2 if gamma is None else gamma) if loss == "simpo" else 0)
        pairs = -(1 - smoothing) * F.logsigmoid(u) - smoothing * F.logsigmoid(-u)
    elif loss == "ipo":
        pairs = (margin - 1 / (2 * beta)) ** 2
    elif loss == "hinge":
        pairs = torch.relu(1 - beta * margin)
    elif loss == "orpo":
        odds = [p / (1 - p) for p in (chosen.exp(), rejected.exp())]
        pairs, rpo = -beta * F.logsigmoid((odds[0] / odds[1]).log()), 1 + rpo
    else:
        pairs = 1 - torch.sigmoid(beta * chosen) + torch.sigmoid(beta * rejected)
    return pairs - rpo * each_sequence(now, mean=True)[0]


def check(objective, head, hidden, targets, columns, value):
    """Compare the loss per pair and its gradients for hidden states and output layer with those of ``value``."""
    ours = found(objective, head, hidden, targets, columns, SEQUENCE)
    assert_equal(ours, value, [hidden, *head.parameters()], rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 40])
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize("normalized", [None, True, False])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_equal_autograd(loss, normalized, beta, chunk):
    head, hidden, targets, columns = problem()
    objective = Preference(loss, beta=beta, length_normalized=normalized, chunk_tokens=chunk)
    now = logprobs(head, hidden, targets)
    mean = loss in ("ipo", "simpo", "orpo") if normalized is None else normalized
    pairs = by_autograd(loss, now, columns["reference_logprobs"], beta=beta, mean=mean)
    check(objective, head, hidden, targets, columns, pairs.mean())


@pytest.mark.parametrize("loss", LOSSES)
def test_weights_of_pairs(loss):
    """Their mean is 1, so the divisor is the number of pairs."""
    head, hidden, targets, columns = problem()
    weights = torch.tensor([0.5, 1.0, 1.5])
    pairs = by_autograd(
        loss, logprobs(head, hidden, targets), columns["reference_logprobs"],
        beta=0.3, gamma=0.0, mean=loss in ("ipo", "simpo", "orpo"),
    )  # fmt: skip
    objective = Preference(loss, beta=0.3, gamma=0.0 if loss == "simpo" else None)
    columns["weight"], objective.columns = weights[SEQUENCE // 2], (*objective.columns, "weight")
    check(objective, head, hidden, targets, columns, (pairs * weights).mean())


@pytest.mark.parametrize("rpo", [0.0, 0.7])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("loss", ["sigmoid", "simpo", "orpo"])
def test_smoothing_margin_and_nll_equal_autograd(loss, smoothing, rpo):
    head, hidden, targets, columns = problem()
    smoothing *= loss != "orpo"
    gamma = 1.4 if loss == "simpo" else None
    beta = 2.0 if loss == "simpo" else 0.1
    objective = Preference(
        loss, label_smoothing=smoothing, gamma=gamma, rpo_alpha=rpo, chunk_tokens=7
    )
    now, mean = logprobs(head, hidden, targets), loss != "sigmoid"
    pairs = by_autograd(
        loss, now, columns["reference_logprobs"], beta=beta, smoothing=smoothing, gamma=1.4, rpo=rpo, mean=mean
    )  # fmt: skip
    check(objective, head, hidden, targets, columns, pairs.mean())


@pytest.mark.parametrize("theirs", [DPOLoss(0.3), DPOLoss(0.1, 0.2), RSOLoss(0.2)])
def test_losses_equal_torchtune(theirs):
    """A config that names torchtune's loss trains with ours."""
    head, hidden, targets, columns = problem()
    now = each_sequence(logprobs(head, hidden, targets))
    losses, *_ = theirs(*now, *each_sequence(columns["reference_logprobs"]))
    check(objective_of(theirs), head, hidden, targets, columns, losses.mean())


def trl_dpo(kinds: list[str], weights: list[float], now, reference):
    """Return the loss of TRL's own method for pairs whose log-probs are ``now``."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer")
    order = [*range(0, len(LENGTHS), 2), *range(1, len(LENGTHS), 2)]

    def padded(values):
        return torch.nn.utils.rnn.pad_sequence(
            [values[s == SEQUENCE] for s in order], batch_first=True
        )

    mask = padded(torch.ones(LABELS))
    zeros = torch.zeros_like(mask)
    outputs = SimpleNamespace(
        log_probs=padded(now), entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )

    class Model(torch.nn.Module):
        def forward(self, **inputs):
            return outputs

    itself = SimpleNamespace(
        model=Model().train(), aux_loss_enabled=False, ld_alpha=None, precompute_ref_logps=True,
        f_divergence_type="reverse_kl", loss_types=kinds, loss_weights=weights, beta=0.3, label_smoothing=0.0,
        use_weighting=False, _metrics=defaultdict(lambda: defaultdict(list)), _total_train_tokens=0, _tp_size=1,
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
    )  # fmt: skip
    # the first token of a row is the prompt's
    completion = F.pad(mask, (1, 0)).long()
    chosen, rejected = each_sequence(reference)
    inputs = {
        "input_ids": completion, "attention_mask": completion, "completion_mask": completion,
        "ref_chosen_logps": chosen, "ref_rejected_logps": rejected,
    }  # fmt: skip
    return trainer.DPOTrainer._compute_loss(itself, itself.model, inputs, False)


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "ipo", "hinge", "apo_zero"])
def test_losses_equal_trl(loss):
    head, hidden, targets, columns = problem()
    theirs = trl_dpo([loss], [1.0], logprobs(head, hidden, targets), columns["reference_logprobs"])
    name, normalized = ("sigmoid", True) if loss == "sigmoid_norm" else (loss, None)
    objective = Preference(name, beta=0.3, length_normalized=normalized)
    check(objective, head, hidden, targets, columns, theirs)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo_equals_trl(smoothing):
    trainer = pytest.importorskip("trl.experimental.cpo.cpo_trainer")
    head, hidden, targets, columns = problem()
    itself = SimpleNamespace(
        alpha=0.0, loss_type="simpo", simpo_gamma=1.0, beta=2.0, label_smoothing=smoothing,
        accelerator=SimpleNamespace(device="cpu"),
    )  # fmt: skip
    losses, *_ = trainer.CPOTrainer.cpo_loss(
        itself, *each_sequence(logprobs(head, hidden, targets), mean=True)
    )
    objective = Preference("simpo", beta=2.0, gamma=1.0, label_smoothing=smoothing)
    check(objective, head, hidden, targets, columns, losses.mean())


def test_orpo_equals_trl():
    """TRL's NLL covers prompts, which are one token here, and is a mean over a batch, which is one pair here."""
    trainer = pytest.importorskip("trl.experimental.orpo.orpo_trainer")
    head, hidden, targets, columns = problem()
    itself = object.__new__(trainer.ORPOTrainer)
    itself.is_encoder_decoder = itself.aux_loss_enabled = False
    itself.beta, itself.padding_value = 0.3, 0
    itself.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value)
    losses = []
    for pair in range(0, len(LENGTHS), 2):
        sides = [SEQUENCE.eq(pair), SEQUENCE.eq(pair + 1)]
        logits = [
            F.pad(head(hidden[side]), (0, 0, 0, max(LENGTHS) + 1 - side.sum())) for side in sides
        ]
        batch = {}
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            tokens = F.pad(targets[side], (1, 0))[None]
            batch |= {f"{name}_input_ids": tokens, f"{name}_attention_mask": torch.ones_like(tokens),
                      f"{name}_labels": F.pad(targets[side], (1, 0), value=-100)[None]}  # fmt: skip
        width = 1 + max(LENGTHS[pair : pair + 2])
        output = SimpleNamespace(logits=torch.stack(logits)[:, :width])
        losses.append(
            itself.get_batch_loss_metrics(lambda *args, output=output, **kwargs: output, batch)[0]
        )
    check(Preference("orpo", beta=0.3), head, hidden, targets, columns, torch.stack(losses).mean())


def test_measurements():
    """The divergence's estimate is that of the exact one for answers that the reference wrote, in the mean."""
    head, hidden, targets, columns = problem()
    objective = Preference("sigmoid", beta=0.3)
    objective.tally = Tally()
    objective(head, hidden, targets, columns, SEQUENCE)
    measured = objective.tally.result(SimpleNamespace(gather=lambda value: [value]))
    now = logprobs(head, hidden, targets).detach()
    distance = now - columns["reference_logprobs"]
    chosen, rejected = (0.3 * score for score in each_sequence(distance))
    assert measured == pytest.approx({
        "reward_chosen": chosen.mean().item(), "reward_rejected": rejected.mean().item(),
        "margin": (chosen - rejected).mean().item(), "accuracy": (chosen > rejected).float().mean().item(),
        "logprobs_chosen": each_sequence(now)[0].mean().item(),
        "logprobs_rejected": each_sequence(now)[1].mean().item(),
        "kl": (distance.exp() * (distance - 1) + 1).mean().item(),
    }, rel=1e-5)  # fmt: skip
    objective.tally = Tally()
    objective.terms(-columns["reference_logprobs"], columns, SEQUENCE)
    first = objective.tally.result(SimpleNamespace(gather=lambda value: [value]))
    assert first["accuracy"] == 0, "before the first update no pair is decided"
    p, q = torch.rand(2, 50).softmax(-1)
    ratio = (p / q).log()
    torch.testing.assert_close((q * (ratio.exp() * (ratio - 1) + 1)).sum(), (p * ratio).sum())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"loss": "kto"}, "loss.loss is 'kto'; expected one of sigmoid, ipo.*UnpairedPreference for single answers"),
        ({"beta": 0}, "beta is 0; expected a number above 0"),
        ({"rpo_alpha": -1}, "rpo_alpha is -1; expected a number"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; expected a share"), ({"gamma": 1.0}, "sigmoid has no g"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "ipo has no label_smoothing"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        Preference(**arguments)


# ---- single answers

GOOD = torch.tensor([True, False, False, True, True, False])
THUMBS = torch.where(GOOD, 1.0, -1.0)[SEQUENCE]


def trl_kto(loss: str, weights: tuple[float, float], scores, mismatched):
    """Return the loss of TRL's own method for answers and for mismatched ones, given both models' sums of log-probs."""
    trainer = pytest.importorskip("trl.trainer.kto_trainer")
    itself = object.__new__(trainer.KTOTrainer)
    itself.loss_type, itself.beta, itself.calculate_KL = loss, 0.3, loss == "kto"
    itself.desirable_weight, itself.undesirable_weight = weights
    itself.aux_loss_enabled, itself.precompute_ref_logps = False, True
    itself._metrics, itself._total_train_tokens, itself._tp_size = (
        defaultdict(lambda: defaultdict(list)),
        0,
        1,
    )
    itself.accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value)

    class Model(torch.nn.Module):
        def forward(self, **inputs):
            now = (mismatched if inputs["input_ids"][0, 0] else scores)[0]
            zeros = torch.zeros(len(GOOD), 1)
            return SimpleNamespace(log_probs=now[:, None], entropy=zeros, mean_logits=zeros)

    itself.model = Model().train()
    ids, mask = torch.zeros(len(GOOD), 2).long(), torch.ones(len(GOOD), 2).long()
    inputs = {"label": GOOD, "input_ids": ids, "attention_mask": mask, "completion_mask": mask, "KL_input_ids": ids + 1,
              "KL_attention_mask": mask, "KL_completion_mask": mask, "ref_logps": scores[1],
              "ref_KL_logps": mismatched[1]}  # fmt: skip
    return itself._compute_loss(itself.model, inputs, False)


def each_answer(values):
    return torch.stack([values[SEQUENCE.eq(i)].sum() for i in range(len(LENGTHS))])


@pytest.mark.parametrize("chunk", [1, 40])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 1.3)])
@pytest.mark.parametrize("shift", [1.5, -1.5])
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_of_single_answers_equal_trl(loss, shift, weights, chunk):
    """A negative estimate of the divergence counts as 0 there, as `set_baseline` has it."""
    head, hidden, targets, columns = problem()
    columns["side"] = THUMBS
    mismatched = torch.randn(2, len(GOOD)) + torch.tensor([[shift], [0.0]])
    scores = (
        each_answer(logprobs(head, hidden, targets)),
        each_answer(columns["reference_logprobs"]),
    )
    theirs = trl_kto(loss, weights, scores, mismatched)
    objective = UnpairedPreference(
        loss,
        beta=0.3,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        chunk_tokens=chunk,
    )
    if loss == "kto":
        objective.baseline = max(0.0, (mismatched[0] - mismatched[1]).mean().item())
        assert (objective.baseline > 0) == (shift > 0)
    check(objective, head, hidden, targets, columns, theirs)


def test_measurements_of_single_answers():
    head, hidden, targets, columns = problem()
    columns["side"] = THUMBS
    objective = UnpairedPreference(beta=0.3)
    objective.baseline = 0.7
    with objective.measuring() as tally:
        objective(head, hidden, targets, columns, SEQUENCE)
    measured = tally.result(SimpleNamespace(gather=lambda value: [value]))
    now = logprobs(head, hidden, targets).detach()
    distance = now - columns["reference_logprobs"]
    rewards = 0.3 * each_answer(distance)
    margins = torch.where(GOOD, 1, -1) * (rewards - 0.3 * 0.7)
    assert measured == pytest.approx({
        "reward_chosen": rewards[GOOD].mean().item(), "reward_rejected": rewards[~GOOD].mean().item(),
        "margin": margins.mean().item(), "accuracy": (margins > 0).float().mean().item(),
        "logprobs_chosen": each_answer(now)[GOOD].mean().item(), "baseline": 0.7,
        "logprobs_rejected": each_answer(now)[~GOOD].mean().item(),
        "kl": (distance.exp() * (distance - 1) + 1).mean().item(),
    }, rel=1e-5)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"loss": "ipo"}, "'ipo'; expected one of kto, apo_zero_unpaired, or loss: .*Preference for pairs"),
     ({"beta": 0}, "beta is 0"), ({"desirable_weight": -1}, "desirable_weight is -1; expected a number of at least 0"),
     ({"undesirable_weight": True}, "undesirable_weight is True")],
)  # fmt: skip
def test_wrong_arguments_of_single_answers_are_refused(arguments, says):
    with pytest.raises(UserError, match=says):
        UnpairedPreference(**arguments)
