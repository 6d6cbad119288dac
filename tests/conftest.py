"""What several test files share."""

import os
from pathlib import Path

import pytest

# Before anything imports torch: threads that wait do not spin, or runs beside each other take many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def pocket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pocket model that is hardly trained; do not write into it."""
    from rocm_ext.pocket import make

    folder = tmp_path_factory.mktemp("pocket") / "model"
    make(folder, seed=7, target=0.01)
    return folder
