"""Checkpoints that cannot be read: they are noticed, named and kept."""

import errno
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rocm_ext.base.errors import UserError
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.train.checkpoint import Checkpoints, rng_state, set_rng_state
from tests.kit.lines import one_line_has
from tests.recipes.test_resume import tree

RANKS = Ranks(torch.device("cpu"))


def saved(folder: Path, *steps: int, keep: int = 9) -> Checkpoints:
    """Checkpoints with a tensor each, and an adapter file beside it."""
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        checkpoints.save(step, {"step": step, "adapter": {"a": torch.arange(9.0) + step}}, write_adapter)
    return checkpoints


def write_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)))


def newest_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.newest(RANKS)
    assert found is not None
    assert found[0].name == f"step_{found[1]['step']:08d}"
    return found[1]["step"]


def test_every_random_generator_goes_on_where_it_was(tmp_path):
    def draw() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(), np.random.randn()]

    torch.save({"rng": rng_state(RANKS.device)}, tmp_path / "state.pt")
    drawn = draw()
    set_rng_state(torch.load(tmp_path / "state.pt")["rng"], RANKS.device)
    assert draw() == drawn


@pytest.mark.parametrize("name", ["state.pt", "adapter_model.safetensors", "adapter_config.json", "SHA256SUMS"])
def test_a_flipped_bit_is_noticed(tmp_path, name):
    checkpoints, path = saved(tmp_path, 8), tmp_path / "step_00000008" / name
    whole = path.read_bytes()
    for bit in random.Random(name).sample(range(8 * len(whole)), k=16):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="step_00000008"):
            checkpoints.newest(RANKS)
    path.write_bytes(whole)
    assert newest_step(checkpoints) == 8
    if shutil.which("sha256sum"):  # which anybody has
        assert os.system(f"cd {path.parent} && sha256sum --check --strict --quiet SHA256SUMS") == 0


def test_where_none_can_be_read_nothing_is_deleted(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2, 4, 6)
    (tmp_path / "step_00000002" / "state.pt").write_bytes(b"torn")
    (tmp_path / "step_00000004" / "state.pt").unlink()
    before, whole = tree(tmp_path), Path.open

    def broken(path, *args, **kwargs):
        if path.match("step_00000006/*"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return whole(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", broken)
    monkeypatch.setattr(Path, "read_bytes", lambda path: path.open("rb").read())
    with pytest.raises(UserError, match="no checkpoint can be read") as error:
        checkpoints.newest(RANKS)
    facts = ("step_00000006: [Errno 5]", "step_00000004: [Errno 2]", "step_00000002: the checksum of state.pt")
    assert one_line_has(str(error.value), *facts)
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    def broken(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    checkpoints = saved(tmp_path, 2)
    monkeypatch.setattr(os, "listdir", broken)
    with pytest.raises(UserError, match=r"cannot read .*: Input/output error"):
        checkpoints.newest(RANKS)


def test_what_was_passed_over_stays(tmp_path, messages):
    checkpoints, damaged = saved(tmp_path, 2, 4, 6, keep=1), b"torn"
    saved(tmp_path, 4, keep=9)
    for attempt in range(2):
        (tmp_path / "step_00000006" / "state.pt").write_bytes(damaged)
        assert newest_step(checkpoints) == 4
        assert one_line_has(messages[-1], "step_00000006", "skipped", "checksum of state.pt")
        checkpoints.sweep(4)
        assert messages[-1].endswith("is kept as step_00000006.unreadable" + "1" * attempt)
        saved(tmp_path, 6, keep=2)
    saved(tmp_path, 8, 10, keep=1)
    kept = {"step_00000006.unreadable", "step_00000006.unreadable1"}
    assert set(os.listdir(tmp_path)) == {"step_00000010"} | kept
    assert all((tmp_path / name / "state.pt").read_bytes() == damaged for name in kept)
