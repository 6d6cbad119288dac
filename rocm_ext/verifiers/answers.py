"""Judge answers as text: by equality, a regular expression, or a JSON Schema."""

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.types import Json, Row
from rocm_ext.sandbox import helper
from rocm_ext.verifiers.base import (
    Result,
    Verifier,
    check_time,
    correct,
    error,
    field,
    short,
    timeout,
    unparsed,
    wrong,
)
from rocm_ext.verifiers.extract import answer_text, fenced_code
from rocm_ext.verifiers.workers.forked import Elsewhere, forked

MAX_JSON = 1 << 20  # characters
BRACKET = re.compile(r"[\[{]")
TRIES = 2000  # brackets that begin no JSON, after which the search ends


class ExactMatch(Verifier):
    """Whether the completion, after its reasoning, equals the text in a row's field.

    Args:
        field: the row's field with the expected text.
        ignore_case: ignore case.
        strip: ignore white space at both ends.
    """

    def __init__(
        self, field: str = "answer", ignore_case: bool = False, strip: bool = True
    ) -> None:
        self.field = field
        self.ignore_case = ignore_case
        self.strip = strip
        self.needs = (field,)

    def check_row(self, row: Row) -> None:
        field(row, self.field, str)

    def __call__(self, completion: str, row: Row) -> Result:
        answer = self._form(answer_text(completion))
        expected = self._form(row[self.field])
        if not answer and expected:
            return unparsed("there is no answer")
        if answer != expected:
            return wrong(f"found {short(answer, 80)!r}")
        return correct()

    at_once = __call__

    def _form(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class Regex(Verifier):
    """Whether a regular expression (of the ``regex`` package) matches the completion.

    Args:
        pattern: the pattern for all rows; or
        field: the row's field with its pattern.
        full: the pattern must match all of the completion but white space at its ends.
        timeout: seconds for the search; a longer one gives TIMEOUT.
    """

    def __init__(
        self,
        pattern: str | None = None,
        field: str | None = None,
        full: bool = False,
        timeout: float = 1.0,
    ) -> None:
        if (pattern is None) == (field is None):
            raise UserError("Regex takes either pattern or field")
        self.pattern = pattern
        self.field = field
        self.full = full
        self.timeout = timeout
        self.needs = (field,) if field else ()
        if pattern is not None:
            _read(_pattern, pattern, "Regex", UserError)

    def check_row(self, row: Row) -> None:
        if self.field:
            _read(_pattern, field(row, self.field, str), f"field {self.field!r}", ValueError)

    def __call__(self, completion: str, row: Row) -> Result:
        pattern = _pattern(row[self.field] if self.field else self.pattern)
        try:
            if self.full:
                match = pattern.fullmatch(completion.strip(), timeout=self.timeout)
            else:
                match = pattern.search(completion, timeout=self.timeout)
        except TimeoutError:
            return timeout(f"the search took more than {self.timeout:g} s")
        if match is None:
            return wrong("no match")
        return correct(f"found {short(match[0], 80)!r}")


class JsonSchema(Verifier):
    """Whether the completion holds JSON that is valid under a JSON Schema.

    The JSON is the last fenced block (tagged json or untagged). In a text without fences it is all of the text or, if
    that is not JSON, the last complete object or array in it. References of the schema to other documents are not
    fetched.

    Args:
        schema: the schema for all rows; or
        field: the row's field with its schema, as an object or as JSON text.
        timeout: seconds for parsing and validation, which run in a child process; longer gives TIMEOUT.
    """

    def __init__(
        self, schema: Json | None = None, field: str | None = None, timeout: float = 5.0
    ) -> None:
        if (schema is None) == (field is None):
            raise UserError("JsonSchema takes either schema or field")
        check_time("JsonSchema", timeout)
        self.field = field
        self.needs = (field,) if field else ()
        self.timeout = timeout
        self._fixed = None if schema is None else _read(_validator, schema, "JsonSchema", UserError)
        self._elsewhere = Elsewhere("JsonSchema", timeout, schema=schema, field=field)

    def check_row(self, row: Row) -> None:
        if self.field:
            schema = field(row, self.field, (str, Mapping))
            _read(_validator, schema, f"field {self.field!r}", ValueError)

    def __call__(self, completion: str, row: Row) -> Result:
        if not helper.RUNNING:
            return self._elsewhere(completion, row)
        judge = functools.partial(self._judge, completion, row)
        return forked(judge, self.timeout, "the validation") or wrong(
            "the validation ran out of memory"
        )

    def _judge(self, completion: str, row: Row) -> Result:
        try:
            value, missing = _json_in(completion)
            if missing:
                return unparsed(missing)
            validator = self._fixed
            if validator is None:
                validator = _validator(row[self.needs[0]])
            problem = next(validator.iter_errors(value), None)
        except (RecursionError, ArithmeticError) as problem:
            return wrong(one_line(problem))  # nested too deeply, or a number beyond all floats
        except Exception as problem:  # the schema's fault: a bad pattern, an unresolved reference
            return error(f"the schema cannot be applied: {one_line(problem)}")
        if problem is None:
            return correct()
        return wrong(f"at /{'/'.join(map(str, problem.absolute_path))}: {problem.message}")


def _json_in(text: str) -> tuple[Any, str]:
    """The JSON value in a completion; None and the reason if it holds none."""
    groups, fenced = fenced_code(text, "json")
    if fenced:
        source = groups[0][-1] if groups else ""
    else:
        source = answer_text(text)
    if not source.strip():
        return None, "no JSON"
    if len(source) > MAX_JSON:
        return None, f"more than {MAX_JSON} characters of JSON"
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    try:
        return decoder.decode(source), ""
    except (ValueError, RecursionError) as problem:
        malformed = f"malformed JSON: {problem}"
    value = None  # the last outermost object or array
    start = failures = 0
    while not fenced and failures < TRIES:
        bracket = BRACKET.search(source, start)
        if bracket is None:
            break
        try:
            value, start = decoder.raw_decode(source, bracket.start())
        except (ValueError, RecursionError):
            start = bracket.end()
            failures += 1
    return value, malformed if value is None else ""


def _read(reader: Callable[[Any], Any], value: Any, where: str, kind: type[Exception]) -> Any:
    """``reader(value)``; its ValueError becomes an error of ``kind`` that says where the value stands."""
    try:
        return reader(value)
    except ValueError as problem:
        raise kind(f"{where}: {problem}") from problem


def _pattern(pattern: Any) -> Any:
    import regex

    try:
        return regex.compile(pattern)  # regex caches compiled patterns
    except regex.error as problem:
        shown = short(pattern, 80)
        raise ValueError(f"{shown!r} is not a regular expression: {problem}") from problem


def _validator(schema: Any) -> Any:
    import jsonschema
    import referencing

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as problem:
            raise ValueError(f"the schema is not JSON: {problem}") from problem
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as problem:
        raise ValueError(f"invalid JSON Schema: {short(problem.message, 150)}") from problem
    return kind(schema, registry=referencing.Registry())


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
