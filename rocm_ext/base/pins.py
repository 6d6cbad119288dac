"""The versions of torchtune and torchao that work together, and what makes newer torchao work with torchtune 0.6.1."""

from __future__ import annotations

import importlib.util
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

from rocm_ext.base.errors import UserError

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
    """One line that says which of torchtune and torchao does not fit, or None. ``versions``: else the installed."""
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


def bridge() -> None:
    """Let torchtune import names that torchao has moved or removed. Programs without torchtune see no difference."""
    if "torchtune.datasets" not in sys.modules:
        sys.meta_path.insert(0, _Bridge())


class _Bridge:
    """An entry of ``sys.meta_path`` that imports nothing itself. It adds the names once, and then leaves.

    torchtune imports torchao, then its own data sets. Not before that is torchao complete: it imports torch, at the end
    of which our hook runs.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchtune.datasets":
            return
        sys.meta_path.remove(self)
        import torchao.dtypes
        import torchao.quantization

        if importlib.util.find_spec("torchao.dtypes.nf4tensor") is None:  # moved in 0.18 (pytorch/ao#4256)
            from torchao.quantization.quantize_.workflows.nf4 import nf4_tensor

            sys.modules["torchao.dtypes.nf4tensor"] = torchao.dtypes.nf4tensor = nf4_tensor
        for module, gone in (
            (torchao.quantization, "int4_weight_only"),  # in 0.16 (pytorch/ao#3308)
            (torchao.quantization, "int8_dynamic_activation_int4_weight"),
            (torchao.dtypes, "TensorCoreTiledLayout"),  # in 0.18 (pytorch/ao#4153)
        ):
            if not hasattr(module, gone):  # torchtune's recipe `quantize` alone calls them
                setattr(module, gone, partial(_refuse, gone))


def _refuse(gone: str, *_: object, **__: object) -> NoReturn:
    raise UserError(f"torchtune's quantizer needs torchao's {gone}, which is gone: pip install \"torchao<0.16\"")
