"""Sample and verify at the same time, and record samples and verdicts as soon as they exist.

A killed rollout continues with the requests without a sample and the samples without a verdict.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import torch

from rocm_ext.base.errors import UserError
from rocm_ext.base.heartbeat import beat
from rocm_ext.base.log import Progress
from rocm_ext.base.types import Json, Row
from rocm_ext.data.prompts import Prompt
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.conversations import ConversationQueue
from rocm_ext.rl.records import PhaseRecords, Sample, key_of, to_result, to_sample
from rocm_ext.runs.records import GREEDY, SampleKey
from rocm_ext.sampling import Completion, Request, RequestQueue, Sampling, Session
from rocm_ext.train.lifecycle import Interrupt
from rocm_ext.verifiers import Pool, Result, Verdict

Requests = Sequence[tuple[Request, Sampling]]
OpenSession = Callable[[], AbstractContextManager[Session]]
Group = tuple[str, bool]  # prompt id, is greedy


@dataclass(frozen=True)
class Job:
    """What to sample and verify.

    Attributes:
        name: where the run is, for messages, such as ``cycle 3``.
        requests: requests with their sampling settings, the same on every rank.
        prompts: the requests' prompts.
        samples, verdicts, turns: records of the phase.
        logprobs_for: settings that need the answers' token ids and log-probs; may be empty.
        earlier: answers of earlier rounds of the step, which count in the denominator of ``max_error_share``.
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
        stats: the engine's statistics on this rank, and of the rollout:
            ``tokens`` of the samples;
            ``seconds`` of this process;
            ``waiting``: seconds of these for verdicts after the last sample;
            ``hidden``: seconds of sampling that passed while the ranks trained;
            ``policy``: sum over samples of the step of the sampling adapter; 0 for records without it.
    """

    samples: dict[SampleKey, Sample]
    results: dict[SampleKey, Result]
    stats: dict[str, float]

    def of(self, prompts: Sequence[Prompt]) -> "Answers":
        """Return the answers to ``prompts``; the statistics stay the rollout's."""
        ids = {prompt.id for prompt in prompts}
        samples = {key: sample for key, sample in self.samples.items() if key[0] in ids}
        results = {key: result for key, result in self.results.items() if key[0] in ids}
        return Answers(samples, results, self.stats)

    def verdicts(self) -> Counter[str]:
        """Count the samples by verdict."""
        return Counter(result.verdict.value for result in self.results.values())


@dataclass
class Workers:
    """The processes of a run's rollouts.

    Attributes:
        ranks: all processes of the run; one with room takes the next prompt.
        interrupt: the user's signals to stop, checked after a sample.
        max_error_share: share of a rollout's samples with the verdict ERROR above which the run stops.
        logs_long_rollouts_only: whether short ones log no progress.
        pools: processes that verify while the model samples, by set of prompts: the key is empty for the run's
            verifier, which judges all prompts whose set has none of its own. Without it environments judge, or nothing.
        conversations: makes a queue of conversations from requests, settings, rows of the prompts and records of turns.
            None if an answer ends with its verdict.
        halted: whether sampling must end early; samples stay in the records.
    """

    ranks: Ranks
    interrupt: Interrupt
    max_error_share: float
    logs_long_rollouts_only: bool = False
    pools: dict[str, Pool] = field(default_factory=dict)
    conversations: (
        Callable[[RequestQueue, Sampling, Mapping[str, Row], PhaseRecords], ConversationQueue]
        | None
    ) = None
    halted: bool = False

    def pool(self, prompt: Prompt) -> Pool | None:
        """Return the processes that verify answers to ``prompt``."""
        return self.pools.get(prompt.set, self.pools.get(""))


class Rollout:
    """Answers that :meth:`finish` samples, verified meanwhile; all ranks call its methods together.

    The constructor prepares the records, and submits samples without a verdict.

    Args:
        job: what to sample and verify.
        workers: the processes that verify.
        open_session: opens a session of the engine. If any rank samples, all ranks call it to gather sharded weights.
    """

    def __init__(self, job: Job, workers: Workers, open_session: OpenSession) -> None:
        self.job = job
        self.workers = workers
        self._open_session = open_session
        self._drop_records()
        self._rows = {prompt.id: prompt.row for prompt in job.prompts}
        self._judge = _Judge(job, workers)
        ranks = workers.ranks
        # an earlier process wrote them; they are the same on every rank
        sampled = job.samples.records
        # prompts with answers go to the ranks in turn: all answers of a group are judged by one rank
        begun = dict.fromkeys(prompt_id for prompt_id, _ in sampled)
        self._owners = {prompt_id: number % ranks.world for number, prompt_id in enumerate(begun)}
        missing: dict[Sampling, list[Request]] = defaultdict(list)
        for request, sampling in job.requests:
            if request.key not in sampled:
                missing[sampling].append(request)
        self._queues: list[tuple[RequestQueue, Sampling]] = []
        for sampling, requests in missing.items():
            queue = RequestQueue(requests, ranks, self._owners)
            if workers.conversations:
                queue = workers.conversations(queue, sampling, self._rows, job.turns)
            self._queues.append((queue, sampling))
        self._count = ranks.counter()  # counts the answers that all ranks sample
        self._stats: dict[str, float] = {}
        if workers.pools:
            for key, record in sampled.items():
                mine = self._owners[key[0]] == ranks.rank
                if mine and key not in job.verdicts.records:
                    self._judge.submit(key, record["text"])
        self._start()

    def _drop_records(self) -> None:
        """Drop the records of an earlier process that this one cannot use."""
        job = self.job
        keys = {request.key for request, _ in job.requests}
        if self.workers.conversations:
            # a conversation whose verdict is missing begins again
            job.samples.drop(lambda record: key_of(record) not in job.verdicts.records)
        else:
            # a group is judged again if it was judged in part, or with other answers than this process asks for
            judged = _by_group(job.verdicts.records)
            asked = _by_group(keys)
            incomplete: set[Group] = set()
            for prompt in job.prompts:
                pool = self.workers.pool(prompt)
                if pool is not None and pool.groups:
                    groups = [(prompt.id, False), (prompt.id, True)]
                    incomplete.update(group for group in groups if judged[group] != asked[group])
            job.verdicts.drop(lambda record: _group(key_of(record)) in incomplete)
        for records in (job.samples, job.verdicts):
            # a resumed run may ask for fewer answers
            records.drop(lambda record: key_of(record) not in keys)

    def _start(self) -> None:
        """Stop if the user asked for it; a signal may arrive after the last check."""
        self.workers.interrupt.check(f"in {self.job.name}", self.workers.ranks)

    def finish(self) -> Answers:
        """Sample, wait for the verdicts, and collect the records of all ranks.

        Raises:
            UserError: too many verdicts are ERROR, or an answer lacks log-probs.
            Interrupted: the user asked to stop.
        """
        began = time.perf_counter()
        with self.workers.interrupt:
            if self._queues:  # the same on all ranks
                with self._open_session() as session:
                    self._sample(session)
            answers = self._collect(time.perf_counter() - began)
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

    def _begin_sampling(self) -> None:
        """Show the progress; the main rank counts all answers."""
        job = self.job
        self._recorded = len(job.samples.records)
        self._progress = Progress(
            len(job.requests),
            self._recorded,
            self.workers.ranks.is_main,
            job.name,
            self.workers.logs_long_rollouts_only,
        )

    def _take_ended(self, queue: ConversationQueue, session: Session) -> None:
        for sample, result in queue.ended():
            self._take(sample, session.stats(), result)

    def _take(
        self, sample: Sample, stats: Mapping[str, float], result: Result | None = None, **more: Any
    ) -> None:
        """Record an answer with ``more`` fields, and record its ``result`` or submit it to the verifier.

        Raises:
            UserError: it lacks log-probs; it stays out of the records, so that a resumed run asks for it again.
        """
        self._need_logprobs(sample)
        self.job.samples.append({**sample.record(), **more})
        if result is not None:
            self._judge.record(sample.key, result)
        elif self.workers.pools:
            self._judge.submit(sample.key, sample.text)
        self._judge.record_finished()
        self._stats |= stats
        finished = self._recorded + self._count() - self._progress.done
        self._progress.update(_describe(self._stats, self._judge.counts), finished)

    def _need_logprobs(self, sample: Sample | Completion) -> None:
        if self.job.logprobs_for and len(sample.logprobs) != len(sample.tokens):
            request = sample if isinstance(sample, Sample) else sample.request
            prompt_id, number = request.key
            raise UserError(
                f"the answer to prompt {prompt_id}, sample {number}, has no token ids and log-probs of "
                f"sampling, which {' and '.join(self.job.logprobs_for)} needs. The answers before it are saved; once "
                "the server returns them, continue with resume_from_checkpoint=True"
            )

    def _collect(self, sampled: float, hidden: float = 0.0) -> Answers:
        """Wait for the verdicts, and collect the answers of all ranks; ``sampled`` and ``hidden`` are seconds."""
        job = self.job
        began = time.perf_counter()
        self._judge.finish()
        self.workers.interrupt.check(f"in {job.name}", self.workers.ranks)
        job.samples.collect()
        job.verdicts.collect()

        def failed(record: Json) -> bool:
            return record["verdict"] == Verdict.ERROR.value

        errors = list(filter(failed, job.verdicts.records.values()))
        total = job.earlier + len(job.requests)
        most = self.workers.max_error_share
        if len(errors) > most * total:
            judge = "verifier" if self.workers.pools else "environment"
            job.verdicts.drop(failed)  # a resumed run judges samples without a verdict again
            raise UserError(
                f"the {judge} failed on {len(errors)} of {total} answers, a larger share than max_error_share "
                f"{most:g}; the first error: {errors[0]['detail']}. The samples are saved: fix the {judge} and "
                "continue with resume_from_checkpoint=True"
            )
        job.turns.file.discard()
        samples = {key: to_sample(record) for key, record in job.samples.records.items()}
        results = {key: to_result(record) for key, record in job.verdicts.records.items()}
        policies = [record.get("policy", 0) for record in job.samples.records.values()]
        waiting = time.perf_counter() - began
        stats = {
            **self._stats,
            "tokens": sum(len(sample.tokens) for sample in samples.values()),
            "seconds": sampled + waiting,
            "waiting": waiting,
            "hidden": hidden,
            "policy": sum(policies),
        }
        return Answers(samples, results, stats)


def _group(key: SampleKey) -> Group:
    """Return the group of an answer. A greedy answer is alone, so its verdict does not depend on the drawn ones."""
    return key[0], key[1] == GREEDY


def _by_group(keys: Iterable[SampleKey]) -> dict[Group, set[SampleKey]]:
    groups: dict[Group, set[SampleKey]] = defaultdict(set)
    for key in keys:
        groups[_group(key)].add(key)
    return groups


class _Judge:
    """Submits samples to the pools and records the verdicts.

    A verifier of groups gets a group once all its samples are there, in the order of their indices.
    """

    def __init__(self, job: Job, workers: Workers) -> None:
        self._workers = workers
        self._prompts = {prompt.id: prompt for prompt in job.prompts}
        self._interrupt = workers.interrupt
        self._records = job.verdicts
        self._groups = _by_group(request.key for request, _ in job.requests)
        # samples of incomplete groups
        self._texts: dict[Group, dict[SampleKey, str]] = defaultdict(dict)
        self._pending: dict[Future, list[SampleKey]] = {}
        self._done: SimpleQueue[Future] = SimpleQueue()
        self.counts = Counter(record["verdict"] for record in self._records.records.values())

    def submit(self, key: SampleKey, text: str) -> None:
        """Submit an answer."""
        prompt = self._prompts[key[0]]
        pool = self._workers.pool(prompt)
        if pool is None:
            return  # of distillation without a verifier
        future: Future
        if not pool.groups:
            keys = [key]
            future = pool.submit(text, prompt.row)
        else:
            group = _group(key)
            texts = self._texts[group]
            texts[key] = text
            if len(texts) < len(self._groups[group]):
                return
            keys = sorted(self._texts.pop(group))
            future = pool.submit_group([texts[key] for key in keys], prompt.row)
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
            keys = self._pending.pop(future)
            result = future.result()
            results: Sequence[Result] = result if isinstance(result, list) else [result]
            for key, result in zip(keys, results, strict=True):
                self.record(key, result)

    def record(self, key: SampleKey, result: Result) -> None:
        """Record a verdict."""
        record = {
            "prompt_id": key[0],
            "sample": key[1],
            "verdict": result.verdict.value,
            "reward": result.reward,
            "detail": result.detail,
        }
        if result.parts:
            record["parts"] = result.parts
        self._records.append(record)
        self.counts[result.verdict.value] += 1

    def finish(self) -> None:
        """Wait for the remaining verdicts; return early if the user asks to stop."""
        while self._pending:
            if self._interrupt.signum is not None:
                return  # the resumed run judges the rest
            self.record_finished(timeout=1.0)
            beat()  # a verification has a time limit


def _describe(stats: Mapping[str, float], counts: Counter[str]) -> str:
    judged = sum(counts.values())
    parts = [f"{stats['tokens_per_second']:,.0f} tok/s"]
    if "occupancy" in stats:
        parts.append(f"slots {stats['occupancy']:.0%} full")
    if "gb_per_second" in stats:
        parts.append(f"memory read at {stats['gb_per_second']:,.1f} GB/s")
    if judged:
        parts.append(f"{counts[Verdict.CORRECT.value]:,} of {judged:,} judged answers right")
    return "  ".join(parts)
