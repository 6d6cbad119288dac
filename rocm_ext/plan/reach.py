"""How near published runs come to computed speeds. tests/published_speeds.yaml lists the runs, with their addresses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reach:
    """The range of published speeds, as shares of those that a plan computes.

    Attributes:
        low, high: range over all machines.
        runs: number of published runs, by chip.
    """

    low: float
    high: float
    runs: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


TRAINING = Reach(0.65, 1.25, {"A100 80 GB": 10, "H100 SXM": 2, "RTX 4090": 1, "MI300X": 1, "Strix Halo 128 GB": 1})
DECODING = Reach(0.65, 0.85, {"MI300X": 1, "Strix Halo 128 GB": 2})


def runs(chip: str | None = None) -> int:
    """Number of published runs, of all machines or of those with a chip."""
    every = [each for reach in (TRAINING, DECODING) for each in reach.runs.items()]
    return sum(count for name, count in every if chip in (None, name))


def said(chip: str) -> str:
    """Say how near published runs come, and how many were on machines with a chip."""
    here = runs(chip)
    own = f"{here} of these {runs()} runs" if here else f"none of these {runs()} runs"
    reached = f"{TRAINING} of such figures in training and {DECODING} in sampling"
    return f"published runs reach {reached}; {own} {'were' if here > 1 else 'was'} on such a machine"


def content(chip: str) -> dict[str, Any]:
    """What :func:`said` says, as JSON."""
    ranges = {"training": [TRAINING.low, TRAINING.high], "sampling": [DECODING.low, DECODING.high]}
    return {**ranges, "runs": runs(), "runs_of_this_machine": runs(chip)}
