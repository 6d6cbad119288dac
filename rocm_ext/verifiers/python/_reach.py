"""What tests change in their own process and expect in the code's. This runs inside the judge's sandbox."""

import ast
import re

FORWARDED = {"builtins.input", "sys.stdin", "sys.stdout", "sys.stderr"}  # changes of these reach the code
OWN = {"solution", "__main__"}
RECORDERS = {"assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex", "catch_warnings"}
FILES = re.compile(r"\b(tempfile|tmp_path|write_text|write_bytes)\b|(?<![.\w])open\(")


def unreached(nodes):
    """The first expression of the tests that changes what only their own process has, as text; "" for none.

    Args:
        nodes: of the tests' source.
    """
    modules = {(alias.asname or alias.name).split(".")[0]: alias.name
               for node in nodes if isinstance(node, ast.Import) for alias in node.names}  # fmt: skip
    for node in nodes:
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name.split(".")[-1] in RECORDERS or (_patches(name) and _elsewhere(node.args, modules)):
                return ast.unparse(node)[:100]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environment(node.value):
            return ast.unparse(node)[:100]
    return ""


def _is_environment(node):
    return ast.unparse(node) in ("os.environ", "environ")


def _patches(name):
    parts = name.split(".")
    return parts[-1] == "patch" or parts[-2:] in (["patch", "object"], ["patch", "dict"], ["monkeypatch", "setattr"])


def _elsewhere(args, modules):
    """Whether the arguments of a patch name a thing of a library."""
    if not args:
        return False
    if isinstance(args[0], ast.Constant):
        target = str(args[0].value)
    else:
        target = ast.unparse(args[0])
        if target.split(".")[0] not in modules:
            return False
        target = modules[target.split(".")[0]] + target[len(target.split(".")[0]) :]
        if len(args) > 1 and isinstance(args[1], ast.Constant):
            target += f".{args[1].value}"
    return target not in FORWARDED and target.split(".")[0] not in OWN


def doubt(tests, modules):
    """Why a failure may come from the two processes; "" if nothing says so.

    Args:
        tests: the tests' source.
        modules: which of ``random`` and ``numpy`` the code has loaded.
    """
    if modules and re.search(r"\bseed\(", tests):
        return "the tests set a seed, and the code draws random numbers of its own"
    if FILES.search(tests):
        return "the tests use files, and the code has a file system of its own"
    return ""
