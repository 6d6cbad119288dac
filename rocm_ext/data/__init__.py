"""Data: sources, chat rendering, rows, micro-batches, and prompts. YAML files name the components in ``__all__``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rocm_ext.data.prompts import prompt_dataset

if TYPE_CHECKING:
    from rocm_ext.data.encoder import HFTokenizer
    from rocm_ext.data.preferences import preference_dataset
    from rocm_ext.data.reasoning_gym import reasoning_gym_prompts
    from rocm_ext.data.sources import sft_dataset

__all__ = [
    "HFTokenizer",
    "preference_dataset",
    "prompt_dataset",
    "reasoning_gym_prompts",
    "sft_dataset",
]

_MODULES = {  # imported on access: some need torch, which `rocm-ext report` does without, or verifiers, not on Windows
    "HFTokenizer": "encoder",
    "preference_dataset": "preferences",
    "reasoning_gym_prompts": "reasoning_gym",
    "sft_dataset": "sources",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
