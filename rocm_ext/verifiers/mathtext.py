"""Read the final answer of a mathematical text, and decimal numbers.

A text is words with runs of mathematics between them. A mark (a box, ``####``, ``<answer>``) or else the last clause
with mathematics gives the answer: its only run, or a list joined by "and", "or" and commas. If there are more runs, or
words change the value ("at least 5"), the answer is all of the text: text with words equals only itself.
"""

import re
from fractions import Fraction
from itertools import pairwise

TAIL = 20_000  # characters at the end of a text that are searched
LONGEST = 500  # characters of a readable answer
DEEPEST = 30  # depth of its brackets

# Characters that models write for LaTeX's commands and ASCII. latex2sympy silently skips some of them.
COMMANDS = (
    r"×\times ·\cdot ⋅\cdot π\pi ∞\infty ≤\le ≥\ge ≠\ne ≈\approx ±\pm °^\circ ∪\cup ∩\cap ∈\in "
    r"∅\emptyset θ\theta"
)
SIGNS = str.maketrans(
    {command[0]: command[1:] + " " for command in COMMANDS.split()}
    | dict.fromkeys("−‐‑–—﹣－", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")
    | dict.fromkeys("“”„«»「」", '"')
    | dict.fromkeys("€£¥₹", "$")
    | dict(zip("÷∕⁄％，、（）＝＋∶：٫٬’", "///%,,()=+::.,'", strict=True))
    | dict(zip("½¼¾⅓⅔", (" 1/2", " 1/4", " 3/4", " 1/3", " 2/3"), strict=True))
    | {"。": ". ", "？": "? ", "！": ". "}
)
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉", "0123456789-0123456789")
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
REWRITES = [  # they lead to one notation, in this order, and change no value
    (r"<<[^<>\n]{1,100}>>", ""),  # GSM8K's calculations: 48+24 = <<48+24=72>>72
    (r"(?m)^[ \t]*(?:[-+*•][ \t]+)+", ""),  # the bullet of a list, which is no minus
    (r"(?<=[\d)])\*\*(?=[\d(])", "^"),
    (r"\*\*+|__+|`+", ""),
    (r"(?<=\d) ?(?:\{ ?, ?\}|, ?\\!) ?(?=\d{3})", ","),  # 14{,}916 and 14,\!916
    (r"(?<=\d)(?: ?x ?| X )(?=\$?\.?\d)", "*"),  # 4 x 5
    (r"(?<=[\w}]) ?\\(?:text|mathrm|mbox) ?\{ ?[mgshlLJNWVC] ?\}", " unit "),  # 72 \text{ m}
    (r"\\(?:text\w*|math(?:rm|bf|sf|it)|[hm]box) ?\{([^{}]*)\}", r" \1 "),
    (r"(?<![\w'\"])(['\"])([^'\"\n]{1,100})\1(?!\w)", r" \2 "),
    (r"(?<=\d)(and|or)(?=[A-Z\\])", r" \1 "),
    (r"(?<!\\)\\[,;:! ]|\\q?quad\b|(?<!\\)~", " "),
    (r"-\\?\$(?=[\d.])", "-"),
    (r"\\not\s*\{?=\}?|=/=", r"\\ne "),
    (r"\\?\$|(?<!\\)\\[()\[\]]|\\displaystyle\b", " "),
    (
        r"(?<=[\d}]) *[ckm]m *\^(?:\{[23]\}|[23])|(?<=\d)(?=(?:[ckm]m|[km]g|ft|in|lb|oz|m[lL]|hrs?|min|mi|mph)\b)",
        " ",
    ),
    (r"\\([dtc]?frac)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),  # \frac 1 2
    (r"_(\w)\s+(?=\d)", r"_{\1}"),  # \log_2 3
    (r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp|sqrt)(?= ?[\d(])", r"\\\1 "),
    (r"(?<![\d.,/^}])(\d{1,20})\s+(\d{1,20}\s*/\s*\d{1,20})(?![\d.!^])", r"(\1+\2)"),  # 1 1/2
    (r"(?<=\d) *(?:percent(?:age)?|pct)\b", "%"),
    (r"(?<=\d) *dozen\b", "*12"),
    *((rf"(?<=\d) *{word}\b", rf"*10^{{{power}}}") for word, power in SCALES.items()),
]
MARKUP = [(re.compile(pattern), by) for pattern, by in REWRITES]
# 1,234 and 1 234, but not the point (1,234)
GROUPED = re.compile(
    r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?!\d|,\d| ?\d)"
)

NESTED = r"(?:\\.|[^{}\\])*"
for _ in range(30):
    NESTED = rf"(?:\\.|[^{{}}\\]|\{{{NESTED}\}})*"
BOX = re.compile(rf"\\(?:boxed|fbox)\s*\{{({NESTED})\}}|\\boxed[ \t]+([^\s{{}}$\\]+)", re.S)
HASHES = re.compile(r"####[ \t]*([^\n]+)")
# Many prompts for reinforcement learning want this tag
TAG = re.compile("<answer>(.*?)</answer>", re.S)
PHRASE = re.compile(r"\banswer\b[*_ \t]*(?:is|are|equals|=|:)[*_: \t]*", re.I)
FINAL = re.compile(rf"\bfinal {PHRASE.pattern}", re.I)
# The end of a sentence; 5! is a factorial
END = re.compile(r"\n|[.?](?=[\s*_\"')]|$)|(?<!\d)!(?=\s|$)")

WORD = re.compile(  # a word of any language; xy is a product
    r"((?<![\\{A-Za-z_^])(?:(?<!\d)\d{1,9}(?:st|nd|rd|th)\b|[A-Za-z]+'(?:s|t|re|ll)\b"
    r"|(?:[^\W\d_]{3,}|is|to|of|in|at|by|so|no|we|he|it|as|an|am|pm|on|if|or|vs|be|do|up|me|my|us|sq|[ckm]m|[km]g|ft|lb"
    r"|oz|m[lL]|hr|mi|(?<!\S)(?<![-+*/=^,(]\s)a(?!\s*[-+*/=^_<>,)}\\(]))(?![A-Za-z{])"
    r"|(?:(?![\u00b2-\u00be\u2070-\u218b])[^\W\d_\x00-\x7f\u0370-\u03ff])+))",
    re.I,
)
# Words that change, deny or doubt a value, as alternatives of regular expressions
WORDS = {
    "change": (  # the value before or after them
        "nor|not|never|cannot|anything but|no longer|n?either|maybe|perhaps|possibly|formerly|previously|originally|"
        "minus|negative|almost|nearly|plus|times|squared|cubed|factorial|hal(?:f|ves)|thirds?|quarters?|fourths|"
        "fifths|sixths|eighths|tenths"
    ),
    "change the next": (
        "or|least|most|than|(?<!add )(?<!adds )up to|over|under|above|below|exceed\\w*|between|from|percent|square|"
        "cube|reciprocal|inverse|opposite|negat\\w+|successor|predecessor|twice|double|triple|thrice|multiples?|roots?"
    ),
    "change the last": (
        "or|unless|wrong|incorrect|isn't|score|gross|lakh|crore|base|mod\\w*|if right|(?:to|through|over) \\d+|"
        f"(?:{'|'.join(SCALES)}|dozen|ten)s?"
    ),
    "deny": (  # or doubt
        "(?:can)?not|never|nobody|(?<!no )(?<!out )(?<!out a )doubt\\w*|den(?:y|ies)|hardly|unlikely|unsure|uncertain|"
        "unequal|untrue|false|except|besides|excluding|(?:could|might|may)(?= be\\b)|"
        "(?:any|every|all)\\w*(?: \\w+){0,2} but"
    ),
    "between": "of|be|the|an?|about|only|just|exactly",  # such a word and the value
    "between a denial": (
        "of|be|been|the|an?|about|only|just|exactly|equals?|to|for|it|is|was|have|that|if|whether|think|believe|say|"
        "claim|sure|certain|correct|right|true|answer|result|value|number|final|really|would|you|I|we"
    ),
}
NEXT = rf"(?: ?(?:{WORDS['between']})\b)*[\s({{]*\Z"
BEFORE = re.compile(
    rf"(?:\b(?:{WORDS['change']}|{WORDS['change the next']})|n't|至少|至多|不是|或){NEXT}", re.I
)
AFTER = re.compile(
    rf"(?:[\s)(]*|[^.?\n]{{0,25}}[\s(])(?:(?:{WORDS['change']}|{WORDS['change the last']})\b|或)",
    re.I,
)
DENIED = re.compile(
    rf"(?:\b(?:{WORDS['deny']})|n't)(?: (?:{WORDS['between a denial']}))*[\s({{]*\Z", re.I
)
# What follows a sentence and makes it a question or one of two answers
OPEN = re.compile(r"[.\s*_)\"']*(?:\?|or\b(?!,| (?:in|as|simply|equivalently)\b))", re.I)
# What makes a box a part of a formula, or denies it
LEFT = re.compile(
    r"(?:[\d+*/^_<>]|(?<!-)-|!=|\\(?:cdot|times|div|pm|neq?|sqrt|[dtc]?frac|log|ln)\b|\}(?=\s*\{)"
    rf"|\b(?:{WORDS['change']})|n't){NEXT}",
    re.I,
)
RIGHT = re.compile(
    r"[\s)]*(?:[*/+^_]|-\s?\d|\.?\d|\\(?:cdot|times|div|pm)\b|and\b[\s(]*\d|,\s*\d[\d. ]*(?:\n|\Z))"
)
# What may stand between boxes of one list
NEAR = re.compile(r".{0,9}|(?=.{0,69}\Z).*\b(?:and|or)\b.*", re.S)
SETS = re.compile(r"[<>]|\\(?:[lg]eq?|lt|gt|in|infty)\b")  # an inequality or an interval
JOIN = re.compile(r"(?:(?:and|or)\b|\w+\s*,)\W*\w?\Z")  # values of a list
CLAUSE = re.compile(
    r"(?:[,;] |(?<!or )\b(?=(?:which|it's|so)\b))(?!(?:and|or|nor)\b)(?=[A-Za-z]{2})", re.I
)
# What makes a marked value one of several
CONDITION = re.compile(
    r"\d ?\.\.|\b(?:if|when|unless|but|except|without|else|lambda|provided)\b", re.I
)
ABOUT = re.compile(
    r"(?:\s*(?:(?:[A-Za-z]\s*)?\\approx(?![a-z])|(?:about|approx(?:imately)?|roughly|around)\b))+",
    re.I,
)
FREE = re.compile(  # f(x) = x + c for any real c
    r"\b(?:for|where)\s+(?:(?:any|all|each|every|some|arbitrary)\s+)(?:(?!but|not|no|except)[a-z]{2,12}\s+){0,3}"
    r"[A-Za-z](?:\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?)?[\s.]*\Z"
)
# The label of a choice: (A) 25, A. Paris; and choices alone: (A), AC, A and C
LABEL = re.compile(
    r"(?s)\s*(?:\(([A-J])\)|([A-J])[.):])(?=\s+(?:[\w$.]|-\d|\\(?:[dt]?frac|sqrt|pi)))"
    r"(?!.*(?:\([A-J]\)|\b[A-J][.):]\s|\bor\b|\bis (?:not|wrong|incorrect|false)\b))"
)
CHOICES = re.compile(
    r"(?:[Oo]ption|[Cc]hoice)?\s*(\(?[A-J]\)?(?:(?:\s*[,;&]\s*|\s+and\s+|\s*)\(?[A-J]\)?){0,9})[.):]?"
)
# What latex2sympy would leave out without a word, or add up: "5 6" is 11 to it, "1, \ldots, 9" is 1, 9.
UNREADABLE = re.compile(
    r"\d\s+\d|\d\s*\}\s+\d|\\[a-z]*dots|\.\.|\d\s*[\"']|\\pmod|\\equiv|\\approx|\\prime|(?<!\\)~|[?#@]"
    r"|^\s*(?:[<>]|\\(?:[lg]eq?|lt|gt)\b)|(?:[<>=]|\\[lg]eq?|\\neq?)\s*$|[^\x00-\x7f]"
)
LETTER = r"(?<![\\A-Za-z])"  # the place before a name that is no command
THING = re.compile(r"\d|\\[A-Za-z]")
NUMBER = re.compile(
    r"([-+]?)\s?(\d+(?:\.\d+)?|\.\d+)(?:(?:[eE]|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*)\{?\s*([-+]?\d{1,3})\s*\}?)?"
    r"\s?(\\?%)?(?:\^\\circ|\^\{\\circ\})?"
)
PLAIN = re.compile(  # a number that is all of the text, a last line ####, or a last box
    r"(?:\A|(?:\A|\n)####|((?:\A|\n|:|\bis|(?<![!<>])=) ?\$?\\boxed\{))[ \t]?"
    r"([-+]?(?:[1-9]\d{0,2}(?:,\d{3})+|\d+)(?:\.\d+)?)(?(1)\}\$?)\.?\s*\Z"
)
AROUND = " \t\n*_,;:"  # characters around an answer that are no part of it
CALCULATION = re.compile(r"[\d \n.=*+-]+", re.A)  # characters whose meaning ends with their line


def plain(text: str, gold: bool = False) -> str | None:
    """The decimal number that a text plainly gives; None if reading it takes more than a look at its end.

    The number is all of the text or marked at its end. Unless the text is ``gold``, it may be the last line of a
    calculation without words.
    """
    if not gold and CALCULATION.fullmatch(text):
        text = text.rstrip().rpartition("\n")[2]
    match = PLAIN.search(text if len(text) <= 80 else "..." + text[-80:])
    if match is None:
        return None
    box, digits = match.groups()
    if box:
        before = text[: text.rindex(box)][-60:]
        boxes = text.count("\\boxed") + text.count("\\fbox")
        if boxes > 1 or DENIED.search(before):
            return None
    return digits.replace(",", "")


def clean(text: str) -> str:
    """The end of a text in ASCII and LaTeX, without mark-up and formula delimiters."""
    text = text[-TAIL:]
    if not text.isascii():
        text = re.sub(r"(?<=\d) ?[ckm]?m[²³]", " ", text)
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(POWERS)}}}", text)
        text = re.sub("[₀-₉]+", lambda m: f"_{{{m[0].translate(POWERS)}}}", text)
        text = text.translate(SIGNS)
        root = r"√\s?(?:\(([^()]{1,100})\)|(\d+(?:\.\d+)?|\w))"
        text = re.sub(root, lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
        text = re.sub(r"\d", lambda m: str(int(m[0])), text)
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return GROUPED.sub(lambda m: re.sub("[, ]", "", m[0]), text)


def final_answer(text: str, gold: bool = False) -> str:
    """The final answer of a text, as ``MathAnswer`` defines it, or empty. A gold text may be all answer."""
    if gold:  # "- 5" is a number here and no list item, and "\boxed{5" lacks its end
        missing = text.count("{") - text.count("}")
        text = re.sub(r"\A\s*-\s+", "-", text) + "}" * missing
    text = clean(text)
    answer = _marked(text)
    if answer is None and gold and not PHRASE.search(text):
        answer = _read(text, marked=True)
    elif answer is None:
        answer = _said(text)
    if gold:
        answer = answer.removeprefix(r"\approx ")
    return answer.strip()


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _marked(text: str) -> str | None:
    """The content of the last mark: joined boxes, a line ``####``, ``<answer>``, or "final answer is ..."."""
    marks: list[tuple[int, str]] = []  # (end, content)
    boxes = list(BOX.finditer(text))
    if boxes:
        marks.append((boxes[-1].end(), _boxed(text, boxes)))
    line = _last(HASHES, text)
    if line:
        marks.append((line.end(), _read(line[1], marked=True)))
    tag = _last(TAG, text)
    if tag:
        content = _marked(tag[1])
        if content is None:
            content = _said(tag[1]) or tag[1].strip()
        marks.append((tag.end(), content))
    phrase = _last(FINAL, text)
    if marks and phrase:
        sentence = _sentences(text[phrase.end() :])[0]
        if "\\boxed" not in sentence and THING.search(sentence):
            stated = _stated(text, phrase.start(), sentence)
            marks.append((phrase.end(), stated))
    return max(marks)[1] if marks else None


def _boxed(text: str, boxes: list[re.Match[str]]) -> str:
    """The content of the last box, with earlier boxes that little text, "and" or "or" joins to it."""
    last = boxes[-1]
    start = last.start()
    parts = [last[1] or (last[2] or "").rstrip(".,;:")]
    for box in reversed(boxes[:-1]):
        if not NEAR.fullmatch(text, box.end(), start):
            break
        start = box.start()
        if box[1] != parts[0]:
            parts.insert(0, box[1] or box[2] or "")
    content = _read(", ".join(parts), marked=True)
    before = text[max(0, start - 60) : start].rpartition("\n")[2]
    after = text[last.end() : last.end() + 60]
    changed_before = LEFT.search(before) or DENIED.search(before)
    changed_after = RIGHT.match(after) or AFTER.match(after) or OPEN.match(after)
    if changed_before or changed_after:
        return f"part of {content}"
    return content


def _sentences(text: str) -> list[str]:
    return [sentence for sentence in END.split(text) if sentence.strip()] or [""]


def _said(text: str) -> str:
    """The answer in the sentence of the last "answer is", else in the last sentence that has a formula or a number."""
    phrase = _last(PHRASE, text)
    if phrase:
        sentence = _sentences(text[phrase.end() :])[0]
        if THING.search(sentence) or not THING.search(text, phrase.end()):
            return _stated(text, phrase.start(), sentence)
    sentences = list(filter(THING.search, _sentences(text)))
    if sentences:
        return _stated(text, text.rindex(sentences[-1]), sentences[-1])
    line = text.rstrip().rpartition("\n")[2]
    if WORD.search(re.sub(r"\A\s*[A-Za-z]+:", "", line)):
        return ""
    return _stated(text, text.rindex(line), line)


def _stated(text: str, start: int, sentence: str) -> str:
    """The value in a sentence after ``start``, with a word if the text before or after it denies or doubts it."""
    value = _read(sentence)
    before = END.split(text[max(0, start - 60) : start])[-1]
    end = text.index(sentence, start) + len(sentence)
    doubted = DENIED.search(before) or OPEN.match(text, end)
    return f"perhaps {value}" if value and doubted else value


def _read(text: str, marked: bool = False) -> str:
    """The value in a cleaned text, or all of the text if words change or hide the value.

    All of a ``marked`` text is the answer, else the end of its last clause.
    """
    text = FREE.sub("", text.strip(AROUND)).strip(AROUND)
    label = LABEL.match(text)
    if label:
        return f"({label[1] or label[2]}) {_read(text[label.end() :], marked)}"
    if choice(text) or (marked and CONDITION.search(text)):
        return text
    if not marked:
        return _value_in(_last_clause(text), marked)
    about = ABOUT.match(text)
    if about:
        return f"\\approx {_read(text[about.end() :], marked)}"
    return _value_in(text, marked)


def _last_clause(text: str) -> str:
    """The last clause with mathematics, and what follows it."""
    thing = _last(THING, text)
    start = 0
    for clause in CLAUSE.finditer(text):
        if thing and clause.end() <= thing.start():
            start = clause.end()
    return text[start:]


def _value_in(text: str, marked: bool) -> str:
    """The value, or the list of values, between the words of a text; all of the text if words change or hide it."""
    pieces = WORD.split(text)  # text, word, text, ...
    values = [_bare(piece) for piece in pieces[::2]]
    runs = [i for i, value in enumerate(values) if THING.search(value)]
    if not runs:
        only_first = values[0] and not any(values[1:])
        if not (only_first and (marked or len(values) == 1)):
            return text.rstrip(".")
        runs = [0]  # x dollars
    first = runs[0]
    last = runs[-1]
    after = "".join(pieces[2 * last + 1 :])
    if AFTER.match(after[:60]):
        return text
    if not marked and len(values) > 1 and re.match(r"[^A-Za-z]*=", values[last]):
        return _result(values[last].rpartition("=")[2])  # 30 hours / 3 = 10
    before = "".join(pieces[: 2 * first])[-60:]
    called = before[-1:].isalpha() and pieces[2 * first].startswith("(")  # sum(5)
    if called or BEFORE.search(before) or DENIED.search(before):
        return text
    gaps = []
    for run, following in pairwise(runs):
        words = "".join(pieces[2 * run + 1 : 2 * following])
        gaps.append(words + pieces[2 * following][:2])
    if not all(map(JOIN.match, gaps)):
        return text
    found = [values[i] for i in runs]
    are_sets = all(map(SETS.search, found))
    by_or = all(gap.startswith("or") for gap in gaps)
    joint = r" \lor " if are_sets and by_or else ", "
    return _result(joint.join(found))


def _bare(run: str) -> str:
    """The text between two words, without punctuation and the sentence's brackets."""
    run = re.sub(r"\A(?:[\s,;:*_?/]|\.(?!\d))+", "", run).rstrip(" \t\n\r\f\v,;:.*_?")
    if run.count("(") == run.count(")") or re.search(r"[\[\]]", run):  # (1, 2] is an interval
        return run
    return run.strip("() ,.;:")


def _result(run: str) -> str:
    """A run without its calculation: the part after the last ``=``, or the equation of a variable."""
    exact, *rounded = re.split(r"\\approx(?![a-z])", run)
    if len(rounded) > 1 or (rounded and number(exact)):
        return run  # 5 \approx 6 is unreadable
    if rounded and not re.search(r"\d", exact):
        run = f"{exact}={rounded[0]}"
    else:
        run = exact
    sides = [side.strip() for side in re.split(r"(?<![!<>\\])=(?!=)", run)]
    if len(sides) == 1 or "," in run or re.search(r"[({\[][^]})]*=", run):
        return run
    numbers = list(filter(None, map(number, sides)))
    values = {value / 100 if percent else value for value, percent in numbers}
    are_simple = all(number(side) or len(side) == 1 for side in sides)
    if len(values) > 1 and are_simple:
        return f"{run} is false"  # 4 = 5, a = 6 = 5
    equation = f"{sides[0]} = {sides[-1]}"
    has_variable = re.search(LETTER + "[A-Za-z]", equation)
    return equation.strip() if has_variable else sides[-1]


def choice(answer: str) -> tuple[str, str] | None:
    """The letters of the choices that an answer names, sorted, and the text after a single one. None without one."""
    label = LABEL.match(answer)
    if label:
        return label[1] or label[2], answer[label.end() :].strip()
    match = CHOICES.fullmatch(answer.strip()) if len(answer) < 60 else None
    if match is None:
        return None
    letters = re.findall(r"\b[A-J]|(?<=[A-J])[A-J]|[A-J](?=\))", match[1])
    if len(letters) > len(set(letters)):
        return None
    return "".join(sorted(letters)), ""


def readable(answer: str) -> str | None:
    """An answer that math-verify can read completely; None if it has words, or math-verify would skip a part."""
    text = re.sub(r"\\(?:boxed|fbox)\s*\{", "{", answer)
    text = text.strip(" \n,").removesuffix(".").removeprefix("=")
    if not text or len(text) > LONGEST or WORD.search(text) or UNREADABLE.search(text):
        return None
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if depth > DEEPEST:  # the parser's time grows with the square of the depth
            return None
    return text


def number(answer: str) -> tuple[Fraction, bool] | None:
    """The exact value of a decimal number, perhaps with a power of ten, and whether it is a percentage; or None."""
    if len(answer) > LONGEST:
        return None
    text = " ".join(answer.split()).replace("- ", "-").removesuffix(".")
    if re.fullmatch(r"\([^()]*\)", text):
        text = text[1:-1]
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, digits, power, percent = match.groups()
    value = Fraction(digits) * Fraction(10) ** int(power or 0)
    return (-value if sign == "-" else value), bool(percent)
