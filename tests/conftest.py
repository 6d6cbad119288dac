"""What several test files share."""

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import OmegaConf

# A job in the background ignores Ctrl-C, and so would the programs that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# As the CPU profile has it, before anything imports torch: recipes need not start themselves again.
_PROFILE = Path(__file__).parents[1] / "recipe_configs" / "hardware" / "cpu.yaml"
for _name, _variable in OmegaConf.load(_PROFILE).environment.items():
    os.environ.setdefault(_name, _variable.value)
# What was measured on this machine must not decide tests.
os.environ["ROCM_EXT_BENCH"] = os.devnull


@pytest.fixture(scope="session")
def pocket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pocket model that is hardly trained; do not write into it."""
    from rocm_ext.pocket import make

    folder = tmp_path_factory.mktemp("pocket") / "model"
    make(folder, seed=7, target=0.01)
    return folder


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What our logger says, each message once, whether or not an earlier run in this process set it up."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rocm_ext")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)
