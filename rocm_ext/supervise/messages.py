"""What a supervisor says: on the terminal, to systemd, and by the user's command."""

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rocm_ext.base.log import note
from rocm_ext.runs.progress import position

_PATIENCE = 60.0  # seconds for the user's command


def say(text: str) -> None:
    """Print a line to stderr, unless nobody can read it any more."""
    with suppress(OSError):  # the terminal was closed, or the reader of a pipe has left
        note(f"supervise: {text}")


def tell_systemd(text: str) -> None:
    """Tell systemd of this service's state, see sd_notify(3); elsewhere do nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # a name in Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as channel,
    ):
        channel.sendto(text.encode(), address)


class Messenger:
    """Reports the events of a run.

    Args:
        run: the run's output_dir.
        command: a shell command that gets each event in environment variables; None without one.
    """

    def __init__(self, run: Path, command: str | None) -> None:
        self._run, self._command = run, command

    def tell(self, event: str, why: str, log: Sequence[str] = ()) -> None:
        """Report an event on the terminal, to systemd and by the user's command; ``log`` has the run's last lines."""
        say(f"{event}: {why}")
        tell_systemd(f"STATUS={event}: {why}")
        if self._command is None:
            return
        environ = os.environ | {
            "SUPERVISE_EVENT": event,
            "SUPERVISE_RUN": str(self._run),
            "SUPERVISE_WHY": why,
            "SUPERVISE_STEP": f"{position(self._run)[1]:g}",
            "SUPERVISE_LOG": "\n".join(log),
        }
        with suppress(
            subprocess.TimeoutExpired, OSError, ValueError
        ):  # ValueError: the run printed a NUL
            ended = subprocess.run(self._command, shell=True, env=environ, timeout=_PATIENCE)
            if ended.returncode == 0:
                return
        say(f"the command of --notify failed, or took more than {_PATIENCE:g} s")
