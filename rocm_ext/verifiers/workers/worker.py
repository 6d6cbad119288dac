"""A process that verifies: it reads JSON lines and answers a line for a line.

The first line is ``{"verifier": ..., "parent": pid}``; further lines are lists of ``{"completion": ..., "row": ...}``
or groups ``{"completions": [...], "row": ...}``. The first answer is ``{"ready": batch size, "groups": ...}``; further
answers are ``{"results": [[verdict, reward, detail, parts], ...]}``. Any answer may be ``{"error": ...}``.
:class:`rocm_ext.verifiers.Pool` starts the process.
"""

import contextlib
import json
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from rocm_ext.base.process import adopt_orphans, signal_at_parents_end
from rocm_ext.base.types import Json
from rocm_ext.verifiers.sandbox.children import children_of

RUNNING = False  # True in a worker, which has one thread and no GPU and may fork


def die_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(parent: int) -> None:
    """Become a helper of the run: die with it, adopt orphaned descendants (see :func:`reap`), at low priority."""
    die_with(parent)
    with contextlib.suppress(OSError, AttributeError):
        adopt_orphans()
    with contextlib.suppress(OSError):
        os.nice(5)


def reap() -> None:
    """Reap the init processes of ended sandboxes: neither bwrap nor PID 1 of many containers waits for them."""
    for pid in children_of(os.getpid()):
        with contextlib.suppress(OSError):
            if "(bwrap) Z" in Path(f"/proc/{pid}/stat").read_text():
                os.waitpid(pid, os.WNOHANG)


def blame(problem: BaseException) -> str:
    """Type, message and last frame of an exception."""
    frames = traceback.extract_tb(problem.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(problem).__name__}: {problem}{where}"


def judged(verifier: Any, requests: Json | list[Json]) -> list[tuple]:
    """The values of the results on requests, or on the answers of a group."""
    from rocm_ext.verifiers.base import all_checked, checked, group_results

    if isinstance(requests, dict):
        results = group_results(verifier, requests["completions"], requests["row"])
    elif len(requests) == 1:
        results = [checked(verifier, verifier(requests[0]["completion"], requests[0]["row"]))]
    else:
        judged = verifier.judge_batch([r["completion"] for r in requests], [r["row"] for r in requests])
        results = all_checked(verifier, "judge_batch", judged, len(requests))
    return [result.values() for result in results]


def main() -> None:
    """Answer requests until stdin ends."""
    global RUNNING
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    # the protocol uses copies of the descriptors; prints of a verifier or its children go to stderr
    reader = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    writer = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(message: Json) -> None:
        writer.write(json.dumps(message) + "\n")
        writer.flush()

    start = json.loads(reader.readline())
    serve(start["parent"])
    RUNNING = True

    from rocm_ext.verifiers.build import build

    try:
        verifier = build(start["verifier"])
        if type(verifier.batch_size) is not int or verifier.batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, found {verifier.batch_size!r}")
    except BaseException as problem:
        say({"error": str(problem) if type(problem).__name__ == "UserError" else blame(problem)})
        return
    say({"ready": verifier.batch_size, "groups": verifier.groups})
    for line in reader:
        answer: Json
        try:
            answer = {"results": judged(verifier, json.loads(line))}
        except BaseException as problem:  # SystemExit too: a verifier must not end the worker
            answer = {"error": blame(problem)}
        reap()
        say(answer)
