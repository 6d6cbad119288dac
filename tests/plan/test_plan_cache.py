"""A remembered plan equals a fresh one, and any change of model, objective or sizes plans anew."""

import dataclasses
import errno
import multiprocessing
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from rocm_ext.model.plan_cache import fingerprint, remembered
from rocm_ext.plan import costs
from tests.kit.plans import as_configured, plan

CONFIG = (
    "--config",
    "mi50_qwen1_5b",
)  # of another machine, so the budget does not depend on free memory


@pytest.fixture
def kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "torchtune-rocm" / "plans"


def refuse(*_):
    raise AssertionError("simulated again")


@as_configured
def test_a_remembered_plan_equals_a_fresh_one(kept, monkeypatch, capsys):
    fresh = plan(capsys, *CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(costs, "on_fake_tensors", refuse)
        assert plan(capsys, *CONFIG) == fresh
        with pytest.raises(AssertionError, match="simulated again"):
            plan(capsys, *CONFIG, "model.lora_rank=4")
    for file in kept.iterdir():
        file.write_text(file.read_text()[:40])  # as a full disk would leave it
    assert plan(capsys, *CONFIG) == fresh


def test_without_a_folder_or_room_nothing_is_remembered(kept, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    calls = []
    with monkeypatch.context() as patch:
        for name in ("write_text", "write_bytes"):
            patch.setattr(Path, name, full)
        assert [remembered(["x"], lambda: calls.append(1) or len(calls)) for _ in range(2)] == [
            1,
            2,
        ]
    shutil.rmtree(kept.parent)
    kept.parent.write_text("a file where the folder should be")
    assert [remembered(["x"], lambda: calls.append(1) or len(calls)) for _ in range(2)] == [3, 4]


def test_ranks_remember_the_same_plan_at_once(kept):
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2, timeout=60)

    def remember():
        for i in range(20):
            assert remembered([i], together.wait) in (0, 1)

    ranks = [context.Process(target=remember) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    assert len(list(kept.iterdir())) == 20


@dataclasses.dataclass
class Setting:
    beta: float = 0.1


def model(**changes):
    made = nn.Sequential(nn.Linear(4, 8, device="meta"), nn.GELU(), nn.Linear(8, 2, device="meta"))
    for name, value in changes.items():
        setattr(made[1], name, value)
    return made


def test_a_fingerprint_depends_on_all_that_decides_costs():
    frozen = model()
    frozen[0].weight.requires_grad_(False)
    other = [
        [model().to(torch.bfloat16), Setting(), {"a", "b"}],
        [frozen, Setting(), {"a", "b"}],
        [model(kernel="flash"), Setting(), {"a", "b"}],
        [model(act=torch.nn.functional.silu), Setting(), {"a", "b"}],
        [model(), Setting(0.2), {"a", "b"}],
        [model(), Setting(), {"a", "c"}],
        [model(), Setting()],
    ]
    assert fingerprint([model(), Setting(), {"a", "b"}]) == fingerprint(
        [model(), Setting(), {"b", "a"}]
    )
    assert (
        len({fingerprint(what) for what in [[model(), Setting(), {"a", "b"}], *other]})
        == len(other) + 1
    )
