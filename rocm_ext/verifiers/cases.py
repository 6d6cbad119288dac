"""Programs that read stdin and write stdout, judged by cases. The expected output never enters the sandbox."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocm_ext.verifiers.base import Result, correct, error, field, short, timeout, wrong
from rocm_ext.verifiers.sandbox import Limits, Outcome, Sandbox


@dataclass(frozen=True)
class CaseResults:
    """What became of a program's cases.

    Attributes:
        total: cases of the row.
        ran: those in which the program ended with status 0.
        right: those of them in which it printed the expected output.
        detail: the first failure.
        timed_out: the program exceeded the time limit.
        broken: the sandbox's own failure; empty if the sandbox worked.
    """

    total: int
    ran: int
    right: int
    detail: str
    timed_out: bool
    broken: str

    def result(self, partial_credit: bool) -> Result:
        """The result: with ``partial_credit`` the share of right cases, else 1 or 0. A timeout is worth 0."""
        if self.broken:
            return error(self.broken)
        if self.timed_out:
            return timeout(self.detail)
        if self.right == self.total:
            return correct(f"passed {self.total} of {self.total}")
        return wrong(f"{self.right} of {self.total} right; {self.detail}",
                     self.right / self.total if partial_credit else 0.0)  # fmt: skip


def cases_of(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The (input, output) pairs of a row.

    Raises:
        ValueError: ``cases`` is not a list of ``{"input": str, "output": str}``, or is empty.
    """
    cases = field(row, "cases", (list, tuple))
    for index, case in enumerate(cases):
        if not isinstance(case, Mapping) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
            raise ValueError(f"field 'cases'[{index}] must be {{input: str, output: str}}, found {short(case, 80)}")
    if not cases:
        raise ValueError("field 'cases' is empty")
    return [(case["input"], case["output"]) for case in cases]


def run_cases(
    sandbox: Sandbox,
    argv: Sequence[str],
    files: Mapping[str, bytes | str],
    cases: Sequence[tuple[str, str]],
    limits: Limits,
    go_on: bool,
) -> CaseResults:
    """Run the program once per case.

    Args:
        sandbox: where it runs.
        argv, files: as for :meth:`Sandbox.start`.
        cases: (input, expected output) pairs.
        limits: of each run, but ``seconds`` are for all cases together.
        go_on: continue after a case that fails. A timeout always ends the row.
    """
    left = limits.seconds
    ran = right = 0
    detail = ""
    for index, (given, expected) in enumerate(cases):
        outcome = sandbox.run(argv, files, given.encode("utf-8", "surrogatepass"), limits.within(left))
        left -= outcome.seconds
        if not outcome.started:
            broken = f"the sandbox did not start: {outcome.stderr.decode('utf-8', 'replace')}"
            return CaseResults(len(cases), ran, right, detail, False, broken)
        if outcome.timed_out:
            return CaseResults(len(cases), ran, right, f"case {index}: still running after {limits.seconds:g} s in all",
                               True, "")  # fmt: skip
        problem = failure(outcome)
        ran += not problem
        if not problem and not same_text(outcome.stdout.decode("utf-8", "replace"), expected):
            problem = f"printed {short(outcome.stdout.decode('utf-8', 'replace'), 80)!r}"
        right += not problem
        if problem:
            detail = detail or f"case {index}: {problem}"
            if not go_on:
                break
    return CaseResults(len(cases), ran, right, detail, False, "")


def failure(outcome: Outcome) -> str:
    """How a run failed; empty if it succeeded."""
    if outcome.killed:
        return outcome.killed
    if outcome.returncode != 0:
        last = outcome.stderr.decode("utf-8", "replace").strip().rsplit("\n", 1)[-1]
        return f"exit status {outcome.returncode}" + (f" ({short(last, 150)})" if last else "")
    return ""


def same_text(printed: str, expected: str) -> bool:
    """Whether two texts are equal apart from white space at the ends of lines and of the text."""

    def lines(text: str) -> list[str]:
        return [line.rstrip() for line in text.rstrip().split("\n")]

    return lines(printed) == lines(expected)
