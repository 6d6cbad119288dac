"""`rocm-ext` itself, and what its subcommands share; they have test files of their own."""

import argparse
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rocm_ext import cli
from rocm_ext.base.errors import UserError
from rocm_ext.cli import _common

NAMES = sorted(path.stem for path in Path(cli.__file__).parent.glob("[a-z]*.py"))


def test_version_imports_no_torch():
    program = (
        "import sys\nfrom rocm_ext import cli\n"
        "try:\n    cli.main(['--version'])\nfinally:\n    print('torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names = ("torchtune-rocm", "torchtune", "torch")
    assert run.stdout.splitlines() == [
        *(f"{name} {importlib.metadata.version(name)}" for name in names),
        "False",
    ]


def test_version_names_what_is_not_installed(capsys, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--version"])
    assert not leaving.value.code
    assert capsys.readouterr().out.splitlines()[-1] == "torch is not installed"


def test_help_has_every_command_under_when_one_needs_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert (
        sorted(
            line.split()[0]
            for line in said.splitlines()
            if line.startswith("  ") and line[2].islower()
        )
        == NAMES
    )
    before, during, after = (
        said.index(f"\n{when} a run:\n") for when in ("before", "during", "after")
    )
    assert (
        before
        < said.index("  doctor ")
        < during
        < said.index("  monitor ")
        < after
        < said.index("  report ")
    )


def test_help_of_a_command_imports_no_torch():
    program = f"""import sys
from rocm_ext import cli
for name in {NAMES}:
    help = cli.parser_of(name).format_help()
    assert f"usage: rocm-ext {{name}} " in help and len(help.split("\\n\\n")[1]) > 60, name
sys.exit("torch" in sys.modules)"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "`rocm-ext COMMAND --help` has a command's options."),
        (["docter"], "there is no command docter; did you mean doctor?"),
        (
            ["plan", "--ranks", "two", "--config", "x"],
            "--ranks: 'two' is not a whole number from 1 to ",
        ),
        (
            ["chat", "x", "--temperature", "nan"],
            "--temperature: 'nan' is not a number from 0 to 100",
        ),
        (["eval", "--nonsense", "--config", "x"], "unrecognized arguments: --nonsense"),
        (["compare", "a", "b", "--tolerance", "nan"], "--tolerance: "),
    ],
)
def test_wrong_arguments_end_with_2_and_say_what_was_expected(arguments, said, capsys):
    with pytest.raises(SystemExit) as leaving:
        cli.main(arguments)
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_exists_is_replaced_with_force_only(tmp_path):
    (there := tmp_path / "rows.jsonl").write_text("precious")
    with pytest.raises(
        UserError, match=r"rows.jsonl exists; name another file, or add --force"
    ) as refused:
        _common.check_new_file(there)
    assert refused.value.code == 2
    assert _common.check_new_file(there, force=True) == there
    assert there.read_text() == "precious"
    for name, said in (("", "is a folder; name a file"), ("rows.jsonl/x", "cannot write")):
        with pytest.raises(UserError, match=said):
            _common.check_new_file(tmp_path / name, force=True)
    assert _common.check_new_file(tmp_path / "a/b/c.json") == tmp_path / "a/b/c.json"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"], "nothing is made by asking"


def test_json_has_no_nan(capsys):
    _common.print_json({"a": [float("nan"), 1.5], "b": (float("inf"),), 3: None})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None], "3": None}


def test_a_text_in_one_line():
    assert _common.shortened("one\ntwo\x1b", 20) == "one ⏎ two\N{REPLACEMENT CHARACTER}"
    assert (_common.shortened("abcdef", 3), _common.shortened("abcdef", -3)) == ("abc …", "… def")
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number from"):
        _common.number(float, 0.5, 2)("inf")
