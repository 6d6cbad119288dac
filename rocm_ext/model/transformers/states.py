"""States of transformers' models in packed rows: short convolutions, gated delta rules and Mamba 2's scans.

A layer with a state carries it from token to token, also from one sequence of a pack to the next. transformers' models
call the functions that do so by a few names, whatever kernel is behind them. The wrappers gather the sequences of a
pack as rows of a batch, in which each state begins anew, and put the results back. All else of the model runs on the
pack.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rocm_ext.model.attention import Lengths

ROWS = "packed_rows"  # name of the argument that hands the lengths to a model's layers; they are needed again backward
_SMALLEST = 16  # tokens of a chunk


def _conv(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``causal_conv1d_fn``: [1, channels, s] -> [1, channels, s]."""

    def conv(hidden_states: Tensor, *weights: Any, packed_rows: Lengths | None = None, **options: Any) -> Tensor:
        if packed_rows is None:
            return theirs(hidden_states, *weights, **options)
        out = packed_rows.each(
            [hidden_states[0].T], lambda x: theirs(x.transpose(1, 2), *weights, **options).transpose(1, 2), True
        )
        return out.T[None]

    return conv


def _delta_rule(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a delta rule: q, k, v [1, s, heads, d], g, beta [1, s, heads] or [..., d] -> [1, s, heads, d], None."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        packed_rows: Lengths | None = None,
        **options: Any,
    ) -> Any:
        def compute(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Any:
            return theirs(q, k, v, g=g, beta=beta, chunk_size=_chunk(chunk_size, q.shape[1]), **options)

        inputs = (query, key, value, g, beta)
        if packed_rows is None:
            return compute(*inputs)
        return packed_rows.each([t[0] for t in inputs], lambda *call: compute(*call)[0], True)[None], None

    return rule


def _scan(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``mamba2_chunk_scan``: x [1, s, heads, d], dt [1, s, heads], B and C [1, s, groups, n] -> as x."""

    def scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        packed_rows: Lengths | None = None,
        **options: Any,
    ) -> Any:
        def compute(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
            return theirs(x, dt, A, b, c, chunk_size=_chunk(chunk_size, x.shape[1]), **options)

        inputs = (hidden_states, dt, B, C)
        if packed_rows is None:
            return compute(*inputs)
        return packed_rows.each([t[0] for t in inputs], compute, True)[None]

    return scan


def _fused(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel of a whole layer, without which the layer calls the other functions."""

    def fused(*arguments: Any, packed_rows: Lengths | None = None, **options: Any) -> Any:
        return theirs(*arguments, **options) if packed_rows is None else None

    return fused


def _chunk(size: int, longest: int) -> int:
    """Return the tokens of a chunk for rows of ``longest``: a power of 2.

    transformers' own functions pad rows to whole chunks, of 256 tokens in Mamba 2.
    """
    return min(size, max(_SMALLEST, 1 << (longest - 1).bit_length()))


_WRAPPERS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _fused,
}


def keep_apart(model: nn.Module) -> bool:
    """Let the layers of ``model`` take the argument :data:`ROWS`; return whether any has a state.

    Their functions are replaced in the modules of transformers that hold the model's code. Without the argument they
    compute what they did, in chunks that are no longer than the rows.
    """
    found = False
    for place in {type(part).__module__ for part in model.modules()}:
        module = sys.modules[place]
        for name, wrapper in _WRAPPERS.items():
            if theirs := getattr(module, name, None):
                found = True
                if not hasattr(theirs, ROWS):
                    ours = torch.compiler.disable(functools.wraps(theirs)(wrapper(theirs)))
                    setattr(ours, ROWS, True)
                    setattr(module, name, ours)
    return found
