"""How many samples an engine in this process decodes at once, and what memory they take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rocm_ext.model.sampler import MAX_ROWS, MIN_ROWS, Sampler
from rocm_ext.sampling.draw import draw_bytes
from rocm_ext.sampling.engine import Sampling

# Slots at which a step becomes compute-bound; more slots gain nothing (measured on a CPU; computed for GPUs).
_MOST_SLOTS = {"cpu": 128, "cuda": 256}
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


def slot_memory(decoder: Sampler, prompts: Sequence[int], length: int, sampling: Sampling, graphs: bool) -> SlotMemory:
    """Estimate the memory of a session.

    Args:
        decoder: the model's copy for sampling.
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
