"""The tables in docs/models.md are those of the tests' models."""

import re

from rocm_ext.model.families import _FAMILIES
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
