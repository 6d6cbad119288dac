"""The order of requests. HTTP adds them from its thread; :meth:`Work.run`, in the thread of the model, does them.

The calls of a client's model are done by their number, ``seq_id``, which is the client's order whatever arrives first.
A call that comes again, because a client repeats it, gets the answer of the first. Calls that sample with the same
settings from the same sampler are done together.
"""

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log

Answer = bytes | dict[str, Any]  # protobuf, or JSON
MOST_WAITING = 20_000  # calls
MOST_BYTES = 2**28  # of their bodies
_KEPT = 4096  # finished calls whose answers are kept for clients that ask again
_TOGETHER = 0.005  # seconds that the first of several samples waits for the others
_LOOK = 0.2  # seconds between looks whether the user asked to stop


class Failed(Exception):
    """An answer that is an error.

    Attributes:
        category: whose mistake it is: ``user`` or ``server``.
    """

    def __init__(self, message: str, category: str) -> None:
        super().__init__(message)
        self.category = category


class Later(Exception):
    """A call cannot be done yet: it is tried again."""


@dataclass
class Call:
    """A call that waits.

    Attributes:
        name: id of the request.
        size: bytes of its body.
        answer: gets the answer, or :class:`Failed`.
        alone: does the call, or raises :class:`Later`. None for samples.
        sample: what a sampling call asks, for :attr:`Work.together`.
    """

    name: str
    size: int
    answer: Future[Answer]
    alone: Callable[[], Answer] | None = None
    sample: Any = None


@dataclass
class _Lane:
    """The calls of a client's model, by number; or samples of one kind, in any order."""

    name: Any
    ordered: bool
    next: int = 0
    waiting: dict[int, Call] = field(default_factory=dict)
    served: float = 0.0  # when the last call was done
    since: float = 0.0  # when the first of these samples came
    again: float = 0.0  # when a call is tried again that could not be done

    def ready(self, now: float) -> bool:
        if self.ordered:
            return self.next in self.waiting and now >= self.again
        return bool(self.waiting) and now >= self.since + _TOGETHER


class Full(Exception):
    """Too many calls wait."""


class Work:
    """All calls of a server.

    Args:
        together: does sampling calls of one kind, given what they ask; returns their answers in order, or a
            :class:`Failed` for a call that failed alone.
    """

    def __init__(self, together: Callable[[Sequence[Any]], Iterable[Answer | Failed]]) -> None:
        self._together = together
        self._changed = Condition()
        self._lanes: dict[Any, _Lane] = {}
        self._calls: OrderedDict[str, Call] = OrderedDict()  # waiting and finished ones
        self._bytes = 0
        self._waiting = 0

    def add(
        self,
        lane: Any,
        number: int | None,
        name: str,
        size: int,
        *,
        alone: Callable[[], Answer] | None = None,
        sample: Any = None,
    ) -> None:
        """Add a call.

        Args:
            lane: the model, or the kind of sample.
            number: place in the order of the model's calls; None for a sample.
            name, size, alone, sample: see :class:`Call`.

        Raises:
            Full: too many wait; the client tries again.
            UserError: the model has done a later call already.
        """
        with self._changed:
            if name in self._calls:
                return
            if self._waiting >= MOST_WAITING or self._bytes + size > MOST_BYTES:
                raise Full
            queue = self._lanes.setdefault(lane, _Lane(lane, ordered=number is not None))
            if number is None:
                number = queue.next
                queue.next += 1
                if not queue.waiting:
                    queue.since = time.monotonic()
            elif number < queue.next:
                raise UserError(
                    f"call {number} of {lane} is done, and its answer is no longer kept"
                )
            call = Call(name, size, Future(), alone, sample)
            self._calls[name] = queue.waiting[number] = call
            self._waiting += 1
            self._bytes += size
            self._forget_old()
            self._changed.notify()

    def find(self, name: str) -> Future[Answer] | None:
        """Return the answer to come of a call; None if there is none of this name."""
        with self._changed:
            call = self._calls.get(name)
        return None if call is None else call.answer

    def drop(self, lane: Any) -> None:
        """Forget a model that is gone, and fail what waits for it."""
        with self._changed:
            gone = self._lanes.pop(lane, None)
            calls = [] if gone is None else list(gone.waiting.values())
            self._take(calls)
        for call in calls:
            call.answer.set_exception(Failed(f"model {lane} has ended", "user"))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Do calls until the user asks to stop; then fail those that wait."""
        while not stopped():
            with self._changed:
                lane = self._next()
                if lane is None:
                    wait = _TOGETHER if any(self._samples()) else _LOOK
                    self._changed.wait(wait)
                    continue
                calls = self._pop(lane)
            try:
                self._do(calls)
            except Later:
                self._put_back(lane, calls)
            lane.served = time.monotonic()
        with self._changed:
            left = [call for lane in self._lanes.values() for call in lane.waiting.values()]
        for call in left:
            call.answer.set_exception(Failed("the server was stopped", "server"))

    def _samples(self) -> Iterable[bool]:
        return (bool(lane.waiting) for lane in self._lanes.values() if not lane.ordered)

    def _next(self) -> _Lane | None:
        """Return the lane with something to do that has waited longest."""
        now = time.monotonic()
        ready = [lane for lane in self._lanes.values() if lane.ready(now)]
        return min(ready, key=lambda lane: lane.served, default=None)

    def _pop(self, lane: _Lane) -> list[Call]:
        """Take what is done next in a lane: one call, or all its samples."""
        if lane.ordered:
            calls = [lane.waiting.pop(lane.next)]
            lane.next += 1
        else:
            calls = list(lane.waiting.values())
            del self._lanes[lane.name]  # samples of this kind may not come again
        self._take(calls)
        return calls

    def _put_back(self, lane: _Lane, calls: Sequence[Call]) -> None:
        """Put a call of a model back, to be tried again in a moment."""
        (call,) = calls
        with self._changed:
            lane.next -= 1
            lane.again = time.monotonic() + _LOOK
            lane.waiting[lane.next] = call
            self._waiting += 1
            self._bytes += call.size

    def _take(self, calls: Sequence[Call]) -> None:
        self._waiting -= len(calls)
        self._bytes -= sum(call.size for call in calls)

    def _do(self, calls: Sequence[Call]) -> None:
        try:
            first = calls[0]
            if first.alone is not None:
                answers: Iterable[Answer | Failed] = [first.alone()]
            else:
                answers = self._together([call.sample for call in calls])
            for call, answer in zip(calls, answers, strict=True):
                if isinstance(answer, Failed):
                    call.answer.set_exception(answer)
                else:
                    call.answer.set_result(answer)
        except KeyboardInterrupt:
            self._fail(calls, Failed("the server was stopped", "server"))
            raise
        except UserError as error:
            self._fail(calls, Failed(str(error), "user"))
        except Later:
            raise
        except Exception as error:  # a fault here must not end the work of other clients
            log.error("%s", traceback.format_exc())
            self._fail(calls, Failed(f"{type(error).__name__}: {one_line(error)}", "server"))

    def _fail(self, calls: Sequence[Call], failure: Failed) -> None:
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(failure)

    def _forget_old(self) -> None:
        """Forget the oldest answers, once they are many."""
        while len(self._calls) - self._waiting > _KEPT:
            oldest = next(iter(self._calls))
            if not self._calls[oldest].answer.done():
                return
            del self._calls[oldest]
