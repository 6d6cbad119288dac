"""The interface of models for training, planning, sampling and export."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rocm_ext.base.errors import UserError
from rocm_ext.data.batches import MicroBatch
from rocm_ext.machine.numerics import Kernel
from rocm_ext.model.names import Names


class Decoder(nn.Module, ABC):
    """A causal language model with adapters.

    Attributes:
        packs: whether it takes packed rows; otherwise rows are padded on the right, which no causal model sees.
        shares: whether packed sequences may share their beginnings, see :class:`rocm_ext.data.batches.MicroBatch`.
        kernel: attention kernel of packed rows; see :func:`rocm_ext.model.attention.sdpa`.
        max_seq_len: positions that it supports.
        num_heads, head_dim: sizes of attention.
        layers: the decoder's layers.
        tok_embeddings: the embeddings.
        output: maps hidden states [n, d] to logits [n, v], including the model's scaling or capping.
        architecture: description of the function, without weights. Empty if the config names its builder.
        graph_obstacle: why no CUDA/HIP graph can replay a decoding step. Empty if one can.
        names: translates the model's names of weights to Hugging Face's and back. None if torchtune's converters
            know the names, see :class:`rocm_ext.model.names.TorchtuneNames`.
        left_out: names of the published model's modules that this decoder lacks, such as a vision tower.
        kernels: kernels of installed packages that its layers call.
        replay: the routers' recorded choices, see :class:`rocm_ext.model.hf.experts.Replay`. None if routers choose.
        quantizes: whether weights with a stand-in of :mod:`rocm_ext.model.weights.quantized` are quantised while they
            are loaded; otherwise the files are quantised.
        published_modules: names of all modules of the published model. Empty if PEFT's names of its layers are
            unique.
        names_of_experts: ends of module names that PEFT takes for experts.
    """

    packs: bool
    shares: bool
    kernel: str
    max_seq_len: int
    num_heads: int
    head_dim: int
    output: Any
    layers: nn.ModuleList
    tok_embeddings: nn.Embedding
    architecture: Any = ""
    graph_obstacle: str = ""
    names: Names | None = None
    left_out: frozenset[str] = frozenset()
    published_modules: frozenset[str] = frozenset()
    names_of_experts: frozenset[str] = frozenset()
    kernels: Sequence[Kernel] = ()
    replay: Any = None
    quantizes = False

    @abstractmethod
    def hidden_states(self, batch: MicroBatch) -> Tensor:
        """Run the model up to its output layer: return [b, s, d], the output layer's input."""

    @property
    def output_layer(self) -> Any:
        """The output layer, without scaling or capping of logits."""
        return self.output

    @abstractmethod
    def place_buffers(self, device: torch.device) -> None:
        """Put the buffers of a model that is built on the meta device on ``device``."""

    def converted(self, state: Mapping[str, Tensor]) -> Any:
        """Return a checkpoint's tensors by this model's names; the argument if they have these names.

        For other names see :class:`rocm_ext.model.hf.checkpoint.Converted`.
        """
        return state

    def buffers_to_load(self) -> dict[str, Tensor]:
        """Return the buffers that a checkpoint holds, by name."""
        return {}

    def joined_weights(self) -> list[list[str]]:
        """Return groups of weights, by name, that sampling multiplies at once: their rows should be contiguous."""
        return []

    @property
    def transposes_tied(self) -> bool:
        """Whether a sampler that uses oneDNN copies the embeddings for the output layer."""
        return False

    def transposed_weights(self) -> list[str]:
        """Return the names of the linear layers' weights that a sampler transposes where it uses oneDNN."""
        return []

    @abstractmethod
    def check_sampling(self) -> int:
        """Return the most positions of a prompt with its answer.

        Raises:
            UserError: the model cannot be sampled from in this process; the message names the reason.
        """

    def replay_routes(self) -> None:
        """Let forward passes use a batch's ``routes`` instead of the routers' choices, or raise a UserError."""
        raise UserError(
            "router_replay is True, and the model has no experts; set router_replay=False"
        )

    @abstractmethod
    def sampler(self, merge: bool | None = None, device: torch.device | None = None) -> Any:
        """Return a copy for sampling, see :class:`rocm_ext.model.sampler.Sampler`.

        Args:
            merge: add the adapters' updates to the weights. With None, only to fp32 weights.
            device: device for sampling, by default the weights' device.

        Raises:
            UserError: the model cannot be sampled from in this process.
        """
