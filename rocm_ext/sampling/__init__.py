"""Engines that sample answers from a model, in this process or on servers."""

from typing import Any

from rocm_ext.sampling.engine import Completion, Engine, Request, RequestQueue, Sampling, Session, sample_seed
from rocm_ext.sampling.local import LocalEngine

__all__ = ["Completion", "Engine", "LocalEngine", "Request", "RequestQueue", "Sampling", "Session", "sample_seed"]


def __getattr__(name: str) -> Any:
    """Import ``OpenAIEngine`` on first use, because only it needs an HTTP client."""
    if name == "OpenAIEngine":
        from rocm_ext.sampling.server.openai import OpenAIEngine

        return OpenAIEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
