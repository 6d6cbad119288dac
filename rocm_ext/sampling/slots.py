"""How many samples an engine in this process decodes at once, and what memory they take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rocm_ext.sampling.decoder import Decoder
from rocm_ext.sampling.draw import draw_bytes
from rocm_ext.sampling.engine import Sampling
from rocm_ext.sampling.matrix import MAX_ROWS, MIN_ROWS

# Slots at which a step becomes compute-bound; more slots gain nothing (measured on a CPU; computed for GPUs).
_MOST_SLOTS = {"cpu": 128, "cuda": 256}
# Attention reads a multiple of this many cache positions. CPU: other numbers change the rounding of attention's sums
# (see `span_for`). GPU: few distinct shapes need few graphs.
_SPAN = {"cpu": 16, "cuda": 256}
PREFILL_TOKENS = 2048  # enough to make a GPU compute-bound
SHARE = 0.9  # share of the free memory for slots; the rest is for the libraries' own use


@dataclass(frozen=True)
class SlotMemory:
    """Bytes that sampling takes in addition to the weights.

    Attributes:
        cache: per slot, including its logits if steps run as graphs.
        step: per slot, during a step.
        prefill: during a prefill; steps and prefills alternate.
    """

    cache: int
    step: int
    prefill: int

    def bytes(self, slots: int) -> int:
        """Peak bytes with ``slots`` slots."""
        return slots * self.cache + max(slots * self.step, self.prefill)

    def fit(self, free: int) -> int:
        """Number of slots that fit into ``free`` bytes."""
        return min(free // (self.cache + self.step), (free - self.prefill) // self.cache)


def slot_memory(decoder: Decoder, prompts: Sequence[int], length: int, sampling: Sampling, graphs: bool) -> SlotMemory:
    """Estimate the memory of a session.

    Args:
        decoder: the model's layout for sampling.
        prompts: tokens of each prompt.
        length: positions of a slot.
        sampling: decides what :func:`draw` holds.
        graphs: whether steps run as graphs, which keep logits.
    """
    vocabulary, itemsize = decoder.vocabulary, decoder.dtype.itemsize
    return SlotMemory(
        cache=int(decoder.cache_bytes(length)) + graphs * vocabulary * itemsize,
        step=decoder.step_bytes(length) + vocabulary * draw_bytes(sampling, itemsize, vocabulary),
        prefill=decoder.prefill_bytes(prompts, PREFILL_TOKENS),
    )


def slots_beside(memory: SlotMemory, most: int, free: int, reserve: int) -> int:
    """Choose the number of slots where training follows in the same process.

    The slots' cache stays allocated during training if that costs at most a tenth of the slots. Otherwise all slots
    that fit while sampling are used, and the cache must be freed before training.

    Args:
        memory: of a slot.
        most: more slots gain nothing.
        free: bytes for sampling.
        reserve: bytes that training will allocate; 0: no training follows.
    """
    fit = min(most, memory.fit(free))
    beside = (free - reserve) // memory.cache
    return min(fit, beside) if beside >= 0.9 * fit else fit


def most_slots(samples: int, device: torch.device, splits_rows: bool = True) -> int:
    """Number of slots for ``samples`` samples if memory sets no limit.

    Args:
        samples: number of samples.
        device: the sampler's.
        splits_rows: of the decoder; others take no more rows than one matrix product may have on a CPU.
    """
    most = _MOST_SLOTS.get(device.type, 128)
    return max(MIN_ROWS, min(samples, most if splits_rows or device.type != "cpu" else MAX_ROWS))


def span_for(on: torch.device, positions: int) -> int:
    """Number of cache positions to read for ``positions``; it is rounded up so that the result stays bit-identical."""
    device = on.type
    positions += -positions % _SPAN.get(device, 256)
    # On CPUs torch's attention works on blocks of 512 positions, and MKL sums more than 384 positions of a block in two
    # halves (measured). So attention reads either the whole last block or its first half at most.
    return positions + -positions % 512 if device == "cpu" and positions % 512 > 256 else positions
