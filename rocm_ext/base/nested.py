"""Nested values of JSON and YAML: by dotted path, and parsed into typed, checked records."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rocm_ext.base.errors import UserError, refuse


def flatten(nested: object, prefix: str = "") -> dict[str, object]:
    """Values by dotted path: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``. Lists and empty mappings are values."""
    if not isinstance(nested, Mapping) or not nested:
        return {prefix: nested}
    return {k: v for name, value in nested.items() for k, v in flatten(value, f"{prefix}.{name}".lstrip(".")).items()}


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
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):  # only with None
        return None if value is None else parse(arguments[0], value, where)
    if is_dataclass(kind) and isinstance(value, Mapping):
        return _dataclass(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(parse(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        return {key: parse(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is Literal and value in arguments:
        return value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**53 else value
    if type(value) is kind and (kind not in (int, float) or 0 <= value < 2**63):  # NaN fails too
        return value
    expected = "an object" if is_dataclass(kind) or origin is dict else "a list" if origin is tuple else None
    expected = expected or (f"one of {', '.join(arguments)}" if origin is Literal else f"{kind.__name__}")
    raise UserError(f"{where} is {repr(value)[:60]}, expected {expected}")


def _dataclass(kind: Any, value: Mapping[str, object], where: str) -> Any:
    known = {field.name: field for field in fields(kind)}
    unknown = sorted(set(value) - set(known))
    refuse(f"{where} has the unknown key {key!r}; known: {', '.join(known)}" for key in unknown)
    required = [name for name, field in known.items() if field.default is field.default_factory is MISSING]
    refuse(f"{where} lacks {name!r}" for name in required if name not in value)
    hints = get_type_hints(kind)
    return kind(**{name: parse(hints[name], item, f"{where}.{name}") for name, item in value.items()})
