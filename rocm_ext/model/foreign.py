"""What this library asks of a decoder that it did not build, such as one of transformers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rocm_ext.data.batches import Batch


class ForeignDecoder(nn.Module, ABC):
    """A decoder whose parameters have the names of the modelling code that it comes from.

    Attributes:
        packs: whether it takes packed rows; otherwise rows are padded on the right, which no causal model sees.
        max_seq_len, num_heads, head_dim: as in torchtune's decoders.
        output: maps hidden states [n, d] to logits [n, v], with the model's own scaling or capping.
        architecture: what the model computes, but for its weights.
    """

    packs: bool
    max_seq_len: int
    num_heads: int
    head_dim: int
    output: nn.Module
    architecture: Any

    @property
    @abstractmethod
    def layers(self) -> nn.ModuleList:
        """The decoder's layers."""

    @property
    @abstractmethod
    def tok_embeddings(self) -> nn.Embedding:
        """The embeddings."""

    @property
    @abstractmethod
    def left_out(self) -> frozenset[str]:
        """Names of the modules that the folder's whole model has beside this decoder's, such as a vision tower's."""

    @abstractmethod
    def hidden_states(self, batch: Batch) -> Tensor:
        """Run the model up to its output layer.

        Returns:
            [b, s, d], the output layer's input.
        """

    @abstractmethod
    def converted(self, state: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return a checkpoint's tensors by this model's names, and the same without their values, for a check."""

    @abstractmethod
    def buffers_to_load(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint holds, by name."""

    @abstractmethod
    def name_of(self, name: str) -> str:
        """Return this model's name of a checkpoint's tensor; of a part of a larger tensor, the checkpoint's."""
