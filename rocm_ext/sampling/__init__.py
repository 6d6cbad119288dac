"""Engines that sample answers from a model, in this process or on servers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rocm_ext.sampling.engine import (
    Completion,
    Engine,
    Request,
    RequestQueue,
    Sampling,
    Session,
    sample_seed,
)

if TYPE_CHECKING:
    from rocm_ext.sampling.local import LocalEngine

__all__ = [
    "Completion",
    "Engine",
    "LocalEngine",
    "Request",
    "RequestQueue",
    "Sampling",
    "Session",
    "sample_seed",
]

_MODULES = {"LocalEngine": "local", "OpenAIEngine": "server.openai"}  # imported on access


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
