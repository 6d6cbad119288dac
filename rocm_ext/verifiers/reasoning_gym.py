"""Puzzles of the package reasoning-gym, and its judges."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.base.types import Json, Row
from rocm_ext.sandbox import BOX, Limits, Sandbox, check_limits, interpreter
from rocm_ext.sandbox.limits import ENVIRONMENT
from rocm_ext.verifiers.base import (
    Result,
    Verifier,
    correct,
    error,
    field,
    short,
    timeout,
    unparsed,
    wrong,
)

INSTALL = "`pip install 'torchtune-rocm[reasoning-gym]'`"
START = 60.0  # seconds that the package may take to import and to make a dataset
COLUMN = "reasoning_gym"
SCRIPT = Path(__file__).with_name("_reasoning_gym.py")


class ReasoningGym(Verifier):
    """The task's judge on the text between the last ``<answer>`` and ``</answer>``.

    Rows come from :func:`rocm_ext.data.reasoning_gym_prompts`. The reward is the judge's score, from 0 to 1; a score of
    1 is CORRECT. Some judges give a small score, such as 0.01, for a wrong answer.

    Several judges evaluate the answer as Python. They run in the sandbox, one process per answer, and evaluate only
    values and formulas.

    Args:
        timeout: seconds of wall time to judge one answer.
        memory_mb: memory for the package and the judge.
        sandbox: ``bubblewrap``, or ``rlimits`` for answers that you trust; see rocm_ext.sandbox.
    """

    needs = ("prompt", COLUMN)
    batch_size = 16  # the package takes a second to import

    def __init__(
        self, timeout: float = 10.0, memory_mb: int = 2048, sandbox: str = "bubblewrap"
    ) -> None:
        check_limits("ReasoningGym", timeout, memory_mb, 256)
        self.timeout = timeout
        self.memory_mb = memory_mb
        self.kind = sandbox

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self.kind, interpreter(sys.executable).folders)

    def check(self) -> None:
        self._sandbox.check()
        self._run([], [])

    def check_row(self, row: Row) -> None:
        super().check_row(row)
        made = field(row, COLUMN, Mapping)
        for name in ("task", "options", "seed", "size", "index"):
            field(made, name)

    def judge_batch(self, completions: Sequence[str], rows: Sequence[Row]) -> list[Result]:
        results = [unparsed("no text between <answer> and </answer>")] * len(rows)
        asked = []
        made = []
        answers = []
        for index, (completion, row) in enumerate(zip(completions, rows, strict=True)):
            answer = _answer(completion)
            if answer is not None:
                asked.append(index)
                made.append({**row[COLUMN], "question": row["prompt"]})
                answers.append(answer)
        if not asked:
            return results
        try:
            said = self._run(made, answers)
        except (UserError, ValueError) as problem:
            return [error(problem)] * len(rows)
        for index, score in zip(asked, said["scores"], strict=True):
            results[index] = self._result(score)
        return results

    def _result(self, said: Json) -> Result:
        """The result for the script's judgement of an answer.

        It has ``score``; or ``row`` or ``answer``, which say what is wrong with them; or ``late``: whether the judge
        took too long, or else its process died.
        """
        if "row" in said:
            return error(said["row"])
        if said.get("late"):
            return timeout(f"the judge is still running after {self.timeout:g} s")
        if "score" not in said:
            why = said.get("answer", "its process died")
            return wrong(f"the judge cannot read the answer: {why}")
        value = said["score"]
        if not 0 <= value <= 1:
            return error(f"the judge gave {value:g}; expected a score from 0 to 1")
        return correct() if value == 1 else wrong(f"the judge gave {value:.4g}", value)

    def _run(self, rows: Sequence[Row], answers: Sequence[str]) -> Json:
        limits = Limits(seconds=START + self.timeout * len(rows), memory_mb=self.memory_mb)
        task = {"rows": rows, "answers": answers, "seconds": self.timeout}
        argv, stdin = _command(task, f"{BOX}/judge.py")
        files = {"judge.py": SCRIPT.read_text()}
        outcome = self._sandbox.run(argv, files, stdin, limits)
        if not outcome.started or outcome.timed_out or outcome.killed:
            said = outcome.stderr.decode("utf-8", "replace")
            why = outcome.killed or said or f"took over {limits.seconds:g} s"
            raise ValueError(f"the sandbox of reasoning-gym: {short(why, 200)}")
        return _read(outcome.stdout, outcome.stderr)


def entries(task: str, options: Json, seed: int, size: int) -> list[tuple[str, str | None]]:
    """Questions with their answers; None where the package has none. Equal arguments make equal entries."""
    row = {"task": task, "options": dict(options), "seed": seed, "size": size}
    argv, stdin = _command({"rows": [row]}, str(SCRIPT))
    # its environment has a fixed seed of hashes, on which a few tasks depend
    process = subprocess.run(argv, input=stdin, capture_output=True, check=False, env=ENVIRONMENT)
    answer = _read(process.stdout, process.stderr)
    return [tuple(entry) for entry in answer["entries"]]


def _command(task: Json, script: str) -> tuple[list[str], bytes]:
    python = interpreter(sys.executable)
    stdin = json.dumps({**task, "path": python.packages}).encode()
    return [python.path, "-s", "-S", script], stdin


def _read(stdout: bytes, stderr: bytes) -> Json:
    """The script's answer; raises UserError if the script failed."""
    try:
        said = json.loads(stdout)
    except ValueError:
        why = short(stderr.decode("utf-8", "replace")[-500:], 200) or "it died"
        raise UserError(f"reasoning-gym: {why}") from None
    if "unknown" in said:
        task = said["unknown"]
        raise UserError(f"reasoning-gym has no task {task!r}{nearest(task, said['tasks'])}")
    if "missing" in said:
        raise UserError(f"reasoning-gym cannot be imported: {said['missing']}; {INSTALL}")
    if "problem" in said:
        raise UserError(f"reasoning-gym: {said['problem']}; set `options` to arguments of the task")
    return said


def _answer(completion: str) -> str | None:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else completion[start + len("<answer>") : end].strip()
