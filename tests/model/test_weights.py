"""Weight files are read as safetensors reads them, without leaving them in the system's page cache."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rocm_ext.base.errors import UserError
from rocm_ext.model.build import Weights
from rocm_ext.model.weights.checkpointer import StoredWeights, on_meta, sample

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
)
TENSORS = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50, deadline=None)
@given(tensors=TENSORS)
def test_tensors_equal_those_that_safetensors_reads(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("weights")
    written = {
        name: (100 * torch.randn(shape)).to(dtype) for name, (dtype, shape) in tensors.items()
    }
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    expected, stored = (
        load_file(folder / "model.safetensors"),
        StoredWeights(folder, ["model.safetensors"]),
    )
    assert set(stored) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor)
        assert (on_meta(stored)[name].shape, on_meta(stored)[name].dtype) == (
            tensor.shape,
            tensor.dtype,
        )
        assert torch.equal(sample(stored, name), sample(expected, name))
    assert Weights(stored, "HF").fingerprint() == Weights(expected, "HF").fingerprint()


def test_a_fingerprint_sees_the_last_value(tmp_path):
    a, b = torch.zeros(1000), torch.zeros(1000)
    b[-1] = 1
    assert Weights({"w": a}, "HF").fingerprint() != Weights({"w": b}, "HF").fingerprint()


def test_a_file_that_became_shorter_is_named(tmp_path):
    save_file({"w": torch.randn(5000)}, tmp_path / "model.safetensors")
    stored = StoredWeights(tmp_path, ["model.safetensors"])
    os.truncate(tmp_path / "model.safetensors", 3000)
    with pytest.raises(UserError, match=r"cannot read .*model.safetensors"):
        stored["w"]
