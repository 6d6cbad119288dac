"""The slots of a key-value cache: their number, their memory, the samples that run in them, and how to draw tokens."""

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
from rocm_ext.sampling.engine import Request, Sampling

# Slots at which a step becomes compute-bound; more slots gain nothing (measured on a CPU; computed for GPUs).
_MOST_SLOTS = {"cpu": 128, "cuda": 256}
PREFILL_TOKENS = 2048  # enough to make a GPU compute-bound
SHARE = 0.9  # share of the free memory for slots; libraries use the rest
_BLOCK = 512  # tokens per block of the two-stage search
_NUCLEUS = 1024  # number of most probable tokens that nearly always hold top_p


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
        in_a_step = free // (self.cache + self.step)
        in_a_prefill = (free - self.prefill) // self.cache
        return min(in_a_step, in_a_prefill)


def slot_memory(
    decoder: Sampler, prompts: Sequence[int], length: int, sampling: Sampling, graphs: bool
) -> SlotMemory:
    """Estimate the memory of a session; ``prompts`` are numbers of tokens, ``length`` is the positions per slot."""
    vocabulary = decoder.vocabulary
    itemsize = decoder.dtype.itemsize
    cache = int(decoder.cache_bytes(length))
    if graphs:
        cache += vocabulary * itemsize
    draw = vocabulary * draw_bytes(sampling, itemsize, vocabulary)
    step = decoder.step_bytes(length) + draw
    return SlotMemory(cache, step, decoder.prefill_bytes(prompts, PREFILL_TOKENS))


def slots_beside(memory: SlotMemory, most: int, free: int, reserve: int) -> int:
    """Choose the number of slots where training follows in the same process.

    The slots' cache stays allocated during training if that costs at most a tenth of the slots. Otherwise sampling uses
    all slots that fit, and the cache must be freed before training.

    Args:
        memory, most: the slots' memory and their maximum number.
        free: bytes for sampling.
        reserve: bytes that training will allocate; 0 if no training follows.
    """
    fit = min(most, memory.fit(free))
    beside = (free - reserve) // memory.cache
    return min(fit, beside) if beside >= 0.9 * fit else fit


def most_slots(samples: int, device: torch.device, splits_rows: bool) -> int:
    """Number of slots for ``samples`` samples if memory sets no limit.

    Without ``splits_rows``, a CPU takes no more rows than one matrix product may have.
    """
    most = _MOST_SLOTS.get(device.type, 128)
    if device.type == "cpu" and not splits_rows:
        most = MAX_ROWS
    return max(MIN_ROWS, min(samples, most))


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
        self,
        decoder: Sampler,
        slots: int,
        length: int,
        sampling: Sampling,
        graphs: Graphs,
        routes: bool,
    ) -> None:
        self.slots = slots
        self.length = length
        self.running: list[RunningSample] = []
        self._decoder = decoder
        self._sampling = sampling
        self._cache = decoder.new_cache(slots, length)
        self._routes = decoder.keep_routes(slots) if routes else None
        # A slot has its newest token, this token's position, its sample's seed, and the number of drawn tokens.
        state = torch.zeros(4, slots, dtype=torch.int64, device=decoder.device)
        self._tokens, self._positions, self._seeds, self._drawn = self._state = state
        self._use_graphs = graphs
        self._graphs: dict[tuple[int, int], Any] = {}
        rows = slots if graphs.used else 0
        shape = rows, decoder.vocabulary
        # shared by all graphs: one runs at a time
        self._logits = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)

    def begin(self, sampling: Sampling) -> None:
        """Prepare for other samples, as if the slots were new.

        Old keys and values are finite and masked. The tokens of spare rows matter in models with experts, whose
        products include all rows.
        """
        self._sampling = sampling
        self._state.zero_()

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return self.slots - len(self.running)

    @property
    def nbytes(self) -> int:
        """Bytes of cache and logits."""
        return int(self.slots * self._decoder.cache_bytes(self.length)) + self._logits.nbytes

    @torch.no_grad()
    def admit(self, requests: list[Request], prefix) -> None:
        """Put requests of one prompt into free slots; ``prefix`` is the cache of the prompt's tokens but the last."""
        first = len(self.running)
        rows = slice(first, first + len(requests))
        prompt = requests[0].tokens
        seeds = [request.seed for request in requests]
        self._cache.put(rows, prefix, len(prompt) - 1)
        self._begin_after(prompt, rows, torch.tensor(seeds, device=self._state.device))
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
        slot = len(self.running)
        known = len(kept.tokens)
        self._cache.restore(slot, kept.cache, known - 1)
        self._begin_after(kept.tokens, slot, request.seed)
        given = deque(request.tokens[known:])
        self.running.append(RunningSample(request, given))

    def _begin_after(self, tokens: Sequence[int], slots: slice | int, seeds: Tensor | int) -> None:
        """Let samples begin after these ``tokens``, of which the cache has all but the last."""
        self._tokens[slots] = tokens[-1]
        self._positions[slots] = len(tokens) - 1
        self._drawn[slots] = 0
        self._seeds[slots] = seeds

    @torch.no_grad()
    def step(self) -> tuple[int, int]:
        """Compute one token of every running sample: the next given one, else a new one.

        Returns the bytes read and the number of new tokens.
        """
        n = len(self.running)
        # Run a few spare slots: at least MIN_ROWS, and multiples of it where every shape needs a graph.
        rows = max(n, MIN_ROWS)
        if self._use_graphs.used:
            rows += -rows % MIN_ROWS
        rows = min(rows, self.slots)
        newest = max(running.position for running in self.running)
        span = span_for(self._decoder.device, newest + 1)
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
            self._tokens[slots] = ids
            self._drawn[slots] = 0
        # both are exact in fp64, and come at once
        drawn = torch.stack([tokens.double(), logprobs.double()])[:, :n]
        chosen = None
        if self._routes is not None:
            chosen = self._routes[:n].cpu().numpy().copy()
        results = zip(self.running, *drawn.tolist(), strict=True)
        for slot, (running, token, logprob) in enumerate(results):
            if slot in given:
                continue
            if math.isnan(logprob):
                raise UserError(
                    f"the model's logits are not finite in {self._decoder.dtype}: if training came before, lower "
                    "optimizer.lr; else set dtype=bf16 or fp32"
                )
            running.tokens.append(int(token))
            running.logprobs.append(logprob)
            if chosen is not None:
                running.routes.append(chosen[slot])
        cache_bytes = int(rows * self._decoder.cache_bytes(span))
        return self._decoder.weight_bytes + cache_bytes, n - len(given)

    def _decode(self, rows: int, span: int) -> Tensor:
        """Return logits [rows, v] of the next tokens."""
        graph = self._graphs.get((rows, span))
        if graph is not None:
            graph.replay()
            return self._logits[:rows]
        # Also before a capture: libraries allocate their workspace in the first call, and a capture computes nothing.
        logits = self._compute(rows, span)
        if self._use_graphs.used:
            self._capture(rows, span)
        return logits

    def _compute(self, rows: int, span: int) -> Tensor:
        tokens = self._tokens[:rows]
        positions = self._positions[:rows]
        return self._decoder.step(tokens, positions, self._cache, span)

    def _capture(self, rows: int, span: int) -> None:
        """Record the step as a graph for later steps of this shape."""
        pool = None
        for other in self._graphs.values():  # all share one
            pool = other.pool()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._logits[:rows].copy_(self._compute(rows, span))
        except RuntimeError as error:
            failure = f"cannot capture the decoding step as a graph ({one_line(error)})"
            if self._use_graphs.asked:
                raise UserError(f"{failure}; engine.graphs=False decodes without graphs") from error
            log.warning("%s; decoding launches each kernel instead", failure)
            self._use_graphs.used = self._decoder.fixed_shapes = False
            self._graphs.clear()
        else:
            self._graphs[rows, span] = graph

    @torch.no_grad()
    def release(self, ended: list[int]) -> None:
        """Free these slots and move running samples from the end into them."""
        moved: dict[int, int] = {}  # slot -> the slot from which its sample comes
        for slot in sorted(ended, reverse=True):
            last = len(self.running) - 1
            running = self.running.pop()
            origin = moved.pop(last, last)
            if slot < last:
                self.running[slot] = running
                moved[slot] = origin
        if moved:
            pairs = [list(moved), list(moved.values())]
            slots, origins = torch.tensor(pairs, device=self._state.device)
            self._state[:, slots] = self._state[:, origins]
            newest = max(self.running[slot].position for slot in moved)
            self._cache.move(slots, origins, newest)
        free = len(self.running)
        self._positions[free : free + len(ended)] = 0


# ---- drawing
#
# A draw depends only on its row's logits, seed and position: a hash of seed and position gives a uniform number, which
# selects a token from the row's cumulative distribution. ``torch.multinomial`` draws from a generator that all rows
# share, so a sample would depend on the rest of its batch.


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one uniform number per row with SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): [n], fp64 in [0, 1).

    It computes any element of a stream directly. ``seeds`` and ``positions`` are int64 [n]: the rows' streams, and the
    elements.
    """
    z = seeds + (positions + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15; int64 wraps around
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return _shift(z ^ _shift(z, 31), 11).double() * 2.0**-53


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> keeps the sign


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [n, v].
        uniform: [n] in [0, 1), fp64.
        sampling: temperature and truncation. As in transformers, top_k applies first, then top_p to the
            remaining tokens, then min_p. Ties with the least probable allowed token are allowed.

    Returns:
        tokens [n], int64, and their log-probs [n], fp32, at ``sampling.logprobs_temperature`` without truncation.
    """
    logits = logits.float()
    temperature = sampling.logprobs_temperature
    peak = logits.amax(-1, keepdim=True)
    weights = _weights(logits, peak, temperature)
    total = weights.sum(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        if sampling.temperature != temperature:
            weights = _weights(logits, peak, sampling.temperature)
        # frees the other weights before the search copies these
        weights = _truncate(weights, sampling)
        tokens = _search(weights, uniform)
    distance = logits.gather(-1, tokens[:, None]) - peak
    return tokens, distance.squeeze(-1) / temperature - total.log()


def _weights(logits: Tensor, peak: Tensor, temperature: float) -> Tensor:
    """Return unnormalised probabilities at a temperature; a row's largest is 1."""
    distance = logits - peak
    if temperature != 1:
        distance.div_(temperature)
    return distance.exp_()


def draw_bytes(sampling: Sampling, itemsize: int, vocabulary: int) -> int:
    """Bytes that :func:`draw` holds at most per logit, including the logit of ``itemsize`` bytes."""
    logits = itemsize if itemsize == 4 else itemsize + 4
    weights = 4
    further = 4 if vocabulary % _BLOCK else 0
    if sampling.temperature not in (0, sampling.logprobs_temperature):
        further = 4
    truncations = (sampling.top_k is not None) + (sampling.min_p is not None)
    if truncations:
        further = 1 + 4 * truncations
    if sampling.top_p is not None and sampling.top_p < 1:
        further = 28  # a full sort, which is rare
    return logits + weights + further


def _truncate(weights: Tensor, sampling: Sampling) -> Tensor:
    """Set to zero the weights of tokens that ``sampling`` excludes: [n, v], unnormalised; a row's largest is 1."""
    if sampling.top_k is not None and sampling.top_k < weights.shape[-1]:
        least = weights.topk(sampling.top_k).values[:, -1:]
        weights = weights.masked_fill(weights < least, 0.0)
    if sampling.top_p is not None and sampling.top_p < 1:
        least = _least_in_nucleus(weights, sampling.top_p)
        weights = weights.masked_fill(weights < least, 0.0)
    if sampling.min_p is not None:
        weights = weights.masked_fill(weights < sampling.min_p, 0.0)
    return weights


def _least_in_nucleus(weights: Tensor, top_p: float) -> Tensor:
    """The least weight, [n, 1], of a row's most probable tokens that hold the share ``top_p`` of its sum."""
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    wanted = total * top_p
    largest = weights.topk(min(_NUCLEUS, weights.shape[-1])).values
    sums = largest.cumsum(-1, dtype=torch.float64)
    if bool((sums[:, -1:] < wanted).any()):
        largest = weights.sort(descending=True).values
        sums = largest.cumsum(-1, dtype=torch.float64)
    # the first token with which the sum reaches top_p
    last = (sums < wanted).sum(-1, keepdim=True)
    last.clamp_(max=largest.shape[-1] - 1)
    return largest.gather(-1, last)


def _search(weights: Tensor, uniform: Tensor) -> Tensor:
    """Find the token where a row's cumulative sum passes the share ``uniform`` of its total: [n, v], [n] -> [n].

    The search first finds a block, then a token in it, so it builds no cumulative sum over the vocabulary. Sums are in
    fp64 where precision matters.
    """
    n, vocabulary = weights.shape
    if vocabulary % _BLOCK:  # torch's pad copies all weights even if it adds no columns
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK))
    blocks = weights.reshape(n, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    bounds = sums.cumsum(-1)
    target = uniform[:, None] * bounds[:, -1:]
    block = torch.searchsorted(bounds, target, right=True)
    block.clamp_(max=sums.shape[-1] - 1)
    # The target's share of its block. It is scaled to the block's fp64 sum below, because the fp32 sum is rounded.
    begin = (bounds - sums).gather(-1, block)
    share = (target - begin) / sums.gather(-1, block)
    rows = torch.arange(n, device=weights.device)
    inside = blocks[rows, block.squeeze(-1)].double().cumsum(-1)
    # Keep the target below the block's sum, so that a last token of weight 0 is never drawn.
    wanted = share.clamp_(0.0, 1.0 - 2.0**-40) * inside[:, -1:]
    token = torch.searchsorted(inside, wanted, right=True)
    token.clamp_(max=_BLOCK - 1)
    index = (block * _BLOCK + token).squeeze(-1)
    return index.clamp_(max=vocabulary - 1)  # NaN gives an index past the end
