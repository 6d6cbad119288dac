"""Extract the code from a completion."""

import ast
import contextlib
import re
import warnings
from collections.abc import Callable
from typing import Any

TAGS = {
    "python": ("python", "py", "python3", "py3"),
    "c": ("c",),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "rust": ("rust", "rs"),
    "go": ("go", "golang"),
    "json": ("json", "jsonc", "json5"),
}
SIGNS = {  # the beginning of a line of unfenced code; bounded repetitions keep the search linear
    "c": re.compile(
        r"^[ \t]*(#include\b|(static |unsigned |const ){0,4}(int|void|char|long|double|float)\s{1,9}\w{1,99}\s{0,9}\()",
        re.M,
    ),
    "cpp": re.compile(
        r"^[ \t]*(#include\b|using namespace\b|(int|void|auto)\s{1,9}\w{1,99}\s{0,9}\(|template\s{0,9}<)",
        re.M,
    ),
    "rust": re.compile(r"^[ \t]*(pub\s{1,9})?(fn|use|struct|impl|mod)\s{1,9}\w", re.M),
    "go": re.compile(r"^[ \t]*(package\s{1,9}\w|func\s{1,9}\w{1,99}\()", re.M),
    "json": re.compile(r"\A\s*[\[{\"\d\-tfn]"),
}
# A list's marker may precede the fence
FENCE = re.compile(r"[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?(?=(`{3,}|~{3,})[ \t]*(\S*))")
REASONING = re.compile(
    r"(?:\A|\n)[ \t]*(?:<think>|\[THINK\]).*?(?:</think>|\[/THINK\]|\Z)|\A.*?(?:</think>|\[/THINK\])(?![\"'\\])",
    re.S,
)
MAX_PARSED = 200_000  # characters


def answer_text(text: str) -> str:
    """A completion without its reasoning, which ``<think>`` or the prompt opens, and with ``\\n`` as line ends.

    It is empty if the reasoning does not end.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "think>" in text or "THINK]" in text:
        return REASONING.sub("", text)
    return text


def extract_code(text: str, language: str, fits: Callable[[str], Any] = bool) -> str | None:
    """The code that a completion, after its reasoning, gives as the answer; None if it has none.

    The last block that ``fits`` counts, else the last block, in this order:

    1. the closed blocks tagged for ``language`` (python: python, py, python3; ...)
    2. the last block, if it is unclosed and tagged for the language: the answer was cut off
    3. the closed blocks without a tag, then the last unclosed one without a tag
    4. a text without fences that is code: Python if it parses, another language if a line begins like code

    Blocks tagged for another language never count. Line ends become ``\\n``.

    Args:
        text: the completion.
        language: a key of TAGS.
        fits: a predicate for blocks, such as "defines ``main``".
    """
    groups, fenced = fenced_code(text, language)
    if fenced:
        blocks = [block for group in groups for block in reversed(group)]
        return next(filter(fits, blocks), blocks[0] if blocks else None)
    text = answer_text(text)
    if language != "python":
        return text if SIGNS[language].search(text) else None
    if len(text) > MAX_PARSED:
        return None
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        for node in parse_python(text).body:
            # prose can parse as an expression
            if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call):
                return text
    return None


def fenced_code(text: str, language: str) -> tuple[list[list[str]], bool]:
    """The blocks that may be the answer, in the order of :func:`extract_code`, and whether the text has a fence.

    A fence is a line of three or more backticks or tildes with an optional tag, also in a list item. The closing fence
    uses the same character, is at least as long, is indented by less than four columns more and has no tag. An unclosed
    block ends with the text. A block's lines lose the indent of its fence.
    """
    tagged: list[str] = []  # closed blocks
    untagged: list[str] = []
    lines: list[str] = []
    tags = ("", *TAGS[language])
    fence = tag = indent = ""
    fenced = False
    for line in answer_text(text).split("\n"):
        bare = line.strip()
        if not fence:
            marker = FENCE.match(line)
            if marker and "`" not in line[marker.end(1) :]:
                indent = " " * marker.end() if marker[0].strip() else marker[0]
                fence = marker[1]
                tag = marker[2].lower().strip("{}.:,")
                lines = []
                fenced = True
            continue
        closes = bare.startswith(fence) and not bare.strip(fence[0])
        if closes and line.index(bare) < len(indent) + 4:
            closed = tagged if tag else untagged
            closed += _block(lines, indent, tag in tags)
            fence = ""
        else:
            lines.append(line)
    unclosed = _block(lines, indent, tag in tags) if fence else []
    groups = [tagged, unclosed, untagged] if tag else [tagged, untagged, unclosed]
    return list(filter(None, groups)), fenced


def _block(lines: list[str], indent: str, ours: bool) -> list[str]:
    """The block between two fences, without the opening fence's indent; empty if it is not ``ours``."""
    first = next(filter(str.strip, lines), "")
    if indent and first.startswith(indent):
        size = len(indent)
        for i, line in enumerate(lines):
            lines[i] = line[size:] if line.startswith(indent) else line.lstrip()
    return ["\n".join(lines) + "\n"] if ours and first else []


def parse_python(source: str) -> ast.Module:
    """``ast.parse(source)``, without the parser's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)
