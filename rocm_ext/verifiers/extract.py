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
FENCE = re.compile(r"^[ \t]{0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$")
SIGNS = {  # how a line of unfenced code begins
    "c": re.compile(r"^\s*(#include\b|(static |unsigned |const )*(int|void|char|long|double|float)\s+\w+\s*\()", re.M),
    "cpp": re.compile(r"^\s*(#include\b|using namespace\b|(int|void|auto)\s+\w+\s*\(|template\s*<)", re.M),
    "rust": re.compile(r"^\s*(pub\s+)?(fn|use|struct|impl|mod)\s+\w+", re.M),
    "go": re.compile(r"^\s*(package\s+\w+|func\s+\w+\()", re.M),
    "json": re.compile(r"\A\s*[\[{\"\d\-tfn]"),
}
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
    closed: dict[bool, str] = {}  # tagged -> the last such block
    unclosed: dict[bool, str] = {}
    lines: list[str] = []
    fence, tag, fenced = "", "", False
    for line in text.split("\n"):
        match = FENCE.match(line)
        if not fence:
            if match:
                fence, tag, lines, fenced = match[1], match[2].lower().strip("{}.:,"), [], True
        elif match and match[1][0] == fence[0] and len(match[1]) >= len(fence) and not match[2]:
            if not tag or tag in TAGS[language]:
                closed[bool(tag)] = "\n".join(lines)
            fence = ""
        else:
            lines.append(line)
    if fence and (not tag or tag in TAGS[language]):
        unclosed[bool(tag)] = "\n".join(lines)
    for found in (closed.get(True), unclosed.get(True), closed.get(False), unclosed.get(False)):
        if found is not None and found.strip():
            return found + "\n"
    if fenced or not text.strip():
        return None
    return text if _is_code(text, language) else None


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
