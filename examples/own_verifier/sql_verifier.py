"""A verifier of SQL: runs the model's query on the row's tables in the sandbox and compares what it returns.

rocm-ext verify --verifier sql_verifier.SQLQuery --data rows.jsonl
"""

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rocm_ext.sandbox import interpreter
from rocm_ext.verifiers import Limits, Result, Sandbox, Verdict, Verifier

_BLOCK = re.compile(r"```(?:sql)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)
# Runs in the sandbox. The query can only read, and calls no function whose value changes from one run to the next.
_PROGRAM = """
import json, sqlite3, sys

READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_RECURSIVE, sqlite3.SQLITE_FUNCTION}
CHANGES = {"random", "randomblob", "date", "time", "datetime", "julianday", "strftime", "unixepoch", "timediff",
           "current_date", "current_time", "current_timestamp"}

def allow(action, _, function, *rest):
    return sqlite3.SQLITE_OK if action in READS and (function or "").lower() not in CHANGES else sqlite3.SQLITE_DENY

tables, query = json.load(sys.stdin)
database = sqlite3.connect(":memory:")
database.executescript(tables)
database.set_authorizer(allow)
rows = database.execute(query).fetchmany(10_001)
print(json.dumps(rows) if len(rows) <= 10_000 else sys.exit("more than 10,000 rows"))
"""


class SQLQuery(Verifier):
    """Accepts a query that returns the same rows as the row's ``answer``, in SQLite.

    The order of the returned rows counts if ``answer`` has ORDER BY.

    Args:
        seconds: that a query may take.
        memory_mb: that it may take.
    """

    needs = ("tables", "answer")

    def __init__(self, seconds: float = 5.0, memory_mb: int = 256) -> None:
        self.sandbox = Sandbox(readable=interpreter(sys.executable)[0])
        self.limits = Limits(seconds=seconds, memory_mb=memory_mb)
        self._expected = functools.lru_cache(1000)(self._own_rows)  # a prompt has several answers

    def check(self) -> None:
        """Raise UserError if the sandbox does not work here."""
        self.sandbox.check()

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise ValueError if ``tables`` or ``answer`` does not run."""
        super().check_row(row)
        self._expected(row["answer"], row["tables"])

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        """Judge the last SQL block of ``completion``, or all of it if it begins with SELECT or WITH."""
        query = completion if re.match(r"\s*(select|with)\b", completion, re.IGNORECASE) else None
        if blocks := _BLOCK.findall(completion):
            query = blocks[-1]
        if query is None:
            return Result(Verdict.UNPARSED, 0.0, "no ```sql block")
        expected = self._expected(row["answer"], row["tables"])
        found = self._run(query, row["tables"])
        if isinstance(found, Result):
            return found
        ordered = re.search(r"\border\s+by\b", row["answer"], re.IGNORECASE)
        if found == expected if ordered else Counter(found) == Counter(expected):
            return Result(Verdict.CORRECT, 1.0)
        return Result(Verdict.WRONG, 0.0, f"returned {found[:3]}, expected {expected[:3]}")

    def _own_rows(self, answer: str, tables: str) -> list[tuple[Any, ...]]:
        rows = self._run(answer, tables)
        if isinstance(rows, Result):
            raise ValueError(f"tables or answer: {rows.detail}")
        return rows

    def _run(self, query: str, tables: str) -> list[tuple[Any, ...]] | Result:
        """Return the rows of ``query`` over ``tables``, or the verdict on a query that returns none."""
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM]
        outcome = self.sandbox.run(
            command, stdin=json.dumps([tables, query]).encode(), limits=self.limits
        )
        said = (
            outcome.killed or outcome.stderr.decode("utf-8", "replace").strip().rpartition("\n")[-1]
        )
        if not outcome.started:
            raise RuntimeError(f"the sandbox failed: {said}")  # an ERROR, which is not trained on
        if outcome.timed_out:
            return Result(Verdict.TIMEOUT, 0.0, f"more than {self.limits.seconds:g} s: {query}")
        if outcome.returncode:
            return Result(Verdict.WRONG, 0.0, f"{said}: {query}")
        return [tuple(row) for row in json.loads(outcome.stdout)]
