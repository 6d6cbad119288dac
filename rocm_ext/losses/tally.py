"""What an objective measures beside the loss, over all labels of a step."""

from torch import Tensor, maximum, stack

from rocm_ext.distributed.ranks import Ranks


class Tally:
    """Means and maxima of values that :meth:`Objective.terms` computes.

    They stay on the device until :meth:`result`, so that measuring waits for the device once per step.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._sums) + len(self._maxima)

    def mean(self, name: str, values: Tensor, weights: Tensor | None = None) -> None:
        """Add ``values``, of any shape, to the mean ``name``; booleans give a share.

        Args:
            name: name of the mean.
            values: the values.
            weights: weight of each value; None: 1.
        """
        values = values.double()
        if weights is None:
            total, count = values.sum(), values.new_full((), values.numel())
        else:
            total, count = (values * weights).sum(), weights.double().sum()
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._counts[name] = self._counts[name] + count if name in self._counts else count

    def highest(self, name: str, values: Tensor) -> None:
        """Add ``values``, of any shape but not empty, to the maximum ``name``."""
        value = values.max().double()
        self._maxima[name] = maximum(self._maxima[name], value) if name in self._maxima else value

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Return means and maxima by name over all ranks, which all call this; a rank need not have measured."""
        tensors = [*self._sums.values(), *self._counts.values(), *self._maxima.values()]
        values = stack(tensors).tolist() if tensors else []
        means = len(self._sums)
        sums, counts = (
            dict(zip(self._sums, values, strict=False)),
            dict(zip(self._counts, values[means:], strict=False)),
        )
        maxima = dict(zip(self._maxima, values[2 * means :], strict=True))
        every = ranks.gather((sums, counts, maxima))
        results = {}
        for name in dict.fromkeys(name for each, _, _ in every for name in each):
            parts = [(each[name], counts[name]) for each, counts, _ in every if name in each]
            results[name] = sum(total for total, _ in parts) / sum(count for _, count in parts)
        for name in dict.fromkeys(name for _, _, each in every for name in each):
            results[name] = max(each[name] for _, _, each in every if name in each)
        return results
