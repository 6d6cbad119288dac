"""Fixtures of the tests of sampling."""

from pathlib import Path

import pytest

from tests.kit.hf_models import write_theirs


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function from a model's name to its folder, written at the first call."""
    top, made = tmp_path_factory.mktemp("theirs"), {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = write_theirs(top / name.replace(" ", "_"), name)
        return made[name]

    return folder
