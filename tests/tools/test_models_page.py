"""The tables in docs/models.md are those of the tests' models."""

import re

from rocm_ext.model.families import _FAMILIES
from rocm_ext.model.llama_cpp import _ROWS
from tests.kit import hf_models, multimodal_models
from tools import models


def test_the_page_is_as_the_command_writes_it():
    page = models.PAGE.read_text()
    assert models.filled(page) == page, "run python tools/models.py"
    emptied = re.sub(r"(made by tools/models.py -->\n\n).*?(?=\n\n<!-- end -->)", r"\1", page, flags=re.DOTALL)
    assert len(emptied) < len(page) - 1500
    assert models.filled(emptied) == page


def test_this_library_s_own_decoders_are_named():
    own, _ = models.PAGE.read_text().split("## Other architectures")
    assert set(re.findall(r"^\| `(\w+ForCausalLM)`", own, re.MULTILINE)) == _FAMILIES.keys()


def test_each_layout_of_llama_cpp_has_a_model_that_the_tests_ask():
    text = {hf_models.MODELS[name][0] for name in hf_models.GGUF}
    assert text | {multimodal_models.MODELS[name][1] for name in multimodal_models.GGUF} == _ROWS.keys()
