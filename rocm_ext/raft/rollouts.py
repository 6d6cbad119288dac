"""Sample and verify at the same time, and write each sample and each verdict to a file as soon as it exists.

A phase is a set of requests. No recorded work is repeated: a phase that was killed continues with the requests
without a sample and the samples without a verdict.
"""

import contextlib
import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import Any

from rocm_ext.data.prompts import Prompt
from rocm_ext.errors import UserError
from rocm_ext.files import disk_errors, read_lines, replace_text
from rocm_ext.generation import Completion, Request, Sampling, Session, sample_seed
from rocm_ext.log import Progress
from rocm_ext.raft.pace import Pace
from rocm_ext.ranks import Ranks
from rocm_ext.runs.reader import SampleKey
from rocm_ext.train.interrupt import Interrupt, Interrupted
from rocm_ext.verifiers import Pool, Result, Verdict


@dataclass(frozen=True)
class Sample:
    """A line of ``samples.jsonl``.

    Attributes:
        prompt_id: id of the prompt.
        sample: index of the answer among the prompt's.
        seed: seed of the answer; it determines everything random about the answer.
        finish_reason, text, tokens: see :class:`rocm_ext.generation.Completion`.
        logprobs: log-probabilities as in :class:`rocm_ext.generation.Completion`, rounded to 1e-6.
    """

    prompt_id: str
    sample: int
    seed: int
    finish_reason: str
    text: str
    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, completion: Completion) -> "Sample":
        """Convert a completion to its record."""
        request = completion.request
        return cls(
            request.prompt_id,
            request.sample,
            request.seed,
            completion.finish_reason,
            completion.text,
            completion.tokens,
            [round(value, 6) for value in completion.logprobs],
        )

    @property
    def key(self) -> SampleKey:
        return self.prompt_id, self.sample

    def record(self) -> dict[str, Any]:
        """Return the line's content.

        This is the sample's own ``vars``, because copying with ``asdict`` took as long as all other work outside the
        model and the verifier.
        """
        return vars(self)


class Journal:
    """An append-only file of JSON lines, with one record per prompt and sample.

    Every rank appends to its own file. Opening the journal again merges these files, with any number of ranks.

    Args:
        path: file of the main rank and of the merged records; other ranks write files beside it.
        ranks: all processes of the run.

    Attributes:
        records: the records by prompt id and sample index: all that were there on opening, and this rank's own.
    """

    def __init__(self, path: Path, ranks: Ranks) -> None:
        self._path, self._ranks = path, ranks
        self._own = path if ranks.is_main else path.with_suffix(f".rank{ranks.rank}.jsonl")
        self._file: Any = None
        self.records: dict[SampleKey, dict[str, Any]] = {}
        self._read()

    def append(self, record: dict[str, Any]) -> None:
        """Append one record and write it at once.

        Raises:
            UserError: the disk is full, or the file cannot be written.
        """
        with disk_errors(self._own):
            self._file = self._file or self._own.open("ab", buffering=0)  # a kill damages at most this line
            line = json.dumps(record).encode() + b"\n"
            if self._file.write(line) != len(line):  # on a full disk it may write a part, and only the count tells
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.records[record["prompt_id"], record["sample"]] = record

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the ``unwanted`` records; call it on every rank, on opening or after :meth:`collect`."""
        kept = {key: record for key, record in self.records.items() if not unwanted(record)}
        if len(kept) < len(self.records) and self._ranks.is_main:
            replace_text(self._path, "".join(json.dumps(record) + "\n" for record in kept.values()))
        self.records = kept
        self._ranks.barrier()

    def collect(self) -> None:
        """Close the file, then merge and read the records of all ranks."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._ranks.world > 1:
            self._read()

    def _read(self) -> None:
        self._ranks.barrier()
        if self._ranks.is_main:
            self._merge()
        self._ranks.barrier()
        self.records = {(record["prompt_id"], record["sample"]): record for record in read_records(self._path)}

    def _merge(self) -> None:
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                whole = _whole(self._path.read_bytes())
                with self._path.open("r+b") as file:
                    file.truncate(whole)
            for part in sorted(self._path.parent.glob(f"{self._path.stem}.rank*.jsonl")):
                content = part.read_bytes()
                with self._path.open("ab") as file:
                    file.write(content[: _whole(content)])
                part.unlink()


def _whole(content: bytes) -> int:
    """Return the length of ``content`` without an incomplete last line, which a kill may leave."""
    return content.rfind(b"\n") + 1


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a journal without an incomplete last one; [] if the file is missing.

    Raises:
        UserError: a line is damaged; the message names it.
    """
    return list(read_lines(path, keys=("prompt_id", "sample")))


def sampling_requests(
    prompts: Sequence[Prompt], tokens: Mapping[str, Sequence[int]], samples: int, seed: int, cycle: int
) -> list[Request]:
    """Return the requests of a cycle: ``samples`` answers to each of ``prompts``.

    Args:
        prompts: prompts that the cycle asks.
        tokens: token ids of each prompt, by id.
        samples: number of answers per prompt.
        seed: the run's seed.
        cycle: number of the cycle; with ``seed`` it determines the seed of each answer.
    """
    return [
        Request(
            prompt.id,
            sample,
            sample_seed(seed, cycle, prompt.id, sample),
            tuple(tokens[prompt.id]),
            prompt.messages,
            prompt.tools,
        )
        for prompt in prompts
        for sample in range(samples)
    ]


@dataclass
class Phase:
    """Samples and verdicts of one phase, and their costs.

    Attributes:
        samples: samples by prompt id and sample index.
        results: verdicts under the same keys.
        stats: the engine's statistics of this process's share; and of the whole phase, with the work of earlier
            processes that were stopped, ``tokens`` of the samples, ``seconds``, and ``waiting``: the part of
            ``seconds`` spent on verdicts after the last sample.
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
    """

    def __init__(self, pool: Pool, ranks: Ranks, interrupt: Interrupt, max_error_share: float) -> None:
        self._pool, self._ranks, self._interrupt = pool, ranks, interrupt
        self._max_error_share = max_error_share

    def make(
        self,
        folder: Path,
        cycle: int,
        what: str,
        requests: Sequence[tuple[Request, Sampling]],
        rows: Mapping[str, Mapping[str, Any]],
        session: Callable[[], AbstractContextManager[Session]],
    ) -> Phase:
        """Complete a phase, whose records are in ``samples.jsonl`` and ``verdicts.jsonl``.

        Args:
            folder: folder of these files.
            cycle: number of the cycle that the phase belongs to.
            what: name of the phase.
            requests: all requests of the phase, the same on every rank.
            rows: columns that the verifier needs, by prompt id.
            session: opens a session of the engine; called only if a rank has something to sample.

        Returns:
            The samples and verdicts of all ranks.

        Raises:
            UserError: too many verdicts are ERROR, or the disk is full.
            Interrupted: the user asked to stop.
        """
        samples = Journal(folder / "samples.jsonl", self._ranks)
        verdicts = Journal(folder / "verdicts.jsonl", self._ranks)
        keys = {(request.prompt_id, request.sample) for request, _ in requests}
        for journal in (samples, verdicts):  # a resumed run may ask for fewer answers
            journal.drop(lambda record: (record["prompt_id"], record["sample"]) not in keys)
        clock = _Clock(samples, verdicts)
        judge = _Judge(self._pool, verdicts, self._interrupt, clock)
        mine = self._share(requests)
        for request, _ in mine:
            key = request.prompt_id, request.sample
            if key in samples.records and key not in verdicts.records:
                judge.submit(key, samples.records[key]["text"], rows[key[0]])
        stats = self._complete(mine, samples, judge, rows, session, clock, f"cycle {cycle} {what}")
        sampled = clock()
        judge.finish()
        if signum := self._interrupt.agree(self._ranks):
            raise Interrupted(f"in cycle {cycle}", signum)
        samples.collect()
        verdicts.collect()
        self._check_errors(verdicts, len(requests))
        tokens, seconds = sum(len(record["tokens"]) for record in samples.records.values()), clock()
        return Phase(
            {key: _sample(record) for key, record in samples.records.items()},
            {key: _result(record) for key, record in verdicts.records.items()},
            {"tokens_per_second": tokens / max(sampled, 1e-9)}  # of the engine, if this process sampled
            | stats
            | {"tokens": tokens, "seconds": seconds, "waiting": seconds - sampled},
        )

    def _share(self, requests: Sequence[tuple[Request, Sampling]]) -> list[tuple[Request, Sampling]]:
        """Return the requests of this rank: every so many prompts, with all their samples."""
        prompts = {prompt_id: i for i, prompt_id in enumerate(dict.fromkeys(r.prompt_id for r, _ in requests))}
        return [(r, s) for r, s in requests if prompts[r.prompt_id] % self._ranks.world == self._ranks.rank]

    def _complete(
        self,
        mine: Sequence[tuple[Request, Sampling]],
        samples: Journal,
        judge: "_Judge",
        rows: Mapping[str, Mapping[str, Any]],
        session: Callable[[], AbstractContextManager[Session]],
        clock: "_Clock",
        name: str,
    ) -> dict[str, float]:
        """Sample the requests that have no record yet, and submit the samples to ``judge``.

        Returns:
            The engine's statistics; empty if there was nothing to sample.
        """
        wanted = [(r, s) for r, s in mine if (r.prompt_id, r.sample) not in samples.records]
        stats: dict[str, float] = {}
        lengths = [len(samples.records[key]["tokens"]) for r, _ in mine if (key := (r.prompt_id, r.sample)) in
                   samples.records]  # fmt: skip
        pace = Pace(len(wanted), lengths, max((s.max_new_tokens for _, s in wanted), default=0))
        progress = Progress(
            len(mine), len(lengths), self._ranks.is_main, name,
            lambda: pace.seconds_left(int(stats["tokens"]), clock() - clock.earlier),
        )  # fmt: skip
        # every rank opens a session if one does, because gathering sharded weights may need every rank
        anything = any(self._ranks.gather(bool(wanted)))
        with contextlib.closing(progress):
            for completion, engine in _generate(wanted, session) if anything else ():
                sample = Sample.of(completion)
                samples.append({**sample.record(), "seconds": clock()})
                judge.submit(sample.key, sample.text, rows[sample.prompt_id])
                judge.record_finished()
                stats |= engine.stats()
                pace.finish(len(sample.tokens))
                progress.update(_describe(stats, judge.counts))
                if self._interrupt.signum is not None:
                    break
        return stats

    def _check_errors(self, verdicts: Journal, total: int) -> None:
        errors = [r for r in verdicts.records.values() if r["verdict"] == Verdict.ERROR.value]
        if len(errors) > self._max_error_share * total:
            # a resumed run judges samples without a verdict again
            verdicts.drop(lambda record: record["verdict"] == Verdict.ERROR.value)
            raise UserError(
                f"the verifier failed on {len(errors)} of {total} answers, a larger share than max_error_share "
                f"{self._max_error_share:g}; the first error: {errors[0]['detail']}. The samples are saved: fix the "
                "verifier and continue with resume_from_checkpoint=True"
            )


def _generate(
    wanted: Sequence[tuple[Request, Sampling]], session: Callable[[], AbstractContextManager[Session]]
) -> Iterable[tuple[Completion, Session]]:
    """Yield the completions of ``wanted`` and the session; it groups requests with equal sampling settings."""
    with session() as engine:
        for sampling in dict.fromkeys(sampling for _, sampling in wanted):
            for completion in engine.generate([r for r, s in wanted if s == sampling], sampling):
                yield completion, engine


class _Clock:
    """Seconds of work on a phase, by all processes; the records of earlier processes say how far they came.

    Attributes:
        earlier: seconds of the processes that were stopped.
    """

    def __init__(self, *journals: Journal) -> None:
        records = (record for journal in journals for record in journal.records.values())
        self.earlier = max((record.get("seconds", 0.0) for record in records), default=0.0)
        self._began = time.perf_counter()

    def __call__(self) -> float:
        return round(self.earlier + time.perf_counter() - self._began, 3)


class _Judge:
    """Submits samples to the pool and records the verdicts in the journal."""

    def __init__(self, pool: Pool, journal: Journal, interrupt: Interrupt, clock: _Clock) -> None:
        self._pool, self._journal, self._interrupt, self._clock = pool, journal, interrupt, clock
        self._pending: dict[Future, SampleKey] = {}
        self._done: SimpleQueue[Future] = SimpleQueue()
        self.counts: Counter[str] = Counter(record["verdict"] for record in journal.records.values())

    def submit(self, key: SampleKey, text: str, row: Mapping[str, Any]) -> None:
        future = self._pool.submit(text, row)
        self._pending[future] = key
        future.add_done_callback(self._done.put)

    def record_finished(self, timeout: float = 0.0) -> None:
        """Record the finished verdicts; wait up to ``timeout`` seconds for the first."""
        while self._pending:
            try:
                future = self._done.get(timeout > 0, timeout)
            except Empty:
                return
            timeout = 0.0
            (prompt_id, sample), result = self._pending.pop(future), future.result()
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


def read_samples(path: Path) -> list[Sample]:
    """Read the samples of a phase, or those in ``kept.jsonl``."""
    return [_sample(record) for record in read_records(path)]


def read_results(path: Path) -> dict[SampleKey, Result]:
    """Read the verdicts of a phase, by prompt id and sample index."""
    return {(record["prompt_id"], record["sample"]): _result(record) for record in read_records(path)}


def _sample(record: Mapping[str, Any]) -> Sample:
    return Sample(**{field: record[field] for field in Sample.__dataclass_fields__})


def _result(record: Mapping[str, Any]) -> Result:
    return Result(Verdict(record["verdict"]), record["reward"], record["detail"])


def entropy(samples: Iterable[Sample]) -> float | None:
    """Estimate the entropy of the model's distribution, in nats per token.

    This is the mean of -log p over the sampled tokens. It is unbiased at temperature 1 without truncation.

    Returns:
        The estimate; None if the samples have no log-probs.
    """
    logprobs = [value for sample in samples for value in sample.logprobs]
    return -fmean(logprobs) if logprobs else None


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
