"""Data: sources, chat rendering, rows, micro-batches, and prompts.

YAML files name two components of this package: ``rocm_ext.data.sft_dataset`` and ``rocm_ext.data.prompt_dataset``.
"""

from rocm_ext.data.prompts import prompt_dataset
from rocm_ext.data.sources import sft_dataset

__all__ = ["prompt_dataset", "sft_dataset"]
