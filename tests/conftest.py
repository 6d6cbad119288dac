"""Shared fixtures and the environment of all tests."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

# A background job ignores Ctrl-C, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Set the CPU profile's variables before anything imports torch, so that recipes do not restart themselves.
_PROFILE = Path(__file__).parents[1] / "recipe_configs" / "hardware" / "cpu.yaml"
for _name, _variable in OmegaConf.load(_PROFILE).environment.items():
    os.environ.setdefault(_name, _variable.value)
# Tests must not depend on this machine's bench file.
os.environ["ROCM_EXT_BENCH"] = os.devnull


@pytest.fixture(scope="session")
def pocket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained pocket model; do not write into its folder."""
    from rocm_ext.pocket import make

    folder = tmp_path_factory.mktemp("pocket") / "model"
    make(folder, seed=7, target=0.01)
    return folder


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Our logger's messages, each once, even if an earlier run in this process has set the logger up."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rocm_ext")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
