"""The versions of torchtune and torchao that work together."""

from __future__ import annotations

from contextlib import suppress

TORCHTUNE_PIN = "0.6.1"
TORCHAO_PIN = ("0.13", "0.19")  # from, below
# torchao 0.18 imports torch.nn.functional.scaled_grouped_mm, which torch has from 2.10 on
OLD_TORCH, OLD_TORCH_PIN = "2.10", ("0.13", "0.18")


def installed() -> dict[str, str | None]:
    """The versions of torchtune, torchao and torch; None: not installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {"torchtune": None, "torchao": None, "torch": None}
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def wrong_pins(versions: dict[str, str | None] | None = None) -> str | None:
    """A line that names the wrong version of torchtune or torchao, or None. ``versions``: default: the installed."""
    versions = installed() if versions is None else versions
    torchtune, torchao = (versions.get(name) or "none" for name in ("torchtune", "torchao"))
    torch = versions.get("torch")
    old = torch is not None and _numbers(torch) < _numbers(OLD_TORCH)
    low, below = OLD_TORCH_PIN if old else TORCHAO_PIN
    fits = _numbers(low) <= _numbers(torchao) < _numbers(below)
    if _numbers(torchtune) == _numbers(TORCHTUNE_PIN) and fits:
        return None
    return (
        f"torchtune-rocm needs torchtune=={TORCHTUNE_PIN} and torchao>={low},<{below}"
        f"{f' with torch {torch}' if old else ''}; found torchtune {torchtune}, torchao {torchao}. "
        f'Fix: pip install "torchtune=={TORCHTUNE_PIN}" "torchao>={low},<{below}"'
    )


def _numbers(version: str) -> tuple[int, ...]:
    head = version.split("+")[0].split(".")
    return tuple(int(part) for part in head if part.isascii() and part.isdigit())
