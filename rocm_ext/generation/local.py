"""Sampling in this process: continuous batching over slots of a key-value cache.

The session prefills each prompt once and copies its cache into the slot of each of its samples. Every step
decodes one token in all running slots. When an answer ends, the last running sample moves into its slot and
waiting samples fill the free slots at the end. A step thus computes only running samples.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from rocm_ext.data.render import to_text
from rocm_ext.errors import UserError, one_line
from rocm_ext.generation.base import Completion, Request, Sampling
from rocm_ext.generation.decoder import MAX_ROWS, MIN_ROWS, Cache, Decoder, check_family, copied_bytes, merged
from rocm_ext.generation.draw import draw, draw_bytes, uniforms
from rocm_ext.log import log
from rocm_ext.model.foreign import ForeignDecoder

# Slots at which a step becomes compute-bound; more slots gain nothing (measured on a CPU; computed for GPUs).
_MOST_SLOTS = {"cpu": 128, "cuda": 256}
# Attention reads a multiple of this many cache positions. CPU: other numbers change the rounding of attention's sums
# (see `span_for`). GPU: few distinct shapes need few graphs.
_SPAN = {"cpu": 16, "cuda": 256}
_PREFILL_TOKENS = 2048  # enough to make a GPU compute-bound
SHARE = 0.9  # share of the free memory for slots; the rest is for the libraries' own use


class LocalEngine:
    """Samples from the model under training, in this process.

    Args:
        slots: samples decoded at once; None: as many as memory allows, up to the number beyond which more
            gain nothing.
        graphs: replay the decoding step as a CUDA/HIP graph; None: on a GPU.
        merge: add the adapter to the weights; None: only to fp32 weights, see
            :func:`rocm_ext.generation.decoder.merged`.
        decoder: torchtune decoder, with or without adapters.
        tokenizer: a torchtune model tokenizer; gives ``stop_tokens``.
        free_memory: returns the free bytes on the device.

    Raises:
        UserError: ``slots`` is out of range, or transformers computes the model.
    """

    exact_tokens = has_logprobs = True

    def __init__(
        self,
        slots: int | None = None,
        graphs: bool | None = None,
        merge: bool | None = None,
        *,
        decoder: TransformerDecoder,
        tokenizer: Any,
        free_memory: Callable[[], int],
    ) -> None:
        if slots is not None and not (type(slots) is int and slots >= MIN_ROWS):
            raise UserError(f"engine.slots is {slots!r}; expected a whole number of at least {MIN_ROWS}, or null")
        self._check_kind(decoder)
        self._slots, self._graphs, self._merge = slots, graphs, merge
        self._decoder, self._tokenizer, self._free_memory = decoder, tokenizer, free_memory

    @property
    def max_seq_len(self) -> int:
        """Positions of the longest prompt with its answer."""
        return self._decoder.max_seq_len

    def check(self) -> None:
        """Check that the model's family is supported and the tokenizer has stop tokens.

        Raises:
            UserError: something is unsupported or missing; the message names it.
        """
        self._check_family()
        if not getattr(self._tokenizer, "stop_tokens", None):
            raise UserError(
                f"tokenizer {type(self._tokenizer).__name__} has no stop_tokens, so no answer would end; "
                "use a chat model's tokenizer"
            )

    @contextmanager
    def session(self, adapter: Path | None = None) -> Iterator["LocalSession"]:
        """Open a session on the decoder's present weights.

        Args:
            adapter: ignored; the decoder already contains the adapter. Other engines load this folder.

        Raises:
            UserError: the family is not supported, or the copy of the weights does not fit into memory.
        """
        self._check_family()
        free, needed = self._free_memory(), self._copied_bytes()
        if needed > free:
            raise UserError(
                f"sampling needs up to {needed / 2**30:.1f} GiB for its own layout of the weights, but "
                f"{free / 2**30:.1f} GiB are free; sample on a server (rocm_ext.generation.OpenAIEngine) or use a "
                "smaller model"
            )
        with self._copied() as decoder:
            yield LocalSession(decoder, self._tokenizer, self._free_memory, self._slots, self._graphs)

    def _check_kind(self, decoder: Any) -> None:
        if isinstance(decoder, ForeignDecoder):
            raise UserError(
                "engine LocalEngine samples from native decoders only, and transformers computes this model; use "
                "rocm_ext.generation.TransformersEngine"
            )

    def _check_family(self) -> None:
        check_family(self._decoder)

    def _copied_bytes(self) -> int:
        return copied_bytes(self._decoder)

    def _copied(self) -> AbstractContextManager[Any]:
        return merged(self._decoder, self._merge)


@dataclass
class _Prompt:
    """A prompt with waiting requests; ``cache`` is None until the prompt is prefilled."""

    tokens: tuple[int, ...]
    waiting: deque[Request]
    cache: Cache | None = None


@dataclass
class _Running:
    """A sample in its slot."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.request.tokens) + len(self.tokens) - 1


class LocalSession:
    """A session of :class:`LocalEngine`; it runs one ``generate`` at a time.

    Args:
        decoder: the model's layout for sampling.
        tokenizer: a torchtune model tokenizer; gives ``stop_tokens``.
        free_memory: returns the free bytes on the device.
        slots, graphs: see :class:`LocalEngine`.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        free_memory: Callable[[], int],
        slots: int | None = None,
        graphs: bool | None = None,
    ) -> None:
        self._decoder, self._tokenizer, self._free_memory = decoder, tokenizer, free_memory
        self._slots = slots
        self._graphs = decoder.device.type == "cuda" if graphs is None else graphs
        self._stop_tokens = frozenset(tokenizer.stop_tokens)
        self._totals = dict.fromkeys(("tokens", "slot_steps", "bytes", "seconds"), 0.0)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield a completion of each request as soon as it is finished.

        Raises:
            UserError: a prompt with its answer may exceed the model's context, or memory holds fewer slots than a
                step needs.
        """
        if not requests:
            return
        longest = max(len(request.tokens) for request in requests) + sampling.max_new_tokens
        if longest > self._decoder.max_seq_len:
            raise UserError(
                f"the longest prompt and max_new_tokens {sampling.max_new_tokens} are {longest} tokens; the model "
                f"takes at most {self._decoder.max_seq_len}. Lower max_new_tokens or drop long prompts"
            )
        length = span_for(self._decoder.device, longest)
        batch = _Batch(self._decoder, self._count_slots(requests, length, sampling), length, sampling, self._graphs)
        prompts = deque(
            _Prompt(tokens, deque(same)) for tokens, same in groupby(requests, key=lambda request: request.tokens)
        )
        while prompts or batch.running:
            began = time.perf_counter()
            self._admit(batch, prompts)
            read, rows = batch.step()
            ended = [(slot, c) for slot in range(rows) if (c := self._completion(batch.running[slot], sampling))]
            batch.release([slot for slot, _ in ended])
            self._count(rows, batch.slots, read, time.perf_counter() - began)
            for _, completion in ended:
                yield completion

    def _count(self, rows: int, slots: int, read: int, seconds: float) -> None:
        for name, amount in (("tokens", rows), ("slot_steps", slots), ("bytes", read), ("seconds", seconds)):
            self._totals[name] += amount

    def _admit(self, batch: "_Batch", prompts: deque[_Prompt]) -> None:
        """Fill free slots with waiting samples; prefill short prompts together."""
        while prompts and batch.free:
            prompt = prompts[0]
            if prompt.cache is None:
                taken: list[_Prompt] = []
                tokens = 0
                for other in prompts:
                    if taken and tokens + len(other.tokens) > _PREFILL_TOKENS:
                        break
                    taken.append(other)
                    tokens += len(other.tokens)
                    if sum(len(p.waiting) for p in taken) >= batch.free:
                        break
                # The first step decodes the last token, which gives the logits of the first new one.
                for other, cache in zip(taken, self._decoder.prefill([p.tokens[:-1] for p in taken]), strict=True):
                    other.cache = cache
            count = min(batch.free, len(prompt.waiting))
            batch.admit([prompt.waiting.popleft() for _ in range(count)], prompt.cache)  # type: ignore[arg-type]
            if not prompt.waiting:
                prompts.popleft()

    def _completion(self, running: _Running, sampling: Sampling) -> Completion | None:
        """Return the finished answer of a slot, or None while it is unfinished."""
        tokens, text = running.tokens, None
        if tokens[-1] in self._stop_tokens:
            text, reason = to_text(self._tokenizer, tokens[:-1]), "stop"
        elif sampling.stop_strings and self._holds_stop_string(tokens, sampling):
            text, reason = to_text(self._tokenizer, tokens), "stop"
        elif len(tokens) == sampling.max_new_tokens:
            text, reason = to_text(self._tokenizer, tokens), "length"
        if text is None:
            return None
        ends = [at for stop in sampling.stop_strings if (at := text.find(stop)) >= 0]
        return Completion(running.request, tokens, running.logprobs, text[: min(ends, default=len(text))], reason)

    def _holds_stop_string(self, tokens: list[int], sampling: Sampling) -> bool:
        # A token has at least one byte. A stop string that ends in the newest token therefore begins in this window.
        window = max(len(text.encode()) for text in sampling.stop_strings) + 4
        tail = to_text(self._tokenizer, tokens[-window:])
        return any(text in tail for text in sampling.stop_strings)

    def _count_slots(self, requests: Sequence[Request], length: int, sampling: Sampling) -> int:
        if self._slots is not None:
            return max(MIN_ROWS, min(self._slots, len(requests)))
        prompts = {request.tokens for request in requests}
        memory = slot_memory(self._decoder, list(map(len, prompts)), length, sampling, self._graphs)
        most = most_slots(len(requests), self._decoder.device, self._decoder.splits_rows)
        free = int(SHARE * self._free_memory())
        fit = memory.fit(free)
        if fit < MIN_ROWS:
            raise UserError(
                f"{free / 2**30:.1f} GiB are free for sampling; {MIN_ROWS} answers of {length} tokens need "
                f"{memory.bytes(MIN_ROWS) / 2**30:.1f} GiB. Lower max_new_tokens"
            )
        if fit < most:
            log.info("sampling %d answers at once, the most that fit into %.1f GiB", fit, free / 2**30)
        return min(most, fit)

    def stats(self) -> dict[str, float]:
        """Return counts since the session began.

        Returns:
            ``tokens`` sampled, ``tokens_per_second``, ``occupancy`` (share of slots with a running sample) and
            ``gb_per_second`` (weights and cache read).
        """
        total = self._totals
        seconds = total["seconds"] or 1.0
        return {
            "tokens": int(total["tokens"]),
            "tokens_per_second": total["tokens"] / seconds,
            "occupancy": total["tokens"] / (total["slot_steps"] or 1),
            "gb_per_second": total["bytes"] / seconds / 1e9,
        }


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
        prefill=decoder.prefill_bytes(prompts, _PREFILL_TOKENS),
    )


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


class _Batch:
    """The slots of the cache; running samples occupy the first ones."""

    def __init__(self, decoder: Decoder, slots: int, length: int, sampling: Sampling, graphs: bool) -> None:
        self._decoder, self._sampling, self.slots = decoder, sampling, slots
        self._cache = decoder.new_cache(slots, length)
        device = decoder.device
        self._tokens, self._positions, self._seeds, self._drawn = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.running: list[_Running] = []
        self._graphs: dict[tuple[int, int], Any] | None = {} if graphs else None
        shape = (slots if graphs else 0, decoder.vocabulary)
        self._logits = torch.empty(shape, dtype=decoder.dtype, device=device)  # shared: one graph runs at a time

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return self.slots - len(self.running)

    @torch.no_grad()
    def admit(self, requests: list[Request], prefix: Cache) -> None:
        """Put requests of one prompt into free slots.

        Args:
            requests: of the same prompt, at most :attr:`free`.
            prefix: cache of all the prompt's tokens but the last.
        """
        first, count = len(self.running), len(requests)
        known = len(requests[0].tokens) - 1
        rows = slice(first, first + count)
        self._cache.put(rows, prefix, known)
        self._tokens[rows] = requests[0].tokens[-1]
        self._positions[rows] = known
        self._drawn[rows] = 0
        self._seeds[rows] = torch.tensor([request.seed for request in requests], device=self._seeds.device)
        self.running += map(_Running, requests)

    @torch.no_grad()
    def step(self) -> tuple[int, int]:
        """Decode one token for every running sample.

        Returns:
            The bytes read and the number of samples.
        """
        n = len(self.running)
        # Run a few spare slots: at least MIN_ROWS, and multiples of it where each shape needs a graph.
        rows = min(self.slots, n + -n % MIN_ROWS if self._graphs is not None else max(n, MIN_ROWS))
        span = span_for(self._decoder.device, max(running.position for running in self.running) + 1)
        logits = self._decode(rows, span)
        uniform = uniforms(self._seeds[:rows], self._drawn[:rows])
        tokens, logprobs = draw(logits, uniform, self._sampling)
        self._tokens[:rows] = tokens
        self._positions[:n] += 1
        self._drawn[:n] += 1
        for running, token, logprob in zip(self.running, tokens.tolist(), logprobs.tolist(), strict=False):
            if math.isnan(logprob):
                raise UserError(f"the model's logits are not finite in {self._decoder.dtype}; set dtype=bf16 or fp32")
            running.tokens.append(token)
            running.logprobs.append(logprob)
        return self._decoder.weight_bytes + int(rows * self._decoder.cache_bytes(span)), n

    def _decode(self, rows: int, span: int) -> Tensor:
        """Return logits [rows, v] of the next tokens."""
        if self._graphs is None:
            return self._decoder.step(self._tokens[:rows], self._positions[:rows], self._cache, span)
        if (rows, span) not in self._graphs:
            self._graphs[rows, span] = self._capture(rows, span)
        self._graphs[rows, span].replay()
        return self._logits[:rows]

    def _capture(self, rows: int, span: int) -> Any:
        def step() -> None:
            logits = self._decoder.step(self._tokens[:rows], self._positions[:rows], self._cache, span)
            self._logits[:rows].copy_(logits)

        step()  # libraries allocate their workspace in the first call; the capture must not record that
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in (self._graphs or {}).values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                step()
        except RuntimeError as error:
            raise UserError(f"cannot capture the decoding step as a graph ({one_line(error)}); engine.graphs=False "
                            "decodes without graphs") from error  # fmt: skip
        return graph

    @torch.no_grad()
    def release(self, ended: list[int]) -> None:
        """Free these slots and move running samples from the end into them."""
        for slot in sorted(ended, reverse=True):
            last = len(self.running) - 1
            moved = self.running.pop()
            if slot != last:
                self.running[slot] = moved
                self._cache.move(slot, last, moved.position)
                for tensor in (self._tokens, self._positions, self._seeds, self._drawn):
                    tensor[slot] = tensor[last]
            self._positions[last] = 0
