"""Reads the table of keys, keys.yaml: the values that a key takes, and whether a resumed run may change it."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import yaml

from rocm_ext.base.kinds import (
    ANY_COMPONENT,
    LIMITS,
    Kind,
    integer,
    list_of_texts,
    number,
    one_of,
    text,
)

TABLE = Path(__file__).with_name("keys.yaml")
_RANGE = re.compile(
    r"((?P<low>[\d.]+) (?P<above><=?) )?(?P<what>integer|number|seconds|share|celsius)"
    r"( (?P<below><=?) (?P<high>[\d.]+))?"
    r"(?P<why>, because .*)?"
)
_NOUNS = {"number": "a number", "seconds": "seconds", "share": "a share", "celsius": "°C"}


@dataclass(frozen=True)
class Key:
    """A key of a defaults file.

    Attributes:
        name: the key.
        section: title of its section in the file.
        default: its default.
        takes: the values, or the kinds of values, that it takes. Empty if another check knows them.
        free: why a resumed run may change it; empty if it may not.
        meaning: its comment in the file.
    """

    name: str
    section: str
    default: Any
    takes: Sequence[Any]
    free: str
    meaning: str


@cache
def table() -> dict[str, Any]:
    """Return the content of keys.yaml, by defaults file."""
    # PyYAML may be built without its C library
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(TABLE.read_text(encoding="utf-8"), loader)


def keys_in(file: str) -> list[Key]:
    """Return the keys that a defaults file lists, without those of the files that it includes."""
    keys = []
    for section, rows in table()[file]["sections"].items():
        for name, row in rows.items():
            key = Key(
                name,
                section,
                row["default"],
                takes=row.get("takes", ()),
                free=row.get("free", ""),
                meaning=row.get("is", ""),
            )
            keys.append(key)
    return keys


def kinds(recipe: str) -> dict[str, Kind]:
    """Return the kind of value of each key of one of this library's recipes, where the table has one."""
    return {key.name: kind_of(key.takes) for key in _keys(recipe) if key.takes}


def free_keys(*recipes: str) -> frozenset[str]:
    """Return the keys, and arguments of components, that resumed runs of these recipes may change."""
    names = set(table()["common"]["free_arguments"])
    for recipe in recipes:
        free = {key.name: key.free for key in _keys(recipe)}
        names.update(name for name, why in free.items() if why)
    return frozenset(names)


def _keys(file: str) -> Iterator[Key]:
    """Yield the keys of a defaults file and of the files that it includes, which come first."""
    content = table()[file]
    for included in content.get("include", ()):
        yield from _keys(included)
    if "extends" in content:
        yield from _keys(content["extends"])
    yield from keys_in(file)


def kind_of(takes: Sequence[Any]) -> Kind:
    """Return the kind of values that ``takes`` lists: values, ranges such as ``0 < number <= 1``, and kinds by name."""
    kinds: list[Kind] = []
    values: list[Any] = []
    for item in takes:
        word, _, rest = str(item).partition(", ")
        match = _RANGE.fullmatch(str(item))
        if word == "component":
            kinds.append(ANY_COMPONENT)
        elif word == "limits":
            kinds.append(LIMITS)
        elif word == "text":
            kinds.append(text(rest))
        elif word == "texts":
            kinds.append(list_of_texts(rest))
        elif match is not None:
            kinds.append(_range(**match.groupdict()))
        else:
            values.append(item)
    if values:
        kinds.append(one_of(*values))
    return reduce(or_, kinds)


def _range(
    low: str | None,
    above: str | None,
    what: str,
    below: str | None,
    high: str | None,
    why: str | None,
) -> Kind:
    """Return the kind of numbers in a range, whose parts are those of ``0 < number <= 1, because ...``."""
    why = why or ""
    if what == "integer":
        return integer(int(low or 0), int(high or 10**9), why)
    words = _NOUNS[what]
    if above == "<":
        words += f" above {low}"
        words += f", at most {high}" if high is not None else ""
    elif high is None:
        words += f" of at least {low}"
    else:
        words += f" from {low} to {'under ' if below == '<' else ''}{high}"
    least, most = float(low or "-inf"), float(high or "inf")

    def fits(value: float) -> bool:
        if value == least:
            return above == "<="
        if value == most:
            return below == "<="
        return least < value < most

    return number(fits, words + why)
