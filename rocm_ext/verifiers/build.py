"""Verifiers built from their configuration."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rocm_ext.base.errors import UserError, explain_errors, nearest
from rocm_ext.base.importing import COMPONENT, Component, import_component
from rocm_ext.base.types import Row
from rocm_ext.verifiers.base import Result, Verifier, group_results, short


class Wrapped(Verifier):
    """A :class:`Verifier` around a user's object that is callable or has ``judge_group``."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.needs = tuple(getattr(inner, "needs", ()))
        self.batch_size = getattr(inner, "batch_size", 0) if hasattr(inner, "judge_batch") else 1
        self.groups = hasattr(inner, "judge_group")

    def check(self) -> None:
        getattr(self.inner, "check", super().check)()

    def check_row(self, row: Row) -> None:
        getattr(self.inner, "check_row", super().check_row)(row)

    def __call__(self, completion: str, row: Row) -> Result:
        if self.groups:
            return group_results(self, [completion], row)[0]
        return self.inner(completion, row)

    def judge_batch(self, completions: Sequence[str], rows: Sequence[Row]) -> list[Result]:
        return self.inner.judge_batch(completions, rows)

    def judge_group(self, completions: Sequence[str], row: Row) -> list[Result]:
        return self.inner.judge_group(completions, row)


def build(node: Component | Verifier) -> Verifier:
    """Build a verifier from its configuration: ``{_component_: rocm_ext.verifiers.MathAnswer, ...}``.

    Components inside the arguments are built first. Modules may lie in the current directory.

    Raises:
        UserError: the component does not exist, does not take these arguments, or raises.
    """
    if isinstance(node, Verifier):
        return node
    if not (isinstance(node, Mapping) and isinstance(node.get(COMPONENT), str)):
        raise UserError(
            f"a verifier must be a mapping with {COMPONENT}: module.Class, found {short(node, 100)}"
        )
    path = node[COMPONENT]
    try:
        made = import_component(path)
    except UserError as error:
        raise UserError(f"{COMPONENT} {error}") from error
    args = {name: _built(value) for name, value in node.items() if name != COMPONENT}
    _check_arguments(path, made, args)
    with explain_errors(f"{path} cannot be built"):
        verifier = made(**args)
    if isinstance(verifier, Verifier):
        return verifier
    if not (callable(verifier) or hasattr(verifier, "judge_group")):
        raise UserError(
            f"{path} builds a {type(verifier).__name__}, which is not callable as (completion, row)"
        )
    return Wrapped(verifier)


def _check_arguments(path: str, made: Callable[..., Any], args: Mapping[str, Any]) -> None:
    """Raise UserError if a component does not take these arguments."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # written in C
        return
    known = []
    takes_all = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            known.append(name)
    for name in args:
        if name not in known and not takes_all:
            hint = nearest(name, known) if known else ""
            raise UserError(f"{path} has no argument {name!r}{hint}")
    try:
        signature.bind(**args)
    except TypeError as error:
        raise UserError(f"{path}: {error}") from error


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        if COMPONENT in value:
            return build(value)
        return {key: _built(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_built(item) for item in value]
    return value
