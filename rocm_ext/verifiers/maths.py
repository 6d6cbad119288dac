"""Mathematical answers, compared by value with math-verify."""

import contextlib
import functools
import logging
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verifier, correct, field, short, unparsed, wrong
from rocm_ext.verifiers.workers import worker
from rocm_ext.verifiers.workers.forked import Elsewhere, forked

TAIL = 20_000  # characters at the end of a completion that are searched
LONGEST = 500  # characters of an answer that is parsed
HASHES = re.compile(r"####[ \t]*([^\n]+)")
BRACE = re.compile(r"\\(?:boxed|fbox)[ \t]*\{|(?<!\\)[{}]")
PHRASE = re.compile(r"\banswer\b[*_ \t]*(?:is|are|equals|=|:)[*_ \t]*:?[*_ \t]*([^\n]+)", re.I)
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"(?<![\w.])-?[$€£]?-?(?:{DIGITS})(?:/-?\d+(?!\.\d))?%?")
PLAIN = re.compile(rf"([-+]?(?:{DIGITS}))\.?(?:\s+([A-Za-z]{{3,}}))?")
SOME = r"(.{1,1000}?)"  # bounded: the search for the end of an unclosed formula would read the whole text
MATHS = re.compile(rf"\$\${SOME}\$\$|(?<!\\)\$([^$\n]{{1,1000}}?)(?<!\\)\$|\\\[{SOME}\\\]|\\\({SOME}\\\)", re.S)
EXPRESSION = re.compile(r"[\w\s+\-*/^().,=|\\{}\[\]<>!%$]{1,200}")
ROW = re.compile(r"\d\s+\d|\d,\s")  # of numbers
WORD = re.compile(r"(?<!\\)\b(?:[A-Za-z]{3,}|or|is|to|of|in|at|by|so|no|we|he|it|as|an|am|pm|on|if)\b", re.I)
FUNCTIONS = {"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "inf"}
NO_UNIT = FUNCTIONS | {"hundred", "thousand", "million", "billion", "trillion", "dozen", "percent", "and"}


class MathAnswer(Verifier):
    """Whether the completion's final answer equals the row's.

    The final answer is the last ``\\boxed{...}`` or ``#### ...``; without one, the text after the last "answer is";
    else the last formula or number of the last line, else of the text. Only this one answer is judged;
    ``\\boxed{1, 2}`` is the set of both. The search covers the last 20,000 characters.

    Two decimal numbers are compared exactly. math-verify compares all else (to six digits), in a process that is
    killed at the time limit.

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
        if number(gold) is None and (len(gold) > LONGEST or not _parse(gold)):
            found = short(row[self.field], 80)
            raise ValueError(f"field {self.field!r} holds no answer that math-verify can parse: {found!r}")

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        gold = gold_answer(str(row[self.field]))
        found = final_answer(completion)
        if found is None:
            return unparsed("no answer found")
        if len(found) > LONGEST:
            return wrong(f"the answer has {len(found)} characters; at most {LONGEST} are compared")
        mine, golden = number(found), number(gold)
        if mine is not None and golden is not None:
            near = abs(mine - golden) <= abs(golden) * Fraction(self.tolerance)
            return correct(f"found {found}") if near else wrong(f"found {found}")
        if worker.RUNNING:
            _library()  # before the fork, so that every child has it
            judge = functools.partial(_judge, gold, found, self.tolerance)
            return forked(judge, self.timeout, "the comparison") or wrong("the answer cannot be compared")
        return self._elsewhere(rf"\boxed{{{found}}}", {"answer": rf"\boxed{{{gold}}}"})


def gold_answer(text: str) -> str:
    """The answer in a row's field: the marked one, as in :func:`final_answer`, or the whole text."""
    marked = _marked(text)
    if marked is None and PHRASE.search(text):
        marked = final_answer(text)
    if marked is None:
        formula = MATHS.fullmatch(text.strip())
        marked = next(filter(None, formula.groups())) if formula else text
    return marked.strip()


def final_answer(text: str) -> str | None:
    """The text of a completion's final answer, as :class:`MathAnswer` defines it; None if it has none."""
    text = text[-TAIL:]
    marked = _marked(text)
    if marked is not None:
        return marked or None
    phrases = [match[1] for match in PHRASE.finditer(text)][-1:]
    lines = [line for line in text.split("\n") if line.strip()][-1:]
    for part in (*phrases, *lines):
        part = part.lstrip(" \t*_").rstrip(" \t*_.")
        if formulas := _formulas(part):
            return formulas[-1]
        if EXPRESSION.fullmatch(part) and not _prose(part):
            return part
        if numbers := NUMBER.findall(part):
            return numbers[-1]
    return next(reversed(_formulas(text) or NUMBER.findall(text)), None)


def _marked(text: str) -> str | None:
    """The last ``#### ...`` or ``\\boxed{...}``."""
    found = [(match.start(), match[1]) for match in HASHES.finditer(text)][-1:]
    if box := _last_box(text):
        found.append(box)
    return max(found)[1].strip() if found else None


def _formulas(text: str) -> list[str]:
    found = (next(filter(None, match.groups())).strip() for match in MATHS.finditer(text))
    return [formula for formula in found if formula]


def _prose(text: str) -> bool:
    """Whether a text is no single expression: it has words, or several numbers in a row without brackets."""
    words = [word for word in WORD.findall(text) if word.lower() not in FUNCTIONS]
    held = text[:1] in "([{" and text[-1:] in ")]}"
    return bool(words) or not (held or number(text) is not None or ROW.search(text) is None)


def _last_box(text: str) -> tuple[int, str] | None:
    """Position and content of the box that is closed last; a box inside another is part of it."""
    found, opened = None, []
    for match in BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match)
        elif opened and (start := opened.pop())[0] != "{":
            found = start.start(), text[start.end() : match.start()]
    return found


def number(answer: str) -> Fraction | None:
    """The exact value of a decimal number; None for any other text.

    It may have a currency sign, thousands commas and a unit.
    """
    if len(answer) > LONGEST:
        return None
    bare = re.sub(r"\\[$!, ]|\\(?:text|mathrm)\{[^{}\d]*\}|[$€£]", "", answer).strip()
    found = PLAIN.fullmatch(bare)
    if found is None or (found[2] or "").lower() in NO_UNIT:
        return None
    return Fraction(found[1].replace(",", ""))


def _judge(gold: str, found: str, tolerance: float) -> Result:
    return correct() if _compare(gold, found, tolerance) else wrong("the answers differ")


def _compare(gold: str, found: str, tolerance: float) -> bool:
    math_verify = _library()
    target, parsed = _parse(gold), _parse(found)
    if not target or not parsed:
        return False
    with contextlib.suppress(TypeError, ValueError, AttributeError, OverflowError):
        if tolerance:
            a, b = (float(side[0].evalf()) for side in (target, parsed))
            return abs(a - b) <= tolerance * abs(a)
    return math_verify.verify(target, parsed, timeout_seconds=None)


def _parse(answer: str) -> list:
    """Parse one answer with math-verify.

    Inner boxes and text commands are unwrapped first: math-verify would judge an inner box alone and ignore text.
    """
    answer = re.sub(r"\\(?:boxed|fbox)[ \t]*\{", "{", answer)
    answer = re.sub(r"\\(?:text\w*|math(?:rm|bf|sf|it)|[hm]box)\s*\{([^{}]*\d[^{}]*)\}", r" \1 ", answer)
    math_verify = _library()
    config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    return math_verify.parse(rf"\boxed{{{answer}}}", extraction_config=config, parsing_timeout=None)


@functools.cache
def _library() -> Any:
    import math_verify

    for name in ("math_verify", "latex2sympy2_extended"):  # they warn that no timeout is set; forked has one
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return math_verify
