"""Judge programs by the output they print for given input. The expected output never enters their sandbox."""

import ast
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import repeat
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Row
from rocm_ext.sandbox import BOX, Limits, Sandbox, interpreter
from rocm_ext.verifiers.base import Result, correct, error, field, short, timeout, wrong
from rocm_ext.verifiers.extract import parse_python

CHECKER_MB = 1024  # it reads all that the program printed
# 007 is a text
NUMBER = re.compile(r"[+-]?((?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)([eE][+-]?\d{1,4})?", re.ASCII)
WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


@dataclass
class CaseResults:
    """How a program did on the cases of a row.

    Attributes:
        total: number of cases.
        ran: number of cases in which the program ended with status 0.
        right: number of cases with the right output; a checker may give fractions.
        detail: the first failure.
    """

    total: int
    ran: int = 0
    right: float = 0.0
    detail: str = ""

    def result(self, reward: float) -> Result:
        """CORRECT if all cases are right; else WRONG with this reward."""
        if self.right == self.total:
            return correct(f"passed {self.total} of {self.total}")
        return wrong(f"{self.right:.4g} of {self.total} right; {self.detail}", reward)


class OutputRule:
    """The rule for right output.

    Args:
        tolerance: how much numbers may differ, absolute or relative to the expected one; all lines are then compared
            word by word, and integers may not differ. Without a tolerance, lines must be equal but for white space at
            their ends; a line that holds only numbers is compared word by word, so that ``5.0`` is 5 and a tab is a
            space. Blank lines at the beginning and the end never count, and ``007`` is not 7. A row's ``tolerance``
            takes precedence.
        checker: a Python file with ``def check(input, output, expected)`` that returns a bool or the case's score from
            0 to 1; a row's ``checker``, which is source, takes precedence. ValueError, LookupError, ArithmeticError
            and AssertionError in it mean wrong output; any other exception is an ERROR. It gets as much time as the
            program, for all cases together.
        sandbox: the kind of sandbox for the checker, which is not the program's.
        python: the interpreter for the checker.
    """

    def __init__(
        self,
        tolerance: float | None,
        checker: str | None,
        sandbox: str,
        python: str = sys.executable,
    ) -> None:
        self.tolerance = tolerance
        self.source = ""
        self.kind = sandbox
        self.python = python
        try:
            if tolerance is not None:
                _tolerance(tolerance)
            if checker is not None:
                self.source = _checker(Path(checker).read_text())
        except (OSError, ValueError) as problem:
            raise UserError(str(problem)) from problem

    def check_row(self, row: Row) -> None:
        """Raise ValueError, naming the field, if the row's tolerance or checker is malformed."""
        if row.get("tolerance") is not None:
            _tolerance(row["tolerance"])
        if row.get("checker") is not None:
            _checker(field(row, "checker", str))

    def within(self, row: Row) -> float | None:
        tolerance = row.get("tolerance")
        return self.tolerance if tolerance is None else tolerance

    def checked(
        self, row: Row, cases: Sequence[tuple[str, str, str]], limits: Limits
    ) -> list[float]:
        """The checker's scores, from 0 to 1, of (input, output, expected output); ValueError if the checker failed."""
        python = interpreter(self.python)
        source = row.get("checker") or self.source
        task = {"checker": source, "path": python.packages, "cases": cases}
        stdin = json.dumps(task).encode()
        script = Path(__file__).with_name("_checker.py").read_text()
        box = Sandbox(self.kind, python.folders)
        apart = Limits(seconds=limits.seconds, memory_mb=CHECKER_MB)
        argv = [python.path, "-s", "-S", f"{BOX}/checker.py"]
        outcome = box.run(argv, {"checker.py": script}, stdin, apart)
        if outcome.killed:
            raise ValueError(f"the checker {outcome.killed}")
        if outcome.timed_out:
            raise ValueError(f"the checker is still running after {limits.seconds:g} s")
        try:
            answer = json.loads(outcome.stdout)
        except ValueError:
            answer = f"the checker did not answer: {outcome.stderr.decode('utf-8', 'replace')}"
        if isinstance(answer, str):
            raise ValueError(answer)
        return answer


def _tolerance(value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value < math.inf):
        raise ValueError(f"tolerance must be a number of at least 0, found {value!r}")


def _checker(source: str) -> str:
    try:
        tree = parse_python(source)
    except (SyntaxError, ValueError) as problem:
        raise ValueError(f"the checker is not Python: {problem}") from problem
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "check" not in functions:
        raise ValueError("the checker defines no function check(input, output, expected)")
    return source


def cases_of(row: Row) -> list[tuple[str, str]]:
    """The (input, expected output) pairs of a row; raises ValueError, naming the case, if they are not texts."""
    cases = _checked_cases(row, "{input: str, output: str}", str, str)
    if not cases:
        raise ValueError("field 'cases' is empty")
    return [(case["input"], case["output"]) for case in cases]


def _checked_cases(row: Row, form: str, given: Any, expected: type) -> Sequence[Any]:
    cases: Sequence[Any] = field(row, "cases", (list, tuple))
    for index, case in enumerate(cases):
        right = isinstance(case, Mapping) and isinstance(case.get("input"), given)
        if not (right and "output" in case and isinstance(case["output"], expected)):
            raise ValueError(f"field 'cases'[{index}] must be {form}, found {short(case, 80)}")
    return cases


def calls_of(row: Row) -> list[tuple[list[Any], Any, bool]] | None:
    """The (arguments, expected value, unwrap) of a row whose cases are calls; None if they are for a program.

    ``unwrap``: an expected list of one also stands for its element.
    """
    first = next(iter(field(row, "cases", (list, tuple))), None)
    given = first.get("input") if isinstance(first, Mapping) else None
    if not isinstance(given, (list, tuple)):
        return None
    cases = _checked_cases(row, "{input: [arguments], output: value}", (list, tuple), object)
    field(row, "entry_point", str)
    calls = []
    for case in cases:
        arguments = list(case["input"])
        unwrap = bool(case.get("unwrap"))
        calls.append((arguments, case["output"], unwrap))
    return calls


def run_cases(
    sandbox: Sandbox,
    argv: Sequence[str],
    files: Mapping[str, bytes | str],
    row: Row,
    limits: Limits,
    go_on: bool,
    comparison: OutputRule,
) -> CaseResults | Result:
    """Run the program once per case; a checker runs once, at the end.

    ``limits.seconds`` are for all cases together. ``go_on`` continues after a case that fails, but not after a timeout.
    A timeout, and a fault of the sandbox or the checker, is a :class:`Result`.
    """
    cases = cases_of(row)
    left = limits.seconds
    batch = bool(row.get("checker") or comparison.source)
    results = CaseResults(len(cases))
    to_check: list[tuple[str, str, str]] = []  # input, output and expected output
    indices: list[int] = []  # the places of `to_check` among the cases
    for index, (given, expected) in enumerate(cases):
        limits_of_run = replace(limits, seconds=max(0.0, left))
        outcome = sandbox.run(argv, files, given.encode("utf-8", "surrogatepass"), limits_of_run)
        left -= outcome.seconds
        text = outcome.stdout.decode("utf-8", "replace")
        if not outcome.started:
            return error(f"the sandbox did not start: {outcome.stderr.decode('utf-8', 'replace')}")
        if outcome.timed_out:
            return timeout(f"case {index}: still running after {limits.seconds:g} s in all")
        problem = outcome.killed
        if outcome.returncode != 0 and not problem:
            stderr = outcome.stderr.decode("utf-8", "replace").strip()
            last = stderr.rsplit("\n", 1)[-1]
            problem = f"exit status {outcome.returncode}"
            if last:
                problem += f" ({short(last, 150)})"
        if not problem:
            results.ran += 1
            if batch:
                to_check.append((given, text, expected))
                indices.append(index)
            elif same_output(text, expected, comparison.within(row)):
                results.right += 1
            else:
                problem = f"printed {short(text, 80)!r}"
        if problem:
            results.detail = results.detail or f"case {index}: {problem}"
            if not go_on:
                return results
    if to_check:
        try:
            scores = comparison.checked(row, to_check, limits)
        except ValueError as failed:
            return error(failed if str(failed) else "the checker failed")
        results.right = sum(scores)
        for index, (_, text, _), score in zip(indices, to_check, scores, strict=True):
            if score < 1 and not results.detail:
                results.detail = f"case {index}: printed {short(text, 80)!r}"
    return results


def same_output(printed: str, expected: str, tolerance: float | None = None) -> bool:
    """Whether a program printed the expected text; see :class:`OutputRule`."""
    found = _lines(printed)
    lines = _lines(expected)
    if len(found) != len(lines):
        return False
    return all(map(_same_line, found, lines, repeat(tolerance)))


def _lines(text: str) -> list[str]:
    """The lines without white space at their ends, and without blank lines at the beginning and the end."""
    text = re.sub(r"\A\s*\n", "", text.rstrip())
    return [line.rstrip() for line in text.split("\n")]


def _same_line(printed: str, line: str, tolerance: float | None) -> bool:
    if printed == line:
        return True
    words = printed.split()
    expected = line.split()
    if tolerance is None and not all(map(NUMBER.fullmatch, expected)):
        return False
    if len(words) != len(expected):
        return False
    return all(map(close, words, expected, repeat(tolerance or 0)))


def close(word: str, expected: str, tolerance: float) -> bool:
    """Whether two words are equal, or numbers within the tolerance, which does not apply to integers."""
    if word == expected:
        return True
    if not (NUMBER.fullmatch(word) and NUMBER.fullmatch(expected)):
        return False
    if Decimal(word) == Decimal(expected):
        return True
    if not tolerance or (WHOLE.fullmatch(word) and WHOLE.fullmatch(expected)):
        return False
    value = float(word)
    right = float(expected)
    near = abs(value - right) <= tolerance * max(1.0, abs(right))
    return near and math.isfinite(value) and math.isfinite(right)
