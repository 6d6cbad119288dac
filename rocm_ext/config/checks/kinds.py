"""Checks of one kind of value each. All raise UserError that names the key, the value and what was expected."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from rocm_ext.errors import UserError

OR_NULL = ", or null"


def check_named(cfg: DictConfig, *keys: str) -> None:
    """Refuse null for components."""
    for key in keys:
        if cfg[key] is None:
            raise UserError(f"{key} is None; expected a _component_, or leave the key out for its default")


def check_whole(cfg: DictConfig, keys: Mapping[str, tuple[int, bool]]) -> None:
    """Refuse all but whole numbers.

    Args:
        cfg: the config.
        keys: key -> the least, and whether it may be null.
    """
    for key, (least, optional) in keys.items():
        value = cfg[key]
        if not (type(value) is int and value >= least) and not (value is None and optional):
            raise UserError(f"{key} is {value!r}; expected a whole number of at least {least}{OR_NULL * optional}")


def check_switches(cfg: DictConfig, keys: Iterable[str]) -> None:
    """Refuse all but True and False."""
    for key in keys:
        if not isinstance(cfg[key], bool):
            raise UserError(f"{key} is {cfg[key]!r}; expected True or False")


def check_choices(cfg: DictConfig, **keys: Sequence[str]) -> None:
    """Refuse all but the names of ``keys``."""
    for key, choices in keys.items():
        if cfg[key] not in choices:
            *most, last = choices
            raise UserError(f"{key} is {cfg[key]!r}; expected {', '.join(most)} or {last}")


def check_numbers(cfg: DictConfig, **keys: tuple[Callable[[Any], bool], str]) -> None:
    """Refuse all but numbers.

    Args:
        cfg: the config.
        keys: key -> whether a number or null fits, and what was expected.
    """
    for key, (fits, expected) in keys.items():
        value = cfg[key]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        try:
            fine = (number or value is None) and fits(value)
        except TypeError:  # null where it may not be
            fine = False
        if not fine:
            raise UserError(f"{key} is {value!r}; expected {expected}")
