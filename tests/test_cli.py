"""`rocm-ext` itself; its subcommands have test files of their own."""

import importlib.metadata
import subprocess
import sys

import pytest

from rocm_ext import cli


def test_version_imports_no_torch():
    program = (
        "import sys\nfrom rocm_ext import cli\n"
        "try:\n    cli.main(['--version'])\nfinally:\n    print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = ("torchtune-rocm", "torchtune", "torch")
    assert run.stdout.splitlines() == [*(f"{name} {importlib.metadata.version(name)}" for name in names), "False"]


def test_version_names_what_is_not_installed(capsys, monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--version"])
    assert not leaving.value.code
    assert capsys.readouterr().out.splitlines()[-1] == "torch is not installed"
