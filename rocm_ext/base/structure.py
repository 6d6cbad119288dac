"""Nested values of JSON and YAML: by dotted path, and parsed into typed, checked records."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rocm_ext.base.errors import UserError


def flatten(nested: object, prefix: str = "") -> dict[str, object]:
    """Values by dotted path: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``. Lists and empty mappings are values."""
    if not isinstance(nested, Mapping) or not nested:
        return {prefix: nested}
    flat: dict[str, object] = {}
    for name, value in nested.items():
        flat |= flatten(value, f"{prefix}.{name}".lstrip("."))
    return flat


def parse(kind: Any, value: Any, where: str) -> Any:
    """Convert ``value`` to the type ``kind``.

    Args:
        kind: a dataclass, tuple[X, ...], dict[str, X], X | None, Literal, str, bool, int, float or Any. Numbers are
            sizes, counts and speeds: they must not be negative.
        value: value from a JSON or YAML reader.
        where: path of ``value``, for messages.

    Raises:
        UserError: the value has another type; the message says where.
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only with None
        return None if value is None else parse(arguments[0], value, where)
    if is_dataclass(kind):
        expected = "an object"
        if isinstance(value, Mapping):
            return _dataclass(kind, value, where)
    elif origin is dict:
        expected = "an object"
        if isinstance(value, Mapping):
            return {key: parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    elif origin is tuple:
        expected = "a list"
        if isinstance(value, list):
            return tuple(parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is Literal:
        expected = f"one of {', '.join(arguments)}"
        if value in arguments:
            return value
    else:
        expected = kind.__name__
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        # NaN fails too
        if type(value) is kind and (kind not in (int, float) or 0 <= value < 2**63):
            return value
    raise UserError(f"{where} is {repr(value)[:60]}, expected {expected}")


def _dataclass(kind: Any, value: Mapping[str, object], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    for key in sorted(value.keys() - known.keys()):
        raise UserError(f"{where} has the unknown key {key!r}; known: {', '.join(known)}")
    for name, field in known.items():
        if name not in value and field.default is field.default_factory is MISSING:
            raise UserError(f"{where} lacks {name!r}")
    hints = get_type_hints(kind)
    values = {name: parse(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    return kind(**values)
