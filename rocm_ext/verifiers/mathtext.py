"""Where the final answer of a mathematical text stands, and the decimal numbers among answers.

A text is words and runs of mathematics between them. The answer is what a mark holds (a box, ``####``, ``<answer>``,
"answer is"), else the last run. The words beside a run may change its value ("at least 5"): then the words stay, and
text with words equals the same words only.
"""

# ruff: noqa: E501 - patterns that are read in one piece

import re
from fractions import Fraction

TAIL = 20_000  # characters at the end of a text that are searched
LONGEST = 500  # characters of an answer that is read

# What a model writes for ASCII and LaTeX's commands. latex2sympy skips some of these characters without a word.
COMMANDS = (
    r"×\times ·\cdot ⋅\cdot π\pi ∞\infty ≤\le ≥\ge ≠\ne ≈\approx ±\pm °^\circ ∪\cup ∩\cap ∈\in ∅\emptyset θ\theta"
)
SIGNS = str.maketrans(
    {command[0]: command[1:] + " " for command in COMMANDS.split()}
    | dict.fromkeys("−‐‑–—﹣－", "-")
    | dict.fromkeys("\u00a0\u2007\u2009\u202f", " ")
    | dict.fromkeys("“”„«»「」", '"')
    | dict.fromkeys("€£¥₹", "$")
    | dict(zip("÷∕⁄％，、（）＝＋∶：٫٬’", "///%,,()=+::.,'", strict=True))
    | dict(zip("½¼¾⅓⅔。？！", [" 1/2", " 1/4", " 3/4", " 1/3", " 2/3", ". ", "? ", ". "], strict=True))
)
POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
REWRITES = [  # mark-up that changes no value, in this order
    (r"<<[^<>\n]{1,100}>>", ""),  # GSM8K's calculations: 48+24 = <<48+24=72>>72
    (r"(?m)^[ \t]*(?:[-+*•][ \t]+)+", ""),  # the bullet of a list, which is no minus
    (r"(?<=[\d)])\*\*(?=[\d(])", "^"),
    (r"\*\*+|__+|`+", ""),
    (r"(?<=\d) ?(?:\{ ?, ?\}|, ?\\!) ?(?=\d{3})", ","),  # 14{,}916 and 14,\!916
    (r"(?<=\d)(?: ?x ?| X )(?=\$?\.?\d)", "*"),  # 4 x 5
    (r"(?<=[\w}]) ?\\(?:text|mathrm|mbox) ?\{ ?[mgshlLJNWVC] ?\}", " unit "),  # 72 \text{ m}
    (r"\\(?:text\w*|math(?:rm|bf|sf|it)|[hm]box) ?\{([^{}]*)\}", r" \1 "),
    (r'\\"', '"'),
    (r"(?<![\w'\"])(['\"])([^'\"\n]{1,100})\1(?!\w)", r" \2 "),
    (r"(?<!\\)\\!", ""),
    (r"(?<=\d)(and|or)(?=[A-Z\\])", r" \1 "),
    (r"(?<!\\)\\[,;: ]|\\q?quad\b|(?<!\\)~", " "),
    (r"-\\?\$(?=[\d.])", "-"),
    (r"\\?\$|(?<!\\)\\[()\[\]]|\\displaystyle\b", " "),
    (r"(?<=[\d}]) *[ckm]m *\^(?:\{[23]\}|[23])|(?<=\d)(?=(?:[ckm]m|[km]g|ft|in|lb|oz|m[lL]|hrs?|min|mi|mph)\b)", " "),
    (r"\\([dtc]?frac)\s*(\d)\s*(\d)", r"\\\1{\2}{\3}"),  # \frac 1 2
    (r"_(\w)\s+(?=\d)", r"_{\1}"),  # \log_2 3
    (r"(?<![\\A-Za-z])(sin|cos|tan|log|ln|exp|sqrt)(?= ?[\d(])", r"\\\1 "),
]
MARKUP = [(re.compile(pattern), by) for pattern, by in REWRITES]

BRACE = re.compile(r"\\(?:boxed|fbox)[ \t]*\{|\\boxed[ \t]+([^\s{}$\\]+)|(?<!\\)[{}]")
HASHES = re.compile(r"####[ \t]*([^\n]+)")
TAG = "<answer>", "</answer>"  # as many prompts for reinforcement learning want it
PHRASE = re.compile(r"\b(final )?answer\b[*_ \t]*(?:is|are|equals|=|:)[*_: \t]*", re.I)
END = re.compile(r"\n|[.?](?=[\s*_\"')]|$)|(?<!\d)!(?=\s|$)")  # of a sentence; 5! is a factorial

WORD = re.compile(  # of any language; xy is a product
    r"(?<![\\{A-Za-z_^])(?:\d+(?:st|nd|rd|th)\b|[A-Za-z]+'(?:s|t|re|ll)\b|(?:[^\W\d_]{3,}"
    r"|is|to|of|in|at|by|so|no|we|he|it|as|an|am|pm|on|if|or|vs|be|do|up|me|my|us|sq|[ckm]m|[km]g|ft|lb|oz|m[lL]|hr|mi|(?<!\S)(?<![-+*/=^,(]\s)a(?!\s*[-+*/=^_<>,)}\\(]))"
    r"(?![A-Za-z{])|[^\W\d_\x00-\x7f\u0370-\u03ff]+)",
    re.I,
)
PARTS = r"hal(?:f|ves)|thirds?|quarters?|fourths|fifths|sixths|eighths|tenths|hundredths"
DENIED = r"not|never|cannot|anything but|no longer|n?either|nor|maybe|perhaps|possibly|formerly|previously|originally"
BEFORE = re.compile(  # what changes the value of the run after it
    rf"(?:\b(?:{DENIED}|least|most|than|(?<!add )(?<!adds )up to|over|under|above|below|exceed\w*|before|after|minus|negative|plus|times|between|from"
    rf"|divided by|multiplied by|out|{PARTS}|percent|squared?|cubed?|reciprocal|inverse|opposite|negat\w+|successor"
    rf"|predecessor|digits|twice|double|triple|thrice|multiples?|roots?|power|factorial|remainder)|n't|至少|至多|不是|或)"
    rf"(?: ?(?:of|be|the|an?|about|only|just|exactly)\b)*[\s(]*$",
    re.I,
)
AFTER = re.compile(  # what changes the value of the run before it
    rf"(?:[\s(]*|[^.?\n]{{0,25}}[\s(])(?:or|maybe|perhaps|possibly|formerly|previously|unless|(?:is|was|are) (?:not|wrong|incorrect)|isn't"
    rf"|squared|cubed|factorial|(?:and )?(?:an? |one |two |three )?(?:{PARTS})|score|gross|lakh|crore|(?:in )?base|mod\w*|hundreds|thousands"
    rf"|[mbtr]+illions|dozens|tens|if right|plus|minus|times|(?:to|through|over) \$?\d|或)\b",
    re.I,
)
JOIN = re.compile(r"(?:[\w\s]{1,20},)?[\s,;&]*(?:(?:and|or)\b)?[\s,;&]*", re.I)
LENGTH = r"hours?|hrs?|minutes?|mins?|days?|weeks?|months?|years?|feet|foot|ft|dollars?|pounds?|lbs?|yards?|k?m|k?g|met(?:er|re)s?"
UNCLEAR = re.compile(  # between two numbers: neither alone is the answer
    rf"[^.]*\b(?:or|nor)\b[^.]*|(?:\w+\s+)?(?:to|through|versus|vs)\s+(?:(?:about|the)\s+)?|of\s+|(?:{LENGTH})\W*"
    rf"|(?:\w+\s+){{0,2}}and\s+|[^(]*\([^)]*",
    re.I,
)
ASIDE = re.compile(
    r"(?!.*\b(?:or|not|but|so|and|less|minus|plus|times)\b)[^,;(]*\b(?:in|for|from|after|during|on|by|to [a-z]{3,})\b[^,;(]*"
)
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
SCALE = re.compile(rf"[\s(]*({'|'.join(SCALES)}|%|percent|percentage|pct)(?![A-Za-z])", re.I)

SPACED = r"[1-9]\d{0,2}(?: \d{3})+"
GROUPED = r"[1-9]\d{0,2}(?:,\d{3})+"
EUROPEAN = r"[1-9]\d{0,2}(?:\.\d{3})+,\d+|[1-9]\d{0,2}(?:\.\d{3}){2,}"
POWER = r"(?:[eE]|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*)\{?\s*([-+]?\d{1,3})\s*\}?"
NUMBER = re.compile(
    rf"([-+]?)\s?(?:({EUROPEAN})|((?:{SPACED}|{GROUPED}|\d+)(?:\.\d+)?|\.\d+))(?:{POWER})?"
    rf"\s?({'|'.join(SCALES)})?\s?(\\?%)?(?:\^\\circ|\^\{{\\circ\}})?"
)
MIXED = re.compile(r"(?<![\d.,/^}])(\d{1,20})\s+(\d{1,20}\s*/\s*\d{1,20})(?![\d.!^])")
# What latex2sympy would leave out without a word, or add up: "5 6" is 11 to it, "1, \ldots, 9" is 1, 9.
UNREADABLE = re.compile(
    r"\d\s+\d|\d\s*\}\s+\d|\\[a-z]*dots|\.\.|\d\s*[\"']|\\pmod|\\equiv|\\prime|(?<!\\)~|[?#@]"
    r"|^\s*(?:[<>]|\\(?:[lg]eq?|lt|gt)\b)|(?:[<>=]|\\[lg]eq?|\\neq?)\s*$|[^\x00-\x7f]"
)
THING = re.compile(r"\d|\\[A-Za-z]")
ROWS = re.compile(r"\\begin\{(\w*matrix|cases|array)\}.{0,400}?\\end\{\1\}", re.S)
BESIDE = re.compile(  # what makes the box before it a part
    r"[\s)]*(?:[*/+]\s*[\d\\(]|-\s?\d|\.?\d|\\(?:cdot|times|div|pm)\b|(?:or|and)\b[\s(]*(?:maybe\s+)?\d|,\s*\d[\d. ]*(?:\n|\Z))"
)
BESIDE_LEFT = re.compile(  # what makes the box after it a part
    rf"(?:\d|[+*/^_<>]\s*|!=\s*|\\(?:cdot|times|div|pm|neq?|sqrt|[dtc]?frac|log|ln)\b\s*|\}}\s*(?=\{{)|(?:\b(?:{DENIED})|n't)(?: be| just| only| exactly)?\s+)[({{\s]*\Z",
    re.I,
)

PLAIN = re.compile(  # a number that needs no search: the whole text, a last line ####, or a last box
    rf"(?:\A|(?:\A|\n)####|((?:\A|\n|:|\bis|(?<![!<>])=) ?\$?\\boxed\{{))[ \t]?([-+]?(?:{GROUPED}|\d+)(?:\.\d+)?)(?(1)\}}\$?)\.?\s*\Z"
)


def plain(text: str) -> Fraction | None:
    """The number that a text certainly gives, found without a search; None if it takes one. Linear."""
    found = PLAIN.search(text if len(text) <= 80 else "..." + text[-80:])
    if found is None or (found[1] and text.count("\\boxed") > 1):
        return None
    return Fraction(found[2].replace(",", ""))


def clean(text: str) -> str:
    """The end of a text without mark-up and formula delimiters, its signs, digits and powers in ASCII and LaTeX."""
    text = text[-TAIL:]
    if not text.isascii():
        text = re.sub(r"(?<=\d) ?[ckm]?m[²³]", " ", text)
        text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: f"^{{{m[0].translate(POWERS)}}}", text).translate(SIGNS)
        text = re.sub(r"√\s?(?:\(([^()]{1,100})\)|(\d+(?:\.\d+)?|\w))", lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text)
        text = re.sub(r"[^\W\d_]|\d", lambda m: str(int(m[0])) if m[0].isdecimal() else m[0], text)
    for pattern, by in MARKUP:
        text = pattern.sub(by, text)
    return ROWS.sub(lambda m: m[0].replace("\n", " "), text)


def gold_answer(text: str) -> str:
    """The answer in a row's field: the marked one, as in :func:`final_answer`, or the whole text."""
    text = clean(re.sub(r"\A\s*-\s+", "-", text))
    found = _marked(text)
    if found is None and PHRASE.search(text):
        found = _said(text)
    return _read(text, True) if found is None else found


def final_answer(text: str) -> str | None:
    """The text of a completion's final answer, as ``MathAnswer`` defines it; None if it has none."""
    text = clean(text)
    found = _marked(text)
    return (_said(text) or "" if found is None else found).strip() or None


def _marked(text: str) -> str | None:
    """What the last mark holds: joined boxes, a line ``####``, ``<answer>``, or a sentence "final answer is ..."."""
    found = [(m.end(), _read(m[1], True)) for m in [*HASHES.finditer(text)][-1:]]
    found += _boxes(text)
    end = text.rfind(TAG[1])
    if (start := text.rfind(TAG[0], 0, max(end, 0))) >= 0:
        inner = text[start + len(TAG[0]) : end]
        found.append((end + 1, _marked(inner) or _said(inner) or inner.strip()))
    for match in [m for m in PHRASE.finditer(text) if m[1]][-1:]:
        sentence = _sentence(text, match.end())
        if found and "\\boxed" not in sentence and THING.search(sentence):
            found.append((match.end() + len(sentence), _read(sentence)))
    return max(found)[1] if found else None


def _boxes(text: str) -> list[tuple[int, str]]:
    """End and content of the last box, and of those before it that it is joined to: by little text, or by and/or."""
    boxes: list[tuple[int, int, str]] = []
    opened = []
    for match in BRACE.finditer(text):
        if match[1]:
            boxes.append((match.start(), match.end(), match[1].rstrip(".,;:")))
        elif match[0] != "}":
            opened.append(match)
        elif opened and (start := opened.pop())[0] != "{":
            while boxes and boxes[-1][0] > start.start():  # a box inside another is part of it
                boxes.pop()
            boxes.append((start.start(), match.end(), text[start.end() : match.start()]))
    if not boxes:
        return []
    first, end, inner = boxes.pop()
    parts = [inner]
    while boxes:
        between = text[boxes[-1][1] : first]
        if len(between) >= 10 and not (len(between) < 70 and re.search(r"\b(?:and|or)\b", between)):
            break
        first, _, inner = boxes.pop()
        parts += [inner] * (inner != parts[-1])
    inner = _read(", ".join(reversed(parts)), True)
    before, after = text[max(0, first - 60) : first].rpartition("\n")[2], text[end : end + 60]
    if part := re.match(r"\s{0,2}[\^_](?:\{[^{}]*\}|\w)", after):
        inner += part[0].strip()
    elif scale := SCALE.match(after.lstrip(" )")):
        inner += _scale(scale)
    elif BESIDE.match(after) or AFTER.match(after):
        return [(end, f"part of {inner}")]
    if minus := re.search(r"(?<![-\d)}])-[ \t]*\Z", before.rstrip(" ({")):
        inner = f"-{inner}" if number(inner) else f"-({inner})"
        before = before[: minus.start()]
    return [(end, f"part of {inner}" if BESIDE_LEFT.search(before) else inner)]


def _scale(match: re.Match | None) -> str:
    return "" if match is None else f" {match[1].lower()}" if match[1].lower() in SCALES else "%"


def _sentence(text: str, start: int) -> str:
    """The sentence that begins at ``start``, or on the next line that has text."""
    rest = text[start:].lstrip()
    end = END.search(rest)
    return rest[: end.start()] if end else rest


def _said(text: str) -> str | None:
    """The answer in the sentence of the last "answer is", else in the last sentence that has a formula or a number."""
    things = [m.start() for m in THING.finditer(text)]
    for match in [*PHRASE.finditer(text)][-1:]:
        sentence = _sentence(text, match.end())
        if THING.search(sentence) or not things or things[-1] < match.end():
            return _read(sentence)
    if not things:
        line = text.rstrip().rpartition("\n")[2]
        return None if WORD.search(re.sub(r"\A\s*[A-Za-z]+:", "", line)) else _read(line)
    start = max((m.end() for m in END.finditer(text) if m.end() <= things[-1]), default=0)
    return _read(_sentence(text, start))


def _read(text: str, marked: bool = False) -> str:
    """The value that a sentence gives, or all of it where words change or hide the value.

    Args:
        text: cleaned.
        marked: all of the text is the answer; else its last run of mathematics is.
    """
    text = text.strip(" \t\n*_,;:")
    edges = [0, *(edge for word in WORD.finditer(text) for edge in word.span()), len(text)]
    spans = [_trim(text, *edges[i : i + 2]) for i in range(0, len(edges), 2)]
    runs = [span for span in spans if THING.search(text, *span)]
    if not runs and (marked or len(spans) == 1) and [span for span in spans if span[0] < span[1]] == spans[:1]:
        runs = spans[:1]  # x dollars
    if not runs:
        return text.rstrip(".")
    last = runs.pop()
    aside = runs and not marked and "=" in text[slice(*runs[-1])] and "=" not in text[slice(*last)]
    if aside and ASIDE.fullmatch(text[runs[-1][1] : last[0]]):  # the result in: 7 * 4 = 28 berries in 4 days
        last = runs.pop()
    first, parts = last, [text[slice(*last)]]
    if calculated := not marked and len(spans) > 1 and re.match(r"[^A-Za-z]*=", parts[0]):  # 30 hours / 3 = 10
        parts = [parts[0].rpartition("=")[2]]
    while runs and not calculated:
        between = text[runs[-1][1] : first[0]]
        if JOIN.fullmatch(between):
            first = runs.pop()
            parts.append(text[slice(*first)])
        elif marked or UNCLEAR.fullmatch(between[:80].strip(" ,") + " "):
            return text
        else:
            break
    scale = SCALE.match(text, last[1])
    refused = AFTER.match(text, scale.end() if scale else last[1], last[1] + 60)
    if refused or (not calculated and BEFORE.search(text[max(0, first[0] - 60) : first[0]])):
        return text
    return _value(", ".join(reversed(parts)).strip()) + _scale(scale)


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    """Where a run between words begins and ends without punctuation and the brackets of the sentence."""
    run = text[start:end]
    bare = re.sub(r"\A(?:[\s,;:*_?/]|\.(?!\d))+|[\s,;:.*_?]+\Z", "", run)
    if not re.search(r"[\[\]]", bare):
        while bare.endswith("(") or (bare.count("(") < bare.count(")") and bare.endswith(")")):
            bare = bare[:-1].rstrip(" ,.;:")
        while bare.startswith(")") or (bare.count("(") > bare.count(")") and bare.startswith("(")):
            bare = bare[1:].lstrip()
    start += run.find(bare)
    return start, start + len(bare)


def _value(run: str) -> str:
    """A run without its label and calculation: what stands after the last ``=``, with a variable on its left."""
    run = re.sub(r"\A[A-Za-z]:\s", "", run)
    sides = [side.strip() for side in re.split(r"(?<![!<>\\])=(?!=)", run)]
    if len(sides) == 1 or re.search(r"[({\[][^]})]*=", run):
        return run
    if not re.search(r"[(\[{]", run):  # the library reads x = 1,350 as two values
        sides = [re.sub(rf"(?<![\d.,]){GROUPED}(?![\d,])", lambda m: m[0].replace(",", ""), side) for side in sides]
    if any("," in side for side in sides):
        return run
    values = {value[0] / (100 if value[1] else 1) for side in sides if (value := number(side))}
    if len(values) > 1 and all(number(side) or len(side) == 1 for side in sides):
        return f"{run} is false"  # 4 = 5, a = 6 = 5
    variable = re.search(r"(?<![\\A-Za-z])[A-Za-z]", sides[0] + " " + sides[-1])
    return f"{sides[0]} = {sides[-1]}".strip() if variable else sides[-1]


def readable(answer: str) -> str | None:
    """An answer as math-verify reads it in full; None if it has words, or math-verify would leave a part out."""
    if len(answer) > LONGEST or WORD.search(answer):
        return None
    text = re.sub(rf"(?<![\d.,]){SPACED}(?![\d,]|\s\d)", lambda match: match[0].replace(" ", ""), answer)
    text = MIXED.sub(r"(\1+\2)", re.sub(r"\\(?:boxed|fbox)\s*\{", "{", text)).strip(" \n,.")
    exact, *rounded = re.split(r"\\approx(?![a-z])", text)
    if len(rounded) > 1 or (rounded and number(exact)):  # 5 \approx 6
        return None
    if rounded:
        text = exact if re.search(r"\d", exact) else exact + "=" + rounded[0]
    text = text.strip().removeprefix("=")
    return None if not text or UNREADABLE.search(text) else text


def number(answer: str, comma: bool = False) -> tuple[Fraction, bool] | None:
    """The exact value of a decimal number and whether it is a percentage; None for any other text.

    It may have thousands separators, a power of ten and a scale such as "million"; with ``comma``, it is ``2,74``.
    """
    bare = " ".join(answer.split()).replace("- ", "-").rstrip(".") if len(answer) <= LONGEST else ""
    if comma:
        return (Fraction(bare.replace(",", ".")), False) if re.fullmatch(r"[-+]?\d+,\d+", bare) else None
    found = NUMBER.fullmatch(bare[1:-1] if re.fullmatch(r"\([^()]*\)", bare) else bare)
    if found is None:
        return None
    sign, european, digits, power, scale, percent = found.groups()
    value = Fraction(european.replace(".", "").replace(",", ".") if european else re.sub("[ ,]", "", digits))
    value *= SCALES.get(scale, 1) * Fraction(10) ** int(power or 0)
    return (-value if sign == "-" else value), bool(percent)
