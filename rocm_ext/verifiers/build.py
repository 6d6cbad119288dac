"""Verifiers built from nodes of a configuration."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from rocm_ext.errors import UserError, nearest, one_line
from rocm_ext.verifiers.base import Result, Verifier

KEY = "_component_"


class Wrapped(Verifier):
    """A user's object that is callable but no :class:`Verifier`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.needs = tuple(getattr(inner, "needs", ()))

    def check(self) -> None:
        if hasattr(self.inner, "check"):
            self.inner.check()

    def check_row(self, row: Mapping[str, Any]) -> None:
        if hasattr(self.inner, "check_row"):
            self.inner.check_row(row)
        else:
            super().check_row(row)

    def __call__(self, completion: str, row: Mapping[str, Any]) -> Result:
        return self.inner(completion, row)


def build(node: "Mapping[str, Any] | Verifier") -> Verifier:
    """Build the verifier that a node describes: ``{_component_: rocm_ext.verifiers.MathAnswer, ...}``.

    Nodes among the arguments, and in lists of them, are built too. A module may be in the current directory.

    Raises:
        UserError: the component does not exist, does not take these arguments, or raises.
    """
    if isinstance(node, Verifier):
        return node
    if not isinstance(node, Mapping) or not isinstance(node.get(KEY), str):
        raise UserError(f"a verifier must be a mapping with {KEY}: module.Class, found {_shown(node)}")
    path = node[KEY]
    made = _find(path)
    args = {name: _built(value) for name, value in node.items() if name != KEY}
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # written in C
        signature = None
    if signature is not None:
        known = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
            for name in args:
                if name not in known:
                    raise UserError(f"{path} has no argument {name!r}{nearest(name, known) if known else ''}")
        try:
            signature.bind(**args)
        except TypeError as error:
            raise UserError(f"{path}: {error}") from error
    try:
        verifier = made(**args)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{path} cannot be built: {one_line(error)}") from error
    if isinstance(verifier, Verifier):
        return verifier
    if not callable(verifier):
        raise UserError(f"{path} builds a {type(verifier).__name__}, which is not callable as (completion, row)")
    return Wrapped(verifier)


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        return build(value) if KEY in value else {key: _built(item) for key, item in value.items()}
    return [_built(item) for item in value] if isinstance(value, (list, tuple)) else value


def _find(path: str) -> Any:
    """The class or function that a dotted path names."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        raise UserError(f"{KEY}: {path!r} must be module.Class, such as rocm_ext.verifiers.MathAnswer")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name + ".").startswith(error.name + "."):
            raise UserError(f"{KEY}: {path!r}: there is no module {error.name!r} here or in {here}") from error
        raise UserError(f"{KEY}: {path!r}: importing {module_name} raised {one_line(error)}") from error
    except Exception as error:
        raise UserError(f"{KEY}: {path!r}: importing {module_name} raised {one_line(error)}") from error
    if not hasattr(module, name):
        public = [key for key, value in vars(module).items() if callable(value) and key[:1] != "_"]
        classes = [key for key in public if isinstance(getattr(module, key), type)]
        raise UserError(f"{module_name} has no {name!r}{nearest(name, classes or public) if public else ''}")
    found = getattr(module, name)
    if not callable(found):
        raise UserError(f"{KEY}: {path!r} is a {type(found).__name__}, not a class")
    return found


def _shown(node: Any) -> str:
    text = repr(dict(node)) if isinstance(node, Mapping) else repr(node)
    return text if len(text) < 100 else text[:97] + "..."
