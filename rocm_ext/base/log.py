"""Log lines and a progress bar."""

import logging
import os
import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

from rocm_ext.base.heartbeat import beat
from rocm_ext.base.process import survive_terminal

log = logging.getLogger("rocm_ext")


def setup_logging() -> None:
    """Log plain lines to stderr; torchtune and the ranks above 0 log warnings only."""
    logging.getLogger("torchtune.utils._logging").addFilter(_is_warning)
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
        log.propagate = False
    is_main = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if is_main else logging.WARNING)


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


def warn(lines: Iterable[str]) -> None:
    """Log ``lines`` as warnings."""
    for line in lines:
        log.warning("%s", line)


class Progress:
    """A progress bar on a terminal; elsewhere a line now and then.

    Args:
        total: number of units.
        start: number of units already done.
        enabled: whether to print anything.
        unit: name of a unit.
        brief: without a terminal, print no line for the first unit, and one for the last unit only after others.
    """

    def __init__(
        self, total: int, start: int, enabled: bool, unit: str = "step", brief: bool = False
    ) -> None:
        self.total = total
        self.done = self._start = start
        self._unit = unit
        self._enabled = enabled
        self._began = time.monotonic()
        self._spoke = self._began if brief else 0.0
        # units that get a line in any case
        self._ends: tuple[int, ...] = () if brief else (start + 1, total)
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=start, unit=unit, dynamic_ncols=True)

    def update(self, text: str, count: int = 1) -> None:
        """Count ``count`` more units; ``text`` describes them, for example by their loss."""
        self.done += count
        beat()
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            try:
                self._bar.update(count)
            except OSError:  # the terminal was closed
                survive_terminal()
            return
        now = time.monotonic()
        due = now - self._spoke >= 30 or self.done in self._ends
        if self._enabled and due:
            self._spoke = now
            self._ends = (self.total,)  # the last line that is printed says the end
            log.info("%s %d/%d  %s%s", self._unit, self.done, self.total, text, self._left())

    def _left(self) -> str:
        past = time.monotonic() - self._began
        if past < 5:  # an estimate would be a guess
            return ""
        pace = past / max(1, self.done - self._start)
        left = pace * (self.total - self.done)
        return f"  {duration(left)} left"

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{seconds:02d}s"
    return f"{seconds}s"


def note(text: str) -> None:
    """Write to stderr, dimmed on a terminal."""
    if text.strip() and sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[2m{text}\033[0m"
    print(text, file=sys.stderr, flush=True)
