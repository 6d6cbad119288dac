"""States of transformers' models in packed rows: short convolutions, gated delta rules and Mamba 2's scans.

A layer with a state carries it from token to token, also from one sequence of a pack to the next. transformers' models
call a few functions for this, by the same names for every kernel. The wrappers here turn the sequences of a pack into
rows of a batch, so that every state begins anew, and put the results back. The rest of the model runs on the pack. The
kernels of packages compute tensors on GPUs only, and none in plans.
"""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import logsigmoid, pad, softplus

from rocm_ext.machine.numerics import Kernel
from rocm_ext.model.attention import Lengths

ROWS = "packed_rows"  # argument that passes the lengths to a model's layers, which need them again backward
Compute = Callable[..., Any]  # a function of tensors
# tokens of a chunk
_SMALLEST = 16
_LARGEST = 64


def on_gpu(x: Tensor) -> bool:
    """Whether a kernel of a package may compute ``x``."""
    return x.is_cuda and not isinstance(x, FakeTensor)


@functools.cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _chosen(
    theirs: Compute,
    in_torch: Compute,
    package: str,
    x: Tensor,
    options: Mapping[str, object],
) -> Compute:
    """Return ``theirs`` where the package's kernel computes it, else the same function ``in_torch``."""
    # without the package, theirs refuses these options
    packs = any(options.get(name) is not None for name in ("seq_idx", "cu_seqlens"))
    has_kernel = _installed(package) and on_gpu(x)
    return theirs if packs or has_kernel else in_torch


@torch.compiler.disable  # lengths differ between batches
def _apart(rows: Lengths, packed: list[Tensor], compute: Compute) -> Tensor:
    return rows.by_sequence(packed, compute, sys.maxsize)


def _conv(theirs: Compute) -> Compute:
    """Wrap ``causal_conv1d_fn``: [1, channels, s] -> [1, channels, s]."""
    in_torch = inspect.unwrap(theirs)

    def conv(
        hidden_states: Tensor, *weights, packed_rows: Lengths | None = None, **options
    ) -> Tensor:
        function = _chosen(theirs, in_torch, "causal_conv1d", hidden_states, options)
        if packed_rows is None:
            return function(hidden_states, *weights, **options)

        def compute(x: Tensor) -> Tensor:
            return function(x.transpose(1, 2), *weights, **options).transpose(1, 2)

        return _apart(packed_rows, [hidden_states[0].T], compute).T[None]

    return conv


def _delta_rule(theirs: Compute, largest: int = _LARGEST) -> Compute:
    """Wrap a delta rule: q, k, v [1, s, heads, d], g, beta [1, s, heads] or [..., d] -> [1, s, heads, d], None.

    transformers' code pads rows to full chunks, of at most ``largest`` tokens here.
    """
    in_torch = inspect.unwrap(theirs)

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = _LARGEST,
        *,
        packed_rows: Lengths | None = None,
        **options,
    ) -> Any:
        function = _chosen(theirs, in_torch, "fla", query, options)

        def compute(q: Tensor, *others: Tensor) -> Any:
            length = q.shape[1]
            power = 1 << (length - 1).bit_length()  # the next power of 2
            size = min(chunk_size, largest, max(_SMALLEST, power))
            # by name, because fla's sixth argument is another
            return function(q, *others, chunk_size=size, **options)

        inputs = (query, key, value, g, beta)
        if packed_rows is None:
            return compute(*inputs)
        packed = [tensor[0] for tensor in inputs]
        out = _apart(packed_rows, packed, lambda *call: compute(*call)[0])
        return out[None], None

    return rule


def _scan(theirs: Compute) -> Compute:
    """Wrap ``mamba2_chunk_scan``: x [1, s, heads, d], dt [1, s, heads], B and C [1, s, groups, n] -> as x."""

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        *,
        packed_rows: Lengths | None = None,
        **options,
    ) -> Any:
        function = _chosen(theirs, chunk_scan, "mamba_ssm", hidden_states, options)

        def compute(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
            return function(x, dt, A, b, c, chunk_size=chunk_size, **options)

        inputs = (hidden_states, dt, B, C)
        if packed_rows is None:
            return compute(*inputs)
        packed = [tensor[0] for tensor in inputs]
        return _apart(packed_rows, packed, compute)[None]

    return scan


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **ignored,
) -> Any:
    """Compute Mamba 2's scan in fp32, as transformers' ``mamba2_chunk_scan`` does.

    Within a chunk it is masked attention; a group's heads read and write their states in one product (SSD,
    arXiv:2405.21060, section 6). transformers' form has chunks of up to 256 tokens, even for short rows, and several
    tensors of [heads, chunk, chunk].

    Args:
        x: [b, s, heads, d].
        dt: [b, s, heads], the steps, before ``dt_bias``, ``dt_softplus`` and ``dt_limit``.
        A: [heads], below zero.
        B, C: [b, s, groups, n].
        D: [heads], or None.
        initial_states: [b, heads, d, n], or None for zeros.
        return_final_states: also return the states at the end.
        ignored: arguments without effect on the result, such as transformers' chunk size.

    Returns:
        [b, s, heads, d] in fp32, or this and the states [b, heads, d, n].
    """
    length = x.shape[1]
    d = x.shape[3]
    groups = B.shape[2]
    size = min(_LARGEST, length)
    count = math.ceil(length / size)

    def chunks(t: Tensor) -> Tensor:  # [b, s, heads, ...] -> [b, chunks, size, heads, ...]
        behind = count * size - length
        others = (0, 0) * (t.dim() - 2)
        padded = pad(t.float(), (*others, 0, behind))
        return padded.unflatten(1, (count, size))

    def joined(t: Tensor) -> Tensor:
        """[b, chunks, heads, i, d] -> [b, chunks, groups, i, heads of a group x d]."""
        by_group = t.unflatten(2, (groups, -1))  # [b, chunks, groups, heads of a group, i, d]
        return by_group.transpose(3, 4).flatten(4)

    def by_head(t: Tensor) -> Tensor:
        """Undo ``joined``."""
        apart = t.unflatten(4, (-1, d))  # [b, chunks, groups, i, heads of a group, d]
        return apart.transpose(3, 4).flatten(2, 3)

    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    values = chunks(x.float() * dt[..., None]).transpose(2, 3)  # [b, chunks, heads, size, d]
    # logs of the decay since the chunk began, [b, chunks, heads, size]
    decay = chunks(dt * A.float()).cumsum(2).transpose(2, 3)
    b = chunks(B).transpose(2, 3)  # [b, chunks, groups, size, n]
    c = chunks(C).transpose(2, 3)

    # what tokens read from earlier ones of their chunk
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    logs = decay[..., :, None] - decay[..., None, :]  # [b, chunks, heads, size, size]
    between = logs.masked_fill(later, -torch.inf).exp()
    products = c @ b.transpose(-1, -2)  # [b, chunks, groups, size, size]
    decays = between.unflatten(2, (groups, -1))  # [b, chunks, groups, heads of a group, size, size]
    scores = products[:, :, :, None] * decays
    out = scores.flatten(2, 3) @ values

    # what each chunk adds to the states, and the states before each chunk
    end = decay[..., -1:]
    left = (end - decay).exp()[..., None]
    written = by_head(b.transpose(-1, -2) @ joined(values * left))  # [b, chunks, heads, n, d]
    if initial_states is None:
        state = torch.zeros_like(written[:, 0])
    else:
        state = initial_states.float().transpose(-1, -2)
    before = []
    for i in range(count):
        before.append(state)
        kept = end[:, i, :, :, None].exp()
        state = state * kept + written[:, i]
    if count > 1 or initial_states is not None:
        read = by_head(c @ joined(torch.stack(before, 1)))  # [b, chunks, heads, size, d]
        out = out + read * decay.exp()[..., None]
    out = out.transpose(2, 3).flatten(1, 2)
    out = out[:, :length].contiguous()  # models take views of it
    if D is not None:
        out = out + D[..., None] * x.float()
    if return_final_states:
        return out, state.transpose(-1, -2)
    return out


def _fused(theirs: Compute) -> Compute:
    """Wrap a kernel that computes a complete layer; the layer calls the other functions where it returns None."""

    def fused(x: Tensor, *arguments, packed_rows: Lengths | None = None, **options) -> Any:
        if packed_rows is not None or not on_gpu(x):
            return None
        return theirs(x, *arguments, **options)

    return fused


# ---- the functions, by what transformers calls them


def _conv_inputs(rng: Generator, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(2, 96, 64, generator=rng).to(dtype)
    weight = torch.randn(64, 4, generator=rng).to(dtype)
    return [x.transpose(1, 2), weight]


def _rule_inputs(
    rng: Generator, dtype: torch.dtype, of_decay: tuple[int, ...] = ()
) -> list[Tensor]:
    q, k, v = torch.randn(3, 2, 96, 2, 32, generator=rng).to(dtype)
    decay = logsigmoid(torch.randn(2, 96, 2, *of_decay, generator=rng))
    beta = torch.rand(2, 96, 2, generator=rng).to(dtype)
    return [q, k, v, decay, beta]


def _scan_inputs(rng: Generator, dtype: torch.dtype) -> list[Tensor]:
    x = torch.randn(2, 96, 4, 32, generator=rng).to(dtype)
    b, c = torch.randn(2, 2, 96, 1, 32, generator=rng).to(dtype)
    dt = torch.rand(2, 96, 4, generator=rng).to(dtype)
    a = -torch.rand(4, generator=rng)
    return [x, dt, a, b, c]


@dataclass(frozen=True)
class _Function:
    """A function of transformers' models.

    Attributes:
        wrap: turns transformers' function into ours.
        package: a package; if installed, transformers uses its kernel instead of code in torch.
        inputs: makes a trial's inputs in a dtype. None if there is no trial.
        options: further arguments of the trial.
    """

    wrap: Callable[..., Compute]
    package: str
    inputs: Callable[[Generator, torch.dtype], list[Tensor]] | None = None
    options: Mapping[str, str | int] = field(default_factory=dict)

    def trial(self, name: str, theirs: Compute) -> Kernel:
        """Return the installed kernel with transformers' code in torch as its reference."""

        def call(function: Compute, *inputs: Tensor) -> Tensor:
            out = function(*inputs, **self.options)
            return out[0] if isinstance(out, tuple) else out

        assert self.inputs is not None
        compute = functools.partial(call, theirs)
        reference = functools.partial(call, inspect.unwrap(theirs))
        return Kernel(_PIP[self.package], name, compute, reference, self.inputs)


_PIP = {
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}  # pip's names
_NORMED = {"use_qk_l2norm_in_kernel": True}
_FUNCTIONS = {
    "causal_conv1d_fn": _Function(_conv, "causal_conv1d", _conv_inputs, {"activation": "silu"}),
    "torch_chunk_gated_delta_rule": _Function(_delta_rule, "fla", _rule_inputs, _NORMED),
    # a decay per channel needs tensors of [chunk, chunk, d]
    "chunk_kimi_delta_attention": _Function(
        functools.partial(_delta_rule, largest=_SMALLEST),
        "fla",
        functools.partial(_rule_inputs, of_decay=(32,)),
        _NORMED,
    ),
    "mamba2_chunk_scan": _Function(_scan, "mamba_ssm", _scan_inputs, {"chunk_size": 64}),
    "mamba2_split_conv1d_scan_combined": _Function(_fused, "mamba_ssm"),
}


def keep_apart(model: nn.Module) -> tuple[bool, list[Kernel]]:
    """Let the layers of ``model`` take the argument :data:`ROWS`.

    Their functions are replaced in transformers' modules with the model's code. Without the argument they compute the
    same as before; code in torch then takes chunks no longer than the rows.

    Returns:
        Whether any layer has a state, and the kernels of installed packages that the functions call.
    """
    has_states = False
    kernels = []
    for path in sorted({type(part).__module__ for part in model.modules()}):
        module = sys.modules[path]
        for name, function in _FUNCTIONS.items():
            theirs = getattr(module, name, None)
            if theirs is None:
                continue
            has_states = True
            if not hasattr(theirs, ROWS):
                ours = functools.wraps(theirs)(function.wrap(theirs))
                setattr(ours, ROWS, True)
                setattr(module, name, ours)
            if function.inputs and _installed(function.package):
                kernels.append(function.trial(name, getattr(module, name)))
    return has_states, kernels
