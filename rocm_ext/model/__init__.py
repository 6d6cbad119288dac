"""The model under training: torchtune builds it; adapters, attention and norms are this library's.

YAML files name two components of this package: ``rocm_ext.model.from_checkpoint`` and
``rocm_ext.model.HFCheckpointer``.
"""

from rocm_ext.model.checkpointer import HFCheckpointer
from rocm_ext.model.native import from_checkpoint

__all__ = ["HFCheckpointer", "from_checkpoint"]
