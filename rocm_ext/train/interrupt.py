"""Delay Ctrl-C, SIGTERM and SIGHUP until the work in progress is saved."""

import signal
from types import FrameType

from rocm_ext.base.log import log
from rocm_ext.base.process import stop_signals, survive_terminal
from rocm_ext.distributed.ranks import Ranks


class Interrupted(Exception):
    """The user asked to stop, or another process is to go on, and the run has saved all finished work.

    Args:
        where: position in the run, such as ``at step 7``; it follows the word "stopped" in the log.
        signum: number of the signal; 0: another process goes on, see :func:`rocm_ext.base.supervised.apart`.
    """

    def __init__(self, where: str, signum: int = 0) -> None:
        super().__init__(where, signum)
        self.where, self.signum = where, signum


class Interrupt:
    """Context in which Ctrl-C, SIGTERM and SIGHUP only set ``signum``; a second Ctrl-C stops at once.

    The context may be entered again inside itself. A process that ignores SIGHUP, as under ``nohup``, goes on
    ignoring it.

    Attributes:
        signum: number of the last signal, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._depth = 0

    def __enter__(self) -> "Interrupt":
        self._depth += 1
        if self._depth == 1:
            self._earlier = {s: signal.signal(s, self._note) for s in (signal.SIGINT, *stop_signals())}
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            for signum, handler in self._earlier.items():
                signal.signal(signum, handler)

    def agree(self, ranks: Ranks) -> int:
        """Return the highest signal number that any rank received, the same on all ranks; 0 without one."""
        return max(signum or 0 for signum in ranks.gather(self.signum))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == self.signum == signal.SIGINT:  # torchrun sends SIGTERM after a Ctrl-C; that one still waits
            raise KeyboardInterrupt
        self.signum = signum
        survive_terminal()
        log.info("stopping once the current work is saved ...")
