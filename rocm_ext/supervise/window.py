"""When a run may go on: the hours of a day, the hours since the start, and until a signal comes."""

import re
import signal
import time
from datetime import datetime
from datetime import time as Clock
from typing import Any, NamedTuple

from rocm_ext.base.process import survive_terminal
from rocm_ext.supervise.messages import tell_systemd

POLL = 0.2  # seconds between two looks at the run


class Hours(NamedTuple):
    """The hours of a day in which a run may go on, local time; they may pass midnight."""

    opens: Clock
    closes: Clock

    @classmethod
    def parse(cls, text: str) -> "Hours":
        """Read ``23:00-07:00``; a ValueError says what is wrong."""
        match = re.fullmatch(r"(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d)", text)
        if not match:
            raise ValueError(f"{text!r} is no span of hours such as 23:00-07:00")
        first, first_minute, last, last_minute = map(int, match.groups())
        hours = cls(Clock(first, first_minute), Clock(last, last_minute))
        if hours.opens == hours.closes:
            raise ValueError(f"{text!r} begins and ends at the same time")
        return hours

    def include(self, now: Clock) -> bool:
        """Whether a time of day is within these hours."""
        if self.opens < self.closes:
            return self.opens <= now < self.closes
        return now >= self.opens or now < self.closes


class Window:
    """The time in which a run may go on. The wall clock decides at each look, so changes to it are obeyed.

    Args:
        between: hours of the day; None: all.
        hours: hours from :meth:`begin` on, without ``between``; None: without end.
    """

    def __init__(self, between: Hours | None = None, hours: float | None = None) -> None:
        self._between, self._hours = between, hours
        self._end: float | None = None

    def begin(self) -> None:
        """Begin to count the hours."""
        if self._hours is not None and self._end is None:
            self._end = _now() + self._hours * 3600

    @property
    def is_over(self) -> bool:
        """Whether it does not open again."""
        return self._end is not None and _now() >= self._end

    @property
    def is_open(self) -> bool:
        """Whether the run may go on now."""
        if self.is_over:
            return False
        return self._between is None or self._between.include(datetime.now().time())

    @property
    def opens(self) -> str:
        """When it opens again, a time of day; without ``between`` it does not."""
        return f"{self._between.opens:%H:%M}" if self._between else "never"


class Stop:
    """The signals to stop that came: Ctrl-C, SIGTERM and SIGHUP.

    Attributes:
        signum: number of the first signal; 0 before.
        again: whether a second Ctrl-C came.
    """

    signum = 0
    again = False

    @property
    def code(self) -> int:
        """The exit code of a program that a signal ended."""
        return 128 + self.signum

    def note(self, signum: int, frame: Any) -> None:
        """Handle a signal."""
        if not self.signum:
            self.signum = signum
        elif signum == signal.SIGINT:
            self.again = True
        survive_terminal()

    def wait_open(self, window: Window) -> None:
        """Wait until the window opens or a signal comes."""
        while not (self.signum or window.is_open):
            _rest()

    def wait(self, seconds: float, window: Window) -> None:
        """Wait for ``seconds``, or until the window closes or a signal comes."""
        end = time.monotonic() + seconds
        while not self.signum and window.is_open and time.monotonic() < end:
            _rest(end - time.monotonic())


def _now() -> float:
    """Seconds that also count while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _rest(most: float = POLL) -> None:
    """Tell systemd that this process lives, and sleep until the next look."""
    tell_systemd("READY=1\nWATCHDOG=1")
    time.sleep(max(0.0, min(most, POLL)))
