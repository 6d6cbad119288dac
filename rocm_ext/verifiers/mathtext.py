"""Where the final answer of a mathematical text stands, and the decimal numbers among answers."""

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

TAIL = 20_000  # characters at the end of a text that are searched
LONGEST = 500  # characters of an answer that is read

# What a model writes for ASCII and LaTeX's commands. latex2sympy skips some of these characters without a word.
SIGNS = str.maketrans(
    dict.fromkeys("−‐‑–—﹣－", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")
    | {"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty "}
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "±": r"\pm ", "°": r"^\circ ", "∪": r"\cup "}
    | {"∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "％": "%", "，": ",", "（": "(", "）": ")", "＝": "="}
    | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3", "⅔": " 2/3", "＋": "+", "∶": ":", "٫": ".", "٬": ","}
)
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
ROOT = re.compile(r"√\s?(?:\(([^()]{1,100})\)|(\d+(?:\.\d+)?|\w))")
THOUSANDS = re.compile(r"(?<=\d) ?(?:\{ ?, ?\}|, ?\\!) ?(?=\d{3})")  # 14{,}916 and 14,\!916

CALCULATION = re.compile(r"<<[^<>\n]{1,100}>>")  # GSM8K's: 48+24 = <<48+24=72>>72

BOLD = re.compile(r"(?<![\w)\]}*])\*\*(?=[^\s*])([^*\n]{1,200})(?<!\s)\*\*(?![\w*])")
PRODUCT = re.compile(r"(?<=\d)(?: ?x ?| X )(?=\$?\.?\d)")  # 4 x 5

# Marks of the final answer
BRACE = re.compile(r"\\(?:boxed|fbox)[ \t]*\{|(?<!\\)[{}]")
NEGATIVE = re.compile(r"(?<!-)-(?:\$|\\\()?\Z|[=($]\s*-\s*\Z")  # before a box; "- \boxed" is an item of a list
BEFORE_BOX = re.compile(  # what changes the value of the box after it
    r"(?:\d|[\d)}]\s*[+*/]\s*|\\(?:cdot|times|div|pm|ne|neq|sqrt|[dt]?frac|log|ln)\s*"
    r"|\\(?:sqrt|[dt]?frac)(?:\[\w+\])?(?:\{[^{}]{0,40}\})?\{|!=\s*"
    r"|(?:\b(?:not|never|cannot be|anything but)|n['’]t)\s+)"
    r"(?:\$|\\\()?\Z",
    re.I,
)
AFTER_BOX = re.compile(  # what changes the value of the box before it
    r"(?P<part>\s{0,2}[\^_](?:\{[^{}]{1,20}\}|\w))"
    r"|[\s$~]{0,3}(?:\\[),; ])?\s?(?:\\(?:text|mathrm|mbox)\s*\{\s*)?"
    r"(?:(?P<scale>(?:hundred|thousand|[mbtr]+illion|dozen)\b)"
    r"|(?:[*/+]\s*[\d\\]|-\d|\\(?:cdot|times|div|pm)\b|or\b[\s}]*(?:maybe\s+)?[$\\(]{0,3}\d"
    r"|is (?:not|wrong|incorrect)\b|isn['’]t\b)"
    r"|,\s*\d[\d.$ ]*(?:\n|\Z))|\.?\d",
    re.I,
)
TAG = "<answer>", "</answer>"  # as many prompts for reinforcement learning want it
HASHES = re.compile(r"####[ \t]*([^\n]+)")
PHRASE = re.compile(r"\b(final )?answer\b[*_ \t]*(?:is|are|equals|=|:)[*_ \t]*:?[*_ \t]*(?=[^\n])", re.I)
END = re.compile(r"\n|[.?](?=[\s*_\"')]|$)|(?<!\d)!(?=\s|$)")  # of a sentence; 5! is a factorial
JOINED = re.compile(r"\b(?:and|or)\b")
FORMULA = re.compile(r"\$\$|(?<!\\)\$|(?<!\\)\\[\[(]")
PERCENT = re.compile(r"[ \t*_$\\)]{0,4}(?:%|percent\b|pct\b)")

# Decimal numbers
SPACED = r"[1-9]\d{0,2}(?: \d{3})+(?![\d,])(?:\.\d+)?"
GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])(?:\.\d+)?"
EUROPEAN = r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}"
SIMPLE = r"\d+(?:\.\d+)?|\.\d+"
POWER = r"(?:[eE]|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*)\{?\s*([-+]?\d{1,3})\s*\}?"
UNIT = r"\s*[A-Za-z]+(?:\^\{?[23]\}?)?(?:\s*/\s*[A-Za-z]+)?\.?(?:\s+[A-Za-z]+(?:\^\{?[23]\}?)?){0,3}"
NUMBER = re.compile(
    rf"([-+]?)\s?(?:({EUROPEAN})|({SPACED}|{GROUPED}|{SIMPLE}))(?:{POWER})?"
    rf"\s*(%|percent\b|pct\b|percentage\b)?({UNIT})?"
)
COMMA = re.compile(r"([-+]?\d+),(\d+)")  # 2,74: a decimal comma, or a list of two numbers
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
FRACTIONS = r"halves|thirds?|fourths|fifths|sixths|eighths|tenths|hundredths"
NO_UNIT = re.compile(  # words that change the number before them
    rf"and|or|to|than|least|most|more|less|fewer|over|half|{FRACTIONS}|squared|cubed|factorial|times|plus|minus|divided"
    r"|out|if|when|is|by|modulo|infinity|score|gross|lakh|crore|percent|pct|percentage|remainder|sin|cos|tan|cot|sec|csc"
    r"|hundreds|thousands|[mb]illions|trillions|dozens|tens|bn|mn|mil|mln|mod|log|ln|exp|sqrt|arcsin|arccos|arctan|inf|st|nd|rd|th|hundred|thousand|million|billion|trillion|dozen",
    re.I,
)
SHORT = re.compile(r"[mgshlL]|[ckm]m|[km]g|ft|in|lb|oz|m[lL]|hrs?|min|sec|mi|yd|mph|kmh|[ap]m|[AP]M")  # units

# Text
WORD = re.compile(r"(?<![\\A-Za-z])(?:[A-Za-z]{3,}|is|to|of|in|at|by|so|no|we|he|it|as|an|am|pm|on|if)\b", re.I)
TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf|sf|it)|[hm]box|operatorname|begin|end)\s*\{[^{}]*\}")
IN_WORDS = re.compile(r"(?<=\d)\s*\(((?!not\b|wrong|incorrect)(?:[A-Za-z]{3,20}[ -]?){1,8})\)\Z")  # 72 (seventy-two)
LABEL = re.compile(r"\s*[A-Za-z]+:\s+")  # "Total: 72"
LEFT = re.compile(  # the left side of an equation in letters
    r"(?<![^\s$*_,;])(?!a\s)(?=[^=]{0,40}[A-Za-z])"
    r"(?:[-+*/^()|\d. ]|(?<![A-Za-z])[A-Za-z](?:_\w)?(?![A-Za-z])){1,40}=[\s$*_]*$"
)
BRACKET = re.compile(r"\\?[\[({][^\[\](){}\n]{1,80},[^\[\](){}\n]{1,80}[\])}]")  # a point, an interval or a set
OPERATORS = {r"\times", r"\cdot", r"\approx"}
DIGITS = rf"(?:{SPACED}|\d+(?:[.,]\d+)*|\.\d+)(?:e[-+]?\d+\b)?"
OPERAND = rf"[-+(]{{0,3}}[$€£¥]?-?{DIGITS}[)%!]{{0,3}}"
SIGN = r"[ \t]{0,3}(?:\*\*|[-+*/^:=]|\\times|\\cdot|x(?=[ \t]?\d))[ \t]{0,3}"
RUN = re.compile(rf"(?<![\w.{{^_\\]){OPERAND}(?: \d+/\d+(?![\d.]))?(?:{SIGN}{OPERAND})*")  # of numbers
ATTACHED = re.compile(r"([^\W\d_]+)(?:\^\{[23]\})?")
BEFORE = re.compile(  # what changes the value of the number after it
    r"(?:\b(?:at (?:least|most)|than|up to|over|under|above|below|exceed\w*"
    r"|not|never|cannot be|anything but|no longer|before|after|n?either|nor|minus|negative|plus|times"
    r"|between|from|(?:divided|multiplied) by|out of|half(?: of| a)?"
    r"|(?:thirds?|quarters?|[a-z]+ths?|percent|%|squared?|cubed?|reciprocal|inverse|opposite|negat\w+|successor|predecessor"
    r"|digits) of|twice|double"
    r"|triple|thrice|multiples? of|root of|power of|factorial of|remainder|root|log|ln|sin|cos|tan|sqrt|r)"
    r"|n['’]t|!=|[-<>~]=?|\\(?:le|ge|ne|lt|gt|neq|leq|geq)\b)(?: (?:the|a|an|about|only|just|exactly))?[\s$€£¥*_]*$",
    re.I,
)
AFTER = re.compile(  # what changes the value of the number before it
    rf"[\s*_$()]{{0,4}}(?:(?:,? ?(?:or|squared|cubed|factorial|{FRACTIONS}"
    r"|(?:to|through|plus|minus|times|divided by|over) [$€£]?\d|score|gross|lakh|crore|modulo|mod|[bdefijknpqruvwxyz]"
    r"|and (?:an?|one|two|three|\d+) ?(?:half|third|quarter))"
    r"|hundreds|thousands|[mb]illions|trillions|dozens|tens|bn|mn|mil|mln"
    r"|[a-z]+ (?:or (?:more|less|fewer|so)|and a half))\b|[<>^_])",
    re.I,
)
LIST = re.compile(r"[\s*_]*(?:,|;|&)?[\s*_]*(?:and|or)?[\s*_]*", re.I)
PHRASE_AFTER = re.compile(  # a result: 7 * 4 = 28 berries in 4 days
    r"(?!.*\b(?:or|not|but|so|base|less|minus|plus|times)\b)(?:\s+[A-Za-z]+){0,4}\s+"
    r"(?:in|for|after|before|during|from|over|to [a-z]{3,}|(?:for|after|on|by) [a-z]+ing)"
    r"(?:\s+(?:the|a|all|these))?\s+\0+(?:\s+[A-Za-z]+){0,6}[\s.!*]*",
    re.I,
)
MEASURE = (
    r"(?:hours?|hrs?|minutes?|mins?|seconds?|secs?|days?|weeks?|months?|years?|feet|foot|ft|inch(?:es)?|dollars?|cents?"
    r"|pounds?|lbs?|ounces?|oz|k?m|cm|k?g|(?:kilo|centi)?(?:met(?:er|re)s?|grams?)|dozen)"
)
UNCLEAR = re.compile(  # between two numbers: neither alone is the answer
    rf"[^.]*\b(?:or|nor)\b[^.]*|(?:\s*\w+)?\s+(?:to|through|versus|vs)\s+(?:(?:about|the)\s+)?|\s*{MEASURE},?\s*|(?:\s*\w+){{0,2}}\s+and\s+",
    re.I,
)


class Thing(NamedTuple):
    """A formula or a number in a text."""

    start: int
    end: int
    inner: str


def clean(text: str) -> str:
    """A text with its signs, digits and powers in ASCII and LaTeX."""
    if "<<" in text:
        text = CALCULATION.sub("", text)
    text = PRODUCT.sub("*", BOLD.sub(r"\1", text))
    if "{" in text or "!" in text:
        text = THOUSANDS.sub(",", text)
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(POWERS)}}}", text)
    text = ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text.translate(SIGNS))
    return re.sub(r"[^\W\d_]|\d", lambda m: str(int(m[0])) if m[0].isdecimal() else m[0], text)


def gold_answer(text: str) -> str:
    """The answer in a row's field: the marked one, as in :func:`final_answer`, or the whole text."""
    text = clean(text[-TAIL:])
    found = _marked(text)
    if found is None and (PHRASE.search(text) or any(_formulas(text))):
        found = final_answer(text)
    return tidy(text if found is None else found)


def final_answer(text: str) -> str | None:
    """The text of a completion's final answer, as ``MathAnswer`` defines it; None if it has none."""
    text = clean(text[-TAIL:])
    found = _marked(text)
    if found is None:
        found = _said(text)
    return tidy(found) or None if found is not None else None


def tidy(answer: str) -> str:
    """An answer without mark-up around it."""
    answer = re.sub(r"(?<!\\)\\[\[\]()]|(?<!\\)\$", " ", answer.strip().strip("*_` \t"))
    answer = re.sub(r"^\s*\\?[\"“”]|\\?[\"“”]\s*\Z", "", answer)
    if label := LABEL.match(answer):
        answer = answer[label.end() :]
    answer = answer.strip().rstrip(".:,;").strip("*_ \t\n").removeprefix("=").strip()
    if (words := IN_WORDS.search(answer)) and not any(NO_UNIT.fullmatch(word) for word in words[1].split()):
        answer = answer[: words.start()]
    return answer


def _marked(text: str) -> str | None:
    """The last of: joined boxes, a line ``#### ...``, a sentence "final answer is ...", ``<answer>...</answer>``."""
    found = [(m.end(), m[1]) for m in HASHES.finditer(text)][-1:]
    if boxes := _boxes(text):
        found.append(boxes)
    end = text.rfind(TAG[1])
    start = text.rfind(TAG[0], 0, max(end, 0))
    if start >= 0:
        inner = text[start + len(TAG[0]) : end]
        found.append((end, _marked(inner) or _in(inner) or inner))
    for match in [m for m in PHRASE.finditer(text) if m[1]][-1:] if found and "final answer" in text.lower() else ():
        sentence = text[match.end() : _end(text, match.end())]
        if "\\boxed" not in sentence and "\\fbox" not in sentence and (said := _in(sentence)):
            found.append((match.end() + len(sentence), said))
    return max(found)[1] if found else None


def _boxes(text: str) -> tuple[int, str] | None:
    """End and content of the last box, and of those before it that it is joined to: by little text, or by and/or."""
    boxes: list[Thing] = []
    opened = []
    for match in BRACE.finditer(text):
        if match[0] != "}":
            opened.append(match)
        elif opened and (start := opened.pop())[0] != "{":
            while boxes and boxes[-1].start > start.start():  # a box inside another is part of it
                boxes.pop()
            boxes.append(Thing(start.start(), match.end(), text[start.end() : match.start()].strip()))
    if not boxes:
        return None
    last, parts = boxes[-1], [boxes[-1].inner]
    first = last
    for box in reversed(boxes[:-1]):
        between = text[box.end : first.start]
        if len(between) >= 10 and not (len(between) < 70 and JOINED.search(between)):
            break
        if box.inner != parts[-1]:
            parts.append(box.inner)
        first = box
    return last.end, _in_place(text, first.start, ", ".join(reversed(parts)), last.end)


def _in_place(text: str, start: int, inner: str, end: int) -> str:
    """What boxes hold, with what around them changes its value."""
    before, after = text[max(0, start - 60) : start], AFTER_BOX.match(text, end)
    if PERCENT.match(text, end):
        inner += "\\%"
    elif after and (more := after["part"] or after["scale"]):
        inner += more if after["part"] else f" {more}"
    elif after:
        return f"... {inner} ..."
    if NEGATIVE.search(before):
        return f"-{inner}" if number(inner) else f"-({inner})"
    return f"... {inner}" if BEFORE_BOX.search(before) else inner


def _said(text: str) -> str | None:
    """The answer in the sentence of the last "answer is", else in the last sentence that has a formula or a number."""
    for match in [*PHRASE.finditer(text)][-1:]:
        start = match.end()
        sentence = text[start : _end(text, start)]
        if (found := _in(sentence)) is not None or not _things(text[start:]):
            return found or sentence
    things = _things(text)
    if not things:
        line = tidy(text.rstrip().rpartition("\n")[2])
        return None if WORD.search(TEXT.sub("", line)) else line
    last = things[-1]
    start = max((m.end() for m in END.finditer(text, 0, last.start)), default=0)
    return _in(text[start : _end(text, last.end)])


def _end(text: str, start: int) -> int:
    """Where the sentence that begins at ``start`` ends; what stands in formulas does not end it."""
    rest = text[start:]
    match = END.search(_without(rest, list(_formulas(rest)), "\0"))
    return start + match.start() if match else len(text)


def _in(sentence: str) -> str | None:
    """The answer in one sentence: all of it if it is one expression, else its last formula or number.

    A number keeps the words around it that change its value, so that it is read as no number.
    """
    whole = tidy(sentence)
    if whole and (number(whole) is not None or not WORD.search(JOINED.sub(",", TEXT.sub("", whole)))):
        return whole
    things = _things(sentence)
    if not things:
        return None
    last = things.pop()
    if things and sentence[: things[-1].start].rstrip(" $").endswith("="):
        rest = _without(sentence, [last], "\0")[things[-1].end :]
        last = things.pop() if PHRASE_AFTER.fullmatch(rest) else last
    first, parts = last, [last.inner]
    while things:
        between = sentence[things[-1].end : first.start]
        if LIST.fullmatch(between):
            first = things.pop()
            parts.append(first.inner)
        elif len(between) < 80 and UNCLEAR.fullmatch(between):
            return f"{things[-1].inner} ... {last.inner}"
        else:
            break
    if BEFORE.search(sentence[max(0, first.start - 60) : first.start]) or AFTER.match(sentence, last.end):
        return f"... {last.inner} ..."
    return ", ".join(reversed(parts))


def _things(text: str) -> list[Thing]:
    """The formulas and numbers of a text in order."""
    found = list(_formulas(text))
    for token in re.finditer(r"\S+", _without(text, found)):
        if re.search(r"\\[A-Za-z]", token[0]) and token[0] not in OPERATORS:
            found.append(Thing(token.start(), token.end(), token[0].strip(".,;:*_")))
    for match in BRACKET.finditer(_without(text, found)):
        if not WORD.search(match[0]):
            found.append(Thing(match.start(), match.end(), match[0]))
    for match in RUN.finditer(_without(text, found)):
        if thing := _run(text, match):
            found.append(thing)
    return sorted(found)


def _run(text: str, match: re.Match) -> Thing | None:
    """Numbers with operators between them, or what stands after their last ``=``; None for 3rd and the like."""
    start, end = match.span()
    while (cut := text.rfind("=", start, end)) >= 0:  # 70 + 2 = 72
        start = cut + 1
    inner = text[start:end].strip()
    inner = inner if "(" in inner[1:] else inner.lstrip("(")
    inner = inner if "(" in inner else inner.rstrip(")")
    before = text[max(0, start - 80) : start]
    if left := LEFT.search(before[before.rfind("\n") + 1 :]):  # x = 72
        start, inner = start - len(left[0]), left[0].strip(" $*_") + inner
    unit = ATTACHED.match(text, end)
    if unit is not None and not SHORT.fullmatch(unit[1]):
        return None if unit[1] in ("st", "nd", "rd", "th") else Thing(start, unit.end(), inner + unit[1])
    if unit is not None:
        return Thing(start, unit.end(), inner)
    if text[end : end + 1] in ("{", "}"):
        return None
    word = re.match(r"[ \t*_]{0,3}([a-z]+)", text[end : end + 30])
    scale = f" {word[1]}" if word and word[1] in SCALES else "%" if PERCENT.match(text, end) else ""
    return Thing(start, end, inner + scale)


def _without(text: str, things: list[Thing], filler: str = " ") -> str:
    """A text in which the things are blank."""
    parts, at = [], 0
    for thing in sorted(things):
        parts += [text[at : thing.start], filler * (thing.end - thing.start)]
        at = thing.end
    return "".join(parts) + text[at:]


def _formulas(text: str) -> Iterator[Thing]:
    r"""The formulas in ``$$``, ``\[ \]``, ``$`` and ``\( \)``; a dollar sign before a price opens none."""
    closers = {"$$": "$$", "\\[": "\\]", "\\(": "\\)", "$": "$"}
    ends: dict[str, int] = {}
    at = 0
    while match := FORMULA.search(text, at):
        opener = match[0]
        closer = closers.get(opener)
        at = match.end()
        if closer is None:  # one that no later text closes
            continue
        end = ends.get(opener, -1)
        if end < at:
            end = ends[opener] = text.find(closer, at)
        while opener == "$" and end > 0 and text[end - 1] == "\\":
            end = ends[opener] = text.find(closer, end + 1)
        if end < 0:
            del closers[opener]
            continue
        if end - at > 2 * LONGEST or not (inner := text[at:end]).strip():
            continue
        worded = " " in inner.strip() and WORD.search(TEXT.sub("", inner))
        price = opener == "$" and (text[end + 1 : end + 2].isdigit() or worded or inner.rstrip()[-1] in "=+-*/")
        if price or (opener in ("$", "\\(") and "\n" in inner):
            continue
        yield Thing(match.start(), end + len(closer), inner.strip().rstrip(".,;"))
        at = end + len(closer)


def exclaimed(answer: str, text: str) -> str:
    """An answer without the exclamation mark that ends a sentence of ``text``, where no factorial can be meant."""
    bare = answer.removesuffix("!")
    if bare == answer or any(mark in text for mark in ("\\boxed", "\\fbox", "####", "$", "\\(", "\\[")):
        return answer
    value = number(bare.rpartition("=")[2])
    ends = re.search(r"\d[*_`]*![*_`]*(?:\s+[A-Z]|\s*\Z)", text)
    return bare if value and ends and (value[0] > 20 or value[0].denominator > 1) else answer


def number(answer: str) -> tuple[Fraction, bool] | None:
    """The exact value of a decimal number and whether it is a percentage; None for any other text.

    It may have a currency sign, thousands separators, a power of ten, a scale such as "million" and a unit.
    """
    if len(answer) > LONGEST:
        return None
    bare = re.sub(r"\\(?:text\w*|mathrm|mbox)\s*\{([^{}\d]*)\}", r" \1 ", answer)
    bare = re.sub(r"\\[ ,!]|\^\\circ|\^\{\\circ\}|[$€£¥₹]|\\(?=[%$])", " ", bare).replace("- ", "-").strip().rstrip(".")
    found = NUMBER.fullmatch(bare.strip())
    if found is None:
        return None
    sign, european, digits, power, percent, unit = found.groups()
    words = re.findall(r"[A-Za-z]+", unit or "")
    value = Fraction(european.replace(".", "").replace(",", ".") if european else re.sub("[ ,]", "", digits))
    if words and words[0] in SCALES:
        value *= SCALES[words.pop(0)]
    if any(NO_UNIT.fullmatch(word) for word in words):
        return None
    if words and (len(words[0]) == 1 or (len(words[0]) == 2 and not SHORT.fullmatch(words[0]))):
        return None  # 2t and 5 m are products
    return (-value if sign == "-" else value) * Fraction(10) ** int(power or 0), bool(percent)


def decimal_comma(answer: str) -> Fraction | None:
    """The value of ``2,74``; None for any other text."""
    found = COMMA.fullmatch(re.sub(r"[$€£¥]", "", answer).strip()) if len(answer) <= LONGEST else None
    return Fraction(f"{found[1]}.{found[2]}") if found else None
