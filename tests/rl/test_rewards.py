"""Verifiers' own time, and JSON."""

import json

import pytest

from rocm_ext.base.errors import UserError
from rocm_ext.verifiers import (
    ExactMatch,
    JsonSchema,
    Pool,
    PythonTests,
    Regex,
    Verdict,
    extract_code,
)
from rocm_ext.verifiers.cases import same_output

pytest.importorskip("resource", reason="forks and POSIX signals")

LONG = 1 << 18  # a search that takes quadratic time ends after the tests' time limit


@pytest.mark.wide(always=20)
@pytest.mark.parametrize(("unit", "end"), [
    ("`", "x`"), ("~~~ ", "`"), ("\n", "x"), (" ", "x"), ("int a\n", "x"),
    ("static ", "x"), ("```\n", ""), ("template\n", ""), ("int ", "("),
])  # fmt: skip
@pytest.mark.parametrize("language", ["c", "cpp", "rust", "go", "json", "python"])
def test_extraction_takes_linear_time(unit: str, end: str, language: str):
    extract_code(unit * (LONG // len(unit)) + end, language)


def test_a_body_after_many_blank_lines_takes_linear_time():
    row = {"entry_point": "f", "code_prefix": "def f():\n", "tests": "assert f() == 1"}
    code = "```python\n" + "\n" * LONG + "x = 1\n```"
    assert PythonTests(sandbox="rlimits", timeout=20)(code, row).verdict is Verdict.WRONG


@pytest.mark.parametrize(
    "printed", ["1" * LONG + "x", "1." + "1" * LONG + "x", "1" * LONG, "1 " * LONG]
)
def test_output_is_compared_in_linear_time(printed: str):
    assert not same_output(printed, "2", 1e-6)
    assert same_output(printed, printed + "\n", 1e-6)


@pytest.mark.parametrize("text", ["A" * LONG, "ß" * LONG, " " * LONG + "x", "x" + "\u0130" * LONG])
def test_text_takes_linear_time(text: str):
    assert ExactMatch(ignore_case=True)(text, {"answer": "y"}).verdict is Verdict.WRONG
    assert Regex("y$", full=True)(text, {}).verdict is Verdict.WRONG


@pytest.mark.parametrize(("text", "verdict"), [
    ("<think>\nIs it 4?\n</think>\n\n5", "CORRECT"), ("Is it 4?</think>5", "CORRECT"), ("5", "CORRECT"),
    ("<think>5</think>4", "WRONG"), ("<think>5", "UNPARSED"), ("", "UNPARSED"),
])  # fmt: skip
def test_equality_is_of_the_answer_after_the_reasoning(text: str, verdict: str):
    assert str(ExactMatch()(text, {"answer": "5"}).verdict) == verdict


@pytest.fixture(scope="module")
def by_row():
    """JSON judged by the schema of its row, by a patient judge or by one with half a second."""
    node = {"_component_": "rocm_ext.verifiers.JsonSchema", "field": "schema"}
    with (
        Pool({**node, "timeout": 30}, 1, 60) as patient,
        Pool({**node, "timeout": 0.5}, 1, 60) as hurried,
    ):
        yield (
            lambda text, schema, hurry: (
                (hurried if hurry else patient).submit(text, {"schema": schema}).result()
            )
        )


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
DEEP = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(("text", "schema", "verdict"), [
    ('```json\n{"a": 1}\n```', SCHEMA, "CORRECT"), ('{"a": 1}', SCHEMA, "CORRECT"),
    ('{"a": "x"}', SCHEMA, "WRONG"),
    ('Here it is: {"a": 1}. I hope [it] helps {you}!', SCHEMA, "CORRECT"),
    ('First {"a": "x"}, then {"a": 1} and {"a": ', SCHEMA, "CORRECT"),  # and must be complete
    ('{"b": {"a": 1}}', SCHEMA, "WRONG"),  # an inner object is no answer
    ('```python\nx = {"a": 1}\n```', SCHEMA, "UNPARSED"),
    ("17", {"type": "integer"}, "CORRECT"),
    ("no json", SCHEMA, "UNPARSED"),
    ('{"a": NaN}', SCHEMA, "UNPARSED"),
    ("[{" * 400_000, SCHEMA, "UNPARSED"),
    ("[" * 900 + "]" * 900, DEEP, "WRONG"),
    ('["' + "a" * 40 + '!"]', {"items": {"pattern": "^(a|a)*$"}}, "TIMEOUT"),
    (json.dumps([{"i": i} for i in range(20_000)]), {"uniqueItems": True}, "TIMEOUT"),
    ('["x"]', {"items": {"pattern": "(?<n"}}, "ERROR"),
    ("[1]", {"items": {"$ref": "https://example.org/no"}}, "ERROR"),
])  # fmt: skip
def test_json_schema(by_row, text: str, schema: object, verdict: str):
    result = by_row(text, schema, verdict == "TIMEOUT")
    assert str(result.verdict) == verdict, result


def test_json_schema_works_anywhere_and_refuses_bad_schemas():
    assert "/a" in JsonSchema(SCHEMA)('{"a": "x"}', {}).detail
    with pytest.raises(ValueError, match="'schema'"):
        JsonSchema(field="schema").check_row({"schema": {"type": "no such type"}})
    with pytest.raises(UserError, match="invalid JSON Schema"):
        JsonSchema({"type": 5})
    with pytest.raises(UserError, match="timeout"):
        JsonSchema({}, timeout=0)
