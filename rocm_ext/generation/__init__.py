"""Where answers come from: engines that sample from a model, in this process or on servers."""

from rocm_ext.generation.base import Completion, Engine, Request, Sampling, Session, sample_seed
from rocm_ext.generation.local import LocalEngine

__all__ = ["Completion", "Engine", "LocalEngine", "Request", "Sampling", "Session", "sample_seed"]
