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

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
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
        by_expert, order = top_k_index.reshape(-1).sort(stable=True)
        device, n = order.device, len(order)
        row, back = torch.arange(n, device=device), torch.empty_like(order)
        ends = torch.searchsorted(by_expert, torch.arange(experts, device=device), right=True, out_int32=True)
        many = n >= _FEW * experts
        if many and device.type == "cpu" and dtype != torch.float32 and not isinstance(order, FakeTensor):
            # oneDNN takes a millisecond or more to build a kernel for a new number of rows: allow few numbers. Decoding
            # has few anyway, and rows of zeros would cost up to half as much again. A plan, perhaps for a GPU, leaves
            # these rows out.
            unit = max(_FEW, 2 ** int(math.log2(max(n // experts // 4, 1))))
            counts = ends.diff(prepend=ends.new_zeros(1))
            padded = (counts + unit - 1) // unit * unit
            row += (padded.cumsum(0) - padded - ends + counts)[by_expert]
            ends = padded.cumsum(0, dtype=torch.int32)
            order = order.new_full((int(ends[-1]),), n).index_copy_(0, row, order)
            back[order[row]] = row
        else:
            back[order] = row
        return cls(order, back, ends, on_gpu(order) and dtype == torch.bfloat16 and grouped_products())

    @classmethod
    def all(cls, top_k_index: Tensor, experts: int) -> "Rows":
        """Let every expert compute all tokens, so that no shape depends on the choices, [t, k].

        Reading the experts' weights bounds a decoding step of up to some hundred tokens, which choose most experts.
        """
        (t, k), device = top_k_index.shape, top_k_index.device
        token = torch.arange(t, device=device)
        ends = t * torch.arange(1, experts + 1, device=device, dtype=torch.int32)
        return cls((k * token).repeat(experts), (t * top_k_index + token[:, None]).flatten(), ends, False, True)

    @cached_property
    def parts(self) -> list[tuple[int, slice]]:
        """Experts with rows, and where these are. It waits for the device."""
        n, experts = len(self.order), len(self.ends)
        if self.every or isinstance(self.ends, FakeTensor) or self.ends.is_meta:  # in plans there are no values
            ends = [n * (i + 1) // experts for i in range(experts)]
        else:
            ends = self.ends.tolist()
        starts = [0, *ends]
        return [(i, slice(starts[i], end)) for i, end in enumerate(ends) if end > starts[i]]

    def products(self, *pairs: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
        """Multiply rows with their experts' weights, and add up: pairs of [n, in] and [experts, in, out] -> [n, out].

        ``bias`` is [experts, out]. The widths ``in`` may differ. With :attr:`every`, rows may be [experts, t, in].
        """
        (x, weight), *others = pairs
        if self.every and is_plain(weight):
            by_expert = [(x.view(len(self.ends), -1, x.shape[-1]), weight) for x, weight in pairs]
            out = torch.bmm(*by_expert[0]) if bias is None else torch.baddbmm(bias[:, None], *by_expert[0])
            for x, weight in by_expert[1:]:
                out.baddbmm_(x, weight)
            return out.flatten(0, 1)
        if self.grouped and _aligned(*chain(*pairs)) and is_plain(weight):  # else one expert is dequantised at a time
            out = _grouped_mm(x, weight, offs=self.ends)
            for x, weight in others:
                out.add_(_grouped_mm(x, weight, offs=self.ends))
            row = torch.arange(len(x), device=x.device)
            return out if bias is None else out.add_(bias[torch.searchsorted(self.ends, row, right=True)])
        x = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(x), weight.shape[2])
        for i, part in ALIKE.get()(self.parts):
            if bias is None:
                torch.mm(x[part], weight[i], out=out[part])
            else:
                torch.addmm(bias[i], x[part], weight[i], out=out[part])
            for x2, weight2 in others:
                out[part].addmm_(x2[part], weight2[i])
        return out

    def gradient(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply two tensors' rows by expert: [n, p], [n, q] -> leftᵀ right, [experts, p, q]."""
        if self.grouped and _aligned(left, right):
            return _grouped_mm(left.T, right, offs=self.ends)
        out = left.new_zeros(len(self.ends), left.shape[1], right.shape[1])
        for i, part in ALIKE.get()(self.parts):
            torch.mm(left[part].T, right[part], out=out[i])
        return out


def _aligned(*matrices: Tensor) -> bool:
    """Whether rows and columns begin at multiples of 16 bytes, as the grouped product expects."""
    return all(size * m.element_size() % 16 == 0 for m in matrices for size in m.shape[-(m.ndim - 1) :])


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
    """Compare grouped products with the loop in bf16, with empty experts: return what is wrong, or ""."""
    rng = torch.Generator().manual_seed(0)
    experts, k, d, f, rank = 64, 4, 512, 768, 16
    index = torch.randint(3, experts - 2, (512, k), generator=rng).to(device)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.bfloat16)

    x, low, w, a, wide = some(2048, d), some(2048, rank), some(experts, f, d), some(experts, rank, d), some(2048, f)
    by_loop = Rows.of(index, experts, torch.float32)
    grouped = replace(by_loop, grouped=True)
    calls: list[Callable[[Rows], Tensor]] = [
        lambda rows: rows.products((x, w.mT)),
        lambda rows: rows.products((x, a.mT)),
        lambda rows: rows.products((wide, w), (low, a)),
        lambda rows: rows.gradient(low, x),
    ]

    def times(rows: Rows, call: Callable[[Rows], Tensor]) -> Tensor:
        return call(replace(rows))  # a copy, because rows remember the experts' parts

    return trials.compare(_WHAT, [(partial(times, grouped, c), partial(times, by_loop, c)) for c in calls], 1e-2)


if __name__ == "__main__":
    trials.main(trial)
