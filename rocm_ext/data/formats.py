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
CLOSE = re.compile(r"^([ \t]+)((?:assert np\.allclose|np\.testing\.assert_allclose)\(out, exp\b)", re.M)
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
        raise ValueError(f"answer has no #### followed by a number, as gsm8k needs; found {row['answer'][-40:]!r}")
    rest = _without(row, "question")
    return {**rest, "prompt": row["question"], "answer": answer.strip(), "solution": row["answer"]}


def _mbpp(row: Row) -> Json:
    if "test_list" not in row:
        _need(row, "mbpp", "prompt", "entry_point", "tests")
        return {**row, "prompt": f"{row['prompt'].rstrip()}\n\nName the function `{row['entry_point']}`."}
    task = "text" if "text" in row else "prompt"
    _need(row, "mbpp", task)
    if not (tests := _texts(row, "test_list")):
        raise ValueError("test_list is empty; expected a list of asserts")
    setup = "\n".join([*_texts(row, "test_imports", []), row.get("test_setup_code", "")]).strip()
    rest = _solved(row, "code", "text", "test_list", "test_imports", "test_setup_code")
    return {**rest, "prompt": _with_tests(row[task], tests), "tests": tests, "test_setup": setup}


def _humaneval(row: Row) -> Json:
    _need(row, "humaneval", "prompt", "test", "entry_point")
    rest = _solved(row, "canonical_solution", "test")
    task = f"Complete this Python function. Answer with all of it in one code block.\n\n```python\n{row['prompt']}"
    return {**rest, "prompt": f"{task.rstrip()}\n```", "code_prefix": row["prompt"], "tests": _with_shapes(row["test"])}


def _mbppplus(row: Row) -> Json:
    _need(row, "mbppplus", "prompt", "test")
    shown, setup = _texts(row, "test_list"), "\n".join(_texts(row, "test_imports", []))
    rest = _solved(row, "code", "test", "test_list", "test_imports")
    names = _called_functions(row.get("code", ""), "\n".join(shown))
    rest |= {"entry_point": names.pop()} if len(names) == 1 else {}
    prompt = _with_tests(row["prompt"], shown)
    return {**rest, "prompt": prompt, "tests": _with_shapes(row["test"]), "test_setup": setup}


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
        if "integer string conversion" in str(error):  # a few rows have numbers that Python refuses to read
            return None
        raise
    if not isinstance(tests, dict) or not all(isinstance(tests.get(k, []), list) for k in ("inputs", "outputs")):
        raise ValueError("input_output must be an object with the lists inputs and outputs")
    inputs, outputs = tests.get("inputs", []), tests.get("outputs", [])
    if len(inputs) != len(outputs):
        raise ValueError(f"input_output has {len(inputs)} inputs and {len(outputs)} outputs")
    if not inputs:
        return None
    solutions = _json(row, "solutions", [])
    rest = _without(row, "question", "solutions", "input_output", "starter_code")
    rest |= {"solution": solutions[0]} if isinstance(solutions, list) and solutions else {}
    starter = string(row.get("starter_code") or "", "starter_code")
    if name := tests.get("fn_name"):
        cases = [
            {"input": args if isinstance(args, list) else [args], "output": value, "unwrap": True}
            for args, value in zip(inputs, outputs, strict=True)
        ]
        return {**rest, **_function(row["question"], starter, string(name, "fn_name"), cases), "tolerance": 1e-5}
    pairs = zip(map(_lines, inputs), map(_lines, outputs), strict=True)
    return {**rest, **_program(row["question"], pairs), "tolerance": 1e-5}


def _livecodebench(row: Row) -> Json | None:
    _need(row, "livecodebench", "question_content", "public_test_cases")
    tests = [*_json(row, "public_test_cases", []), *_private(row.get("private_test_cases") or "[]")]
    if not all(
        isinstance(t, dict) and isinstance(t.get("input"), str) and isinstance(t.get("output"), str) for t in tests
    ):
        raise ValueError("public_test_cases and private_test_cases must be lists of {input, output, testtype}")
    if not tests:
        return None
    rest = _without(row, "question_content", "starter_code", "public_test_cases", "private_test_cases", "metadata")
    rest |= {} if "id" in row or "task_id" in row or "question_id" not in row else {"id": row["question_id"]}
    kinds = {test.get("testtype") for test in tests}
    if kinds == {"stdin"}:
        pairs = ((test["input"], test["output"]) for test in tests)
        return {**rest, **_program(row["question_content"], pairs), "tolerance": 0}
    if kinds != {"functional"}:
        raise ValueError(f"testtype must be stdin or functional in all tests, found {sorted(map(str, kinds))}")
    name = string((_json(row, "metadata", {}) or {}).get("func_name"), "metadata's func_name")
    value = partial(parsed, otherwise="a test's input or output is not JSON")
    cases = [
        {"input": [value(line) for line in test["input"].split("\n")], "output": value(test["output"])}
        for test in tests
    ]
    starter = string(row.get("starter_code") or "", "starter_code")
    return {**rest, **_function(row["question_content"], starter, name, cases), "tolerance": 0}


FORMATS = {
    "gsm8k": _gsm8k,
    "mbpp": _mbpp,
    "mbppplus": _mbppplus,
    "humaneval": _humaneval,
    "apps": _apps,
    "taco": _apps,
    "livecodebench": _livecodebench,
}


def _program(question: str, pairs: Any) -> Json:
    """Return the fields of a task for a program that reads stdin, from (input, output) pairs."""
    cases = [{"input": given, "output": wanted} for given, wanted in pairs]
    return {"prompt": f"{question.rstrip()}\n\n{PROGRAM}", "cases": cases}


def _function(question: str, starter: str, name: str, cases: list[Json]) -> Json:
    """Return the fields of a task for a function, or for a method of LeetCode's ``class Solution``."""
    entry = f"Solution().{name}" if "class Solution" in starter else name
    asks = f"{FUNCTION}\n\n```python\n{starter.rstrip()}\n```" if starter.strip() else f"Name the function `{name}`."
    return {"prompt": f"{question.rstrip()}\n\n{asks}", "entry_point": entry, "cases": cases, "test_setup": LEETCODE}


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
        raise ValueError(f"private_test_cases is neither JSON nor a packed pickle: {error}") from error
    texts = [argument for code, argument, _ in opcodes if "UNICODE" in code.name]
    if len(texts) != 1 or not {code.name for code, _, _ in opcodes} <= TEXT_OPCODES:
        raise ValueError("private_test_cases must be a pickle of text alone; unpickling another could run code")
    return _json({"private_test_cases": texts[0]}, "private_test_cases", [])


def _called_functions(code: Any, tests: str) -> set[str]:
    """Return the top-level functions of ``code`` that ``tests`` call; none if either is not Python."""
    try:
        body, nodes = ast.parse(string(code, "code")).body, list(ast.walk(ast.parse(tests)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return called & {statement.name for statement in body if isinstance(statement, ast.FunctionDef)}


def _need(row: Row, format: str, *columns: str) -> None:
    if missing := [column for column in columns if column not in row]:
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
    return _without(row, solution, *columns) | ({"solution": row[solution]} if solution in row else {})
