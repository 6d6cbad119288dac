"""A process that verifies: it reads JSON lines and answers a line for a line.

The first line is ``{"verifier": ..., "parent": pid}``; further lines are lists of ``{"completion": ..., "row": ...}``
or groups ``{"completions": [...], "row": ...}``. The first answer is ``{"ready": batch size, "groups": ...}``; further
answers are ``{"results": [[verdict, reward, detail, parts], ...]}``. Any answer may be ``{"error": ...}``.
:class:`rocm_ext.verifiers.Pool` starts the process.
"""

import json
import os
import signal
from typing import Any

from rocm_ext.base.types import Json
from rocm_ext.sandbox import helper


def judged(verifier: Any, requests: Json | list[Json]) -> list[tuple]:
    """The values of the results on requests, or on the answers of a group."""
    from rocm_ext.verifiers.base import all_checked, checked, group_results

    if isinstance(requests, dict):
        results = group_results(verifier, requests["completions"], requests["row"])
    elif len(requests) == 1:
        request = requests[0]
        results = [checked(verifier, verifier(request["completion"], request["row"]))]
    else:
        completions = [request["completion"] for request in requests]
        rows = [request["row"] for request in requests]
        batch = verifier.judge_batch(completions, rows)
        results = all_checked(verifier, "judge_batch", batch, len(requests))
    return [result.values() for result in results]


def main() -> None:
    """Answer requests until stdin ends."""
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
    helper.serve(start["parent"])
    helper.RUNNING = True

    from rocm_ext.verifiers.build import build

    try:
        verifier = build(start["verifier"])
        if type(verifier.batch_size) is not int or verifier.batch_size < 1:
            raise ValueError(
                f"batch_size must be a whole number of at least 1, found {verifier.batch_size!r}"
            )
    except BaseException as problem:
        is_mistake = type(problem).__name__ == "UserError"
        say({"error": str(problem) if is_mistake else helper.blame(problem)})
        return
    say({"ready": verifier.batch_size, "groups": verifier.groups})
    for line in reader:
        answer: Json
        try:
            answer = {"results": judged(verifier, json.loads(line))}
        except BaseException as problem:  # SystemExit too: a verifier must not end the worker
            answer = {"error": helper.blame(problem)}
        helper.reap()
        say(answer)
