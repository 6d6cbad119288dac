"""``pause_at_celsius``: a run pauses while the GPU, or the processor around it, is too hot.

Small boxes throttle after hours of training, and some switch off. A pause changes no result: it lies between
micro-batches of training and steps of decoding.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rocm_ext.base.errors import UserError
from rocm_ext.base.heartbeat import beat
from rocm_ext.base.log import duration, log
from rocm_ext.machine.sysfs import Sensor, hottest, temperatures

_LESS = 4.0  # °C below the limit at which the run goes on, so that a pause lasts tens of seconds
_LOOK = 2.0  # seconds between two readings
_LONGEST = 300.0  # seconds of a pause; other ranks wait meanwhile
_GIVEN_UP = 1800.0  # seconds without pauses after such a one
_QUIET = 600.0  # seconds between two lines about pauses


class _Cooling:
    """Pauses at ``limit`` °C; see :func:`cooling`."""

    def __init__(self, limit: float, root: Path) -> None:
        self._limit, self._root = limit, root
        self._look_at = -_LOOK  # when to read next
        self._speak_at = -_QUIET
        self.paused = 0.0  # seconds that no line of metrics has yet
        self.ended = False  # no more pauses, because the run stops
        self._lost = False  # whether no sensor could be read

    def rest(self) -> None:
        """Pause if it is too hot; it reads the sensors now and then."""
        if self.ended or time.monotonic() < self._look_at:
            return
        sensor = self._read()
        patience = _LOOK
        if sensor is not None and sensor.celsius >= self._limit:
            patience = self._pause(sensor)
        self._look_at = time.monotonic() + patience

    def _read(self) -> Sensor | None:
        """The hottest sensor; None if none can be read, of which it warns."""
        sensor = hottest(temperatures(self._root))
        lost = sensor is None
        if lost and not self._lost:
            log.warning("no temperature can be read any more: the run no longer pauses for heat")
        elif self._lost and not lost:
            log.warning("temperatures can be read again")
        self._lost = lost
        return sensor

    def _pause(self, sensor: Sensor) -> float:
        """Pause until it is cool; return the seconds until the next reading."""
        began = time.monotonic()
        speaks = began >= self._speak_at
        goal = self._limit - _LESS
        if speaks:
            self._speak_at = began + _QUIET
            log.info("%s: the run pauses until %g °C", _reading(sensor), goal)
        now: Sensor | None = sensor
        patience = _LOOK
        while now is not None and now.celsius > goal and not self.ended:
            if time.monotonic() - began >= _LONGEST:
                patience = _GIVEN_UP
                log.warning(
                    "%s after a pause of %s. The run goes on, and does not pause for %s. Stop what else keeps this "
                    "machine busy, or raise pause_at_celsius",
                    _reading(now),
                    duration(_LONGEST),
                    duration(_GIVEN_UP),
                )
                break
            beat()
            time.sleep(1)
            now = self._read()
        seconds = time.monotonic() - began
        self.paused += seconds
        if speaks:
            log.info("the run goes on after a pause of %s", duration(seconds))
        return patience


_current: _Cooling | None = None


def check_sensors(limit: float | None, root: Path = Path("/")) -> None:
    """Raise a UserError if a run is to pause at ``limit`` °C and no temperature of an AMD GPU can be read."""
    if limit is not None and hottest(temperatures(root)) is None:
        raise UserError(
            f"pause_at_celsius is {limit:g}, and the kernel shows no temperature of an AMD GPU here; "
            "`rocm-ext doctor` shows the sensors. null never pauses"
        )


@contextmanager
def cooling(limit: float | None, root: Path = Path("/")) -> Iterator[None]:
    """Context in which :func:`rest` pauses at ``limit`` °C, until it is 4 °C less; None: never."""
    global _current
    if limit is not None:
        _current = _Cooling(limit, root)
    try:
        yield
    finally:
        _current = None


def rest() -> None:
    """Pause if it is too hot. Loops that keep the GPU busy call this in every turn, as they call ``beat``."""
    if _current is not None:
        _current.rest()


def end_pauses() -> None:
    """End the pause, and have no more: the run was asked to stop."""
    if _current is not None:
        _current.ended = True


def take_paused() -> float:
    """The seconds of pauses since this was last called."""
    if _current is None:
        return 0.0
    seconds = _current.paused
    _current.paused = 0.0
    return seconds


def _reading(sensor: Sensor) -> str:
    return f"{sensor.device} {sensor.label} is at {sensor.celsius:.0f} °C"
