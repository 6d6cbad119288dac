"""The measurements of two runs against each other, and how they are made."""

from dataclasses import dataclass, field
from typing import Any

from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.intervals import Interval, more_often


@dataclass(frozen=True)
class Losses:
    """The losses of two SFT or DPO runs.

    Attributes:
        steps: number of steps that both runs have.
        first: relative difference at step 1. Both runs have the same weights there (a new adapter adds nothing), so it
            shows the effect of a setting on one forward pass; None if step 1 is missing.
        last_half: relative difference over the last half of ``steps``, which decides: in the first half, runs may not
            have had the time to diverge.
        all: relative difference over all ``steps``.
        values: mean losses of A and B in the last half.
        validation: step, A, B of the last validation at the same step with equally many labels; None without one.
        best_validation: A, B, if both runs are finished and all their validations have equally many labels.
        not_comparable: why training losses at the same step measure different things; empty if they do not.
        attributable: whether the settings can explain a difference; with different seeds it may be chance.
    """

    steps: int
    first: float | None
    last_half: Interval
    all: Interval
    values: tuple[float, float]
    validation: tuple[int, float, float] | None
    best_validation: tuple[float, float] | None
    not_comparable: str
    attributable: bool


@dataclass(frozen=True)
class Scores:
    """Held-out scores of two RAFT or GRPO runs.

    Attributes:
        after: what A and B had done: ``cycle 3`` or ``step 40``.
        trained: False before any training, where settings can affect sampling alone.
        answers: how many answers A and B had sampled to train on.
        a, b: correct, total.
        gain: gain of B, as a share of prompts.
        p: p-value that both are right equally often (exact McNemar test); None without verdicts by prompt.
        not_comparable: why the scores measure different things; empty if they do not.
    """

    after: tuple[str, str]
    trained: bool
    answers: tuple[int, int]
    a: tuple[int, int]
    b: tuple[int, int]
    gain: Interval
    p: float | None
    not_comparable: str


@dataclass(frozen=True)
class Stability:
    """What went wrong in A and in B, in steps that both runs have.

    If both spike at a step, its rows are hard; a spike of one alone counts against that run. A few spikes are chance:
    B is less stable if a fair coin would give it as many of them in less than 5 % of cases.

    Attributes:
        resumed: how often, according to hardware.jsonl.
        not_finite: losses that are not finite.
        skipped: steps whose gradient was not finite; fp16 skips one now and then.
        loss_spikes, grad_spikes: spikes of A alone, and of B alone.
    """

    resumed: tuple[int, int] = (0, 0)
    not_finite: tuple[int, int] = (0, 0)
    skipped: tuple[int, int] = (0, 0)
    loss_spikes: tuple[int, int] = (0, 0)
    grad_spikes: tuple[int, int] = (0, 0)

    @property
    def problem(self) -> str:
        """Why B is less stable than A; empty if it is as stable."""
        if self.not_finite[1] > self.not_finite[0]:
            return f"{self.not_finite[1]} losses of B are not finite"
        for what, (a, b) in (("loss", self.loss_spikes), ("gradient", self.grad_spikes)):
            if more_often(a, b) < 0.05:
                return f"B has {b} {what} spikes where A has {a}"
        return ""


@dataclass
class Comparison:
    """The measurements of :func:`compare`.

    Attributes:
        a, b: the runs.
        settings: those that differ, by name: A's value, B's.
        speed: speed of B, as a multiple of A's. SFT and DPO: ratio of median tokens/s after warm-up. RAFT: ratio of the
            time that both runs' cycles took for the same work, with the slowest and the fastest cycle as its interval.
            GRPO: ratio of the medians of sampled tokens per second of a whole step. RAFT against GRPO: ratio of
            sampled tokens per second of sampling and training.
        memory: peak bytes of A and B; NaN if unknown.
        rates: other measures of speed and size by name: A's value, B's.
        stability: what went wrong.
        losses: losses of SFT and DPO runs.
        scores: scores of RAFT and GRPO runs, in order.
        learning: of two GRPO or DPO runs: means over the last half of the common steps by name, A's and B's; of DPO
            also values of the last common validation.
        notes: messages for the reader.
    """

    a: RunFolder
    b: RunFolder
    settings: dict[str, tuple[Any, Any]]
    speed: Interval
    memory: tuple[float, float]
    rates: dict[str, tuple[float, float]]
    stability: Stability
    losses: Losses | None = None
    scores: list[Scores] = field(default_factory=list)
    learning: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
