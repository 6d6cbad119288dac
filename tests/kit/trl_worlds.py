"""Environments as TRL's users write them, and reward functions for them."""

from typing import Any


class Counter:
    """Counts up to the row's target."""

    def __init__(self) -> None:
        self.value = self.target = 0
        self.rows: list[dict[str, Any]] = []

    def reset(self, target: int, **row: Any) -> str:
        self.value, self.target = 0, target
        self.rows.append(row)
        return f" The target is {target}."

    def add(self, amount: int) -> dict[str, int]:
        """
        Adds to the counter.

        Args:
            amount: How much to add.

        Returns:
            The counter.
        """
        if amount < 0:
            raise ValueError("the amount is negative")
        self.value += amount
        return {"value": self.value}

    async def double(self) -> str:
        """Doubles the counter."""
        self.value *= 2
        return str(self.value)

    def _hidden(self) -> None:
        raise AssertionError


class Rewarded(Counter):
    """As Counter, with a reward of its own."""

    async def get_reward(self) -> float:
        return float(self.value == self.target)


class Silent(Counter):
    """As Counter, whose reset says nothing."""

    def reset(self, **row: Any) -> None:
        super().reset(**row)


class Timeless:
    """Has no reset."""

    def add(self) -> str:
        """Adds."""
        return ""


def nearness(
    prompts: Any, completions: Any, environments: Any, target: list[int], **columns: Any
) -> list[float]:
    """How near the counter is; 0 unless the function gets what TRL's trainers give."""
    given = [[m["role"] for m in c] for c in completions]
    ends = all(roles[-1] == "assistant" for roles in given) and all(
        p[-1]["role"] == "user" for p in prompts
    )
    return [
        float(ends) * max(0.0, 1 - abs(e.value - t) / 10)
        for e, t in zip(environments, target, strict=True)
    ]


def trainers_own(completion_ids: Any, **columns: Any) -> list[float]:
    """Takes what a trainer alone has."""
    return [1.0 for _ in completion_ids]
