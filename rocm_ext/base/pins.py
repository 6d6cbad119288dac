"""The versions of torchtune and torchao that work together."""

from __future__ import annotations

from contextlib import suppress

TORCHTUNE_PIN = "0.6.1"
TORCHAO_PIN = ("0.13", "0.16")  # from, below


def installed() -> dict[str, str | None]:
    """The versions of torchtune and torchao; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {"torchtune": None, "torchao": None}
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def wrong_pins(versions: dict[str, str | None] | None = None) -> str | None:
    """One line that says which of torchtune and torchao does not fit, or None. ``versions``: else the installed."""
    versions = installed() if versions is None else versions
    torchtune, torchao = (versions.get(name) or "none" for name in ("torchtune", "torchao"))
    low, below = (_numbers(pin) for pin in TORCHAO_PIN)
    if _numbers(torchtune) == _numbers(TORCHTUNE_PIN) and low <= _numbers(torchao) < below:
        return None
    return (
        f"torchtune-rocm needs torchtune=={TORCHTUNE_PIN} and torchao>={TORCHAO_PIN[0]},<{TORCHAO_PIN[1]}; "
        f"found torchtune {torchtune}, torchao {torchao}. "
        f'Fix: pip install "torchtune=={TORCHTUNE_PIN}" "torchao=={TORCHAO_PIN[0]}.0"'
    )


def _numbers(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isascii() and part.isdigit())
