"""Fixtures of the tests of data."""

import pytest

from tests.kit.run_folders import write_jsonl


@pytest.fixture
def rows(tmp_path):
    """Return a function that writes rows as JSON lines and returns their file."""
    return lambda *rows, name="rows.jsonl": str(write_jsonl(tmp_path / name, rows))
