"""Finding the code in a completion."""

import ast
import re
import warnings

TAGS = {
    "python": ("python", "py", "python3", "py3"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "rust": ("rust", "rs"),
    "go": ("go", "golang"),
    "json": ("json", "jsonc", "json5"),
}
SIGNS = {  # how a line of unfenced code begins; all repetitions are bounded, so that the search takes linear time
    "c": re.compile(
        r"^[ \t]*(#include\b|(static |unsigned |const ){0,4}(int|void|char|long|double|float)\s{1,9}\w{1,99}\s{0,9}\()",
        re.M,
    ),
    "cpp": re.compile(
        r"^[ \t]*(#include\b|using namespace\b|(int|void|auto)\s{1,9}\w{1,99}\s{0,9}\(|template\s{0,9}<)", re.M
    ),
    "rust": re.compile(r"^[ \t]*(pub\s{1,9})?(fn|use|struct|impl|mod)\s{1,9}\w", re.M),
    "go": re.compile(r"^[ \t]*(package\s{1,9}\w|func\s{1,9}\w{1,99}\()", re.M),
    "json": re.compile(r"\A\s*[\[{\"\d\-tfn]"),
}
WORD = re.compile(r"\S*")
MAX_PARSED = 200_000  # characters


def extract_code(text: str, language: str) -> str | None:
    """The code in a completion that is its answer; None if it holds no code.

    A fence is a line of three or more backticks or tildes with an optional tag. The closing fence uses the same
    character, is at least as long and has no tag. An unclosed block ends with the text. The first of these counts:

    1. the last closed block tagged for ``language`` (python: python, py, python3; ...)
    2. the last block, if it is unclosed and tagged for the language: the answer was cut off
    3. the last closed block without a tag, then the last unclosed one without a tag
    4. a text without any fence that is code: Python if it parses, another language if a line begins like code

    Blocks tagged for another language never count. Line ends become ``\\n``.

    Args:
        text: the completion.
        language: python, c, cpp, rust, go or json.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    block, fenced = fenced_code(text, language)
    if fenced or not text.strip():
        return block
    return text if _is_code(text, language) else None


def fenced_code(text: str, language: str) -> tuple[str | None, bool]:
    """The block that :func:`extract_code` finds, and whether the text has any fence."""
    closed: dict[bool, str] = {}  # tagged -> the last such block
    unclosed: dict[bool, str] = {}
    lines: list[str] = []
    fence, tag, fenced = "", "", False
    for line in text.split("\n"):
        marker = _fence(line)
        if not fence:
            if marker:
                fence, tag, lines, fenced = marker[0], marker[1].lower().strip("{}.:,"), [], True
        elif marker and marker[0].startswith(fence) and not marker[1]:
            if not tag or tag in TAGS[language]:
                closed[bool(tag)] = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    if fence and (not tag or tag in TAGS[language]):
        unclosed[bool(tag)] = "\n".join(lines)
    for block in (closed.get(True), unclosed.get(True), closed.get(False), unclosed.get(False)):
        if block is not None and block.strip():
            return block + "\n", fenced
    return None, fenced


def _fence(line: str) -> tuple[str, str] | None:
    """The fence that a line is, and its tag; None if it is no fence."""
    bare = line.lstrip(" \t")
    rest = bare.lstrip(bare[:1]) if bare[:1] in ("`", "~") else bare
    fence = bare[: len(bare) - len(rest)]
    if len(fence) < 3 or len(line) - len(bare) > 3 or "`" in rest:
        return None
    return fence, WORD.match(rest.lstrip(" \t"))[0]  # type: ignore[index]


def parse_python(source: str) -> ast.Module:
    """The syntax tree of ``source``, without printing the parser's warnings.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is not Python, or nested too deeply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _is_code(text: str, language: str) -> bool:
    if language != "python":
        return bool(SIGNS[language].search(text))
    if len(text) > MAX_PARSED:
        return False
    try:
        body = parse_python(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    # a word, or words with commas, parse as an expression
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in body)
