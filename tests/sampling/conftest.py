"""Fixtures of the tests of sampling."""

import pytest

from tests.kit.families import on_demand
from tests.kit.hf_models import write_theirs


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """The folder of a model of :data:`tests.kit.hf_models.MODELS`, by name."""
    return on_demand(tmp_path_factory.mktemp("theirs"), write_theirs, sharded="")
