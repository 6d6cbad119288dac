"""The divergence from a teacher equals plain autograd and TRL's, in value and gradients."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rocm_ext.base.errors import UserError
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.losses import Distillation, distillation
from rocm_ext.losses.distillation import HIDDEN, LOGPROBS

LABELS, WIDTH, WORDS = 40, 16, 50
SEQUENCE = torch.tensor([0] * 3 + [1] * 17 + [2] * 20)


def problem(words: int = WORDS) -> tuple[nn.Linear, Tensor, Tensor, nn.Linear, Tensor]:
    """Return output layer, hidden states and targets, and layer and hidden states of a teacher of ``words`` words."""
    torch.manual_seed(0)
    head, theirs = nn.Linear(WIDTH, WORDS), nn.Linear(24, words)
    hidden = torch.randn(LABELS, WIDTH, requires_grad=True)
    return head, hidden, torch.randint(0, WORDS, (LABELS,)), theirs, 2 * torch.randn(LABELS, 24)


def made(theirs: nn.Linear, **arguments: object) -> Distillation:
    objective = Distillation(**arguments)
    objective.teacher = SimpleNamespace(logits=lambda hidden: theirs(hidden).detach(), hidden=None)
    return objective


def by_formula(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return each label's divergence [n] as the papers write it, from log-probs."""
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


@pytest.mark.parametrize("words", [WORDS, 64, 44])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    ("chunk", "block"), [(1, WORDS), (7, 3 * WORDS), (None, 2**19), (None, 16 * WORDS)]
)
@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_value_and_gradients_equal_autograd(beta, chunk, block, temperature, words, monkeypatch):
    monkeypatch.setattr(distillation, "_IN_CACHE", block)
    head, hidden, targets, theirs, seen = problem(words)
    both = min(WORDS, words)
    logprobs = [
        (x[:, :both] / temperature).log_softmax(-1) for x in (head(hidden), theirs(seen).detach())
    ]
    whole = by_formula(*logprobs, beta).sum()
    gradients = torch.autograd.grad(whole, [hidden, *head.parameters()])
    objective = made(theirs, beta=beta, temperature=temperature, chunk_tokens=chunk)
    found = objective(head, hidden, targets, {HIDDEN: seen}, SEQUENCE)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)
    for ours, other in zip(
        torch.autograd.grad(found, [hidden, *head.parameters()]), gradients, strict=True
    ):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert objective(head, hidden, targets, {HIDDEN: seen}, SEQUENCE) == pytest.approx(
            whole.item(), rel=1e-5
        )


def test_agreement_is_the_share_of_labels_with_a_common_best_word():
    """Of rows with equal, different, tied and no numbers, the first and third agree."""
    model = torch.tensor([[0.0, 2, 1], [0, 2, 1], [2, 2, 1], [math.nan, 2, 1]])
    teacher = torch.tensor([[1.0, 5, 0], [5, 1, 0], [0, 3, 1], [1, 5, 0]])
    objective = Distillation()
    with objective.measuring() as tally:
        objective.compare(model, teacher, gradient=False)
    assert tally.result(Ranks(torch.device("cpu"))) == {"agreement": 0.5}


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_value_and_gradients_equal_trl(beta, temperature):
    theirs_of = pytest.importorskip("trl.trainer.distillation_trainer")._chunked_divergence_loss
    head, hidden, targets, theirs, seen = problem()
    expected, _, count = theirs_of(
        hidden[None], seen[None], head.weight, theirs.weight, torch.ones(1, LABELS), beta,
        student_lm_head_bias=head.bias, teacher_lm_head_bias=theirs.bias, temperature=temperature,
    )  # fmt: skip
    objective = made(theirs, beta=beta, temperature=temperature, chunk_tokens=16)
    found = objective(head, hidden, targets, {HIDDEN: seen}, SEQUENCE) / objective.denominator(
        int(count), 3
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    pairs = zip(
        *(torch.autograd.grad(loss, [hidden, *head.parameters()]) for loss in (found, expected)),
        strict=True,
    )
    for ours, other in pairs:
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)


def test_reverse_kl_of_samples_is_unbiased():
    """Over all words, weighed by their probabilities, the estimates are the divergence, and so are their gradients."""
    torch.manual_seed(0)
    logits, teacher = (
        torch.randn(1, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(1, 7).log_softmax(-1),
    )
    logprobs = logits.log_softmax(-1)
    whole = by_formula(logprobs, teacher, 1.0).sum()
    (gradient,) = torch.autograd.grad(whole, logits, retain_graph=True)
    value, derivative = Distillation("reverse_kl").terms(
        -logprobs[0].detach(), {LOGPROBS: teacher[0]}, SEQUENCE[:7]
    )
    weights = logprobs[0].detach().exp()
    assert (weights * value).sum().item() == pytest.approx(whole.item(), rel=1e-6)
    (estimated,) = torch.autograd.grad((weights * derivative * -logprobs[0]).sum(), logits)
    torch.testing.assert_close(estimated, gradient)


def test_a_model_that_is_its_teacher_has_nothing_to_learn():
    head, hidden, targets, *_ = problem()
    for beta in (0.0, 0.5, 1.0):
        objective = made(head, beta=beta)
        with objective.measuring() as tally:
            found = objective(head, hidden, targets, {HIDDEN: hidden.detach()}, SEQUENCE)
        assert found.item() == pytest.approx(0, abs=1e-5)
        assert torch.autograd.grad(found, hidden)[0].abs().max() < 1e-6
        assert tally._sums["agreement"] / tally._counts["agreement"] == 1


@pytest.mark.parametrize(
    "arguments",
    [{"loss": "kl"}, {"beta": 1.1}, {"beta": True}, {"temperature": 0}, {"chunk_tokens": 0}],
)
def test_bad_arguments(arguments):
    name = next(iter(arguments))
    with pytest.raises(UserError, match=rf"loss\.{name} is"):
        Distillation(**arguments)
