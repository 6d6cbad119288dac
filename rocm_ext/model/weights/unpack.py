"""Unpack the blocks of ggml's types into numbers, by transformers' functions where it has them.

In fp32, values equal those of llama.cpp's package ``gguf`` bit for bit. On a GPU, torch.compile turns a function into
one kernel that reads blocks and writes values; uncompiled, it reads and writes some 40 bytes per value.
"""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import Tensor

from rocm_ext.base.errors import UserError
from rocm_ext.machine import trials

# values and bytes of a block
BLOCKS = {
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34), "Q2_K": (256, 84),
    "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74), "IQ2_S": (256, 82), "IQ3_XXS": (256, 98), "IQ3_S": (256, 110), "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
# values that are unpacked at a time: intermediate values stay in a CPU's cache (a third of the time), and are small
# compared with a GPU's memory
_PIECE = {"cpu": 1 << 18}
_LARGE_PIECE = 1 << 26
_WHAT = "the compiled unpacking of GGUF blocks"
_SAID = ("GGUF: compiled unpacking", "GGUF: blocks are unpacked step by step")
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the values, as ggml has them; its scales are half


# One operation, because the tables of some kinds are tensors, which torch.compile and plans must not look into
@torch.library.custom_op("rocm_ext::unpack", mutates_args=())
def unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values of complete blocks, [..., bytes] uint8 -> [..., values], rounded once from fp32.

    ``kind`` is a key of :data:`BLOCKS`.
    """
    values, size = BLOCKS[kind]
    blocks = packed.reshape(-1, size) if packed.numel() else packed.new_empty(0, size)
    kernel = _kernel(kind, dtype) if packed.is_cuda else None
    function = kernel or _function(kind)
    count = _PIECE.get(packed.device.type, _LARGE_PIECE) // values
    if kernel and len(blocks) <= count:
        return kernel(blocks).view(_shape(packed, kind))
    out = torch.empty(len(blocks), values, dtype=dtype, device=packed.device)
    for made, piece in zip(out.split(count), blocks.split(count), strict=True) if len(blocks) else ():
        made.copy_(function(piece).view(-1, values))
    return out.view(_shape(packed, kind))


@unpack.register_fake
def _(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(_shape(packed, kind), dtype=dtype)


def _shape(packed: Tensor, kind: str) -> tuple[int, ...]:
    values, size = BLOCKS[kind]
    return *packed.shape[:-1], packed.shape[-1] // size * values


@cache
def _kernel(kind: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """Return a compiled function; None: compiling does not work on this machine."""
    return compiled(kind, dtype) if trials.works("unpack", _WHAT, __name__, *_SAID) else None


def compiled(kind: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return a compiled function that unpacks blocks of a kind: [n, bytes] to [n, values] of ``dtype``."""
    function = _function(kind)

    def unpacked(blocks: Tensor) -> Tensor:
        return function(blocks).reshape(-1, BLOCKS[kind][0]).to(dtype)

    # torch.compile keeps eight graphs per code object: every kind and dtype gets a new one
    code = unpacked.__code__.replace(co_name=f"unpacked_{kind}_{dtype}")
    renamed = FunctionType(code, unpacked.__globals__, None, None, unpacked.__closure__)
    return torch.no_grad()(torch.compile(renamed, dynamic=True))


def trial(device: torch.device) -> str:
    """Compare compiled functions with the uncompiled ones: return a failure, or ""."""
    rng = torch.Generator().manual_seed(0)
    pairs: list[tuple[Callable[[], Tensor], Callable[[], Tensor]]] = []
    for kind, (_, size) in BLOCKS.items():
        blocks = torch.randint(0, 120, (4096, size), generator=rng, dtype=torch.uint8).to(device)  # no infinite scales
        pairs.append((partial(compiled(kind, torch.bfloat16), blocks), partial(_plain, kind, blocks)))
    failure = trials.compare(_WHAT, pairs, 1e-3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return failure or ("" if graphs >= len(BLOCKS) else f"{_WHAT} has {graphs} graphs for {len(BLOCKS)} kinds")


def _plain(kind: str, blocks: Tensor) -> Tensor:
    return _function(kind)(blocks).reshape(-1, BLOCKS[kind][0]).bfloat16()


def _function(kind: str) -> Callable[[Tensor], Tensor]:
    """Return the function that unpacks blocks of a kind: one of this module, or transformers'."""
    if kind in _OURS:
        return _OURS[kind]
    try:
        from transformers.integrations.gguf import dequant
    except ImportError as error:
        raise UserError(
            f"a GGUF file's {kind} is unpacked by transformers from 5.24 on: pip install 'torchtune-rocm[transformers]'"
        ) from error
    number = next(number for number, name in dequant.GGML_NAME.items() if name == kind)
    return lambda blocks: dequant.dequantize(blocks, number)


def _half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes of a block, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes, for value i: 16 or 0."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, None] >> bits & 1) << 4).flatten(1)


def _q5_0(blocks: Tensor) -> Tensor:
    values = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).to(torch.int8) - 16
    return _half(blocks, 0) * values


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * values + _half(blocks, 2)


def _mxfp4(blocks: Tensor) -> Tensor:
    levels = torch.tensor([sign * level for sign in (1.0, -1.0) for level in _E2M1], device=blocks.device)
    half_scales = torch.ldexp(torch.ones_like(blocks[:, :1], dtype=torch.float32), blocks[:, :1].int() - 128)
    return half_scales * levels[_nibbles(blocks[:, 1:]).int()]


_OURS: dict[str, Callable[[Tensor], Tensor]] = {"Q5_0": _q5_0, "Q5_1": _q5_1, "MXFP4": _mxfp4}


if __name__ == "__main__":
    trials.main(trial)
