"""What this library asks of a decoder that it did not build, such as one of transformers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from rocm_ext.data.batches import MicroBatch


class ForeignWeights(Mapping[str, Tensor]):
    """A checkpoint's tensors by the names of a decoder; those made of several are put together at each access."""

    @abstractmethod
    def on_meta(self) -> dict[str, Tensor]:
        """Return all tensors without their values, at no cost of memory."""

    @abstractmethod
    def group(self, name: str) -> tuple[list[str], list[str]]:
        """Return the weights that are made of the same tensors as ``name``, and the checkpoint's names of these."""

    @abstractmethod
    def taken_apart(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors that make up a group's ``weights``.

        Raises:
            UserError: the conversion cannot be undone.
        """


class ForeignDecoder(nn.Module, ABC):
    """A decoder whose parameters have the names of the modelling code that it comes from.

    Attributes:
        packs: whether it takes packed rows; otherwise rows are padded on the right, which no causal model sees.
        shares: whether packed sequences may share their beginnings, see :class:`rocm_ext.data.batches.MicroBatch`.
        kernel: that computes attention of packed rows; see :func:`rocm_ext.model.sdpa.sdpa`.
        max_seq_len, num_heads, head_dim: as in torchtune's decoders.
        output: maps hidden states [n, d] to logits [n, v], with the model's own scaling or capping.
        architecture: what the model computes, but for its weights.
    """

    packs: bool
    shares: bool
    kernel: str = "auto"
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
    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Run the model up to its output layer.

        Returns:
            [b, s, d], the output layer's input.
        """

    @abstractmethod
    def converted(self, state: Mapping[str, Tensor]) -> ForeignWeights:
        """Return a checkpoint's tensors by this model's names."""

    @abstractmethod
    def buffers_to_load(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint holds, by name."""

    @abstractmethod
    def check_sampling(self) -> int:
        """Check that the model can be sampled from in this process.

        Returns:
            The positions of the longest prompt with its answer.

        Raises:
            UserError: it cannot; the message names the reason.
        """

    @abstractmethod
    def copied_bytes(self, merge: bool | None) -> int:
        """Upper bound on the bytes that :meth:`sampler` adds to the model's; arguments as there."""

    @abstractmethod
    def sampler(self, merge: bool | None, rounded: Callable[[int], int], together: bool) -> Any:
        """Return a copy of the model for sampling, which shares the weights that no adapter changes.

        Args:
            merge: add the adapters' updates to the weights; None: only to fp32 weights.
            rounded: returns the number of cache positions that a sliding window takes.
            together: compute prompts together where the model allows it, up to rounding.

        Raises:
            UserError: the model cannot be sampled from in this process.
        """
