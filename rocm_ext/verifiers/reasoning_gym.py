"""Puzzles of the package reasoning-gym, and its judges."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypedDict

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


class _Judgement(TypedDict, total=False):
    """The script's judgement of an answer; it has one of these keys."""

    score: float
    row: str  # what is wrong with the row
    answer: str  # why the judge cannot read the answer
    late: bool  # True: the judge took too long; False: its process died


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
        self.timeout, self.memory_mb, self.kind = timeout, memory_mb, sandbox

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
        answers = [_answer(completion) for completion in completions]
        asked = [index for index, answer in enumerate(answers) if answer is not None]
        results = [unparsed("no text between <answer> and </answer>")] * len(rows)
        if not asked:
            return results
        made = [{**rows[index][COLUMN], "question": rows[index]["prompt"]} for index in asked]
        try:
            said = self._run(made, [answers[index] for index in asked])
        except (UserError, ValueError) as problem:
            return [error(problem)] * len(rows)
        for index, score in zip(asked, said["scores"], strict=True):
            results[index] = self._result(score)
        return results

    def _result(self, said: _Judgement) -> Result:
        if "row" in said:
            return error(said["row"])
        if said.get("late"):
            return timeout(f"the judge is still running after {self.timeout:g} s")
        if "score" not in said:
            return wrong(
                f"the judge cannot read the answer: {said.get('answer', 'its process died')}"
            )
        value = said["score"]
        if not 0 <= value <= 1:
            return error(f"the judge gave {value:g}; expected a score from 0 to 1")
        return correct() if value == 1 else wrong(f"the judge gave {value:.4g}", value)

    def _run(self, rows: Sequence[Row], answers: Sequence[str | None]) -> Json:
        limits = Limits(seconds=START + self.timeout * len(rows), memory_mb=self.memory_mb)
        argv, stdin = _command(
            {"rows": rows, "answers": answers, "seconds": self.timeout}, f"{BOX}/judge.py"
        )
        outcome = self._sandbox.run(argv, {"judge.py": SCRIPT.read_text()}, stdin, limits)
        why = (
            outcome.killed
            or outcome.stderr.decode("utf-8", "replace")
            or f"took over {limits.seconds:g} s"
        )
        if not (outcome.started and not outcome.timed_out and not outcome.killed):
            raise ValueError(f"the sandbox of reasoning-gym: {short(why, 200)}")
        return _read(outcome.stdout, outcome.stderr)


def entries(task: str, options: Json, seed: int, size: int) -> list[tuple[str, str | None]]:
    """Questions with their answers; None where the package has none. Equal arguments make equal entries."""
    row = {"task": task, "options": dict(options), "seed": seed, "size": size}
    argv, stdin = _command({"rows": [row]}, str(SCRIPT))
    # its environment has a fixed seed of hashes, on which a few tasks depend
    process = subprocess.run(argv, input=stdin, capture_output=True, check=False, env=ENVIRONMENT)
    return [
        (question, answer) for question, answer in _read(process.stdout, process.stderr)["entries"]
    ]


def _command(task: Json, script: str) -> tuple[list[str], bytes]:
    python = interpreter(sys.executable)
    return [python.path, "-s", "-S", script], json.dumps({**task, "path": python.packages}).encode()


def _read(stdout: bytes, stderr: bytes) -> Json:
    """The script's answer; raises UserError if the script failed."""
    try:
        said = json.loads(stdout)
    except ValueError:
        raise UserError(
            f"reasoning-gym: {short(stderr.decode('utf-8', 'replace')[-500:], 200) or 'it died'}"
        ) from None
    if "unknown" in said:
        raise UserError(
            f"reasoning-gym has no task {said['unknown']!r}{nearest(said['unknown'], said['tasks'])}"
        )
    if "missing" in said:
        raise UserError(f"reasoning-gym cannot be imported: {said.get('missing')}; {INSTALL}")
    if "problem" in said:
        raise UserError(
            f"reasoning-gym: {said.get('problem')}; set `options` to arguments of the task"
        )
    return said


def _answer(completion: str) -> str | None:
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, max(end, 0))
    return None if start < 0 else completion[start + len("<answer>") : end].strip()
