"""Kinds of values that a key of a config may hold, and a check of many keys by a table.

A table is a mapping such as ``{"epochs": integer(1), "seed": integer(0) | NULL}``.
"""

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, ListConfig

from rocm_ext.base.errors import UserError


@dataclass(frozen=True)
class Kind:
    """A kind of value; ``|`` joins two.

    Attributes:
        fits: returns whether a value is of this kind.
        names: names in messages, several for joined kinds.
    """

    fits: Callable[[Any], bool]
    names: tuple[str, ...]

    def __or__(self, other: "Kind") -> "Kind":
        return Kind(lambda value: self.fits(value) or other.fits(value), self.names + other.names)

    def __str__(self) -> str:
        *most, last = self.names
        return f"{', '.join(most)}, or {last}" if most else last


def check(
    config: Mapping[str, object] | DictConfig, kinds: Mapping[str, Kind], where: str = ""
) -> None:
    """Raise a UserError for values that do not fit a table; the message names key, value and what was expected.

    Args:
        config: the config, or a part of it; keys may be missing.
        kinds: kind of value by key.
        where: prefix of keys in messages, such as ``model.``.
    """
    for key, kind in kinds.items():
        if key in config and not kind.fits(config[key]):
            raise UserError(f"{where}{key} is {config[key]!r}; expected {kind}")


def one_of(*values: Any) -> Kind:
    """One of these values; 1 does not stand for True."""

    def fits(value: Any) -> bool:
        return any(type(value) is type(one) and value == one for one in values)

    *most, last = ["null" if value is None else str(value) for value in values]
    return Kind(fits, (f"{', '.join(most)} or {last}" if most else last,))


def integer(least: int, most: int = 10**9, why: str = "") -> Kind:
    """A whole number in a range; ``why`` follows the range in the error."""
    name = f"a whole number from {least} to {most}{why}"
    return Kind(lambda value: type(value) is int and least <= value <= most, (name,))


def number(fits: Callable[[float], bool], name: str) -> Kind:
    """A finite number that ``fits``."""
    most = sys.float_info.max  # a whole number may be larger

    def is_number(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return -most <= value <= most

    return Kind(lambda value: is_number(value) and fits(value), (name,))


def text(name: str) -> Kind:
    """A text, not empty."""
    return Kind(lambda value: isinstance(value, str) and bool(value), (name,))


def list_of_texts(name: str) -> Kind:
    """A list of texts."""

    def fits(value: Any) -> bool:
        return isinstance(value, ListConfig) and all(isinstance(item, str) for item in value)

    return Kind(fits, (name,))


def by_pattern(kind: Kind) -> Kind:
    """A mapping from regular expressions to values of this kind."""

    def fits(mapping: Any) -> bool:
        if not isinstance(mapping, Mapping):
            return False
        for pattern, value in mapping.items():
            if not isinstance(pattern, str) or not pattern or not kind.fits(value):
                return False
            try:
                re.compile(f"({pattern})")
            except (re.error, OverflowError, RecursionError):
                return False
        return True

    return Kind(fits, (f"layers' names or regular expressions, with {kind} for each",))


def _around_one(value: Any) -> bool:
    if not isinstance(value, ListConfig | list | tuple) or len(value) != 2:
        return False
    low, high = value
    if type(low) not in (int, float) or type(high) not in (int, float):
        return False
    return 0 <= low <= 1 <= high < math.inf


NULL = Kind(lambda value: value is None, ("null",))
SWITCH = one_of(True, False)
JSON_SWITCH = Kind(lambda value: isinstance(value, bool), ("true or false",))  # in JSON
ANY_COMPONENT = Kind(
    lambda value: value is not None, ("a _component_", "leave the key out for its default")
)
POSITIVE = number(lambda x: x > 0, "a number above 0")
NOT_NEGATIVE = number(lambda x: x >= 0, "a number of at least 0")
SHARE = number(lambda x: 0 < x <= 1, "a share above 0, at most 1")
LIMITS = Kind(
    _around_one, ("a list of two numbers, the lowest from 0 to 1 and the highest of at least 1",)
)
REST = number(lambda x: 0 <= x < 1, "a share from 0 to under 1")
