"""Reading JSON lines that a process is writing, or was killed while it wrote."""

from pathlib import Path

import pytest

from rocm_ext.errors import UserError
from rocm_ext.files import read_json, read_lines


def written(folder: Path, content: bytes) -> Path:
    path = folder / "lines.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("torn", [b'{"a"', b'{"a": 2', b"\xff", b"0", b"[" * 100_000])
def test_a_torn_last_line_is_skipped(tmp_path, torn):
    path, problems = written(tmp_path, b'{"a": 1}\n\n' + torn), []
    assert list(read_lines(path)) == list(read_lines(path, problems=problems)) == [{"a": 1}]
    assert problems == []


def test_a_last_line_that_only_lacks_its_break_counts(tmp_path):
    assert list(read_lines(written(tmp_path, b'{"a": 1}\n{"a": 2}'))) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("damaged", [b'{"a"', b"[1]", b"\xff", b"0", b"[" * 100_000, b'{"b": 1}'])
def test_a_damaged_line_is_named_or_skipped(tmp_path, damaged):
    path = written(tmp_path, b'{"a": 1}\n' + damaged + b'\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"lines\.jsonl:2 is damaged; expected a JSON object with a\b"):
        list(read_lines(path, keys=["a"]))
    problems: list[str] = []
    assert list(read_lines(path, keys=["a"], problems=problems)) == [{"a": 1}, {"a": 2}]
    assert problems == [f"{path}: skipped 1 line that is not a JSON object"]


def test_files_that_cannot_be_read(tmp_path):
    assert list(read_lines(tmp_path / "none.jsonl")) == []
    problems: list[str] = []
    assert list(read_lines(tmp_path, problems=problems)) == []
    assert problems == [f"{tmp_path} cannot be read: Is a directory"]
    for read in (lambda path: list(read_lines(path)), read_json):
        with pytest.raises(UserError, match=r"cannot read .*: Is a directory\. Nothing was changed; check the disk"):
            read(tmp_path)
    assert read_json(tmp_path / "none.json") is None
    with pytest.raises(UserError, match=r"lines\.jsonl is damaged; expected a JSON object"):
        read_json(written(tmp_path, b'{"a": 1'))


def test_characters_that_break_lines_elsewhere(tmp_path):
    text = '{"a": "\u2028\u0085\x1c"}\n'
    assert list(read_lines(written(tmp_path, text.replace("\x1c", "\\u001c").encode()))) == [{"a": "\u2028\u0085\x1c"}]
