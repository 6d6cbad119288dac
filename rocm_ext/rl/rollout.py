"""Sample and verify at the same time, and write each sample and each verdict to a file as soon as it exists.

No recorded work is repeated: a rollout that was killed continues with the requests without a sample and the samples
without a verdict.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from rocm_ext.base.errors import UserError
from rocm_ext.base.log import Progress
from rocm_ext.base.supervised import beat
from rocm_ext.data.prompts import Prompt
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.conversations import ConversationQueue
from rocm_ext.rl.records import PhaseRecords, Sample, key_of, to_result, to_sample
from rocm_ext.runs.folder import GREEDY, SampleKey
from rocm_ext.sampling import Completion, Request, RequestQueue, Sampling, Session
from rocm_ext.train.lifecycle import Interrupt, Interrupted
from rocm_ext.verifiers import Pool, Result, Verdict

Requests = Sequence[tuple[Request, Sampling]]
OpenSession = Callable[[], AbstractContextManager[Session]]
Group = tuple[str, bool]  # prompt id, whether it is the greedy answer's


@dataclass(frozen=True)
class Job:
    """What to sample and verify.

    Attributes:
        name: where the run is, for messages, such as ``cycle 3``.
        requests: requests with their sampling settings, the same on every rank.
        prompts: the requests' prompts.
        samples, verdicts, turns: records of the phase.
        logprobs_for: settings that need the token ids and log-probs of each answer; empty: none does.
        earlier: answers before these that ``max_error_share`` is a share of, too: a few answers more should not end a
            run because of one error.
    """

    name: str
    requests: Requests
    prompts: Sequence[Prompt]
    samples: PhaseRecords
    verdicts: PhaseRecords
    turns: PhaseRecords
    logprobs_for: Sequence[str] = ()
    earlier: int = 0


@dataclass(frozen=True)
class Answers:
    """Samples and verdicts of a rollout, and their costs.

    Attributes:
        samples: samples by prompt id and sample index.
        results: verdicts under the same keys.
        stats: the engine's statistics of this process's share; and of the whole rollout, with the work of earlier
            processes that were stopped, ``tokens`` of the samples, ``seconds``, and ``waiting``: the part of
            ``seconds`` spent on verdicts after the last sample. ``policy`` is the sum over the samples of the step
            after which their adapter sampled, where the records have it. ``hidden``: the seconds of sampling that
            passed while the ranks trained.
    """

    samples: dict[SampleKey, Sample]
    results: dict[SampleKey, Result]
    stats: dict[str, float]

    def verdicts(self) -> Counter[str]:
        """Count the samples by verdict."""
        return Counter(result.verdict.value for result in self.results.values())


@dataclass
class Workers:
    """The processes of a run's rollouts.

    Attributes:
        pool: processes that verify while the model samples; None: environments judge.
        conversations: makes the queue of a rollout's conversations of its requests and settings, with the rows of its
            prompts and the records of their turns; None: an answer ends with its verdict.
        ranks: all processes of the run; each takes the next prompt as soon as it has room for one.
        interrupt: the user's signals to stop, checked after each sample.
        max_error_share: share of a rollout's samples with the verdict ERROR above which the run stops.
        logs_long_rollouts_only: whether short ones log no progress.
        halted: whether sampling must end early; what is sampled stays in the records.
    """

    pool: Pool | None
    ranks: Ranks
    interrupt: Interrupt
    max_error_share: float
    logs_long_rollouts_only: bool = False
    conversations: Callable[[RequestQueue, Sampling, Mapping[str, Any], PhaseRecords], ConversationQueue] | None = None
    halted: bool = False


class Rollout:
    """Answers that are sampled when :meth:`finish` is called, and verified meanwhile.

    All ranks call :meth:`begin` and :meth:`finish` together.

    Args:
        job: what to sample and verify.
        workers: the processes.
        open_session: opens a session of the engine; every rank does if one has something to sample, because gathering
            sharded weights may need every rank.
    """

    def __init__(self, job: Job, workers: Workers, open_session: OpenSession) -> None:
        self.job, self.workers, self._open_session = job, workers, open_session
        self._rows = {prompt.id: prompt.row for prompt in job.prompts}
        self._clock = _Clock(job.samples, job.verdicts)
        self._judge = _Judge(job, workers, self._clock)
        ranks, sampled = workers.ranks, job.samples.records  # which are those of an earlier process, on every rank
        # prompts with answers go to the ranks in turn: all answers of a group are judged by one rank
        begun = dict.fromkeys(prompt_id for prompt_id, _ in sampled)
        self._owners = {prompt_id: number % ranks.world for number, prompt_id in enumerate(begun)}
        self._missing = [(r, s) for r, s in job.requests if r.key not in sampled]
        self._queues = [
            (self._queue([r for r, s in self._missing if s == sampling], sampling), sampling)
            for sampling in dict.fromkeys(sampling for _, sampling in self._missing)
        ]
        self._count = ranks.counter()  # of the answers that all ranks sample
        self._stats: dict[str, float] = {}
        self._sampled: float | None = None

    def _queue(self, requests: Sequence[Request], sampling: Sampling) -> RequestQueue:
        queue, talk = RequestQueue(requests, self.workers.ranks, self._owners), self.workers.conversations
        return talk(queue, sampling, self._rows, self.job.turns) if talk else queue

    @classmethod
    def begin(cls, job: Job, workers: Workers, open_session: OpenSession) -> "Rollout":
        """Prepare the records of ``job``, submit the samples that have no verdict yet, and return the rollout.

        Raises:
            Interrupted: the user asked to stop.
            UserError: a record cannot be written.
        """
        # a resumed run may ask for fewer answers
        keys = {request.key for request, _ in job.requests}
        if workers.pool is None:  # a conversation whose verdict is missing begins again
            job.samples.drop(lambda record: key_of(record) not in job.verdicts.records)
        elif workers.pool.groups:  # judged in part, or with other answers than this process asks for
            groups, judged = _by_group(keys), _by_group(job.verdicts.records)
            complete = {group for group in groups if judged.get(group) == groups[group]}
            job.verdicts.drop(lambda record: _group(key_of(record)) not in complete)
        for records in (job.samples, job.verdicts):
            records.drop(lambda record: key_of(record) not in keys)
        rollout = cls(job, workers, open_session)
        for key, record in job.samples.records.items():
            if key not in job.verdicts.records and rollout._owners[key[0]] == workers.ranks.rank:
                rollout._judge.submit(key, record["text"], rollout._rows[key[0]])
        rollout._start(bool(rollout._missing))
        return rollout

    def _start(self, needed: bool) -> None:
        """Take note of whether a rank has something to sample."""
        self._needed, workers = needed, self.workers
        if signum := workers.interrupt.agree(workers.ranks):  # a signal may arrive after the last rollout's check
            raise Interrupted(f"in {self.job.name}", signum)

    def finish(self) -> Answers:
        """Sample, wait for the verdicts, and collect the records of all ranks.

        Raises:
            UserError: too many verdicts are ERROR, an answer lacks what the settings need, or the disk is full.
            Interrupted: the user asked to stop.
        """
        with self.workers.interrupt:
            if self._needed:
                with self._open_session() as session:
                    self._sample(session)
            answers = self._collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees the key-value cache's memory for training
        return answers

    def _sample(self, session: Session) -> None:
        """Sample requests that have no record yet, and submit the samples. This uses no collective operation."""
        self._begin_sampling()
        try:
            for queue, sampling in self._queues:
                for completion in session.generate(queue, sampling):
                    if isinstance(queue, ConversationQueue):
                        self._need_logprobs(completion)
                        queue.add(completion)
                        self._take_ended(queue, session)
                    else:
                        self._take(Sample.of(completion), session.stats())
                    if self.workers.interrupt.signum is not None:
                        return
                if isinstance(queue, ConversationQueue):
                    self._take_ended(queue, session)
        finally:
            self._progress.close()
            self._sampled = self._clock()

    def _begin_sampling(self) -> None:
        """Show the progress. That of the main rank counts all answers, and expects equal shares of the rest."""
        clock, stats, world = self._clock, self._stats, self.workers.ranks.world
        lengths = [len(record["tokens"]) for record in self.job.samples.records.values()]
        pace = Pace(len(self._missing) / world, lengths, max((s.max_new_tokens for _, s in self._missing), default=0))
        self._pace, self._recorded = pace, len(lengths)
        self._progress = Progress(
            len(self.job.requests),
            len(lengths),
            self.workers.ranks.is_main,
            self.job.name,
            lambda: pace.seconds_left(int(stats["tokens"]), clock() - clock.earlier),
            self.workers.logs_long_rollouts_only,
        )

    def _take_ended(self, queue: ConversationQueue, session: Session) -> None:
        for sample, result in queue.ended():
            self._take(sample, session.stats(), result)

    def _take(self, sample: Sample, stats: Mapping[str, float], result: Result | None = None, **more: Any) -> None:
        """Record an answer, with what ``more`` is known of it, and its ``result``, or submit it.

        Raises:
            UserError: it has no log-probs; it is not recorded, so that a resumed run asks for it again.
        """
        self._need_logprobs(sample)
        self.job.samples.append({**sample.record(), **more, "seconds": self._clock()})
        if result is None:
            self._judge.submit(sample.key, sample.text, self._rows[sample.prompt_id])
        else:
            self._judge.record(sample.key, result)
        self._judge.record_finished()
        self._stats |= stats
        finished = self._recorded + self._count() - self._progress.done
        self._pace.finish(len(sample.tokens), finished / self.workers.ranks.world)
        self._progress.update(_describe(self._stats, self._judge.counts), finished)

    def _need_logprobs(self, sample: Sample | Completion) -> None:
        if self.job.logprobs_for and len(sample.logprobs) != len(sample.tokens):
            prompt_id, number = sample.key if isinstance(sample, Sample) else sample.request.key
            raise UserError(
                f"the answer to prompt {prompt_id}, sample {number}, has no token ids and log-probs of "
                f"sampling, which {' and '.join(self.job.logprobs_for)} needs. The answers before it are saved; once "
                "the server returns them, continue with resume_from_checkpoint=True"
            )

    def _collect(self) -> Answers:
        job, ranks = self.job, self.workers.ranks
        sampled = self._clock() if self._sampled is None else self._sampled
        self._judge.finish()
        if signum := self.workers.interrupt.agree(ranks):
            raise Interrupted(f"in {job.name}", signum)
        job.samples.collect()
        job.verdicts.collect()
        errors = [record for record in job.verdicts.records.values() if record["verdict"] == Verdict.ERROR.value]
        total, most = job.earlier + len(job.requests), self.workers.max_error_share
        if len(errors) > most * total:
            judge = "verifier" if self.workers.pool else "environment"
            # a resumed run judges samples without a verdict again
            job.verdicts.drop(lambda record: record["verdict"] == Verdict.ERROR.value)
            raise UserError(
                f"the {judge} failed on {len(errors)} of {total} answers, a larger share than max_error_share "
                f"{most:g}; the first error: {errors[0]['detail']}. The samples are saved: fix the {judge} and "
                "continue with resume_from_checkpoint=True"
            )
        job.turns.file.discard()
        samples, verdicts = job.samples.records, job.verdicts.records
        tokens, seconds = sum(len(record["tokens"]) for record in samples.values()), self._clock()
        return Answers(
            {key: to_sample(record) for key, record in samples.items()},
            {key: to_result(record) for key, record in verdicts.items()},
            {"tokens_per_second": tokens / max(sampled, 1e-9)}  # of the engine, if this process sampled
            | self._stats
            | {"tokens": tokens, "seconds": seconds, "waiting": seconds - sampled}
            | {"policy": sum(record.get("policy", 0) for record in samples.values())},
        )


class _Clock:
    """Seconds of work on a rollout, by all processes; the records of earlier processes say how far they came.

    Attributes:
        earlier: seconds of the processes that were stopped.
    """

    def __init__(self, *files: PhaseRecords) -> None:
        records = (record for file in files for record in file.records.values())
        self.earlier = max((record.get("seconds", 0.0) for record in records), default=0.0)
        self._began = time.perf_counter()
        self._paused: float | None = None

    def __call__(self) -> float:
        return round(self.earlier + self.now - self._began, 3)

    @property
    def now(self) -> float:
        """When this process counted its last second."""
        return time.perf_counter() if self._paused is None else self._paused

    def begin(self, at: float) -> None:
        """Count this process's seconds from ``at`` on, if it is later than before."""
        self._began = max(self._began, min(at, self.now))

    def pause(self) -> None:
        """Stop the clock, because the run does other work meanwhile."""
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Let the paused clock run again."""
        if self._paused is not None:
            self._began += time.perf_counter() - self._paused
            self._paused = None


def _group(key: SampleKey) -> Group:
    """Return the group of an answer. A greedy answer is alone, so its verdict does not depend on the drawn ones."""
    return key[0], key[1] == GREEDY


def _by_group(keys: Iterable[SampleKey]) -> dict[Group, set[SampleKey]]:
    groups: dict[Group, set[SampleKey]] = {}
    for key in keys:
        groups.setdefault(_group(key), set()).add(key)
    return groups


class _Judge:
    """Submits samples to the pool and records the verdicts.

    A verifier of groups gets a group once all its samples are there, in the order of their indices.
    """

    def __init__(self, job: Job, workers: Workers, clock: _Clock) -> None:
        self._pool, self._interrupt, self._clock = workers.pool, workers.interrupt, clock
        self._records = job.verdicts
        self._groups = _by_group(request.key for request, _ in job.requests)
        self._texts: dict[Group, dict[SampleKey, str]] = {}  # samples of incomplete groups
        self._pending: dict[Future, list[SampleKey]] = {}
        self._done: SimpleQueue[Future] = SimpleQueue()
        self.counts = Counter(record["verdict"] for record in self._records.records.values())

    def submit(self, key: SampleKey, text: str, row: Mapping[str, Any]) -> None:
        """Have an answer judged, by the fields of its prompt's row."""
        assert self._pool is not None, "an environment judges its conversations itself"
        if self._pool.groups:
            group = _group(key)
            texts = self._texts.setdefault(group, {})
            texts[key] = text
            if len(texts) == len(self._groups[group]):
                del self._texts[group]
                keys = sorted(texts)
                self._wait_for(self._pool.submit_group([texts[key] for key in keys], row), keys)
        else:
            self._wait_for(self._pool.submit(text, row), [key])

    def _wait_for(self, future: Future, keys: list[SampleKey]) -> None:
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
            beat()
            keys, result = self._pending.pop(future), future.result()
            results: Sequence[Result] = result if isinstance(result, list) else [result]
            for key, result in zip(keys, results, strict=True):
                self.record(key, result)

    def record(self, key: SampleKey, result: Result) -> None:
        """Record a verdict."""
        self._records.append(
            {
                "prompt_id": key[0],
                "sample": key[1],
                "verdict": result.verdict.value,
                "reward": result.reward,
                "detail": result.detail,
                **({"parts": result.parts} if result.parts else {}),
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
            beat()  # each verification has a time limit


class Pace:
    """Estimates the rest of a phase from tokens.

    Short answers finish first, and the first ones finish late: many begin at the same time. So both the finished
    answers per second and their mean length are too low at first. The mean length is therefore estimated as all sampled
    tokens, those of unfinished answers too, per finished answer: the maximum-likelihood mean of geometric lengths of
    which some are still unknown (censored).

    Args:
        answers: answers to sample, those of all ranks divided by their number.
        recorded: lengths of answers of the same phase that earlier processes sampled, in tokens.
        longest: the most tokens that an answer can have.
    """

    def __init__(self, answers: float, recorded: Iterable[int], longest: int) -> None:
        self._left, self._longest = answers, longest
        lengths = list(recorded)
        self._earlier, self._finished, self._answers = sum(lengths), 0, len(lengths)

    def finish(self, tokens: int, answers: float = 1.0) -> None:
        """Count a finished answer of this many tokens, and as many less to sample as ``answers``."""
        self._left -= answers
        self._answers += 1
        self._finished += tokens

    def seconds_left(self, sampled: int, seconds: float) -> float | None:
        """Estimate the seconds that the unfinished answers take.

        Args:
            sampled: tokens that this process has sampled, those of unfinished answers too.
            seconds: how long it took.

        Returns:
            The estimate; None while more than half of the known tokens belong to unfinished answers.
        """
        open_ = max(0, sampled - self._finished)
        known = self._earlier + self._finished
        if not sampled or not self._answers or open_ > known:
            return None
        mean = min((known + open_) / self._answers, self._longest)
        return max(0.0, self._left * mean - open_) * seconds / sampled


def _describe(stats: Mapping[str, float], counts: Counter[str]) -> str:
    judged = sum(counts.values())
    parts = [f"{stats['tokens_per_second']:,.0f} tok/s"]
    if "occupancy" in stats:
        parts.append(f"slots {stats['occupancy']:.0%} full")
    if "gb_per_second" in stats:
        parts.append(f"{stats['gb_per_second']:,.1f} GB/s")
    if judged:
        parts.append(f"{judged} judged so far, {counts[Verdict.CORRECT.value] / judged:.0%} of them right")
    return "  ".join(parts)
