"""Sampling in this process: continuous batching over slots of a key-value cache.

The session prefills a prompt once and copies its cache into the slots of its samples. Every step decodes one token in
all running slots. When an answer ends, the last running sample moves into its slot and waiting samples fill the free
slots at the end. A step thus computes only running samples.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rocm_ext.base.errors import UserError
from rocm_ext.base.heartbeat import beat
from rocm_ext.base.kinds import NULL, check, integer
from rocm_ext.base.log import log
from rocm_ext.data.encoder import to_text
from rocm_ext.data.tokenizer import ChatTokenizer
from rocm_ext.machine.budget import gib
from rocm_ext.machine.cooling import rest
from rocm_ext.machine.trace import DECODING, PREFILL, Trace
from rocm_ext.model.attention import span_for
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.sampler import MIN_ROWS, Sampler, copied_bytes, sampler_of
from rocm_ext.sampling.engine import Completion, Request, RequestQueue, Sampling
from rocm_ext.sampling.slots import (
    PREFILL_TOKENS,
    SHARE,
    Graphs,
    Kept,
    RunningSample,
    SlotBatch,
    SlotMemory,
    most_slots,
    slot_memory,
    slots_beside,
)


class LocalEngine:
    """Samples from the model under training, in this process.

    Args:
        slots: samples decoded at once; by default as many as memory allows, up to the number at which a step becomes
            compute-bound.
        graphs: replay the decoding step as a CUDA/HIP graph; by default on a GPU, if a step on fake tensors shows that
            the model's code allows it; otherwise the log says why not.
        merge: add the adapter to the weights; by default only to fp32 weights, see
            :func:`rocm_ext.model.sampler.sampler_of`.
        decoder: the model, with or without adapters.
        tokenizer: a torchtune model tokenizer with ``stop_tokens``.
        free_memory: returns the free bytes on the device.
        trace: records steps of sampling, see ``profile_steps``.
        routes: whether completions have the routers' chosen experts.

    Raises:
        UserError: ``slots`` is out of range, or no graph can replay the model's code.
    """

    exact_tokens = has_logprobs = refreshes = True

    def __init__(
        self,
        slots: int | None = None,
        graphs: bool | None = None,
        merge: bool | None = None,
        *,
        decoder: Decoder,
        tokenizer,
        free_memory: Callable[[], int],
        trace: Trace | None = None,
        routes: bool = False,
    ) -> None:
        why = (
            " (a CPU rounds smaller products differently, and samples would depend on their batch)"
        )
        kinds = {"slots": integer(MIN_ROWS, _MOST_SLOTS, why) | NULL}
        check({"slots": slots}, kinds, "engine.")
        obstacle = decoder.graph_obstacle if graphs else None
        if obstacle:
            raise UserError(
                f"engine.graphs is True, but no graph can replay a step: {obstacle}; set graphs: null"
            )
        self._slots = slots
        self._graphs = graphs
        self._merge = merge
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._free_memory = free_memory
        self._trace = trace
        self._routes = routes

    @property
    def max_seq_len(self) -> int:
        """Most positions of a prompt with its answer."""
        return self._decoder.check_sampling()

    def check(self) -> None:
        """Check that the model can be sampled from and the tokenizer has stop tokens."""
        self._decoder.check_sampling()
        if not getattr(self._tokenizer, "stop_tokens", None):
            raise UserError(
                f"tokenizer {type(self._tokenizer).__name__} has no stop_tokens, so no answer would end; "
                "use a chat model's tokenizer"
            )

    @contextmanager
    def session(self, adapter: Path | None = None) -> Iterator["LocalSession"]:
        """Open a session on the decoder's current weights, which include the adapter.

        Raises:
            UserError: the model is not supported, or the copy of the weights does not fit into memory.
        """
        self._decoder.check_sampling()
        free = self._free_memory()
        needed = self.layout_bytes()
        if needed > free:
            raise UserError(
                f"sampling needs up to {gib(needed)} for a copy of weights, but "
                f"{gib(free)} are free; sample on a server (rocm_ext.sampling.OpenAIEngine) or use a "
                "smaller model"
            )
        with sampler_of(self._decoder, self._merge) as decoder:
            if self._graphs is None and decoder.device.type == "cuda":
                obstacle = self._decoder.graph_obstacle
                if obstacle:
                    log.info("decoding without graphs: %s", obstacle)
                    self._graphs = False
            session = LocalSession(
                decoder,
                self._tokenizer,
                self._free_memory,
                self._slots,
                self._graphs,
                self._trace,
                self._routes,
            )
            try:
                yield session
            finally:
                session.release()

    def layout_bytes(self) -> int:
        """Upper bound on the bytes of weights that a session copies."""
        return copied_bytes(self._decoder, self._merge)


_MOST_SLOTS = 16_384  # computes at once; beyond 256, more gain nothing on any GPU
_NONE_YET = 0.002  # seconds between looks for new requests


@dataclass
class _Prompt:
    """A prompt's waiting requests, and its cache, which is None until the prompt is prefilled."""

    waiting: deque[Request]
    cache: Any = None


class LocalSession:
    """A session of :class:`LocalEngine`; it runs one ``generate`` at a time.

    It may stay open during training: call :meth:`refresh` after the adapter has changed. The next ``generate`` reuses
    the key-value cache and the graphs if they are large enough.

    Args:
        decoder: the model's copy for sampling.
        tokenizer, free_memory, slots, graphs, trace, routes: see :class:`LocalEngine`.

    Attributes:
        reserve: returns the bytes that training will allocate while this session stays open; by default 0.
    """

    def __init__(
        self,
        decoder: Sampler,
        tokenizer,
        free_memory: Callable[[], int],
        slots: int | None = None,
        graphs: bool | None = None,
        trace: Trace | None = None,
        routes: bool = False,
    ) -> None:
        self._decoder = decoder
        self._free_memory = free_memory
        # torchtune's tokenizer, because it decodes ids
        self._tokenizer = tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer
        self._routes = routes
        self._slots = slots
        self._trace = trace or Trace()
        used = decoder.device.type == "cuda" if graphs is None else graphs
        self._graphs = Graphs(used, asked=graphs is True)
        decoder.fixed_shapes = used
        self._stop_tokens = frozenset(tokenizer.stop_tokens)
        self._totals: Any = Counter()
        self._batch: SlotBatch | None = None  # between two calls of generate
        self.reserve: Callable[[], int] = int

    def refresh(self) -> None:
        """Copy the adapter's values and restart the counts. With sharded weights every rank calls this."""
        self._decoder.refresh()
        self._totals.clear()

    def release(self) -> None:
        """Free the key-value cache and the graphs; the next ``generate`` makes new ones."""
        self._batch = None

    def generate(
        self, requests: Iterable[Request | None], sampling: Sampling
    ) -> Iterator[Completion]:
        """Yield completions as they finish; take prompts when slots are free.

        Raises:
            UserError: a prompt with its answer may exceed the model's context, or memory holds too few slots.
        """
        queue = requests
        if not isinstance(queue, RequestQueue):
            queue = RequestQueue(filter(None, requests))
        for _, completions in self._steps(queue, sampling, MIN_ROWS):
            yield from completions

    def stream(self, request: Request, sampling: Sampling) -> Iterator[list[int] | Completion]:
        """Yield the tokens of one answer so far after every step, and finally its completion.

        The answer equals that of :meth:`generate` except for rounding: a step here has one row.
        """
        for running, completions in self._steps(RequestQueue([request]), sampling, 1):
            yield from ([running[0].tokens] if running else completions)

    def _steps(
        self, queue: RequestQueue, sampling: Sampling, least: int
    ) -> Iterator[tuple[list[RunningSample], list[Completion]]]:
        """Yield running samples and finished answers after every step; for ``least`` see _take_batch."""
        if not queue.requests:
            return
        prompt = max(len(request.tokens) for request in queue.requests)
        longest = prompt + sampling.max_new_tokens + queue.added
        if longest > self._decoder.max_seq_len:
            raise UserError(
                f"the longest prompt and max_new_tokens {sampling.max_new_tokens} are {longest} tokens; the model "
                f"takes at most {self._decoder.max_seq_len}. Lower max_new_tokens or drop long prompts"
            )
        coming = queue.prompts()
        first = next(coming, None)
        if first is None:  # other ranks have taken all
            return
        prompts = deque([_Prompt(deque(first))] if first else [])
        length = span_for(self._decoder.device, longest)
        batch = self._take_batch(queue, length, sampling, least)
        kept: dict[tuple[str, int], Kept] = {}  # caches of waiting conversations
        keeps = bool(queue.added) and self._keeps(batch, queue, sampling)
        while True:
            began = time.perf_counter()
            beat()
            rest()
            all_came = self._admit(batch, prompts, coming, queue.share, kept)
            rows = len(batch.running)
            if not rows:
                if all_came:
                    break
                time.sleep(_NONE_YET)
                continue
            with self._trace.part(DECODING):
                read, new = batch.step()
            ended = {}  # by slot
            for slot, running in enumerate(batch.running):
                completion = self._completion(running, sampling)
                if completion is not None:
                    ended[slot] = completion
            if keeps and ended:
                kept = {key: cache for key, cache in kept.items() if queue.continues(key)}
                for slot, completion in ended.items():
                    if len(kept) < batch.slots:
                        kept[completion.request.key] = batch.keep(slot)
            batch.release(list(ended))
            seconds = time.perf_counter() - began
            self._count(new, rows, batch.slots, read, seconds)
            yield batch.running, list(ended.values())
        # an error or an early end leaves samples in its slots, and does not come here
        self._batch = batch

    def _count(self, tokens: int, rows: int, slots: int, read: int, seconds: float) -> None:
        self._totals.update(tokens=tokens, rows=rows, slot_steps=slots, bytes=read, seconds=seconds)

    def _admit(
        self,
        batch: SlotBatch,
        prompts: deque[_Prompt],
        coming: Iterator[list[Request]],
        share: int,
        kept: dict[tuple[str, int], Kept],
    ) -> bool:
        """Fill free slots with samples of ``prompts``, then of ``coming`` ones while fewer than ``share`` run.

        Conversations continue with their ``kept`` cache. Returns whether all requests have come.
        """
        waiting = sum(len(prompt.waiting) for prompt in prompts)
        all_came = False
        while waiting < min(batch.free, share - len(batch.running)):
            requests = next(coming, None)
            if not requests:  # an empty list: none yet
                all_came = requests is None
                break
            request = requests[0]
            before = kept.pop(request.key, None)
            if before is not None and request.tokens[: len(before.tokens)] == before.tokens:
                batch.go_on(request, before)
                continue
            prompts.append(_Prompt(deque(requests)))
            waiting += len(requests)
        while prompts and batch.free:
            if prompts[0].cache is None:
                self._prefill(batch.free, prompts)
            prompt = prompts[0]
            count = min(batch.free, len(prompt.waiting))
            requests = [prompt.waiting.popleft() for _ in range(count)]
            batch.admit(requests, prompt.cache)
            if not prompt.waiting:
                prompts.popleft()
        return all_came

    def _prefill(self, free: int, prompts: deque[_Prompt]) -> None:
        """Prefill the first prompts together, as many as fill ``free`` slots or :data:`PREFILL_TOKENS`."""
        taken: list[tuple[int, ...]] = []
        tokens = samples = 0
        for prompt in prompts:
            ids = prompt.waiting[0].tokens
            tokens += len(ids)
            if taken and tokens > PREFILL_TOKENS:
                break
            # The first step decodes the prompt's last token, which gives the first new token's logits.
            taken.append(ids[:-1])
            samples += len(prompt.waiting)
            if samples >= free:
                break
        with self._trace.part(PREFILL):
            caches = self._decoder.prefill(taken)
        for prompt, cache in zip(prompts, caches, strict=False):
            prompt.cache = cache

    def _completion(self, running: RunningSample, sampling: Sampling) -> Completion | None:
        """Return the finished answer of a slot, or None while it is unfinished."""
        tokens = running.tokens
        if not tokens:
            return None
        stops = self._stop_tokens if sampling.stop_tokens is None else sampling.stop_tokens
        ended = tokens[-1] in stops
        stopped = ended or self._holds_stop_string(tokens, sampling)
        most = sampling.max_new_tokens if running.request.most is None else running.request.most
        if not stopped and len(tokens) != most:
            return None
        text = to_text(self._tokenizer, tokens[:-1] if ended else tokens)
        text, _ = sampling.until_stop(text)
        reason = "stop" if stopped else "length"
        routes = np.stack(running.routes) if running.routes else None
        return Completion(running.request, tokens, running.logprobs, text, reason, routes)

    def _holds_stop_string(self, tokens: list[int], sampling: Sampling) -> bool:
        if not sampling.stop_strings:
            return False
        # A token has at least one byte. A stop string that ends in the newest token therefore begins in this window.
        window = max(len(text.encode()) for text in sampling.stop_strings) + 4
        tail = to_text(self._tokenizer, tokens[-window:])
        return any(text in tail for text in sampling.stop_strings)

    def _keeps(self, batch: SlotBatch, queue: RequestQueue, sampling: Sampling) -> bool:
        """Whether memory holds as many waiting conversations as running ones, without fewer slots."""
        slots, free, memory = self._fit(
            batch.slots, queue, batch.length, sampling, replaced=batch.nbytes
        )
        return memory.bytes(slots) + slots * memory.cache <= free

    def _take_batch(
        self, queue: RequestQueue, length: int, sampling: Sampling, least: int
    ) -> SlotBatch:
        """Return the session's batch if it serves these requests, else a new one; the session no longer has it.

        ``least`` is the minimum number of slots; below MIN_ROWS it is also the maximum.
        """
        kept = self._batch
        self._batch = None
        if least < MIN_ROWS:
            most = least
        elif self._slots is not None:
            most = max(MIN_ROWS, min(self._slots, queue.share))
        else:
            most = most_slots(queue.share, self._decoder.device, self._decoder.splits_rows)
        if kept is not None:
            longest = max(length, kept.length)
            slots, _, _ = self._fit(most, queue, longest, sampling, replaced=kept.nbytes)
            # a difference of less than a tenth is not worth a new cache and new graphs
            enough = slots == most or slots >= 0.9 * kept.slots
            if kept.length >= length and enough and slots <= 1.1 * kept.slots:
                kept.begin(sampling)
                return kept
            if slots == most:
                length = longest  # the new slots are as long as the old ones
            del kept  # frees its memory
        slots, free, memory = self._fit(most, queue, length, sampling)
        if slots < least:
            raise UserError(
                f"{gib(free)} are free for sampling; {least} answers of {length} tokens need "
                f"{gib(memory.bytes(least))}. Lower max_new_tokens"
            )
        if slots < most:
            log.info("sampling %d answers at once, the most that fit into %s", slots, gib(free))
        return SlotBatch(self._decoder, slots, length, sampling, self._graphs, self._routes)

    def _fit(
        self, most: int, queue: RequestQueue, length: int, sampling: Sampling, replaced: int = 0
    ) -> tuple[int, int, SlotMemory]:
        """Return the number of slots that fit into memory, up to ``most``, the free bytes, and the slots' memory.

        ``replaced`` is the bytes of a batch that the new slots would replace.
        """
        prompts = {request.tokens for request in queue.requests}
        # a conversation's last prompt contains nearly all of it
        lengths = [length if queue.added else len(tokens) for tokens in prompts]
        memory = slot_memory(self._decoder, lengths, length, sampling, self._graphs.used)
        free = int(SHARE * (self._free_memory() + replaced))
        slots = most
        if self._slots is None:
            slots = slots_beside(memory, most, free, self.reserve())
        return slots, free, memory

    def stats(self) -> dict[str, float]:
        """Return counts since the session began or was refreshed.

        They are ``tokens``, ``tokens_per_second``, ``occupancy`` (share of slots with a running sample) and
        ``gb_per_second`` (weights and cache read).
        """
        total = self._totals
        seconds = total["seconds"] or 1.0
        return {
            "tokens": total["tokens"],
            "tokens_per_second": total["tokens"] / seconds,
            "occupancy": total["rows"] / (total["slot_steps"] or 1),
            "gb_per_second": total["bytes"] / seconds / 1e9,
        }
