"""The slots of a key-value cache: their number, their memory, and the samples that run in them."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log
from rocm_ext.model.attention import span_for
from rocm_ext.model.sampler import MAX_ROWS, MIN_ROWS, Sampler
from rocm_ext.sampling.draw import draw, draw_bytes, uniforms
from rocm_ext.sampling.engine import Request, Sampling

# Slots at which a step becomes compute-bound; more slots gain nothing (measured on a CPU; computed for GPUs).
_MOST_SLOTS = {"cpu": 128, "cuda": 256}
PREFILL_TOKENS = 2048  # enough to make a GPU compute-bound
SHARE = 0.9  # share of the free memory for slots; libraries use the rest


@dataclass(frozen=True)
class SlotMemory:
    """Bytes that sampling takes in addition to the weights.

    Attributes:
        cache: bytes per slot, including its logits if steps run as graphs.
        step: bytes per slot during a step.
        prefill: bytes during a prefill; steps and prefills alternate.
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
    """Estimate the memory of a session; ``prompts`` are numbers of tokens, ``length`` is the positions per slot."""
    vocabulary, itemsize = decoder.vocabulary, decoder.dtype.itemsize
    return SlotMemory(
        cache=int(decoder.cache_bytes(length)) + graphs * vocabulary * itemsize,
        step=decoder.step_bytes(length) + vocabulary * draw_bytes(sampling, itemsize, vocabulary),
        prefill=decoder.prefill_bytes(prompts, PREFILL_TOKENS),
    )


def slots_beside(memory: SlotMemory, most: int, free: int, reserve: int) -> int:
    """Choose the number of slots where training follows in the same process.

    The slots' cache stays allocated during training if that costs at most a tenth of the slots. Otherwise sampling uses
    all slots that fit, and the cache must be freed before training.

    Args:
        memory: the slots' memory.
        most: maximum number of slots.
        free: bytes for sampling.
        reserve: bytes that training will allocate; 0: no training follows.
    """
    fit = min(most, memory.fit(free))
    beside = (free - reserve) // memory.cache
    return min(fit, beside) if beside >= 0.9 * fit else fit


def most_slots(samples: int, device: torch.device, splits_rows: bool = True) -> int:
    """Number of slots for ``samples`` samples if memory sets no limit.

    Without ``splits_rows``, a CPU takes no more rows than one matrix product may have.
    """
    most = _MOST_SLOTS.get(device.type, 128)
    return max(MIN_ROWS, min(samples, most if splits_rows or device.type != "cpu" else MAX_ROWS))


# ---- samples in slots


@dataclass
class Graphs:
    """Whether steps are replayed as CUDA/HIP graphs.

    Attributes:
        used: whether graphs are used; a failed capture sets it to False.
        asked: whether a failure is an error.
    """

    used: bool
    asked: bool = False


@dataclass
class RunningSample:
    """A sample in its slot; ``given`` has the request's last tokens, which are not computed yet."""

    request: Request
    given: deque[int] = field(default_factory=deque)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.request.tokens) - len(self.given) + len(self.tokens) - 1


class Kept(NamedTuple):
    """A sample's tokens, and the cache of all but the last."""

    tokens: tuple[int, ...]
    cache: list[Tensor]


class SlotBatch:
    """The slots of the cache; running samples occupy the first ones.

    Args:
        decoder: the model's copy for sampling.
        slots: number of slots.
        length: positions per slot.
        sampling: sampling settings.
        graphs: whether to replay steps as graphs.
        routes: whether samples keep the routers' chosen experts.
    """

    def __init__(
        self, decoder: Sampler, slots: int, length: int, sampling: Sampling, graphs: Graphs, routes: bool = False
    ) -> None:
        self._decoder, self._sampling, self.slots, self.length = decoder, sampling, slots, length
        self._cache = decoder.new_cache(slots, length)
        self._routes = decoder.keep_routes(slots) if routes else None
        device = decoder.device
        self._tokens, self._positions, self._seeds, self._drawn = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.running: list[RunningSample] = []
        self._use, self._graphs = graphs, dict[tuple[int, int], Any]()
        shape = (slots if graphs.used else 0, decoder.vocabulary)
        self._logits = torch.empty(shape, dtype=decoder.dtype, device=device)  # shared: one graph runs at a time

    def begin(self, sampling: Sampling) -> None:
        """Prepare for other samples, as if the slots were new.

        Old keys and values are finite and masked. The tokens of spare rows matter in models with experts, whose
        products include all rows.
        """
        self._sampling = sampling
        for tensor in (self._tokens, self._positions, self._seeds, self._drawn):
            tensor.zero_()

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return self.slots - len(self.running)

    @property
    def nbytes(self) -> int:
        """Bytes of cache and logits."""
        return int(self.slots * self._decoder.cache_bytes(self.length)) + self._logits.nbytes

    @torch.no_grad()
    def admit(self, requests: list[Request], prefix: Any) -> None:
        """Put requests of one prompt into free slots; ``prefix`` is the cache of the prompt's tokens but the last."""
        first, count = len(self.running), len(requests)
        known = len(requests[0].tokens) - 1
        rows = slice(first, first + count)
        self._cache.put(rows, prefix, known)
        self._tokens[rows] = requests[0].tokens[-1]
        self._positions[rows] = known
        self._drawn[rows] = 0
        self._seeds[rows] = torch.tensor([request.seed for request in requests], device=self._seeds.device)
        self.running += map(RunningSample, requests)

    @torch.no_grad()
    def keep(self, slot: int) -> Kept:
        """Return a copy of a slot's sample and cache; the newest token is not computed yet."""
        running = self.running[slot]
        tokens = (*running.request.tokens, *running.tokens)
        return Kept(tokens, self._cache.save(slot, len(tokens) - 1))

    @torch.no_grad()
    def go_on(self, request: Request, kept: Kept) -> None:
        """Put a request that begins with the tokens of ``kept`` into a free slot; steps compute its other tokens."""
        slot, known = len(self.running), len(kept.tokens) - 1
        self._cache.restore(slot, kept.cache, known)
        self._tokens[slot], self._positions[slot] = kept.tokens[-1], known
        self._drawn[slot], self._seeds[slot] = 0, request.seed
        self.running.append(RunningSample(request, deque(request.tokens[known + 1 :])))

    @torch.no_grad()
    def step(self) -> tuple[int, int]:
        """Compute one token of every running sample: the next given one, else a new one.

        Returns the bytes read and the number of new tokens.
        """
        n = len(self.running)
        # Run a few spare slots: at least MIN_ROWS, and multiples of it where every shape needs a graph.
        rows = min(self.slots, n + -n % MIN_ROWS if self._use.used else max(n, MIN_ROWS))
        span = span_for(self._decoder.device, max(running.position for running in self.running) + 1)
        logits = self._decode(rows, span)
        uniform = uniforms(self._seeds[:rows], self._drawn[:rows])
        tokens, logprobs = draw(logits, uniform, self._sampling)
        self._tokens[:rows] = tokens
        self._positions[:n] += 1
        self._drawn[:n] += 1
        given = [slot for slot, running in enumerate(self.running) if running.given]
        if given:
            ids = [self.running[slot].given.popleft() for slot in given]
            slots, ids = torch.tensor([given, ids], device=tokens.device)
            self._tokens[slots], self._drawn[slots] = ids, 0
        drawn = torch.stack([tokens[:n].double(), logprobs[:n].double()])  # both are exact in fp64, and come at once
        for slot, (running, token, logprob) in enumerate(zip(self.running, *drawn.tolist(), strict=True)):
            if slot in given:
                continue
            if math.isnan(logprob):
                raise UserError(
                    f"the model's logits are not finite in {self._decoder.dtype}: if training came before, lower "
                    "optimizer.lr; else set dtype=bf16 or fp32"
                )
            running.tokens.append(int(token))
            running.logprobs.append(logprob)
        if self._routes is not None:
            chosen = self._routes[:n].cpu().numpy().copy()
            for slot in set(range(n)) - set(given):
                self.running[slot].routes.append(chosen[slot])
        return self._decoder.weight_bytes + int(rows * self._decoder.cache_bytes(span)), n - len(given)

    def _decode(self, rows: int, span: int) -> Tensor:
        """Return logits [rows, v] of the next tokens."""
        if graph := self._graphs.get((rows, span)):
            graph.replay()
            return self._logits[:rows]
        # Also before a capture: libraries allocate their workspace in the first call, and a capture computes nothing.
        logits = self._decoder.step(self._tokens[:rows], self._positions[:rows], self._cache, span)
        if self._use.used:
            self._capture(rows, span)
        return logits

    def _capture(self, rows: int, span: int) -> None:
        """Record the step as a graph for later steps of this shape."""
        pool = next((other.pool() for other in self._graphs.values()), None)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = self._decoder.step(self._tokens[:rows], self._positions[:rows], self._cache, span)
                self._logits[:rows].copy_(logits)
        except RuntimeError as error:
            failure = f"cannot capture the decoding step as a graph ({one_line(error)})"
            if self._use.asked:
                raise UserError(f"{failure}; engine.graphs=False decodes without graphs") from error
            log.warning("%s; decoding launches each kernel instead", failure)
            self._use.used = self._decoder.fixed_shapes = False
            self._graphs.clear()
        else:
            self._graphs[rows, span] = graph

    @torch.no_grad()
    def release(self, ended: list[int]) -> None:
        """Free these slots and move running samples from the end into them."""
        sources = list(range(len(self.running)))
        for slot in sorted(ended, reverse=True):
            running, source = self.running.pop(), sources.pop()
            if slot < len(sources):
                self.running[slot], sources[slot] = running, source
        if moved := [slot for slot, source in enumerate(sources) if slot != source]:
            pairs = [moved, [sources[slot] for slot in moved]]
            to, origin = torch.tensor(pairs, device=self._positions.device)
            for tensor in (self._tokens, self._positions, self._seeds, self._drawn):
                tensor[to] = tensor[origin]
            self._cache.move(to, origin, max(self.running[slot].position for slot in moved))
        self._positions[len(sources) : len(sources) + len(ended)] = 0
