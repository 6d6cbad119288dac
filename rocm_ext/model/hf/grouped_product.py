"""Matrix products of rows that are sorted by expert: every expert's rows with its weight.

On a GPU, bf16 goes through torch's grouped product, one kernel for all experts, if a child process has shown on this
machine that it ends, is right and is faster: ROCm wheels for many GPUs crash in it (unsloth#5301, TheRock#5284).
Elsewhere a loop computes one product per expert.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rocm_ext.base.log import log
from rocm_ext.machine import trials
from rocm_ext.model.hf.packed_states import on_gpu
from rocm_ext.model.lora import is_plain

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
Pairs = Sequence[tuple[Tensor, Tensor]]  # rows, and their experts' weights
_WHAT = "the grouped product"
_FEW = 16  # rows per expert, on average
# the loop over experts; a plan computes one expert and counts its kernels for all
ALIKE: ContextVar[Callable[[Sequence[Any]], Iterator[Any]]] = ContextVar("ALIKE", default=iter)


@dataclass(frozen=True)
class Rows:
    """The t k choices of a layer's tokens as rows, sorted by expert; an expert's rows may end with rows of zeros.

    Attributes:
        order: [n], the rows' choices; t k: a row of zeros.
        back: [t k], the choices' rows.
        ends: [experts], the ends of the experts' rows.
        grouped: whether torch's grouped product is used.
        every: whether every expert has rows for all tokens.
    """

    order: Tensor
    back: Tensor
    ends: Tensor
    grouped: bool
    every: bool = False

    @classmethod
    def of(cls, top_k_index: Tensor, experts: int, dtype: torch.dtype) -> "Rows":
        """Sort the choices, [t, k], for products in ``dtype``."""
        by_expert, choices = top_k_index.reshape(-1).sort(stable=True)
        device = choices.device
        n = len(choices)
        order = choices
        row = torch.arange(n, device=device)
        numbers = torch.arange(experts, device=device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        many = n >= _FEW * experts
        on_cpu = device.type == "cpu" and not isinstance(choices, FakeTensor)
        if many and on_cpu and dtype != torch.float32:
            # oneDNN takes a millisecond or more to build a kernel for a new number of rows: allow few numbers. Decoding
            # has few anyway, and rows of zeros would cost up to half as much again. A plan, perhaps for a GPU, leaves
            # these rows out.
            quarter = max(n // experts // 4, 1)
            unit = max(_FEW, 2 ** int(math.log2(quarter)))
            counts = ends.diff(prepend=ends.new_zeros(1))
            padded = (counts + unit - 1) // unit * unit
            begins = ends - counts
            padded_begins = padded.cumsum(0) - padded
            row += (padded_begins - begins)[by_expert]
            ends = padded.cumsum(0, dtype=torch.int32)
            order = choices.new_full((int(ends[-1]),), n)
            order.index_copy_(0, row, choices)
        back = torch.empty_like(choices)
        back[choices] = row
        grouped = on_gpu(order) and dtype == torch.bfloat16 and grouped_products()
        return cls(order, back, ends, grouped)

    @classmethod
    def all(cls, top_k_index: Tensor, experts: int) -> "Rows":
        """Let every expert compute all tokens, so that no shape depends on the choices, [t, k].

        Reading the experts' weights bounds a decoding step of up to some hundred tokens, which choose most experts.
        """
        t, k = top_k_index.shape
        device = top_k_index.device
        token = torch.arange(t, device=device)
        order = (k * token).repeat(experts)
        back = t * top_k_index + token[:, None]  # [t, k]
        numbers = torch.arange(1, experts + 1, device=device, dtype=torch.int32)
        ends = t * numbers
        return cls(order, back.flatten(), ends, grouped=False, every=True)

    @cached_property
    def parts(self) -> list[tuple[int, slice]]:
        """Experts with rows, and where these are. It waits for the device."""
        # plans have no values
        if self.every or isinstance(self.ends, FakeTensor) or self.ends.is_meta:
            rows = len(self.order)
            experts = len(self.ends)
            ends = [rows * number // experts for number in range(1, experts + 1)]
        else:
            ends = self.ends.tolist()
        parts = []
        begin = 0
        for i, end in enumerate(ends):
            if end > begin:
                parts.append((i, slice(begin, end)))
            begin = end
        return parts

    def products(self, *pairs: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
        """Multiply rows with their experts' weights, and add up: pairs of [n, in] and [experts, in, out] -> [n, out].

        ``bias`` is [experts, out]. The widths ``in`` may differ. With :attr:`every`, rows may be [experts, t, in].
        """
        _, weight = pairs[0]
        if self.every and is_plain(weight):
            return self._in_batches(pairs, bias)
        if self.grouped and is_plain(weight) and _aligned(*chain(*pairs)):
            return self._in_groups(pairs, bias)
        return self._by_expert(pairs, bias)  # dequantises one expert at a time

    def _in_batches(self, pairs: Pairs, bias: Tensor | None) -> Tensor:
        """Compute :meth:`products` where every expert has rows for all tokens."""
        out: Any = None
        for x, weight in pairs:
            rows = x.view(len(self.ends), -1, x.shape[-1])  # [experts, t, in]
            if out is not None:
                out.baddbmm_(rows, weight)
            elif bias is not None:
                out = torch.baddbmm(bias[:, None], rows, weight)
            else:
                out = torch.bmm(rows, weight)
        return out.flatten(0, 1)

    def _in_groups(self, pairs: Pairs, bias: Tensor | None) -> Tensor:
        """Compute :meth:`products` by torch's grouped product."""
        (x, weight), *others = pairs
        out = _grouped_mm(x, weight, offs=self.ends)
        for x2, weight2 in others:
            out.add_(_grouped_mm(x2, weight2, offs=self.ends))
        if bias is None:
            return out
        row = torch.arange(len(x), device=x.device)
        expert = torch.searchsorted(self.ends, row, right=True)
        return out.add_(bias[expert])

    def _by_expert(self, pairs: Pairs, bias: Tensor | None) -> Tensor:
        """Compute :meth:`products` by one product for each expert."""
        (x, weight), *others = pairs
        x = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(x), weight.shape[2])
        for i, part in ALIKE.get()(self.parts):
            rows = x[part]
            products = out[part]
            if bias is None:
                torch.mm(rows, weight[i], out=products)
            else:
                torch.addmm(bias[i], rows, weight[i], out=products)
            for x2, weight2 in others:
                products.addmm_(x2[part], weight2[i])
        return out

    def gradient(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two tensors' rows by expert: [n, p], [n, q] -> leftᵀ right, [experts, p, q]."""
        if self.grouped and _aligned(left, right):
            return _grouped_mm(left.T, right, offs=self.ends)
        shape = len(self.ends), left.shape[1], right.shape[1]
        out = left.new_zeros(shape)
        for i, part in ALIKE.get()(self.parts):
            torch.mm(left[part].T, right[part], out=out[i])
        return out


def _aligned(*matrices: Tensor) -> bool:
    """Whether rows and columns begin at multiples of 16 bytes, as the grouped product expects."""
    for matrix in matrices:
        sizes = matrix.shape[-1:] if matrix.ndim == 2 else matrix.shape[1:]
        if any(size * matrix.element_size() % 16 for size in sizes):
            return False
    return True


# ---- whether this machine computes grouped products


@cache
def grouped_products() -> bool:
    """Whether torch's grouped product is right and fast on this machine's GPU; a line in the log says so."""
    each = "experts: one product for each"
    if _grouped_mm is None:
        log.info("%s, because torch %s has no grouped product", each, torch.__version__)
        return False
    return trials.works("grouped_mm", _WHAT, __name__, "experts: one grouped product for all", each)


def trial(device: torch.device) -> str:
    """Compare grouped products with the loop in bf16, with empty experts: return what is wrong. Empty if nothing is."""
    rng = torch.Generator().manual_seed(0)
    experts = 64
    k = 4
    d = 512
    f = 768
    rank = 16
    index = torch.randint(3, experts - 2, (512, k), generator=rng)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.bfloat16)

    x = some(2048, d)
    low = some(2048, rank)
    w = some(experts, f, d)
    a = some(experts, rank, d)
    wide = some(2048, f)
    by_loop = Rows.of(index.to(device), experts, torch.float32)
    grouped = replace(by_loop, grouped=True)
    calls = [
        lambda rows: rows.products((x, w.mT)),
        lambda rows: rows.products((x, a.mT)),
        lambda rows: rows.products((wide, w), (low, a)),
        lambda rows: rows.gradient(low, x),
    ]

    def times(rows: Rows, call: Callable[[Rows], Tensor]) -> Tensor:
        return call(replace(rows))  # a copy, because rows remember the experts' parts

    pairs: list[Any] = []
    for call in calls:
        fast = partial(times, grouped, call)
        slow = partial(times, by_loop, call)
        pairs.append((fast, slow))
    return trials.compare(_WHAT, pairs, 1e-2)


if __name__ == "__main__":
    trials.main(trial)
