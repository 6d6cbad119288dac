"""What several tests of recipes share: a small world, and a run of RAFT in it. They do not write into either."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two base models, 12 prompts and 6 held-out prompts."""
    from tests.kit.raft_runs import write_world

    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def make(folder: Path) -> Callable[..., Path]:
    """Write the YAML of a run of RAFT: 2 cycles of 12 prompts with 4 answers each."""
    from tests.kit.raft_runs import write_run

    return partial(write_run, folder)


@pytest.fixture(scope="session")
def reference(make: Callable[..., Path], folder: Path) -> Path:
    """An undisturbed run of RAFT, whose metric logger writes the file ``log``."""
    from rocm_ext.recipes.raft_rocm import main

    from tests.kit.forks import forked

    out = folder / "reference"
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(out), "filename": "log"}
    code, messages = forked(main, make(out, metric_logger=logger))
    assert code == 0, messages
    return out
