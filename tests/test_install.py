"""What an installation leaves in ``site-packages``, and what happens when the checkout it links to is gone."""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.constraints import versions

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()
PROJECT = ("pyproject.toml", "setup.py", "rocm_ext_hook.py", "README.md", "LICENSE", "rocm_ext", "recipes",
           "recipe_configs")  # fmt: skip
# what torch does at the end of its import
CALL_HOOKS = """
import sys
from importlib.metadata import entry_points
for hook in entry_points(group="torch.backends"):
    hook.load()()
print("rocm_ext.hook" in sys.modules)
"""


def test_containers_get_what_an_installation_needs():
    """Their context holds the files that the other tests install from; the extras that they install exist."""
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(PROJECT)
    wanted = re.findall(r'"/opt/torchtune-rocm\[([\w,]+)\]"', (ROOT / "Containerfile").read_text())
    assert len(wanted) == 2
    assert {*",".join(wanted).split(",")} <= {*metadata("torchtune-rocm").get_all("Provides-Extra")}


@pytest.mark.parametrize(("target", "library"), [("demo", '"."'), ("setup", '".[test]"')])
def test_make_installs_the_cpu_build_and_no_more_than_is_needed(target, library, tmp_path):
    given = (
        "TORCH",
        "CONSTRAINTS",
        "MAKEFLAGS",
        "MAKELEVEL",
        "MFLAGS",
    )  # to the make that runs the tests
    environ = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "-n", target, f"VENV={tmp_path}"]
    said = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout
    torch, ours = re.findall(r"pip install -q (.*torch==2.*|.*-e \S+)", said)
    assert ours.endswith(f" -e {library}")
    assert (
        torch.endswith("https://download.pytorch.org/whl/cpu; \\")
        != Path("/dev/nvidiactl").exists()
    )


def test_exact_versions_are_within_our_ranges():
    exact = dict(line.split("==") for line in CONSTRAINTS if not line.startswith("#"))
    ours = [
        each
        for each in map(Requirement, requires("torchtune-rocm"))
        if canonicalize_name(each.name) in exact
    ]
    assert len(ours) > 30
    assert [
        str(each) for each in ours if exact[canonicalize_name(each.name)] not in each.specifier
    ] == []


def test_exact_versions_are_those_of_this_environment():
    ready = Path(sys.prefix, ".ready")  # `make setup` writes here which versions it took
    if not ready.exists() or not ready.read_text().strip():
        pytest.skip("set up without constraints.txt")
    assert {f"{name}=={exact}" for name, exact in versions("test").items()} <= {*CONSTRAINTS}


@pytest.fixture
def editable(tmp_path):
    """A checkout and the Python of a venv into which it is installed with ``pip install -e``."""
    checkout, folder = tmp_path / "checkout", tmp_path / "venv"
    checkout.mkdir()
    for name in PROJECT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next(folder.glob("lib/python*/site-packages"))
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "zz_packages_of_the_tests.pth").write_text("\n".join(packages))
    pip = [sys.executable, "-m", "pip", "-q", "--python", str(python), "install"]
    subprocess.run(
        [*pip, "--no-index", "--no-deps", "--no-build-isolation", "-e", str(checkout)], check=True
    )
    return checkout, python


def run(python, *command):
    """What a Python program that ends well writes, on stdout and on stderr."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [python, *command], capture_output=True, text=True, cwd=python.parent, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.wide
def test_torch_imports_without_the_checkout(editable, tmp_path):
    checkout, python = editable
    tune = tmp_path / "tune"
    tune.write_text(CALL_HOOKS)
    assert run(python, "-c", CALL_HOOKS) == ("True\n", "")

    (checkout / "rocm_ext" / "hook.py").rename(
        checkout / "rocm_ext" / "hooks.py"
    )  # another version checked out
    assert run(python, "-c", CALL_HOOKS) == ("False\n", "")
    assert "No module named 'rocm_ext.hook'" in run(python, tune)[1]

    checkout.rename(tmp_path / "moved")
    assert run(python, "-c", "import torch; print(torch.ones(2).sum())") == ("tensor(2.)\n", "")
    said = run(python, tune)[1]
    assert said.count("\n") == 1
    assert said.startswith(
        "torchtune-rocm: its recipes are not registered: No module named 'rocm_ext'; "
    )
    assert "pip install" in said
    assert "pip uninstall torchtune-rocm" in said
