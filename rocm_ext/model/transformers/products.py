"""Matrix products of rows that are sorted by expert, each expert's with its own weight.

On a GPU, bf16 goes through torch's grouped product, one kernel for all experts, if a child process has shown on this
machine that it ends, is right and is faster: ROCm wheels that are built for many GPUs at once crash in it
(unsloth#5301, TheRock#5284). Elsewhere a loop computes one product per expert.
"""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import read_json, replace_text
from rocm_ext.base.log import log
from rocm_ext.machine.bench_file import cache_folder, machine_key
from rocm_ext.machine.detect import detect
from rocm_ext.model.lora import is_plain
from rocm_ext.model.transformers.states import on_gpu

_grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_TIMEOUT = 300  # seconds
_FEW = 16  # rows per expert, on average
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGBUS, signal.SIGFPE)  # they would come again


@dataclass(frozen=True)
class Rows:
    """The t k choices of a layer's tokens as rows, sorted by expert; after an expert's rows there may be rows of zeros.

    Attributes:
        order: [n], the choice of each row; t k: none, a row of zeros.
        back: [t k], the row of each choice.
        ends: [experts], where each expert's rows end.
        grouped: whether torch's grouped product is used.
        every: whether each expert has a row of each token.
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
            # oneDNN builds a kernel for each new number of rows, in a millisecond or more: let there be few numbers.
            # In decoding there are few, and rows of zeros cost up to half as much again.
            # A plan leaves these rows out: it may be for a GPU
            unit = max(_FEW, 2 ** int(math.log2(max(n // experts // 4, 1))))
            counts = ends.diff(prepend=ends.new_zeros(1))
            padded = (counts + unit - 1) // unit * unit
            row += (padded.cumsum(0) - padded - ends + counts)[by_expert]
            ends = padded.cumsum(0, dtype=torch.int32)
            order = order.new_full((int(ends[-1]),), n).index_copy_(0, row, order)
            back[order[row]] = row
        else:
            back[order] = row
        return cls(order, back, ends, _takes_grouped(order, dtype))

    @classmethod
    def all(cls, top_k_index: Tensor, experts: int) -> "Rows":
        """Let each expert compute all tokens, so that no shape depends on the choices, [t, k].

        A decoding step of up to some hundred tokens is bound by reading the weights of experts, most of which some
        token has chosen.
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

        ``bias`` is [experts, out]. The widths ``in`` may differ. Where each expert has a row of each token, rows may
        come as [experts, t, in].
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
            each = torch.arange(len(x), device=x.device)
            return out if bias is None else out.add_(bias[torch.searchsorted(self.ends, each, right=True)])
        x = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(x), weight.shape[2])
        for i, part in self.parts:
            if bias is None:
                torch.mm(x[part], weight[i], out=out[part])
            else:
                torch.addmm(bias[i], x[part], weight[i], out=out[part])
            for x2, weight2 in others:
                out[part].addmm_(x2[part], weight2[i])
        return out

    def gradient(self, left: Tensor, right: Tensor) -> Tensor:
        """Multiply the rows of each expert with each other: [n, p], [n, q] -> leftᵀ right, [experts, p, q]."""
        if self.grouped and _aligned(left, right):
            return _grouped_mm(left.T, right, offs=self.ends)
        out = left.new_zeros(len(self.ends), left.shape[1], right.shape[1])
        for i, part in self.parts:
            torch.mm(left[part].T, right[part], out=out[i])
        return out


def _takes_grouped(rows: Tensor, dtype: torch.dtype) -> bool:
    return on_gpu(rows) and dtype == torch.bfloat16 and grouped_products()


def _aligned(*matrices: Tensor) -> bool:
    """Whether rows and columns begin at multiples of 16 bytes, as the grouped product expects."""
    return all(size * m.element_size() % 16 == 0 for m in matrices for size in m.shape[-(m.ndim - 1) :])


# ---- whether this machine computes grouped products


@cache
def grouped_products() -> bool:
    """Whether torch's grouped product is right and fast on this machine's GPU; a child process tells, once a machine.

    A line in the log says what was found. The finding is kept in the cache folder until GPU or torch change.
    """
    machine, folder = machine_key(detect()), cache_folder()
    file = folder / "grouped_mm.json" if folder else None
    failure = None
    with suppress(UserError, KeyError):  # a damaged file is written again
        if file and (kept := read_json(file)) and kept["machine"] == machine:
            failure = kept["failure"]
    if failure is None:
        failure, final = _tried()
        with suppress(UserError):  # a cache folder that cannot be written, or that another rank writes to
            if file and final:
                replace_text(file, json.dumps({"machine": machine, "failure": failure}))
    log.info("experts: %s", f"one product for each, because {failure}" if failure else "one grouped product for all")
    return not failure


def _tried() -> tuple[str, bool]:
    """Return why this machine has no grouped products, or "", and whether another try would find the same."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped product", False
    command = [sys.executable, "-m", __name__, str(torch.cuda.current_device() if torch.cuda.is_available() else 0)]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True)
    try:
        found = json.loads(child.communicate(timeout=_TIMEOUT)[0].splitlines()[-1])
        return found["failure"], found["final"]
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: a process that hangs in the driver does not die
        return f"the grouped product took longer than {_TIMEOUT} s", False
    except (ValueError, IndexError):
        status = child.returncode
        return f"a trial of the grouped product ended with status {status}", -status in _CRASHES


def trial(device: torch.device) -> str:
    """Compare grouped products with the loop in bf16, with empty experts: return what is wrong, or ""."""
    rng = torch.Generator().manual_seed(0)
    experts, k, d, f, rank = 64, 4, 512, 768, 16
    index = torch.randint(3, experts - 2, (512, k), generator=rng).to(device)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, torch.bfloat16)

    x, low, w, a, wide = some(2048, d), some(2048, rank), some(experts, f, d), some(experts, rank, d), some(2048, f)
    by_loop = Rows.of(index, experts, torch.float32)
    grouped = Rows(by_loop.order, by_loop.back, by_loop.ends, True)
    calls: list[Callable[[Rows], Tensor]] = [
        lambda rows: rows.products((x, w.mT)),
        lambda rows: rows.products((x, a.mT)),
        lambda rows: rows.products((wide, w), (low, a)),
        lambda rows: rows.gradient(low, x),
    ]
    for call in calls:
        expected = call(by_loop)
        torch.full_like(expected, torch.nan)  # in the memory that the next call gets: it must write all of it
        found, again = call(grouped), call(grouped)
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        if not error < 1e-2:
            return f"the grouped product is wrong by {error:.1e} of its result"
        if not torch.equal(found, again):
            return "the grouped product differs from call to call"

    def seconds(rows: Rows) -> float:
        began, layer = time.perf_counter(), Rows(rows.order, rows.back, rows.ends, rows.grouped)
        for call in calls:
            call(layer).sum().item()
        return time.perf_counter() - began

    ratio = min(seconds(by_loop) for _ in range(5)) / min(seconds(grouped) for _ in range(5))
    return "" if ratio > 1 else f"the grouped product is {ratio:.2f} times as fast"


def main() -> None:
    """Try grouped products on the GPU; print the failure, and whether it would come again."""
    try:
        failure, final = trial(torch.device("cuda", int(sys.argv[1]))), True
    except NotImplementedError as error:
        failure, final = one_line(error), True
    except RuntimeError as error:  # such as memory that is full; the next process tries again
        failure, final = one_line(error), False
    print(json.dumps({"failure": failure, "final": final}))


if __name__ == "__main__":
    main()
