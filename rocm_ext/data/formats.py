"""The columns of well-known datasets, converted to ours.

- gsm8k: ``question``, ``answer`` -> ``prompt``, ``answer`` (the text after ``####``) and ``solution``
- mbpp: Google's ``text``, ``code``, ``test_list``, ``test_setup_code``, or the sanitized ``prompt``, ``code``,
  ``test_imports``, ``test_list`` -> ``prompt``, which shows the tests, ``tests`` (a list of asserts), ``test_setup``
  and ``solution``; or ``prompt``, ``entry_point`` and ``tests`` (source), where the prompt gets a sentence with the
  function's name
- mbppplus (evalplus/mbppplus): as mbpp's sanitized columns, with ``test``; the prompt shows ``test_list``, and ``test``
  judges
- humaneval: ``prompt``, ``test``, ``entry_point``, ``canonical_solution`` -> ``prompt``, which asks for the whole
  function, ``code_prefix`` (the given beginning), ``tests`` (source) and ``solution``. evalplus/humanevalplus has the
  same columns
- apps and taco: ``question``, ``input_output`` and ``solutions`` (JSON text), ``starter_code`` -> ``prompt``, ``cases``
  and ``solution`` (the first); calls of ``fn_name`` if the tests have one, else a program that reads stdin. Rows
  without tests are left out, and those whose tests have whole numbers of more than 4,300 digits
- livecodebench (livecodebench/code_generation_lite): ``question_content``, ``starter_code``, ``public_test_cases``,
  ``private_test_cases``, ``metadata`` -> ``prompt``, and ``cases`` of both

In the last three, words that are numbers are compared by value, as these benchmarks do: apps and taco allow a relative
error of 1e-5, livecodebench none. EvalPlus's tests (mbppplus, evalplus/humanevalplus) of close numbers also compare
shapes.
"""

import ast
import base64
import binascii
import json
import pickletools
import re
import zlib
from contextlib import suppress
from functools import partial
from typing import Any

from rocm_ext.base.types import Json, Row
from rocm_ext.data.dialects import expect, parsed, string

MAX_TESTS = 1 << 30  # bytes of a row's unpacked tests
TEXT_OPCODES = {"PROTO", "FRAME", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
TEXT_OPCODES |= {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
CLOSE = re.compile(
    r"^([ \t]+)((?:assert np\.allclose|np\.testing\.assert_allclose)\(out, exp\b)", re.M
)
# names that answers to LeetCode and LiveCodeBench use without an import
LEETCODE = """import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import pow"""
PROGRAM = "Write a Python program that reads stdin and writes stdout. Answer with all of it in one code block."
FUNCTION = "Begin with this code. Answer with all of it in one code block."


def _gsm8k(row: Row) -> Json:
    _need(row, "gsm8k", "question", "answer")
    _, mark, answer = row["answer"].rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(
            f"answer has no #### followed by a number, as gsm8k needs; found {row['answer'][-40:]!r}"
        )
    fields = _without(row, "question")
    fields["prompt"] = row["question"]
    fields["answer"] = answer.strip()
    fields["solution"] = row["answer"]
    return fields


def _mbpp(row: Row) -> Json:
    if "test_list" not in row:
        _need(row, "mbpp", "prompt", "entry_point", "tests")
        task = f"{row['prompt'].rstrip()}\n\nName the function `{row['entry_point']}`."
        return {**row, "prompt": task}
    task = "text" if "text" in row else "prompt"
    _need(row, "mbpp", task)
    tests = _texts(row, "test_list")
    if not tests:
        raise ValueError("test_list is empty; expected a list of asserts")
    setup = [*_texts(row, "test_imports", []), row.get("test_setup_code", "")]
    fields = _solved(row, "code", "text", "test_list", "test_imports", "test_setup_code")
    fields["prompt"] = _with_tests(row[task], tests)
    fields["tests"] = tests
    fields["test_setup"] = "\n".join(setup).strip()
    return fields


def _humaneval(row: Row) -> Json:
    _need(row, "humaneval", "prompt", "test", "entry_point")
    task = f"Complete this Python function. Answer with all of it in one code block.\n\n```python\n{row['prompt']}"
    fields = _solved(row, "canonical_solution", "test")
    fields["prompt"] = f"{task.rstrip()}\n```"
    fields["code_prefix"] = row["prompt"]
    fields["tests"] = _with_shapes(row["test"])
    return fields


def _mbppplus(row: Row) -> Json:
    _need(row, "mbppplus", "prompt", "test")
    shown = _texts(row, "test_list")
    setup = _texts(row, "test_imports", [])
    fields = _solved(row, "code", "test", "test_list", "test_imports")
    names = _called_functions(row.get("code", ""), "\n".join(shown))
    if len(names) == 1:
        fields["entry_point"] = names.pop()
    fields["prompt"] = _with_tests(row["prompt"], shown)
    fields["tests"] = _with_shapes(row["test"])
    fields["test_setup"] = "\n".join(setup)
    return fields


def _with_tests(task: str, tests: list[str]) -> str:
    shown = "\n".join(tests)
    return f"{task.rstrip()}\n\nYour code should pass these tests:\n\n{shown}"


def _with_shapes(tests: str) -> str:
    """Make EvalPlus's tests of close numbers compare shapes as well: in numpy, ``[]`` is close to any number."""
    return CLOSE.sub(r"\1assert np.shape(out) == np.shape(exp)\n\1\2", tests)


def _apps(row: Row) -> Json | None:
    _need(row, "apps", "question")
    try:
        tests = _json(row, "input_output", {}) or {}
    except ValueError as error:
        # a few rows have numbers that Python refuses to read
        if "integer string conversion" in str(error):
            return None
        raise
    inputs = tests.get("inputs", []) if isinstance(tests, dict) else None
    outputs = tests.get("outputs", []) if isinstance(tests, dict) else None
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError("input_output must be an object with the lists inputs and outputs")
    if len(inputs) != len(outputs):
        raise ValueError(f"input_output has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        return None
    fields = _without(row, "question", "solutions", "input_output", "starter_code")
    solutions = _json(row, "solutions", [])
    if isinstance(solutions, list) and solutions:
        fields["solution"] = solutions[0]
    starter = string(row.get("starter_code") or "", "starter_code")
    name = tests.get("fn_name")
    cases = []
    if name:
        for given, value in zip(inputs, outputs, strict=True):
            arguments = given if isinstance(given, list) else [given]
            cases.append({"input": arguments, "output": value, "unwrap": True})
        fields |= _function(row["question"], starter, string(name, "fn_name"), cases)
    else:
        for given, printed in zip(inputs, outputs, strict=True):
            cases.append({"input": _lines(given), "output": _lines(printed)})
        fields |= _program(row["question"], cases)
    fields["tolerance"] = 1e-5
    return fields


def _livecodebench(row: Row) -> Json | None:
    _need(row, "livecodebench", "question_content", "public_test_cases")
    public = _json(row, "public_test_cases", [])
    private = _private(row.get("private_test_cases") or "[]")
    tests = [*public, *private]
    if not all(map(_is_test, tests)):
        raise ValueError(
            "public_test_cases and private_test_cases must be lists of {input, output, testtype}"
        )
    if not tests:
        return None
    fields = _without(
        row,
        "question_content",
        "starter_code",
        "public_test_cases",
        "private_test_cases",
        "metadata",
    )
    if "question_id" in row and "id" not in row and "task_id" not in row:
        fields["id"] = row["question_id"]
    fields["tolerance"] = 0
    question = row["question_content"]
    kinds = {test.get("testtype") for test in tests}
    cases = []
    if kinds == {"stdin"}:
        for test in tests:
            cases.append({"input": test["input"], "output": test["output"]})
        return fields | _program(question, cases)
    if kinds != {"functional"}:
        raise ValueError(
            f"testtype must be stdin or functional in all tests, found {sorted(map(str, kinds))}"
        )
    metadata = _json(row, "metadata", {}) or {}
    name = string(metadata.get("func_name"), "metadata's func_name")
    value = partial(parsed, otherwise="a test's input or output is not JSON")
    for test in tests:
        arguments = [value(line) for line in test["input"].split("\n")]
        cases.append({"input": arguments, "output": value(test["output"])})
    starter = string(row.get("starter_code") or "", "starter_code")
    return fields | _function(question, starter, name, cases)


def _is_test(test: Any) -> bool:
    return isinstance(test, dict) and all(
        isinstance(test.get(key), str) for key in ("input", "output")
    )


FORMATS = {
    "gsm8k": _gsm8k,
    "mbpp": _mbpp,
    "mbppplus": _mbppplus,
    "humaneval": _humaneval,
    "apps": _apps,
    "taco": _apps,
    "livecodebench": _livecodebench,
}


def _program(question: str, cases: list[Json]) -> Json:
    """Return the fields of a task for a program that reads stdin."""
    return {"prompt": f"{question.rstrip()}\n\n{PROGRAM}", "cases": cases}


def _function(question: str, starter: str, name: str, cases: list[Json]) -> Json:
    """Return the fields of a task for a function, or for a method of LeetCode's ``class Solution``."""
    task = f"Name the function `{name}`."
    if starter.strip():
        task = f"{FUNCTION}\n\n```python\n{starter.rstrip()}\n```"
    return {
        "prompt": f"{question.rstrip()}\n\n{task}",
        "entry_point": f"Solution().{name}" if "class Solution" in starter else name,
        "cases": cases,
        "test_setup": LEETCODE,
    }


def _lines(text: Any) -> str:
    """Return an input or output as text; it may be a list of lines."""
    if isinstance(text, list) and all(isinstance(line, str) for line in text):
        return "\n".join(text)
    return string(text, "input_output's inputs and outputs")


def _json(row: Row, column: str, default: Any) -> Any:
    """Return the value of a column with JSON text; ``default`` if it is empty."""
    value = row.get(column)
    empty = value is None or (isinstance(value, str) and not value.strip())
    return default if empty else parsed(value, f"{column} is not JSON")


def _private(text: Any) -> list[Any]:
    """Read LiveCodeBench's private tests: JSON, or the base64 of zlib of a pickle of JSON text.

    The pickle must hold one text and nothing else: unpickling could run code, so this parses its opcodes instead.
    """
    if not isinstance(text, str):
        return expect(text, list, "private_test_cases must be text")
    with suppress(ValueError):  # it is packed
        return list(json.loads(text))
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_TESTS)
        if unpacker.unconsumed_tail:
            raise ValueError(f"it has more than {MAX_TESTS} bytes")
        opcodes = list(pickletools.genops(data))
    except (ValueError, binascii.Error, zlib.error, IndexError) as error:
        raise ValueError(
            f"private_test_cases is neither JSON nor a packed pickle: {error}"
        ) from error
    texts = [argument for code, argument, _ in opcodes if "UNICODE" in code.name]
    names = {code.name for code, _, _ in opcodes}
    if len(texts) != 1 or not names <= TEXT_OPCODES:
        raise ValueError(
            "private_test_cases must be a pickle of text alone; unpickling another could run code"
        )
    return _json({"private_test_cases": texts[0]}, "private_test_cases", [])


def _called_functions(code: Any, tests: str) -> set[str]:
    """Return the top-level functions of ``code`` that ``tests`` call; none if either is not Python."""
    try:
        body = ast.parse(string(code, "code")).body
        nodes = list(ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    defined = {statement.name for statement in body if isinstance(statement, ast.FunctionDef)}
    functions = [node.func for node in nodes if isinstance(node, ast.Call)]
    called = {function.id for function in functions if isinstance(function, ast.Name)}
    return defined & called


def _need(row: Row, format: str, *columns: str) -> None:
    missing = [column for column in columns if column not in row]
    if missing:
        raise ValueError(f"format {format} needs {', '.join(missing)}; the columns are {list(row)}")
    for column in columns:
        if not string(row[column], column).strip():
            raise ValueError(f"{column} is empty")


def _texts(row: Row, column: str, default: Any = None) -> list[str]:
    texts = expect(row.get(column, default), list, f"{column} must be a list of text")
    return [string(text, f"{column}[{i}]") for i, text in enumerate(texts)]


def _without(row: Row, *columns: str) -> Json:
    return {key: value for key, value in row.items() if key not in columns}


def _solved(row: Row, solution: str, *columns: str) -> Json:
    """Return a row without these columns; its column ``solution`` gets this name."""
    fields = _without(row, solution, *columns)
    if solution in row:
        fields["solution"] = row[solution]
    return fields
