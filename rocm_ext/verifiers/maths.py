"""Mathematical answers, compared by value with math-verify."""

import contextlib
import functools
import logging
import re
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.types import Row
from rocm_ext.sandbox import helper
from rocm_ext.verifiers.base import (
    Result,
    Verdict,
    Verifier,
    correct,
    error,
    field,
    right_or_wrong,
    short,
    unparsed,
    wrong,
)
from rocm_ext.verifiers.extract import answer_text
from rocm_ext.verifiers.mathtext import (
    LETTER,
    TAIL,
    WORD,
    choice,
    clean,
    final_answer,
    number,
    plain,
    readable,
)
from rocm_ext.verifiers.workers.forked import Elsewhere, forked

GROUP_SECONDS = 30.0  # time limit for all forks of a group: half of verify_timeout's default
SET = re.compile(r"\s*(?:\\left\s*)?\\\{(?!\s*\()")
TUPLE = re.compile(r"\s*(?:\\left\s*)?\([^()]*\)\s*")
BASE = re.compile(r"\d_\{?(\d+)\}?$")
ARGUMENT = re.compile(LETTER + r"[A-Za-z]\(([A-Za-z])\)\s*=")  # x of f(x) =
# Left sides of equations that are not solved: those of 2x = 10, x^2 = 25 and x + 1 = 5, but not that of f(2) = 5.
UNSOLVED = re.compile(
    r"[\d)}]\s*[A-Za-z(]|\^|[-+*]\s*\d|/\s*\d|\\(?:[dt]?frac|sqrt|cdot)|[A-Za-z]\s*[-+*/]\s*[A-Za-z]"
)


class MathAnswer(Verifier):
    r"""Whether the completion's final answer equals the row's.

    The final answer is the last of: a ``\boxed{...}``, a line ``#### ...``, ``<answer>...</answer>``, and a sentence
    "final answer is ..."; else the only value in the last clause of "answer is ...", or of the mathematics. Boxes
    joined by "and" or "or" are one list. The answer is WRONG if words change, deny or doubt the value ("at least 5",
    "17, maybe 23", "I doubt 5", "5... or is it 6?"), if several values form no list ("3 out of 4"), or if text outside
    a box changes it (``-\boxed{5}``).

    Equal are the same texts; decimal numbers of exactly the same value, also as ``1,234.5``, ``1 234.5``, ``1.2e5`` or
    ``2,74``; 50% and both 50 and 0.5; ``x = 5`` and 5, but not ``2x = 10`` and 10; the choices ``C``, ``(C)`` and
    ``C. 25``, ``AC`` and ``A, C``. ``1, 2`` is a set, ``(1, 2)`` a point or open interval. math-verify compares the
    rest, decimals with fractions to six digits. An answer that it cannot read completely is WRONG. Plain numbers are
    compared at once, other answers in a process with a time limit.

    Args:
        field: the row's field with the gold answer: a text that ends like GSM8K's (``#### 72``) or has a ``\boxed{}``,
            or the answer alone.
        tolerance: relative error allowed between two numbers.
        timeout: seconds for one answer; longer gives TIMEOUT.
    """

    def __init__(self, field: str = "answer", tolerance: float = 0.0, timeout: float = 5.0) -> None:
        if not (0 <= tolerance < 1 and timeout > 0):
            raise UserError(
                f"{type(self).__name__} needs 0 <= tolerance < 1, timeout > 0: {tolerance}, {timeout}"
            )
        self.field = field
        self.tolerance = tolerance
        self.timeout = timeout
        self.needs: tuple[str, ...] = (field,)
        # this process may be unable to fork
        self._elsewhere = Elsewhere("MathAnswer", timeout, tolerance=tolerance)

    def check(self) -> None:
        try:
            _library()
        except ImportError as error:
            raise UserError(f"MathAnswer needs `pip install math-verify` ({error})") from error

    def check_row(self, row: Row) -> None:
        value = row.get(self.field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        gold = final_answer(field(row, self.field, str), gold=True)
        worded = WORD.search(gold) and not re.search(r"\d", gold)
        if not (number(gold) is not None or worded or _parse(gold)):
            raise ValueError(
                f"field {self.field!r} holds no answer that math-verify can parse: {short(value, 80)!r}"
            )

    def at_once(self, completion: str, row: Row) -> Result | None:
        found = plain(answer_text(completion))
        gold = plain(str(row[self.field]), gold=True)
        if found is None or gold is None:
            return None
        equal = _close(Fraction(found), Fraction(gold), self.tolerance)
        return right_or_wrong(equal, f"found {found}")

    def __call__(self, completion: str, row: Row) -> Result:
        result = self.at_once(completion, row)
        if result is not None:
            return result
        completion = answer_text(completion)
        answer = str(row[self.field])
        if not helper.RUNNING:
            return self._elsewhere(completion[-TAIL:], {"answer": answer})
        return _child(self.timeout, _judge, completion, answer, self.tolerance)


class MajorityAnswer(MathAnswer):
    """Whether the completion's final answer is the most frequent one among the answers to its prompt.

    Majority voting needs no gold answers (TTRL, arXiv:2504.16084). A row that has one is judged by it, so that held-out
    rows can measure progress. Final answers are read and compared as in :class:`MathAnswer`. A completion without one
    is UNPARSED and has no vote. If two final answers are equally frequent, no completion is CORRECT.

    A model that is mostly wrong becomes surer of its mistakes.

    Args:
        min_share: share of the group's answers that the most frequent final answer needs.
        field: a field with the gold answer, which rows may lack. With None, all rows vote.
        tolerance: as in :class:`MathAnswer`.
        timeout: seconds for one answer, at most 30 for a group; a slower one is TIMEOUT and has no vote.
    """

    def __init__(
        self,
        min_share: float = 0.0,
        field: str | None = "answer",
        tolerance: float = 0.0,
        timeout: float = 5.0,
    ) -> None:
        if not (0 <= min_share <= 1):
            raise UserError(f"MajorityAnswer needs min_share in [0, 1], found {min_share}")
        super().__init__(field or "", tolerance, timeout)
        self.needs = ()
        self.min_share = min_share
        self._elsewhere = Elsewhere(
            "MajorityAnswer", timeout, min_share=min_share, tolerance=tolerance
        )

    def check_row(self, row: Row) -> None:
        if row.get(self.field) is not None:
            super().check_row(row)

    def __call__(self, completion: str, row: Row) -> Result:
        return self.judge_group([completion], row)[0]

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        if row.get(self.field) is not None:
            return [
                super(MajorityAnswer, self).__call__(completion, row) for completion in completions
            ]
        if len(completions) < 2:
            needed = self.field and f"; to judge it alone, the row needs the field {self.field!r}"
            return [error(f"one answer alone has no majority{needed}")]
        completions = list(map(answer_text, completions))
        if not helper.RUNNING and any(plain(text) is None for text in completions):
            return self._elsewhere.judge_group([text[-TAIL:] for text in completions], {})
        results = []
        votes: dict[str, list[int]] = {}  # final answer -> indices of its completions
        end = time.monotonic() + GROUP_SECONDS
        for index, completion in enumerate(completions):
            value = plain(completion)
            if value is not None and all(map(number, votes)):
                vote = _vote(value, list(votes), self.tolerance)
            else:
                share = (end - time.monotonic()) / (len(completions) - index)
                seconds = min(self.timeout, max(0.01, share))
                vote = _child(seconds, _vote, completion, list(votes), self.tolerance)
            if vote.verdict is Verdict.CORRECT:
                votes.setdefault(vote.detail, []).append(index)
            results.append(vote)
        most = max(map(len, votes.values()), default=0)
        most_frequent = [answer for answer, voters in votes.items() if len(voters) == most]
        is_enough = most >= self.min_share * len(completions)
        for answer, voters in votes.items():
            right = is_enough and most_frequent == [answer]
            detail = f"{len(voters)} of {len(completions)} answers are {answer}"
            for index in voters:
                results[index] = right_or_wrong(right, detail)
        return results


def _vote(completion: str, known: Sequence[str], tolerance: float) -> Result:
    """A vote: CORRECT with the final answer, written as its equal in ``known`` if there is one; else no vote."""
    answer = final_answer(completion)
    if not answer:
        return unparsed("no answer found")
    if len(answer) > 250:
        return wrong("the answer is too long to vote")
    parsed = _parse(answer) if number(answer) is None else []
    if parsed:
        # an answer that takes too long to compute reaches the time limit here
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            parsed[0].evalf(15)
    for other in known:
        if _equal(other, answer, tolerance):
            return correct(other)
    return correct(answer)


def _child(seconds: float, judge: Callable[..., Result], *args: Any) -> Result:
    _library()  # before the fork, so that children need not import it
    return forked(functools.partial(judge, *args), seconds, "the comparison") or wrong(
        "the answer cannot be compared"
    )


def _judge(completion: str, answer: str, tolerance: float) -> Result:
    """Whether the final answer equals the gold one."""
    gold = final_answer(answer, gold=True)
    final = final_answer(completion)
    text = final or clean(completion)
    if choice(text):
        final = text.strip()
    if _same_text(text, gold) or _same_text(completion, answer):
        return correct(f"found {gold}")
    if not final:
        return unparsed("no answer found")
    return right_or_wrong(_equal(gold, final, tolerance), f"found {final}")


def _equal(gold: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are the same text or number, or equal for math-verify."""
    if _same_text(gold, answer):
        return True
    gold_letters, gold_text = choice(gold) or ("", "")
    letters, text = choice(answer) or ("", "")
    if gold_letters and letters:
        if gold_letters != letters:
            return False
        return not (gold_text and text) or _equal(gold_text, text, tolerance)
    if gold_text or text:  # only one has a letter
        return _equal(gold_text or gold, text or answer, tolerance)
    if "." in gold + answer:  # \approx 5 is not 5, but \approx 3.33 is 3.33
        answer = answer.removeprefix(r"\approx ")
    by_number = _by_number(gold, answer, tolerance)
    if by_number is not None:
        return by_number
    return _compare(gold, answer, tolerance)


def _same_text(a: str, b: str) -> bool:
    """Whether two answers are the same text, apart from white space and the case of words."""
    a = " ".join(a.split()).removesuffix(".")
    b = " ".join(b.split()).removesuffix(".")
    words = len(a) > 1 and all(map(str.isalpha, a.split()))
    return a == b or (words and a.casefold() == b.casefold())


def _close(value: Fraction, gold: Fraction, tolerance: float) -> bool:
    return abs(value - gold) <= abs(gold) * Fraction(tolerance)


def _by_number(gold: str, answer: str, tolerance: float) -> bool | None:
    """Whether two decimal numbers are equal; None if one is no number. If only one is, ``2,74`` counts as 2.74."""
    expected = number(gold)
    if expected is None:
        found = number(answer)
    else:
        found = number(re.sub(r"\A[A-Za-z](?:_\w)?\s*=", "", answer))
    if found is None and expected is not None:
        found = number(answer.replace(",", "."))
    elif expected is None and found is not None:
        expected = number(gold.replace(",", "."))
    if found is None or expected is None:
        return None
    value, is_percentage = found
    gold_value, gold_is_percentage = expected
    if is_percentage == gold_is_percentage:
        return _close(value, gold_value, tolerance)
    rescaled = value / 100 if is_percentage else value * 100
    return _close(value, gold_value, tolerance) or _close(rescaled, gold_value, tolerance)


def _compare(gold: str, answer: str, tolerance: float) -> bool:
    """Whether two answers are equal for a stricter math-verify. Runs in a child only."""
    from sympy import Eq

    gold_arguments = set(ARGUMENT.findall(gold))
    arguments = set(ARGUMENT.findall(answer))
    named = len(gold_arguments) == len(arguments) == 1
    if named and gold_arguments.isdisjoint(re.sub(r"\\[A-Za-z]+", "", answer)):
        # W(x) = 1 says what W(n) = 1 does
        answer = re.sub(LETTER + arguments.pop(), gold_arguments.pop(), answer)
    if r"\lor" in gold + answer:
        union = _union(gold)
        if union is not None and union == _union(answer):
            return True
        gold = gold.replace(r" \lor ", ", ")
        answer = answer.replace(r" \lor ", ", ")
    target = _parse(gold)
    parsed = _parse(answer)
    if not target or not parsed:
        return False
    if (SET.match(gold) and TUPLE.fullmatch(answer)) or (
        SET.match(answer) and TUPLE.fullmatch(gold)
    ):
        return False
    base = BASE.search(answer)
    gold_base = BASE.search(gold)
    if base and base[1] != (gold_base[1] if gold_base else "10"):
        return False
    if isinstance(parsed[0], Eq) and not isinstance(target[0], Eq):
        left, equals, _ = answer.partition("=")
        if equals and UNSOLVED.search(left):
            return False
    return _strict(tolerance).verify(target, parsed, timeout_seconds=None)


def _union(answer: str) -> Any:
    """The union of intervals, or of inequalities in one variable, that "or" joins; None if the answer is none."""
    from sympy import Set, Union

    sets = []
    variables = set()
    for part in answer.split(r"\lor"):
        parsed = _parse(part)
        if not parsed:
            return None
        right = getattr(parsed[0], "rhs", None)
        value = right if isinstance(right, Set) else parsed[0]  # x in (1, 2)
        try:
            variables |= value.free_symbols
            sets.append(value if isinstance(value, Set) else value.as_set())
        except (TypeError, ValueError, NotImplementedError, AttributeError):
            return None
    return Union(*sets) if len(variables) < 2 else None


@functools.cache
def _strict(tolerance: float) -> Any:
    """math-verify, changed in this process to compare small numbers by their ratio and to solve equations strictly.

    Unchanged, it rounds differences (``10^{-20}`` and ``1/2006!`` equal zero) and takes two equations without solutions
    for equal.
    """
    from sympy import Float, Rational, UnevaluatedExpr, solve

    math_verify = _library()
    grader = math_verify.grader
    numeric = grader.sympy_numeric_eq
    solved = grader.sympy_solve_and_compare

    def numeric_equal(a: Any, b: Any, *digits: int) -> bool:
        with contextlib.suppress(TypeError, ValueError, AttributeError):
            percentage = a.has(UnevaluatedExpr) or b.has(UnevaluatedExpr)
            if not (a.is_Matrix or percentage):
                symbols = sorted(a.free_symbols | b.free_symbols, key=str)
                point = {}
                for i, symbol in enumerate(symbols):
                    point[symbol] = Rational(1009 + 26 * i, 997 - 6 * i)
                x = a.subs(point).evalf(30)
                y = b.subs(point).evalf(30)
                near = tolerance or (1e-5 if a.has(Float) or b.has(Float) else 1e-12)
                if abs(x - y) > near * abs(x):
                    return False
                if tolerance and not symbols and x.is_finite:
                    return True
        return numeric(a, b, *digits)

    def solve_and_compare(a: Any, b: Any, *digits: int) -> bool:
        return bool(solve(a, a.free_symbols)) and solved(a, b, *digits)

    grader.sympy_numeric_eq = numeric_equal
    grader.sympy_solve_and_compare = solve_and_compare
    return math_verify


def _parse(answer: str) -> list:
    """The answer as math-verify parses it; empty if it cannot read all of it."""
    from latex2sympy2_extended import NormalizationConfig

    text = readable(answer)
    if text is None:
        return []
    math_verify = _library()
    # units: math-verify would take the t off 2t
    normal = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
    )
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)
    return math_verify.parse(
        rf"\boxed{{{text}}}",
        extraction_config=[config],
        parsing_timeout=None,
        extraction_mode="first_match",
    )


@functools.cache
def _library() -> Any:
    import math_verify
    import math_verify.grader

    # They warn that no timeout is set; forked has one.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # This loads the parser's tables once, not in every child.
    x = math_verify.parse(r"$\frac{x}{2}$", parsing_timeout=None)
    y = math_verify.parse("$x+1$", parsing_timeout=None)
    math_verify.verify(x, y, timeout_seconds=None)
    return math_verify
