"""Data: sources, chat rendering, rows, micro-batches, and prompts. YAML files name the components in ``__all__``."""

from typing import TYPE_CHECKING, Any

from rocm_ext.data.prompts import prompt_dataset

if TYPE_CHECKING:
    from rocm_ext.data.encoder import HFTokenizer
    from rocm_ext.data.preferences import preference_dataset
    from rocm_ext.data.reasoning_gym import reasoning_gym_prompts
    from rocm_ext.data.sources import sft_dataset

__all__ = ["HFTokenizer", "preference_dataset", "prompt_dataset", "reasoning_gym_prompts", "sft_dataset"]


def __getattr__(name: str) -> Any:
    # sources imports torch; `rocm-ext report` reads prompts without it
    if name == "sft_dataset":
        from rocm_ext.data.sources import sft_dataset

        return sft_dataset
    if name == "preference_dataset":
        from rocm_ext.data.preferences import preference_dataset

        return preference_dataset
    if name == "reasoning_gym_prompts":  # it needs the verifiers, which Windows lacks
        from rocm_ext.data.reasoning_gym import reasoning_gym_prompts

        return reasoning_gym_prompts
    if name == "HFTokenizer":
        from rocm_ext.data.encoder import HFTokenizer

        return HFTokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
