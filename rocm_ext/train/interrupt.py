"""Ctrl-C and SIGTERM that wait for a good moment."""

import signal
from types import FrameType

from rocm_ext.log import log
from rocm_ext.ranks import Ranks


class Interrupted(Exception):
    """The user asked to stop, and everything done so far is saved.

    Args:
        where: what was being done, as in "stopped {where}".
        signum: the signal that asked.
    """

    def __init__(self, where: str, signum: int) -> None:
        super().__init__(where, signum)
        self.where, self.signum = where, signum


class Interrupt:
    """While entered, Ctrl-C and SIGTERM only set ``signum``; a second Ctrl-C stops at once.

    Attributes:
        signum: the signal that came last, or None.
    """

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "Interrupt":
        self._earlier = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    def agree(self, ranks: Ranks) -> int:
        """The signal that some rank got, the same on all of them; 0: none."""
        return max(signum or 0 for signum in ranks.gather(self.signum))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == self.signum == signal.SIGINT:  # torchrun follows a Ctrl-C with SIGTERM: that still waits
            raise KeyboardInterrupt
        self.signum = signum
        log.info("stopping as soon as what is being done is saved ...")
