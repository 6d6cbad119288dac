"""What RAFT trains on, and verifiers' own time."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from rocm_ext.recipes.raft_rocm import main

from rocm_ext.base.errors import UserError
from rocm_ext.rl.records import read_records
from rocm_ext.verifiers import ExactMatch, JsonSchema, Pool, PythonTests, Regex, Verdict, extract_code
from rocm_ext.verifiers.cases import same_output
from tests.kit.forks import forked
from tests.kit.raft_runs import assert_equal, cycle_row, records, write_run, write_world

pytest.importorskip("resource", reason="forks and POSIX signals")
HERE = "rocm_ext.verifiers."
RESUME = "resume_from_checkpoint=True"


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Write the YAML of a run whose verifier gives wrong answers the reward 0.5."""
    folder = write_world(tmp_path_factory.mktemp("rewards"))
    graded = {"verifier": {"_component_": "tests.kit.judges.Graded"}, "eval_prompts": None}
    return partial(write_run, folder, **graded, max_new_tokens=8, samples_per_prompt=2, epochs=1)


@pytest.fixture(scope="module")
def rewarded(make, tmp_path_factory):
    """A run that keeps wrong answers with enough reward."""
    return ran(make, tmp_path_factory.mktemp("rewarded") / "run", "keep=rewarded")


def ran(make, out: Path, *overrides: str) -> Path:
    code, messages = forked(main, make(out), *overrides)
    assert code == 0, messages
    return out


def kept_verdicts(out: Path, cycle: int = 1) -> set[str]:
    verdicts = {(r["prompt_id"], r["sample"]): r["verdict"] for r in records(out, cycle, "verdicts")}
    return {verdicts[r["prompt_id"], r["sample"]] for r in read_records(out / f"cycle_{cycle}/kept.jsonl")}


@pytest.mark.wide
def test_wrong_answers_are_not_trained_on_however_well_rewarded(make, rewarded, tmp_path):
    out = ran(make, tmp_path / "run")
    assert kept_verdicts(out) == {"CORRECT"}
    row = cycle_row(out, 1)
    assert row["filter"] == {"not_correct": row["verdicts"]["WRONG"], "kept": row["verdicts"]["CORRECT"]}
    assert row["pass_rate"] == row["verdicts"]["CORRECT"] / row["samples"]
    assert kept_verdicts(rewarded) == {"CORRECT", "WRONG"}
    assert cycle_row(rewarded, 1)["pass_rate"] == 1


@pytest.mark.wide
def test_a_resumed_run_keeps_its_rule(make, rewarded, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(rewarded, out)
    ran(make, out, RESUME, "cycles=2", "keep=rewarded")
    assert_equal(out, rewarded)
    ran(make, out, RESUME, "cycles=3", "keep=rewarded")
    assert kept_verdicts(out, 2) == kept_verdicts(out, 3) == {"CORRECT", "WRONG"}


LONG = 1 << 18  # a search that takes quadratic time ends after the tests' time limit


@pytest.mark.wide(always=20)
@pytest.mark.parametrize(("unit", "end"), [
    ("~", "`"), ("`", "x`"), ("~~~ ", "`"), ("\n", "x"), (" ", "x"), ("\n ", "x"), ("int\n", "x"), ("int a\n", "x"),
    ("static ", "x"), ("```\n", ""), ("~~~~\n", "```"), ("template\n", ""), ("pub\n", ""), ("int ", "("), ("a", "("),
])  # fmt: skip
@pytest.mark.parametrize("language", ["c", "cpp", "rust", "go", "json", "python"])
def test_extraction_takes_linear_time(unit: str, end: str, language: str):
    extract_code(unit * (LONG // len(unit)) + end, language)


def test_a_body_after_many_blank_lines_takes_linear_time():
    row = {"entry_point": "f", "code_prefix": "def f():\n", "tests": "assert f() == 1"}
    code = "```python\n" + "\n" * LONG + "x = 1\n```"
    assert PythonTests(sandbox="rlimits", timeout=20)(code, row).verdict is Verdict.WRONG


@pytest.mark.parametrize("printed", ["1" * LONG + "x", "1." + "1" * LONG + "x", "1" * LONG, "1 " * LONG])
def test_output_is_compared_in_linear_time(printed: str):
    assert not same_output(printed, "2", 1e-6)
    assert same_output(printed, printed + "\n", 1e-6)


@pytest.mark.parametrize("text", ["A" * LONG, "ß" * LONG, " " * LONG + "x", "x" + "\u0130" * LONG])
def test_text_takes_linear_time(text: str):
    assert ExactMatch(ignore_case=True)(text, {"answer": "y"}).verdict is Verdict.WRONG
    assert Regex("y$", full=True)(text, {}).verdict is Verdict.WRONG


@pytest.fixture(scope="module")
def by_row():
    """JSON judged by the schema of its row, by a patient judge or by one with half a second."""
    node = {"_component_": HERE + "JsonSchema", "field": "schema"}
    with Pool({**node, "timeout": 30}, 1, 60) as patient, Pool({**node, "timeout": 0.5}, 1, 60) as hurried:
        yield lambda text, schema, hurry: (hurried if hurry else patient).submit(text, {"schema": schema}).result()


SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
DEEP = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(("text", "schema", "verdict"), [
    ('```json\n{"a": 1}\n```', SCHEMA, "CORRECT"), ('{"a": 1}', SCHEMA, "CORRECT"),
    ('{"a": 1}', json.dumps(SCHEMA), "CORRECT"), ('{"a": "x"}', SCHEMA, "WRONG"),
    ('Here it is: {"a": 1}. I hope [it] helps {you}!', SCHEMA, "CORRECT"),
    ('First {"a": 1}, then {"a": "x"}', SCHEMA, "WRONG"),  # the last counts
    ('First {"a": "x"}, then {"a": 1} and {"a": ', SCHEMA, "CORRECT"),  # and must be complete
    ('{"b": {"a": 1}}', SCHEMA, "WRONG"),  # an inner object is no answer
    ('So: {"b": {"a": 1}}', SCHEMA, "WRONG"), ('```python\nx = {"a": 1}\n```', SCHEMA, "UNPARSED"),
    ('{"a": 1}\n```json\n{"a": }\n```', SCHEMA, "UNPARSED"), ("17", {"type": "integer"}, "CORRECT"),
    ("It is 17", {"type": "integer"}, "UNPARSED"), ("no json", SCHEMA, "UNPARSED"), ("", SCHEMA, "UNPARSED"),
    ('{"a": NaN}', SCHEMA, "UNPARSED"), ('{"a": ' + "9" * 5000 + "}", SCHEMA, "UNPARSED"),
    ("[" * 100_000, SCHEMA, "UNPARSED"), ("[{" * 400_000, SCHEMA, "UNPARSED"), ("[]" * 500_000, SCHEMA, "WRONG"),
    ("[1,\n" * 5_000 + '"', SCHEMA, "UNPARSED"), ("[" * 900 + "]" * 900, DEEP, "WRONG"),
    ("x" * (1 << 21), SCHEMA, "UNPARSED"), ('["' + "a" * 40 + '!"]', {"items": {"pattern": "^(a|a)*$"}}, "TIMEOUT"),
    (json.dumps([{"i": i} for i in range(20_000)]), {"uniqueItems": True}, "TIMEOUT"),
    ("1e999", {"multipleOf": 0.1}, "WRONG"), ('["x"]', {"items": {"pattern": "(?<n"}}, "ERROR"),
    ("[1]", {"items": {"$ref": "https://example.org/no"}}, "ERROR"),
])  # fmt: skip
def test_json_schema(by_row, text: str, schema: object, verdict: str):
    result = by_row(text, schema, verdict == "TIMEOUT")
    assert str(result.verdict) == verdict, result


def test_json_schema_works_in_any_process_and_refuses_bad_schemas():
    assert "/a" in JsonSchema(SCHEMA)('{"a": "x"}', {}).detail
    with pytest.raises(ValueError, match="'schema'"):
        JsonSchema(field="schema").check_row({"schema": {"type": "no such type"}})
    with pytest.raises(UserError, match="invalid JSON Schema"):
        JsonSchema({"type": 5})
    with pytest.raises(UserError, match="timeout"):
        JsonSchema({}, timeout=0)
