"""Where answers come from: engines that sample from a model, in this process or on servers."""

from typing import Any

from rocm_ext.generation.base import Completion, Engine, Request, Sampling, Session, sample_seed
from rocm_ext.generation.local import LocalEngine

__all__ = ["Completion", "Engine", "LocalEngine", "Request", "Sampling", "Session", "sample_seed"]


def __getattr__(name: str) -> Any:
    """``OpenAIEngine``, which alone needs an HTTP client, is imported when it is asked for."""
    if name == "OpenAIEngine":
        from rocm_ext.generation.openai import OpenAIEngine

        return OpenAIEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
