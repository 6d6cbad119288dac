"""The versions of torchtune and torchao that work together."""

from __future__ import annotations

from contextlib import suppress

TORCHTUNE_PIN = "0.6.1"
TORCHAO_PIN = ("0.13", "0.19")  # from, below
# torchao 0.18 imports torch.nn.functional.scaled_grouped_mm, which torch has from 2.10 on
OLD_TORCH, OLD_TORCH_PIN = "2.10", ("0.13", "0.18")


def installed() -> dict[str, str | None]:
    """The versions of torchtune, torchao and torch; None for one that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {"torchtune": None, "torchao": None, "torch": None}
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def wrong_pins(versions: dict[str, str | None] | None = None) -> str | None:
    """A line that names a wrong version of torchtune or torchao among ``versions``, or None.

    Without ``versions``, the installed ones are checked.
    """
    if versions is None:
        versions = installed()
    torchtune = versions.get("torchtune") or "none"
    torchao = versions.get("torchao") or "none"
    torch = versions.get("torch")
    low, below = TORCHAO_PIN
    with_torch = ""
    if torch is not None and _numbers(torch) < _numbers(OLD_TORCH):
        low, below = OLD_TORCH_PIN
        with_torch = f" with torch {torch}"
    fits = _numbers(low) <= _numbers(torchao) < _numbers(below)
    if fits and _numbers(torchtune) == _numbers(TORCHTUNE_PIN):
        return None
    return (
        f"torchtune-rocm needs torchtune=={TORCHTUNE_PIN} and torchao>={low},<{below}{with_torch}; "
        f"found torchtune {torchtune}, torchao {torchao}. "
        f'Fix: pip install "torchtune=={TORCHTUNE_PIN}" "torchao>={low},<{below}"'
    )


def _numbers(version: str) -> tuple[int, ...]:
    release = version.partition("+")[0]
    parts = [part for part in release.split(".") if part.isascii() and part.isdigit()]
    return tuple(map(int, parts))
