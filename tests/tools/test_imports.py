"""The tools import what exists, also inside functions, which few tests call."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
OURS = ("rocm_ext", "recipes", "tests", "tools")


@pytest.mark.parametrize(
    "path", [str(path.relative_to(TOOLS)) for path in sorted(TOOLS.rglob("*.py"))]
)
def test_what_a_tool_imports_exists(path):
    for statement in ast.walk(ast.parse((TOOLS / path).read_text())):
        if (
            not isinstance(statement, ast.ImportFrom)
            or (statement.module or "").split(".")[0] not in OURS
        ):
            continue
        if statement.module.startswith(
            "tools.benchmarks.sides"
        ):  # scripts, which begin to work when imported
            assert find_spec(statement.module)
            continue
        module = import_module(statement.module)
        for name in statement.names:
            assert hasattr(module, name.name) or find_spec(f"{statement.module}.{name.name}"), (
                name.name
            )
