"""The model under training: torchtune builds it; adapters, attention and norms are this library's.

YAML files name two components of this package: ``rocm_ext.model.from_checkpoint`` and
``rocm_ext.model.HFCheckpointer``.
"""

from rocm_ext.model.folder import from_checkpoint
from rocm_ext.model.weights.checkpointer import HFCheckpointer

__all__ = ["HFCheckpointer", "from_checkpoint"]
