"""Folders that are replaced whole or not at all, and JSON lines that a process is writing, or was killed at."""

import errno
from pathlib import Path

import pytest

from rocm_ext.base import files
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import read_json, read_lines, remove_folder, replace_folder, replace_text


@pytest.fixture
def adapter(tmp_path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "weights").write_text("old")
    return folder


def replace(folder: Path, text: str = "new") -> None:
    with replace_folder(folder) as aside:
        (aside / "part").mkdir()
        (aside / "weights").write_text(text)


@pytest.mark.parametrize(
    "error", [SystemExit(143), KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=repr
)
@pytest.mark.parametrize("at", [1, 2])
def test_a_folder_whose_renames_fail_keeps_its_content(adapter, monkeypatch, at, error):
    """SIGTERM's handler raises SystemExit anywhere, also between the two renames."""
    original, done = Path.rename, []

    def rename(self, target):
        done.append(target)
        if len(done) == at:
            raise error
        return original(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        replace(adapter)
    assert len(done) >= at
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]
    assert (adapter / "weights").read_text() == "old"
    replace(adapter)
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]
    assert (adapter / "weights").read_text() == "new"


def test_a_folder_of_a_kill_between_renames_comes_back(adapter):
    adapter.rename(adapter.with_name(".adapter.old"))
    with pytest.raises(UserError, match="no space left"), replace_folder(adapter):
        raise OSError(errno.ENOSPC, "full")
    assert [path.name for path in adapter.parent.iterdir()] == ["adapter"]
    assert (adapter / "weights").read_text() == "old"


def test_what_a_killed_removal_leaves_does_not_come_back(adapter, monkeypatch):
    monkeypatch.setattr(files.shutil, "rmtree", lambda *args, **kwargs: None)  # killed before
    remove_folder(adapter)
    monkeypatch.undo()
    with pytest.raises(UserError, match="no space left"), replace_folder(adapter):
        raise OSError(errno.ENOSPC, "full")
    assert list(adapter.parent.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_all_is_flushed_before_it_appears_and_its_name_after(tmp_path, monkeypatch, kind):
    flushed, path = [], tmp_path / "name"
    original = files.flush

    def sync(what):
        flushed.append((what.relative_to(tmp_path).as_posix(), path.exists()))
        original(what)

    monkeypatch.setattr(files, "flush", sync)
    if kind == "folder":
        replace(path)
        before = [".name.tmp/part", ".name.tmp/weights"]
        assert sorted(flushed[:2]) == [(name, False) for name in before]
        assert flushed[2:] == [(".name.tmp", False), (".", True)]
    else:
        replace_text(path, "text")
        assert flushed == [(".name.tmp", False), (".", True)]


def written(folder: Path, content: bytes) -> Path:
    path = folder / "lines.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("torn", [b'{"a"', b'{"a": 2', b"\xff", b"0", b"[" * 100_000])
def test_a_torn_last_line_is_skipped(tmp_path, torn):
    path, problems = written(tmp_path, b'{"a": 1}\n\n' + torn), []
    assert list(read_lines(path)) == list(read_lines(path, problems=problems)) == [{"a": 1}]
    assert problems == []
    assert list(read_lines(written(tmp_path, b'{"a": 1}\n{"a": 2}'))) == [{"a": 1}, {"a": 2}]
    text = '{"a": "\u2028\u0085\\u001c"}\n'  # characters that break lines elsewhere
    assert list(read_lines(written(tmp_path, text.encode()))) == [{"a": "\u2028\u0085\x1c"}]


@pytest.mark.parametrize("damaged", [b'{"a"', b"[1]", b"\xff", b"0", b"[" * 100_000, b'{"b": 1}'])
def test_a_damaged_line_is_named_or_skipped(tmp_path, damaged):
    path = written(tmp_path, b'{"a": 1}\n' + damaged + b'\n{"a": 2}\n')
    with pytest.raises(
        UserError, match=r"lines\.jsonl:2 is damaged; expected a JSON object with a\b"
    ):
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
        with pytest.raises(
            UserError, match=r"cannot read .*: Is a directory\. Nothing was changed; check the disk"
        ):
            read(tmp_path)
    assert read_json(tmp_path / "none.json") is None
    with pytest.raises(UserError, match=r"lines\.jsonl is damaged; expected a JSON object"):
        read_json(written(tmp_path, b'{"a": 1'))
