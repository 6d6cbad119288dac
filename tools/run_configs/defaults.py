"""Prints the defaults files of recipes from the table of keys, rocm_ext/config/keys.yaml."""

from typing import Any

from rocm_ext.config.keys import Key, keys_in, table

_COLUMN = 32  # where comments begin


def defaults_file(name: str) -> str:
    """Return the text of a defaults file."""
    content = table()[name]
    lines = [f"# {line}".rstrip() for line in content["about"].rstrip().split("\n")]
    lines.append("")
    if name.endswith("_rocm"):
        lines.append(f"recipe: {name}")
    if "extends" in content:
        lines.append(f"extends: {content['extends']}")
    if "include" in content:
        lines.append(f"include: [{', '.join(content['include'])}]")
    section = ""
    for key in keys_in(name):
        if key.section != section:
            section = key.section
            if lines[-1]:
                lines.append("")
            lines.append(f"# ---- {section}")
        elif not section and lines[-1].startswith(("extends", "include")):
            lines.append("")
        lines += _lines_of(key)
    return "\n".join(lines) + "\n"


def _lines_of(key: Key) -> list[str]:
    """Return the lines of a key: its default, and what it means."""
    nested = key.default if isinstance(key.default, dict) and key.default else {}
    line = f"{key.name}:" if nested else f"{key.name}: {_value(key.default)}"
    if key.meaning:
        line = f"{f'{line}  '.ljust(_COLUMN)}# {key.meaning}"
    return [line, *(f"  {name}: {_value(value)}" for name, value in nested.items())]


def _value(value: Any) -> str:
    """Write a value as YAML, as people write it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str) and value[:1].isdigit() and "e" not in value:
        return f'"{value}"'
    return str(value)
