"""Verdicts on MBPP's right answers, beside starting one interpreter in bubblewrap, and one without.

A verdict of PythonTests starts the answer in a new sandbox, so it costs at least one start. A side has as many
processes at a time as there are workers.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rocm_ext.base.process import end_with_parent
from rocm_ext.data.prompts import prompt_dataset
from rocm_ext.sandbox import bubblewrap, interpreter
from rocm_ext.verifiers import Pool, Verdict
from tools.benchmarks.protocol import Failed, Ratio, take_turns

MBPP = "google-research-datasets/mbpp"
VERIFIER = {"_component_": "rocm_ext.verifiers.PythonTests"}
NICE = 5  # as the workers are
STARTS = 100  # per turn
FAILING = 0.01  # share of MBPP's right answers that may fail its tests
BARE = [sys.executable, "-s", "-S", "-c", "pass"]
PEERS = {"an interpreter in bubblewrap": lambda: [*boxed(), *BARE], "an interpreter": lambda: BARE}


def boxed() -> list[str]:
    """Return the command of a plain sandbox that can run this interpreter."""
    command = [
        bubblewrap.bwrap()[0],
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/usr",
        "/usr",
    ]
    for name in ("/bin", "/lib", "/lib64"):
        command += (
            ["--symlink", os.readlink(name), name]
            if os.path.islink(name)
            else ["--ro-bind", name, name]
        )
    command += [
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--tmpfs",
        "/tmp",
    ]  # before folders that may lie in them
    for folder in interpreter(sys.executable)[0]:
        command += ["--ro-bind", folder, folder]
    return command


def start_one(command: list[str]) -> None:
    subprocess.run(command, check=True, preexec_fn=end_with_parent)


def measure(_: Path, source: str, rounds: int, workers: int) -> list[dict[str, Any]]:
    """Measure ``rounds`` turns of each side and return a row of the table for each peer.

    Args:
        _: an empty folder, which is not used.
        source: MBPP's data set, or a file of that format.
        rounds: turns of each side.
        workers: processes at a time.

    Raises:
        Failed: more of the right answers fail than MBPP's errors explain.
    """
    rows = [prompt.row for prompt in prompt_dataset(source=source, format="mbpp")]
    starters = ProcessPoolExecutor(workers, get_context("spawn"), os.nice, (NICE,))
    with starters, Pool(VERIFIER, workers, timeout=60) as pool:

        def verify() -> int:
            results = [pool.submit(row["solution"], row) for row in rows]
            return sum(result.result().verdict is Verdict.CORRECT for result in results)

        def start(command: list[str]) -> None:
            list(starters.map(start_one, [command] * STARTS))

        start(BARE)  # the starters themselves start with the first command
        right = verify()
        if right < (1 - FAILING) * len(rows):
            raise Failed(f"{right} of {len(rows)} right answers pass")

        def turn(command: list[str] | None) -> float:
            began = time.perf_counter()
            if command is None:
                verify()
            else:
                start(command)
            return (time.perf_counter() - began) / (STARTS if command else len(rows))

        sides: dict[str, list[str] | None] = {
            "ours": None,
            **{name: command() for name, command in PEERS.items()},
        }
        seconds = take_turns(sides, rounds, turn)
    return [
        {"work": "verify", "workers": workers, "peer": name, "right": right, "rows": len(rows), "rounds": rounds,
         "seconds": sorted(seconds["ours"])[rounds // 2], **Ratio.of(seconds[name], seconds["ours"]).describe()}
        for name in PEERS
    ]  # fmt: skip
