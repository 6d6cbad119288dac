"""Sample and verify at the same time, and write each sample and each verdict to a file as soon as it exists.

A phase is a set of requests. No recorded work is repeated: a phase that was killed continues with the requests
without a sample and the samples without a verdict.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.generation import Completion, Request, Sampling, Session
from rocm_ext.log import Progress
from rocm_ext.ranks import Ranks
from rocm_ext.rollouts.journal import Records
from rocm_ext.rollouts.pace import Pace
from rocm_ext.rollouts.samples import Sample, to_result, to_sample
from rocm_ext.runs.reader import GREEDY, SampleKey
from rocm_ext.train.interrupt import Interrupt, Interrupted
from rocm_ext.verifiers import Pool, Result, Verdict

Group = tuple[str, bool]  # prompt id, whether it is the greedy answer's


@dataclass
class Phase:
    """Samples and verdicts of one phase, and their costs.

    Attributes:
        samples: samples by prompt id and sample index.
        results: verdicts under the same keys.
        stats: the engine's statistics of this process's share; and of the whole phase, with the work of earlier
            processes that were stopped, ``tokens`` of the samples, ``seconds``, and ``waiting``: the part of
            ``seconds`` spent on verdicts after the last sample. ``policy`` is the sum over the samples of the step
            after which their adapter sampled, where the records have it.
    """

    samples: dict[SampleKey, Sample]
    results: dict[SampleKey, Result]
    stats: dict[str, float]

    def verdicts(self) -> Counter[str]:
        """Count the samples by verdict."""
        return Counter(result.verdict.value for result in self.results.values())


class Rollouts:
    """Runs phases: samples answers and verifies them at the same time.

    Args:
        pool: processes that verify while the model samples.
        ranks: all processes of the run; each samples its share of the prompts.
        interrupt: the user's signals to stop, checked after each sample.
        max_error_share: share of a phase's samples with the verdict ERROR above which the run stops.
        brief: log the progress of long phases only.

    Attributes:
        halted: whether sampling must end early; what is sampled stays in the records.
    """

    def __init__(
        self, pool: Pool, ranks: Ranks, interrupt: Interrupt, max_error_share: float, brief: bool = False
    ) -> None:
        self.pool, self.ranks, self.interrupt = pool, ranks, interrupt
        self.max_error_share, self.brief, self.halted = max_error_share, brief, False

    def make(
        self,
        name: str,
        journals: tuple[Records, Records],
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, Mapping[str, Any]],
        session: Callable[[], AbstractContextManager[Session]],
        earlier: int = 0,
    ) -> Phase:
        """Complete a phase.

        Args:
            name: of the phase, for messages.
            journals: records of samples and of verdicts.
            requests: all requests of the phase, the same on every rank.
            rows: columns that the verifier needs, by prompt id.
            session: opens a session of the engine; called only if a rank has something to sample.
            earlier: answers before the phase that ``max_error_share`` is a share of, too: a few answers more should
                not end a run because of one error.

        Returns:
            The samples and verdicts of all ranks.

        Raises:
            UserError: too many verdicts are ERROR, or the disk is full.
            Interrupted: the user asked to stop.
        """
        begun = self.begin(name, journals, requests, rows, earlier)
        if begun.wanted_by_any:
            with session() as engine:
                begun.sample(engine)
        return begun.finish()

    def begin(
        self,
        name: str,
        journals: tuple[Records, Records],
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, Mapping[str, Any]],
        earlier: int = 0,
    ) -> "Begun":
        """Prepare a phase, and submit the samples that have no verdict yet; arguments as in :meth:`make`."""
        return Begun(self, name, journals, requests, rows, earlier)


class Begun:
    """A phase in progress; :meth:`Rollouts.begin` makes it.

    :meth:`sample` uses no collective operation, so a thread may call it while the ranks train. All ranks construct it
    and call :meth:`finish` together.

    Attributes:
        wanted_by_any: whether a rank has something to sample. Every rank opens a session if one does, because
            gathering sharded weights may need every rank.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        name: str,
        journals: tuple[Records, Records],
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, Mapping[str, Any]],
        earlier: int = 0,
    ) -> None:
        self._rollouts, pool, ranks = rollouts, rollouts.pool, rollouts.ranks
        self._interrupt = rollouts.interrupt
        self._name, self._ranks, self._brief = name, ranks, rollouts.brief
        self._max_error_share = rollouts.max_error_share
        self._samples, self._verdicts = journals
        self._total, self._rows = earlier + len(requests), rows
        keys = {(request.prompt_id, request.sample) for request, _ in requests}
        groups = _by_group(keys)
        if pool.groups:  # judged in part, or with other answers than this process asks for
            judged = _by_group(self._verdicts.records)
            whole = {group for group in groups if judged.get(group) == groups[group]}
            self._verdicts.drop(lambda record: _group((record["prompt_id"], record["sample"])) not in whole)
        for journal in journals:  # a resumed run may ask for fewer answers
            journal.drop(lambda record: (record["prompt_id"], record["sample"]) not in keys)
        self._clock = _Clock(*journals)
        self._judge = _Judge(pool, self._verdicts, self._interrupt, self._clock, groups)
        self._mine, known = self._share(requests), self._samples.records
        for request, _ in self._mine:
            key = request.prompt_id, request.sample
            if key in known and key not in self._verdicts.records:
                self._judge.submit(key, known[key]["text"], rows[key[0]])
        self._wanted = [(r, s) for r, s in self._mine if (r.prompt_id, r.sample) not in known]
        self._stats: dict[str, float] = {}
        self._sampled: float | None = None
        self.wanted_by_any = any(ranks.gather(bool(self._wanted)))

    def _share(self, requests: Sequence[tuple[Request, Sampling]]) -> list[tuple[Request, Sampling]]:
        """Return the requests of this rank: every so many prompts, with all their samples."""
        prompts = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt_id for r, _ in requests))}
        return [(r, s) for r, s in requests if prompts[r.prompt_id] % self._ranks.world == self._ranks.rank]

    def sample(self, engine: Session) -> None:
        """Sample the requests that have no record yet, and submit the samples to the verifier."""
        wanted, stats, clock = self._wanted, self._stats, self._clock
        known = self._samples.records
        lengths = [len(known[key]["tokens"]) for r, _ in self._mine if (key := (r.prompt_id, r.sample)) in known]
        pace = Pace(len(wanted), lengths, max((s.max_new_tokens for _, s in wanted), default=0))
        progress = Progress(
            len(self._mine), len(lengths), self._ranks.is_main, self._name,
            lambda: pace.seconds_left(int(stats["tokens"]), clock() - clock.earlier), self._brief,
        )  # fmt: skip
        with contextlib.closing(progress):
            for completion in _generate(wanted, engine):
                sample = Sample.of(completion)
                self._samples.append({**sample.record(), "seconds": clock()})
                self._judge.submit(sample.key, sample.text, self._rows[sample.prompt_id])
                self._judge.record_finished()
                stats |= engine.stats()
                pace.finish(len(sample.tokens))
                progress.update(_describe(stats, self._judge.counts))
                if self._interrupt.signum is not None or self._rollouts.halted:
                    break
        self._sampled = clock()

    def pause(self) -> None:
        """Stop the clock until :meth:`finish`, because the run does other work meanwhile."""
        self._clock.pause()

    def finish(self) -> Phase:
        """Wait for the verdicts, and collect the records of all ranks.

        Raises:
            UserError: too many verdicts are ERROR, or the disk is full.
            Interrupted: the user asked to stop.
        """
        self._clock.go_on()
        sampled = self._clock() if self._sampled is None else self._sampled
        self._judge.finish()
        if signum := self._interrupt.agree(self._ranks):
            raise Interrupted(f"in {self._name}", signum)
        self._samples.collect()
        self._verdicts.collect()
        self._check_errors()
        samples, verdicts = self._samples.records, self._verdicts.records
        tokens, seconds = sum(len(record["tokens"]) for record in samples.values()), self._clock()
        return Phase(
            {key: to_sample(record) for key, record in samples.items()},
            {key: to_result(record) for key, record in verdicts.items()},
            {"tokens_per_second": tokens / max(sampled, 1e-9)}  # of the engine, if this process sampled
            | self._stats
            | {"tokens": tokens, "seconds": seconds, "waiting": seconds - sampled}
            | {"policy": sum(record.get("policy", 0) for record in samples.values())},
        )

    def _check_errors(self) -> None:
        verdicts, total = self._verdicts, self._total
        errors = [r for r in verdicts.records.values() if r["verdict"] == Verdict.ERROR.value]
        if len(errors) > self._max_error_share * total:
            # a resumed run judges samples without a verdict again
            verdicts.drop(lambda record: record["verdict"] == Verdict.ERROR.value)
            raise UserError(
                f"the verifier failed on {len(errors)} of {total} answers, a larger share than max_error_share "
                f"{self._max_error_share:g}; the first error: {errors[0]['detail']}. The samples are saved: fix the "
                "verifier and continue with resume_from_checkpoint=True"
            )


def _generate(wanted: Sequence[tuple[Request, Sampling]], engine: Session) -> Iterator[Completion]:
    """Yield the completions of ``wanted``; it groups requests with equal sampling settings."""
    for sampling in dict.fromkeys(sampling for _, sampling in wanted):
        yield from engine.generate([r for r, s in wanted if s == sampling], sampling)


class _Clock:
    """Seconds of work on a phase, by all processes; the records of earlier processes say how far they came.

    Attributes:
        earlier: seconds of the processes that were stopped.
    """

    def __init__(self, *journals: Records) -> None:
        records = (record for journal in journals for record in journal.records.values())
        self.earlier = max((record.get("seconds", 0.0) for record in records), default=0.0)
        self._began = time.perf_counter()
        self._paused: float | None = None

    def __call__(self) -> float:
        return round(self.earlier + time.perf_counter() - self._began, 3)

    def pause(self) -> None:
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None


def _group(key: SampleKey) -> Group:
    """Return the group of an answer. A greedy answer is alone, so its verdict does not depend on the drawn ones."""
    return key[0], key[1] == GREEDY


def _by_group(keys: Iterable[SampleKey]) -> dict[Group, set[SampleKey]]:
    found: dict[Group, set[SampleKey]] = {}
    for key in keys:
        found.setdefault(_group(key), set()).add(key)
    return found


class _Judge:
    """Submits samples to the pool and records the verdicts in the journal.

    A verifier of groups gets a group once all its samples are there, in the order of their indices.
    """

    def __init__(
        self, pool: Pool, journal: Records, interrupt: Interrupt, clock: _Clock, groups: dict[Group, set[SampleKey]]
    ) -> None:
        self._pool, self._journal, self._interrupt, self._clock = pool, journal, interrupt, clock
        self._groups = groups
        self._texts: dict[Group, dict[SampleKey, str]] = {}  # samples of incomplete groups
        self._pending: dict[Future, list[SampleKey]] = {}
        self._done: SimpleQueue[Future] = SimpleQueue()
        self.counts: Counter[str] = Counter(record["verdict"] for record in journal.records.values())

    def submit(self, key: SampleKey, text: str, row: Mapping[str, Any]) -> None:
        if self._pool.groups:
            group = _group(key)
            texts = self._texts.setdefault(group, {})
            texts[key] = text
            if len(texts) == len(self._groups[group]):
                del self._texts[group]
                keys = sorted(texts)
                self._wait(self._pool.submit_group([texts[key] for key in keys], row), keys)
        else:
            self._wait(self._pool.submit(text, row), [key])

    def _wait(self, future: Future, keys: list[SampleKey]) -> None:
        self._pending[future] = keys
        future.add_done_callback(self._done.put)

    def record_finished(self, timeout: float = 0.0) -> None:
        """Record the finished verdicts; wait up to ``timeout`` seconds for the first."""
        while self._pending:
            try:
                future = self._done.get(timeout > 0, timeout)
            except Empty:
                return
            timeout = 0.0
            keys, found = self._pending.pop(future), future.result()
            for (prompt_id, sample), result in zip(keys, found if self._pool.groups else [found], strict=True):
                self._journal.append(
                    {
                        "prompt_id": prompt_id,
                        "sample": sample,
                        "verdict": result.verdict.value,
                        "reward": result.reward,
                        "detail": result.detail,
                        "seconds": self._clock(),
                    }
                )
                self.counts[result.verdict.value] += 1

    def finish(self) -> None:
        """Wait for the remaining verdicts and record them; return early if the user asks to stop."""
        while self._pending:
            if self._interrupt.signum is not None:
                return  # the resumed run judges the rest
            self.record_finished(timeout=1.0)


def _describe(stats: Mapping[str, float], counts: Counter[str]) -> str:
    judged = sum(counts.values())
    parts = [f"{stats['tokens_per_second']:,.0f} tok/s"]
    if "occupancy" in stats:
        parts.append(f"slots {stats['occupancy']:.0%} full")
    if "gb_per_second" in stats:
        parts.append(f"{stats['gb_per_second']:,.1f} GB/s")
    if judged:
        parts.append(f"{counts[Verdict.CORRECT.value] / judged:.0%} of {judged} right")
    return "  ".join(parts)
