"""Mappings of mappings, as configs are."""

from collections.abc import Mapping
from typing import Any


def flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted path: ``{"a": {"b": 1}}`` -> ``{"a.b": 1}``. Lists and empty mappings are values."""
    if not isinstance(nested, Mapping) or not nested:
        return {prefix: nested}
    return {k: v for name, value in nested.items() for k, v in flatten(value, f"{prefix}.{name}".lstrip(".")).items()}
