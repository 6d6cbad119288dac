"""What several tests of models share; they do not write into it."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of :data:`tests.kit.hf_models.MODELS`, by name."""
    from tests.kit.families import on_demand
    from tests.kit.hf_models import write_theirs

    return on_demand(tmp_path_factory.mktemp("theirs"), write_theirs, sharded="qwen3 moe")


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 rows for SFT."""
    from tests.kit.tiny import write_rows

    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 80)
