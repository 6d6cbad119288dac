"""Mathematical answers, compared by value with math-verify."""

import contextlib
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verdict, Verifier, correct, error, field, short, unparsed, wrong
from rocm_ext.verifiers.mathtext import (
    LONGEST,
    NO_UNIT,
    TAIL,
    decimal_comma,
    exclaimed,
    final_answer,
    gold_answer,
    number,
)
from rocm_ext.verifiers.workers import worker
from rocm_ext.verifiers.workers.forked import Elsewhere, forked

BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*\{")
TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it)|[hm]box)\s*\{([^{}]*\d[^{}]*)\}")
UNIT = re.compile(
    r"(?<=[\d})!])\s*(?:\\[,;! ]|~)*\s*(?:\\(?:text\w*|mathrm|mbox|hbox)\s*\{\s*([^{}\d]{2,40}|[mgshlLJNWVC])\s*\}"
    r"|(?<=\s)([A-Za-z]{2,20}))(?:\^\{?[23]\}?)?$"
)
MIXED = re.compile(r"(?<![\d.,/^}])(\d{1,20})\s+(\d{1,20}\s*/\s*\d{1,20})(?![\d.!^])")
COMMAS = re.compile(r"\s*(?:(?:,|\\q?quad\b|\\text\s*\{\s*(?:and|or)\s*\}|(?<![A-Za-z])(?:and|or)(?![A-Za-z]))\s*)+")
GROUPED = re.compile(r"=\s*-?[1-9]\d{0,2}(?:,\d{3})+(?=$|\s*=)")  # the library reads x = 1,350 as two values
SPACED = re.compile(r"(?<![\d.,])([1-9]\d{0,2})((?:\s\d{3})+)(?![\d,]|\s\d)")
# What latex2sympy would leave out without a word, or add up: "5 6" is 11 to it, "1, \ldots, 9" is 1, 9.
UNREADABLE = re.compile(
    r"\d\s+\d|\d\s*\}\s+\d|\\[a-z]*dots|\.\.|\d\s*[\"']\s*\d|\\pmod|\\equiv|(?<!\\)~|\d\s*\\(?:[,;:! ]|quad)\s*\d"
    r"|\\[lg]e?q?\s*$|[?#@;]\s*\d+\s*[?#@]"
)
ASSIGNED = re.compile(r"^[A-Za-z](?:_\w)?\s*=")
APPROX = re.compile(r"^([^\d]*)\\approx")
SET = re.compile(r"\s*(?:\\left\s*)?\\\{(?!\s*\()")
TUPLE = re.compile(r"\s*(?:\\left\s*)?\([^()]*\)\s*")
BASE = re.compile(r"\d_\{?(\d+)\}?$")


class MathAnswer(Verifier):
    r"""Whether the completion's final answer equals the row's.

    The final answer is the last of: a ``\boxed{...}``, a line ``#### ...``, ``<answer>...</answer>``, and a sentence
    "final answer is ...". A sign, power or "million" beside a box counts. Boxes beside each other, or joined by "and"
    or "or", are one list. Without these marks it is what the sentence of the last "answer is" gives; else what the last
    sentence with a number or formula gives: all of the sentence if it is one expression, else its last number or
    formula, or the list that this ends. The search covers the last 20,000 characters.

    Words that change a number are read ("1 million", "5 dozen") or make the answer WRONG ("at least 5", "5 to 6",
    "5 or 6" for 6, "2 hours 30 minutes" for 30). Units and currency signs do not count. Equal are: the same texts;
    two decimal numbers of exactly the same value, also as ``1,234.5``, ``1 234.5``, ``1.234,5``, ``1.2e5`` or ``2,74``;
    50% and both 50 and 0.5; ``x = 5`` and 5, but not ``2x = 10`` and 10. ``a:b`` is a ratio, ``1, 2`` a set,
    ``(1, 2)`` a point or open interval. math-verify compares all else, decimals with fractions to six digits, in a
    process that is killed at the time limit; what it cannot read in full is WRONG.

    Args:
        field: the row's field with the gold answer: text that ends like GSM8K's (``#### 72``), has a ``\\boxed{}``,
            or is the bare answer.
        tolerance: relative error allowed between two decimal numbers.
        timeout: seconds for one comparison by math-verify; one that takes longer gives TIMEOUT.
    """

    def __init__(self, field: str = "answer", tolerance: float = 0.0, timeout: float = 5.0) -> None:
        if not 0 <= tolerance < 1 or timeout <= 0:
            raise UserError(f"MathAnswer needs 0 <= tolerance < 1 and timeout > 0, found {tolerance} and {timeout}")
        self.field, self.tolerance, self.timeout = field, tolerance, timeout
        self.needs = (field,)
        node = {"_component_": "rocm_ext.verifiers.MathAnswer", "tolerance": tolerance, "timeout": timeout}
        self._elsewhere = Elsewhere(node, timeout)  # this process may be unable to fork

    def check(self) -> None:
        try:
            _library()
        except ImportError as error:
            raise UserError(f"MathAnswer needs `pip install math-verify` ({error})") from error

    def check_row(self, row: Mapping[str, Any]) -> None:
        value = row.get(self.field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return
        gold = gold_answer(field(row, self.field, str))
        text = readable(gold)
        if number(gold) is None and (text is None or not _parse(text)):
            found = short(row[self.field], 80)
            raise ValueError(f"field {self.field!r} holds no answer that math-verify can parse: {found!r}")

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        gold = gold_answer(str(row[self.field]))
        found = final_answer(completion)
        if same_text(completion[-LONGEST:] if found is None else found, gold):
            return correct(f"found {gold}")
        if found is None:
            return unparsed("no answer found")
        if len(found) > LONGEST:
            return wrong(f"the answer has {len(found)} characters; at most {LONGEST} are compared")
        if number(gold) is not None:
            found = exclaimed(found, completion[-TAIL:])
        equal = self._numbers(gold, found)
        if equal is not None:
            return correct(f"found {found}") if equal else wrong(f"found {found}")
        mine, golden = readable(found), readable(gold)
        if mine is None or golden is None:
            return wrong(f"cannot compare {found}")
        if worker.RUNNING:
            _library()  # before the fork, so that every child has it
            judge = functools.partial(_judge, golden, mine, self.tolerance)
            return forked(judge, self.timeout, "the comparison") or wrong("the answer cannot be compared")
        return self._elsewhere(completion[-TAIL:], {"answer": rf"\boxed{{{gold}}}"})

    def _numbers(self, gold: str, found: str) -> bool | None:
        """Whether two decimal numbers are equal; None if one is no number."""
        golden = number(gold)
        mine = number(found if golden is None else ASSIGNED.sub("", found))
        if (mine is None) != (golden is None):
            mine = mine or _with_comma(found)
            golden = golden or _with_comma(gold)
        if mine is None or golden is None:
            return None
        values = {mine[0]} if mine[1] == golden[1] else {mine[0], mine[0] / 100 if mine[1] else mine[0] * 100}
        return any(abs(value - golden[0]) <= abs(golden[0]) * Fraction(self.tolerance) for value in values)


class MajorityAnswer(Verifier):
    """Whether the completion's final answer is the most frequent one among the answers to its prompt.

    Majority voting needs no right answers (TTRL, arXiv:2504.16084). A row that has one is judged by it, so held-out
    rows can measure what the model learns. Final answers are found and compared as in :class:`MathAnswer`. An answer
    without one is UNPARSED and has no vote. If two final answers are equally frequent, no answer is CORRECT.

    A model that is mostly wrong becomes surer of its mistakes.

    Args:
        min_share: share of the group's answers that the most frequent final answer needs.
        field: the row's field with the right answer, if the row has it; None: always vote.
        tolerance: as in :class:`MathAnswer`.
        timeout: seconds for one comparison by math-verify; answers that take longer count as different.
    """

    def __init__(
        self, min_share: float = 0.0, field: str | None = "answer", tolerance: float = 0.0, timeout: float = 5.0
    ) -> None:
        if not 0 <= min_share <= 1:
            raise UserError(f"MajorityAnswer needs min_share in [0, 1], found {min_share}")
        self.min_share, self.field = min_share, field
        self._compared = MathAnswer(field or "answer", tolerance, timeout)

    def check(self) -> None:
        self._compared.check()

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self._has_answer(row):
            self._compared.check_row(row)

    def _has_answer(self, row: Mapping[str, Any]) -> bool:
        return self.field is not None and row.get(self.field) is not None

    def judge_group(self, completions: Sequence[str], row: Mapping[str, Any]) -> list[Result]:
        if self._has_answer(row):
            return [self._compared(completion, row) for completion in completions]
        if len(completions) < 2:
            more = "" if self.field is None else f"; to judge it alone, the row needs the field {self.field!r}"
            return [error(f"one answer alone has no majority{more}")] * len(completions)
        votes: dict[str, list[int]] = {}  # places of the completions with each final answer
        for place, completion in enumerate(completions):
            answer = final_answer(completion)
            if answer is not None:
                same = next((known for known in votes if self._equal(completion, known)), answer)
                votes.setdefault(same, []).append(place)
        ranked = sorted(votes, key=lambda answer: -len(votes[answer]))
        counts = [len(votes[answer]) for answer in ranked]
        results = [unparsed("no answer found")] * len(completions)
        for answer, places in votes.items():
            shown = f"{len(places)} of {len(completions)} answers are {answer}"
            agreed = counts[1:2] != counts[:1] and counts[0] >= self.min_share * len(completions)
            for place in places:
                results[place] = correct(shown) if agreed and answer == ranked[0] else wrong(shown)
        return results

    def _equal(self, completion: str, answer: str) -> bool:
        return self._compared(completion, {self._compared.field: rf"\boxed{{{answer}}}"}).verdict is Verdict.CORRECT


def same_text(a: str, b: str) -> bool:
    """Whether two answers are the same text, apart from white space and the case of words."""
    a, b = " ".join(a.split()).rstrip("."), " ".join(b.split()).rstrip(".")
    return a == b or (len(a) > 1 and a.casefold() == b.casefold() and all(part.isalpha() for part in a.split()))


def _with_comma(answer: str) -> tuple[Fraction, bool] | None:
    value = decimal_comma(answer)
    return None if value is None else (value, False)


def readable(answer: str) -> str | None:
    """An answer as math-verify reads it in full; None if it would leave a part out.

    Boxes, text commands around numbers, and units are taken off, mixed numbers become sums, joined answers a list.
    """
    if len(answer) > LONGEST or "..." in answer:
        return None
    text = BOX.sub("{", answer)
    text = COMMAS.sub(lambda match: match[0] if match[0].strip() == "," else ", ", text)
    text = TEXT.sub(r" \1 ", text).strip().strip(",. ")
    text = GROUPED.sub(lambda match: match[0].replace(",", ""), text)
    text = MIXED.sub(r"(\1+\2)", SPACED.sub(lambda match: re.sub(r"\s", "", match[0]), text))
    while unit := UNIT.search(text):
        if any(NO_UNIT.fullmatch(word) for word in re.findall(r"\w+", unit[1] or unit[2])):
            break
        text = text[: unit.start()].rstrip()
    text = APPROX.sub(r"\1=", text).removeprefix("=")
    return None if not text or UNREADABLE.search(text) else text


def _judge(gold: str, found: str, tolerance: float) -> Result:
    return correct() if _compare(gold, found, tolerance) else wrong("the answers differ")


def _compare(gold: str, found: str, tolerance: float) -> bool:
    """Whether two readable answers are equal. It runs in a child, whose math-verify it makes stricter."""
    from sympy import Eq

    math_verify = _library()
    base, other = BASE.search(gold), BASE.search(found)
    if other and other[1] != (base[1] if base else "10"):
        return False
    target, parsed = _parse(gold), _parse(found)
    if not target or not parsed:
        return False
    with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
        if tolerance:
            a, b = (float(side[0].evalf()) for side in (target, parsed))
            return abs(a - b) <= tolerance * abs(a)
    if isinstance(parsed[0], Eq) and not isinstance(target[0], Eq) and not _defines(parsed[0].lhs):
        return False
    if any(SET.match(a) and TUPLE.fullmatch(b) for a, b in ((gold, found), (found, gold))):
        return False
    _stricter(math_verify.grader)
    return math_verify.verify(target, parsed, timeout_seconds=None)


def _defines(left: Any) -> bool:
    """Whether an equation with this left side gives a value: ``f(2) = 5`` does; ``2x = 10`` and ``x^2 = 5`` do not."""
    from sympy import Symbol, preorder_traversal
    from sympy.core.function import AppliedUndef

    left = left.replace(lambda part: isinstance(part, AppliedUndef), lambda part: Symbol("f"))
    if not left.free_symbols:
        return True
    for part in preorder_traversal(left):
        numbers = [each for each in part.args if each.is_Number]
        if (part.is_Pow and part.exp != -1) or (part.is_Add and numbers):
            return False
        if part.is_Mul and any(abs(each) != 1 for each in numbers):
            return False
    return True


def _stricter(grader: Any) -> None:
    """Have math-verify compare small numbers by their ratio, and no two equations without solutions as equal.

    By itself it rounds differences: ``10^{-20}`` and ``1/2006!`` are zero to it.
    """
    from sympy import solve

    numeric, solved = grader.sympy_numeric_eq, grader.sympy_solve_and_compare

    def numeric_equal(a: Any, b: Any, *digits: int) -> bool:
        return numeric(a, b, *digits) and not _far(a, b)

    def solutions_equal(a: Any, b: Any, *digits: int) -> bool:
        return bool(solve(a, a.free_symbols)) and solved(a, b, *digits)

    grader.sympy_numeric_eq, grader.sympy_solve_and_compare = numeric_equal, solutions_equal


def _far(a: Any, b: Any) -> bool:
    """Whether two expressions differ by more than 1e-5 of their size (1e-12 if exact), at one value of the symbols."""
    from sympy import Float, Rational, UnevaluatedExpr

    if getattr(a, "is_Matrix", False) or a.has(UnevaluatedExpr) or b.has(UnevaluatedExpr):
        return False
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    values = {symbol: Rational(1009 + 26 * i, 997 - 6 * i) for i, symbol in enumerate(symbols)}
    near = 1e-5 if a.has(Float) or b.has(Float) else 1e-12
    with contextlib.suppress(TypeError, ValueError, AttributeError):
        x, y = a.subs(values).evalf(30), b.subs(values).evalf(30)
        return bool(abs(x - y) > near * max(abs(x), abs(y)))
    return False


def _parse(text: str) -> list:
    """Parse a readable answer with math-verify; empty if it cannot read it."""
    from latex2sympy2_extended import NormalizationConfig

    math_verify = _library()
    # units: math-verify would take the t off 2t
    normal = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all")
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    return math_verify.parse(
        rf"\boxed{{{text}}}", extraction_config=config, parsing_timeout=None, extraction_mode="first_match"
    )


@functools.cache
def _library() -> Any:
    import math_verify
    import math_verify.grader

    for name in ("math_verify", "latex2sympy2_extended"):  # they warn that no timeout is set; forked has one
        logging.getLogger(name).setLevel(logging.CRITICAL)
    x, y = (math_verify.parse(text, parsing_timeout=None) for text in (r"$\frac{x}{2}$", "$x+1$"))
    math_verify.verify(x, y, timeout_seconds=None)  # loads the parser's tables once, not in every child
    return math_verify
