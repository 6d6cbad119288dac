"""Rows that hold the judge of Python tests to account: honest classes with state, and attempts at a free reward."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rocm_ext.verifiers import PythonTests, Verdict

ROWS = Path(__file__).parent / "code_rows"
STATEFUL, ATTACKS = (
    [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text().splitlines()] for name in ("stateful", "attacks")
)


def test_plain_python_passes_the_right_answers_and_no_mutant(tmp_path: Path):
    """The rows themselves, without a judge: each variant is a module of its own, which pytest imports and runs."""
    wrong = set()
    for row in STATEFUL:
        for number, code in enumerate([row["code"], *row["mutants"]]):
            end = f"\ncheck({row['entry_point']})\n" if "def check(" in row["tests"] else ""
            path = tmp_path / f"test_{row['id']}_{number}.py"
            path.write_text(code + row["tests"] + end)
            wrong |= {path.name} if number else set()
    argv = [sys.executable, "-m", "pytest", "-rfE", "--tb=no", "--continue-on-collection-errors", "-c", "/dev/null"]
    said = subprocess.run(
        [*argv, "--import-mode=importlib", "."], cwd=tmp_path, capture_output=True, text=True, timeout=300
    ).stdout
    failed = set(re.findall(r"^(?:FAILED|ERROR) (\w+\.py)", said, re.M))
    assert sorted(failed ^ wrong) == []
    assert len(wrong) == 2 * len(STATEFUL) == 200


@pytest.fixture(scope="module")
def judge():
    verifier = PythonTests(timeout=20, memory_mb=4096, unjudged="error")

    def verdict(code: str, row: dict) -> Verdict | None:
        """None: the row is refused before anything is judged."""
        fields = {name: row[name] for name in ("tests", "entry_point", "test_setup") if name in row}
        try:
            verifier.check_row(fields)
        except ValueError:
            return None
        result = verifier(f"```python\n{code}\n```", fields)
        assert (result.verdict is Verdict.CORRECT) == (result.reward == 1), result
        return result.verdict

    return verdict


def test_classes_with_state_are_judged(judge):
    unjudged = Counter()
    for row in STATEFUL:
        right = judge(row["code"], row)
        assert right in (Verdict.CORRECT, Verdict.ERROR, None), (row["id"], right)
        wrong = [judge(code, row) for code in row["mutants"]]
        if right is Verdict.CORRECT:
            assert wrong == [Verdict.WRONG, Verdict.WRONG], row["id"]
        assert Verdict.CORRECT not in wrong, row["id"]
        unjudged[row["kind"]] += right is not Verdict.CORRECT
    print("not judged:", dict(+unjudged))
    assert unjudged.total() <= 10, unjudged


@pytest.fixture(scope="module")
def verifier() -> PythonTests:
    return PythonTests(timeout=4, memory_mb=2048)


@pytest.mark.parametrize("row", ATTACKS, ids=lambda row: row["id"])
def test_no_attack_is_right(verifier: PythonTests, row: dict):
    fields = {name: value for name, value in row.items() if name not in ("id", "code")}
    try:
        verifier.check_row(fields)
    except ValueError:
        return
    result = verifier(f"```python\n{row['code']}```", fields)
    assert result.verdict is not Verdict.CORRECT, result
    assert not result.reward
