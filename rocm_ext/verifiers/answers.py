"""Answers judged as text: by equality or a regular expression."""

from collections.abc import Mapping
from typing import Any

from rocm_ext.errors import UserError
from rocm_ext.verifiers.base import Result, Verifier, correct, field, short, timeout, unparsed, wrong


class ExactMatch(Verifier):
    """Whether the completion equals the text in a row's field.

    Args:
        field: the row's field with the expected text.
        ignore_case: ignore case.
        strip: ignore white space at both ends.
    """

    def __init__(self, field: str = "answer", ignore_case: bool = False, strip: bool = True) -> None:
        self.field, self.ignore_case, self.strip = field, ignore_case, strip
        self.needs = (field,)

    def check_row(self, row: Mapping[str, Any]) -> None:
        field(row, self.field, str)

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        found, expected = self._form(completion), self._form(row[self.field])
        if not found and expected:
            return unparsed("the completion is empty")
        return correct() if found == expected else wrong(f"found {short(found, 80)!r}")

    def _form(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class Regex(Verifier):
    """Whether a regular expression (of the ``regex`` package) matches the completion.

    Args:
        pattern: the pattern for all rows; or
        field: the row's field with its pattern.
        full: the pattern must match the whole completion, apart from white space at its ends.
        timeout: seconds for the search; a search that takes longer gives TIMEOUT.
    """

    def __init__(
        self, pattern: str | None = None, field: str | None = None, full: bool = False, timeout: float = 1.0
    ) -> None:
        if (pattern is None) == (field is None):
            raise UserError("Regex takes either pattern or field")
        self.pattern, self.field, self.full, self.timeout = pattern, field, full, timeout
        self.needs = (field,) if field else ()
        if pattern is not None:
            try:
                self._compiled(pattern)
            except ValueError as error:
                raise UserError(f"Regex: {error}") from error

    def check_row(self, row: Mapping[str, Any]) -> None:
        if self.field:
            try:
                self._compiled(field(row, self.field, str))
            except ValueError as error:
                raise ValueError(f"field {self.field!r}: {error}") from error

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        pattern = self._compiled(row[self.field] if self.field else self.pattern)
        try:
            search = pattern.fullmatch if self.full else pattern.search
            found = search(completion.strip() if self.full else completion, timeout=self.timeout)
        except TimeoutError:
            return timeout(f"the search took more than {self.timeout:g} s")
        return correct(f"found {short(found[0], 80)!r}") if found else wrong("no match")

    @staticmethod
    def _compiled(pattern: Any) -> Any:
        import regex

        try:
            return regex.compile(pattern)  # regex caches compiled patterns
        except regex.error as error:
            raise ValueError(f"{short(pattern, 80)!r} is not a regular expression: {error}") from error
