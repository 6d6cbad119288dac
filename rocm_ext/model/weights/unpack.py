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
Unpack = Callable[[Tensor], Tensor]  # maps blocks [n, bytes] to values
_WHAT = "the compiled unpacking of GGUF blocks"
_E2M1 = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the values; ggml's scales are half


# One operation, because the tables of some kinds are tensors, which torch.compile and plans must not look into
@torch.library.custom_op("rocm_ext::unpack", mutates_args=())
def unpack(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    """Return the values of complete blocks, [..., bytes] uint8 -> [..., values], rounded once from fp32.

    ``kind`` is a key of :data:`BLOCKS`.
    """
    shape = _shape(packed, kind)
    if not packed.numel():
        return packed.new_empty(shape, dtype=dtype)
    values, size = BLOCKS[kind]
    blocks = packed.reshape(-1, size)
    kernel = _kernel(kind, dtype) if packed.is_cuda else None
    function = kernel or _function(kind)
    count = _PIECE.get(packed.device.type, _LARGE_PIECE) // values
    if kernel and len(blocks) <= count:
        return kernel(blocks).view(shape)
    out = torch.empty(len(blocks), values, dtype=dtype, device=packed.device)
    for begin in range(0, len(blocks), count):
        piece = slice(begin, begin + count)
        out[piece] = function(blocks[piece]).view(-1, values)
    return out.view(shape)


@unpack.register_fake
def _(packed: Tensor, kind: str, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(_shape(packed, kind), dtype=dtype)


def _shape(packed: Tensor, kind: str) -> tuple[int, ...]:
    values, size = BLOCKS[kind]
    *rows, nbytes = packed.shape
    return *rows, nbytes // size * values


@cache
def _kernel(kind: str, dtype: torch.dtype) -> Unpack | None:
    """Return a compiled function, or None if compiling does not work on this machine."""
    instead = "GGUF: blocks are unpacked step by step"
    works = trials.works("unpack", _WHAT, __name__, "GGUF: compiled unpacking", instead)
    return compiled(kind, dtype) if works else None


def compiled(kind: str, dtype: torch.dtype) -> Unpack:
    """Return a compiled function that unpacks blocks of a kind: [n, bytes] to [n, values] of ``dtype``."""
    function = _function(kind)
    values, _ = BLOCKS[kind]

    def unpacked(blocks: Tensor) -> Tensor:
        return function(blocks).reshape(-1, values).to(dtype)

    # torch.compile keeps eight graphs per code object: every kind and dtype gets a new one
    code = unpacked.__code__.replace(co_name=f"unpacked_{kind}_{dtype}")
    renamed = FunctionType(code, unpacked.__globals__, None, None, unpacked.__closure__)
    return torch.no_grad()(torch.compile(renamed, dynamic=True))


def trial(device: torch.device) -> str:
    """Compare compiled functions with the uncompiled ones. Return what differs, or an empty text."""
    rng = torch.Generator().manual_seed(0)
    pairs: list[tuple[trials.Call, trials.Call]] = []
    for kind, (_, size) in BLOCKS.items():
        # bytes below 120 make no infinite scales
        blocks = torch.randint(0, 120, (4096, size), generator=rng, dtype=torch.uint8)
        blocks = blocks.to(device)
        fast = partial(compiled(kind, torch.bfloat16), blocks)
        slow = partial(_plain, kind, blocks)
        pairs.append((fast, slow))
    failure = trials.compare(_WHAT, pairs, 1e-3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if not failure and graphs < len(BLOCKS):
        failure = f"{_WHAT} has {graphs} graphs for {len(BLOCKS)} kinds"
    return failure


def _plain(kind: str, blocks: Tensor) -> Tensor:
    values, _ = BLOCKS[kind]
    return _function(kind)(blocks).reshape(-1, values).bfloat16()


def _function(kind: str) -> Unpack:
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
    """The number in fp16 at byte ``at`` of each block: [n, 1]."""
    two_bytes = blocks[:, at : at + 2]
    return two_bytes.view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of all bytes of a block, then the high ones: [n, bytes] -> [n, 2 bytes]."""
    low = packed & 15
    high = packed >> 4
    return torch.cat([low, high], dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Bit i of four bytes, for value i: 16 or 0."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed[:, :, None] >> places & 1  # [n, bytes, 8]
    return (bits << 4).flatten(1)


def _q5_0(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0)
    high = _fifth_bits(blocks[:, 2:6])
    values = _nibbles(blocks[:, 6:]) | high
    return scale * (values.to(torch.int8) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    scale = _half(blocks, 0)
    least = _half(blocks, 2)
    high = _fifth_bits(blocks[:, 4:8])
    values = _nibbles(blocks[:, 8:]) | high
    return scale * values + least


def _mxfp4(blocks: Tensor) -> Tensor:
    magnitudes = torch.tensor(_E2M1, device=blocks.device)
    levels = torch.cat([magnitudes, -magnitudes])
    exponents = blocks[:, :1].int() - 128
    half_scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    numbers = _nibbles(blocks[:, 1:]).int()
    return half_scales * levels[numbers]


_OURS: dict[str, Unpack] = {"Q5_0": _q5_0, "Q5_1": _q5_1, "MXFP4": _mxfp4}


if __name__ == "__main__":
    trials.main(trial)
