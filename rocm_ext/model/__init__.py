"""The model under training: torchtune's modules or transformers' code, with this library's adapters and attention.

YAML files name two components of this package: ``rocm_ext.model.from_checkpoint`` and
``rocm_ext.model.HFCheckpointer``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rocm_ext.model.pretrained import from_checkpoint
    from rocm_ext.model.weights.checkpointer import HFCheckpointer

__all__ = ["HFCheckpointer", "from_checkpoint"]

_MODULES = {
    "HFCheckpointer": "weights.checkpointer",
    "from_checkpoint": "pretrained",
}  # imported on access


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
