"""The order of requests. HTTP adds them from its thread; :meth:`Work.run`, in the thread of the model, does them.

The calls of a client's model are done by their number, ``seq_id``, which is the client's order whatever arrives first.
A call that comes again, because a client repeats it, gets the answer of the first. Calls that sample with the same
settings from the same sampler are done together. Models and samples take turns.
"""

import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.log import log

Answer = bytes | dict[str, Any]  # protobuf, or JSON
MOST_WAITING = 20_000  # calls
MOST_BYTES = 2**28  # of their bodies
_KEPT = 4096  # answers that are kept for clients that ask again
_KEPT_BYTES = 2**28
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


class Full(Exception):
    """Too many calls wait."""


class Later(Exception):
    """A call cannot be done yet: it is tried again."""


@dataclass
class _Call:
    """A call that waits.

    Attributes:
        name: id of the request.
        size: bytes of its body.
        asked: what it asks of :attr:`Work._together`, if it samples; else a function that does it.
        answer: gets the answer, or :class:`Failed`.
    """

    name: str
    size: int
    asked: Any
    answer: Future[Answer] = field(default_factory=Future)


@dataclass
class _Model:
    """The calls of a client's model.

    Attributes:
        next: number of the call that is done next.
        waiting: calls by number.
        last: call that ends the model, once those before are done.
        served: when its last call was done.
        again: when the next call may be tried again that could not be done.
    """

    next: int = 0
    waiting: dict[int, _Call] = field(default_factory=dict)
    last: _Call | None = None
    served: float = 0.0
    again: float = 0.0

    def ready(self, now: float) -> bool:
        """Whether there is something to do."""
        return now >= self.again and (self.next in self.waiting or self.last is not None)


@dataclass
class _Samples:
    """Sampling calls of one kind, since the first came."""

    since: float
    waiting: list[_Call] = field(default_factory=list)

    def ready(self, now: float) -> bool:
        """Whether the first has waited for others."""
        return now >= self.since + _TOGETHER


class Work:
    """All calls of a server.

    Args:
        together: does sampling calls of one kind, given what they ask; returns their answers in order.
    """

    def __init__(self, together: Callable[[Sequence[Any]], Iterable[Answer]]) -> None:
        self._together = together
        self._changed = Condition()
        self._models: dict[str, _Model] = {}
        self._ended: set[str] = set()
        self._samples: dict[Hashable, _Samples] = {}
        self._sampled = 0.0  # when samples of any kind were done
        self._waiting: dict[str, _Call] = {}
        self._bytes = 0
        self._answers: OrderedDict[str, tuple[Future[Answer], int]] = OrderedDict()
        self._kept = 0  # bytes of these answers

    # ---- the thread of HTTP

    def add(self, model: str, number: int, name: str, size: int, do: Callable[[], Answer]) -> None:
        """Add the call ``number`` of a model; for ``name`` and ``size`` see :class:`_Call`.

        Raises:
            Full: too many calls wait; the client tries again. The call that a model waits for is always taken.
            UserError: the model has ended, or has done this call long ago.
        """
        with self._changed:
            if self._known(name):
                return
            if model in self._ended:
                raise UserError(
                    f"model {model} has ended; make a training client from its last checkpoint, "
                    "tinker://RUN/weights/NAME"
                )
            lane = self._models.setdefault(model, _Model())
            if number < lane.next:
                raise UserError(f"call {number} of {model} is done, and its answer no longer kept")
            if number != lane.next:
                self._check_room(size)
            lane.waiting[number] = self._new(name, size, do)

    def add_sample(self, kind: Hashable, name: str, size: int, asked: Any) -> None:
        """Add a sampling call; calls of one ``kind`` are done together. Raises :class:`Full` as :meth:`add`."""
        with self._changed:
            if self._known(name):
                return
            self._check_room(size)
            if kind not in self._samples:
                self._samples[kind] = _Samples(time.monotonic())
            self._samples[kind].waiting.append(self._new(name, size, asked))

    def end(self, model: str, name: str, do: Callable[[], Answer]) -> None:
        """Add the last call of a model, which is done after all others that have come."""
        with self._changed:
            if self._known(name):
                return
            lane = self._models.setdefault(model, _Model())
            lane.last = self._new(name, 0, do)

    def find(self, name: str) -> Future[Answer] | None:
        """Return the answer to come of a call; None if there is none of this name."""
        with self._changed:
            if name in self._waiting:
                return self._waiting[name].answer
            answer, _ = self._answers.get(name, (None, 0))
            return answer

    def _known(self, name: str) -> bool:
        return name in self._waiting or name in self._answers

    def _check_room(self, size: int) -> None:
        if len(self._waiting) >= MOST_WAITING or self._bytes + size > MOST_BYTES:
            raise Full

    def _new(self, name: str, size: int, asked: Any) -> _Call:
        call = _Call(name, size, asked)
        self._waiting[name] = call
        self._bytes += size
        self._changed.notify()
        return call

    # ---- the thread of the model

    def drop(self, model: str) -> None:
        """End a model: fail the calls that wait for it, and refuse later ones."""
        with self._changed:
            lane = self._models.pop(model, _Model())
            self._ended.add(model)
            calls = list(lane.waiting.values())
            if lane.last is not None:
                calls.append(lane.last)
        self._finish(calls, Failed(f"model {model} has ended", "user"))

    def run(self, stopped: Callable[[], bool]) -> None:
        """Do calls until the user asks to stop; then fail those that wait."""
        try:
            while not stopped():
                with self._changed:
                    model, kind = self._next()
                    if model is None and kind is None:
                        self._changed.wait(_TOGETHER if self._samples else _LOOK)
                if model is not None:
                    self._do_call(self._models[model])
                elif kind is not None:
                    self._do_samples(kind)
        finally:
            with self._changed:
                left = list(self._waiting.values())
            self._finish(left, Failed("the server was stopped", "server"))

    def _next(self) -> tuple[str | None, Hashable | None]:
        """Return the model, or the kind of samples, that has waited longest for its turn; None for the other."""
        now = time.monotonic()
        ready = {name: lane for name, lane in self._models.items() if lane.ready(now)}
        model = min(ready, key=lambda name: ready[name].served, default=None)
        kinds = [kind for kind, samples in self._samples.items() if samples.ready(now)]
        if kinds and (model is None or self._sampled < ready[model].served):
            return None, kinds[0]
        return model, None

    def _do_call(self, lane: _Model) -> None:
        """Do a model's next call, or its last."""
        with self._changed:
            number = lane.next
            call = lane.waiting.pop(number, None)
            if call is None:
                call, lane.last = lane.last, None
            else:
                lane.next += 1
        assert call is not None
        asked = call.asked
        try:
            answers = self._outcome([call], lambda: [asked()])
        except Later:
            lane.next = number
            lane.waiting[number] = call
            lane.again = time.monotonic() + _LOOK
            return
        lane.served = time.monotonic()
        self._finish([call], *answers)

    def _do_samples(self, kind: Hashable) -> None:
        """Do the samples of one kind that have come."""
        with self._changed:
            calls = self._samples.pop(kind).waiting
        answers = self._outcome(calls, lambda: self._together([call.asked for call in calls]))
        self._sampled = time.monotonic()
        self._finish(calls, *answers)

    def _outcome(
        self, calls: Sequence[_Call], do: Callable[[], Iterable[Answer]]
    ) -> list[Answer] | list[Failed]:
        """Return the answers to calls, or the failure of each."""
        try:
            return list(do())
        except Later:
            raise
        except UserError as error:
            failure = Failed(str(error), "user")
        except Exception as error:  # a fault here must not end the work of other clients
            log.error("%s", traceback.format_exc())
            failure = Failed(f"{type(error).__name__}: {one_line(error)}", "server")
        return [failure] * len(calls)

    def _finish(self, calls: Sequence[_Call], *answers: Answer | Failed) -> None:
        """Give calls their answers, one each or one for all, and keep these for clients that ask again."""
        if len(answers) == 1:
            answers *= len(calls)
        with self._changed:
            for call, answer in zip(calls, answers, strict=True):
                if call.answer.done():
                    continue
                if isinstance(answer, Failed):
                    call.answer.set_exception(answer)
                else:
                    call.answer.set_result(answer)
                del self._waiting[call.name]
                self._bytes -= call.size
                size = len(answer) if isinstance(answer, bytes) else 1024
                self._answers[call.name] = call.answer, size
                self._kept += size
            while len(self._answers) > _KEPT or self._kept > _KEPT_BYTES:
                _, (_, size) = self._answers.popitem(last=False)
                self._kept -= size
