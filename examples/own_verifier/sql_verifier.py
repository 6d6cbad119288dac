"""A verifier of SQL: runs the model's query on the row's tables and compares what it returns.

rocm-ext verify --verifier sql_verifier.SQLQuery --data rows.jsonl
"""

import re
import sqlite3
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rocm_ext.verifiers import Result, Verdict, Verifier

_BLOCK = re.compile(r"```(?:sql)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
# functions that are not deterministic, that fill the memory or that read files
_DENIED = {"random", "randomblob", "zeroblob", "load_extension", "readfile", "date", "time", "datetime", "julianday",
           "strftime", "unixepoch", "timediff", "current_date", "current_time", "current_timestamp"}  # fmt: skip


class SQLQuery(Verifier):
    """Accepts a query that returns the same rows as the row's ``answer``, in SQLite.

    The order of the returned rows counts if ``answer`` has ORDER BY. A query can only read, and runs in this process:
    SQLite's own limits bound its time and its memory.

    Args:
        steps: instructions of SQLite's machine that a query may take; a million take about a tenth of a second.
        most: rows that a query may return.
    """

    needs = ("tables", "answer")

    def __init__(self, steps: int = 2_000_000, most: int = 10_000) -> None:
        self.steps, self.most = steps, most

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if ``tables`` or ``answer`` does not run."""
        super().check_row(row)
        try:
            self._run(row["answer"], row["tables"])
        except sqlite3.Error as error:
            raise ValueError(f"tables or answer: {error}") from error

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        """Judge the last SQL block of ``completion``, or all of it if it begins with SELECT or WITH."""
        query = completion if re.match(r"\s*(select|with)\b", completion, re.IGNORECASE) else None
        if blocks := _BLOCK.findall(completion):
            query = blocks[-1]
        if query is None:
            return Result(Verdict.UNPARSED, 0.0, "no ```sql block")
        expected = self._run(row["answer"], row["tables"])
        try:
            found = self._run(query, row["tables"])
        except sqlite3.OperationalError as error:
            slow = str(error) == "interrupted"
            return Result(Verdict.TIMEOUT if slow else Verdict.WRONG, 0.0, f"{error}: {query}")
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            return Result(Verdict.WRONG, 0.0, f"{error}: {query}")
        ordered = re.search(r"\border\s+by\b", row["answer"], re.IGNORECASE)
        right = found == expected if ordered else Counter(found) == Counter(expected)
        if right:
            return Result(Verdict.CORRECT, 1.0)
        return Result(Verdict.WRONG, 0.0, f"returned {found[:3]}, expected {expected[:3]}")

    def _run(self, query: str, tables: str) -> list[tuple[Any, ...]]:
        """Return the rows of ``query`` over ``tables``.

        Raises:
            sqlite3.Error: the query fails, takes too long, is not allowed or returns too much.
        """
        database = sqlite3.connect(":memory:")
        try:
            database.executescript(tables)
            if hasattr(database, "setlimit"):  # Python 3.11
                database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1_000_000)  # bytes of a value
            database.set_authorizer(_only_reads)
            database.set_progress_handler(lambda: 1, self.steps)  # interrupts the query after so many instructions
            rows = database.execute(query).fetchmany(self.most + 1)
        finally:
            database.close()
        if len(rows) > self.most:
            raise sqlite3.DataError(f"more than {self.most} rows")
        return rows


def _only_reads(action: int, _: str | None, function: str | None, *__: Any) -> int:
    denied = action not in _READS or (action == sqlite3.SQLITE_FUNCTION and (function or "").lower() in _DENIED)
    return sqlite3.SQLITE_DENY if denied else sqlite3.SQLITE_OK
