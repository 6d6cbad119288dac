"""Rollouts of coming steps: servers sample them while the ranks train and evaluate."""

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from rocm_ext.base.errors import one_line, refuse
from rocm_ext.rl.records import Sample
from rocm_ext.rl.rollout import Answers, Job, OpenSession, Rollout, Workers
from rocm_ext.sampling import Completion, Request

_POLL = 0.2  # seconds between looks at whether the thread still samples


class RolloutAhead(Rollout):
    """Answers for a coming step, which :class:`Ahead` samples."""

    def _start(self) -> None:
        self.sampled = threading.Event()  # this rank has no more to sample
        self._open = 1  # requests without an answer, and 1 until all are taken
        self._lock = threading.Lock()
        self._tokens = 0
        # when sampling began and ended on this rank
        self._began = self.ended = time.perf_counter()

    def requests(self) -> Iterator[Request | None]:
        """Take the requests without an answer."""
        self._began = time.perf_counter()
        self._begin_sampling()
        for queue, _ in self._queues:
            for request in queue:
                self._count_open(1)
                yield request
        self._count_open(-1)

    def take(self, completion: Completion, policy: int) -> None:
        """Record an answer of the adapter of step ``policy``."""
        self._tokens += len(completion.tokens)
        seconds = max(time.perf_counter() - self._began, 1e-9)
        stats = {"tokens": self._tokens, "tokens_per_second": self._tokens / seconds}
        self._take(Sample.of(completion), stats, policy=policy)
        self._count_open(-1)

    def _count_open(self, more: int) -> None:
        with self._lock:  # one thread takes requests, and another records answers
            self._open += more
            if not self._open:
                self._progress.close()
                self.ended = time.perf_counter()
                self.sampled.set()

    def finish(self, waited: float = 0.0, free: float = 0.0) -> Answers:
        """Wait for the verdicts, after ``waited`` seconds for the samples; see :meth:`Rollout.finish`.

        This step's seconds count from ``free`` on, the time when the steps before had their samples.
        """
        seconds = self.ended - max(self._began, min(free, self.ended))
        return self._collect(seconds, hidden=max(0.0, seconds - waited))


class _Adapter(NamedTuple):
    """The adapter of a step, which servers keep while requests may use it."""

    step: int
    session: Any
    stack: ExitStack  # closes the session


class Ahead:
    """A thread that samples coming steps on servers while the ranks train and evaluate.

    It takes steps in order, and a request begins with the newest adapter in use. If step k + 1 + n is added while the
    adapter of step k is in use, its answers are at most n steps old.

    The thread uses no collective operation. All ranks call every method but :meth:`abandon` together.

    Args:
        step: steps done.
        keep: steps for which the servers keep an older adapter, because requests still use it.

    Attributes:
        last: the last step that was added.
    """

    def __init__(self, workers: Workers, step: int, keep: int) -> None:
        self._workers = workers
        self.last = step
        self._keep = keep
        self._steps: deque[RolloutAhead] = deque()  # not finished, oldest first
        self._added: SimpleQueue[RolloutAhead] = SimpleQueue()
        self._adapters: deque[_Adapter] = deque()  # oldest first
        # rollout and adapter's step, by the request's id
        self._asked: dict[int, tuple[RolloutAhead, int]] = {}
        self._free = 0.0  # when the finished steps had their answers
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    def use(self, policy: int, open_session: OpenSession) -> None:
        """Let new requests begin with the adapter of ``policy``, the last finished step."""
        oldest = policy - self._keep
        while self._adapters and self._adapters[0].step < oldest:
            self._adapters.popleft().stack.close()
        stack = ExitStack()
        session = stack.enter_context(open_session())
        self._adapters.append(_Adapter(policy, session, stack))

    def add(self, rollout: RolloutAhead) -> None:
        """Add the step after the last one."""
        self.last += 1
        self._steps.append(rollout)
        self._added.put(rollout)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()

    def finish(self) -> tuple[Job, Answers]:
        """Wait for samples and verdicts of the oldest step; see :meth:`Rollout.finish`."""
        assert self._thread is not None, "finish() comes after add()"
        rollout = self._steps[0]
        began = time.perf_counter()
        while not rollout.sampled.wait(_POLL) and self._thread.is_alive():
            pass
        waited = time.perf_counter() - began
        free = self._free
        self._free = max(free, rollout.ended)
        failure = one_line(self._failed) if self._failed else ""
        failures = self._workers.ranks.gather(failure)
        if self._failed:
            raise self._failed
        refuse(f"rank {rank}: {why}" for rank, why in enumerate(failures) if why)
        self._steps.popleft()
        return rollout.job, rollout.finish(waited, free)

    def stop(self) -> None:
        """Stop sampling; samples stay in the records."""
        self._halt()
        while self._adapters:
            self._adapters.pop().stack.close()

    def abandon(self) -> None:
        """Stop sampling without the other ranks, because this one failed."""
        self._halt()
        while self._adapters:
            with suppress(_Failed), self._adapters.pop().stack:
                raise _Failed

    def _halt(self) -> None:
        self._workers.halted = True
        if self._thread is not None:
            self._thread.join()
        self._workers.halted = False

    # ---- the thread

    def _run(self) -> None:
        pending = self._pending()
        _, sampling = self._steps[0].job.requests[0]
        try:
            while not self._stopped:
                session = self._adapters[-1].session
                requests = self._requests(pending, session)
                for completion in session.generate(requests, sampling):
                    rollout, policy = self._asked.pop(id(completion.request))
                    rollout.take(completion, policy)
        except BaseException as error:  # `finish` raises it
            self._failed = error

    @property
    def _stopped(self) -> bool:
        return self._workers.interrupt.signum is not None or self._workers.halted

    def _requests(
        self, pending: Iterator[tuple[Any, Request | None]], session: Any
    ) -> Iterator[Request | None]:
        """Yield requests with the newest adapter, and None while there are none.

        This ends once there is a newer session, if ``session`` has given up a server or uses one that has refused the
        newest adapter.
        """
        while not self._stopped:
            newest = self._adapters[-1].session
            if newest is not session and (session.given_up or session.servers != newest.servers):
                return
            rollout, request = next(pending)
            if request is not None:
                adapter = self._adapters[-1]
                request = replace(request, adapter=adapter.session.adapter)
                self._asked[id(request)] = rollout, adapter.step
            yield request

    def _pending(self) -> Iterator[tuple[Any, Request | None]]:
        """Yield the added steps' requests with their rollouts; None while there are none."""
        while True:
            if self._added.empty():
                yield None, None
            else:
                rollout = self._added.get()
                for request in rollout.requests():
                    yield rollout, request


class _Failed(BaseException):
    """This rank has failed, perhaps alone."""
