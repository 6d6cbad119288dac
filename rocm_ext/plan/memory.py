"""Estimate the memory of training, by part, before anything is loaded, and choose the layers to checkpoint.

A checkpointed layer keeps only its input. The backward pass computes the layer again, which saves memory for a third
more compute.
"""

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.losses import Objective
from rocm_ext.machine.budget import readable
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import adapter_parameters, quantized
from rocm_ext.plan.costs import Kernels, LayerCosts, LossCosts, simulate

# QLoRA's NF4: 4 bits per value, an 8-bit scale per 64 values, an fp32 scale per 256 of these scales
_NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that training needs on one rank, by part.

    Attributes:
        weights: this rank's shard of the frozen base model, and the layers' shared tables and masks.
        gathered: weights that FSDP2 gathers at once; 0 on one rank.
        adapter: trainable parameters, fp32.
        gradients: gradients of the trainable parameters.
        optimizer: the optimiser's state.
        layer_costs: costs of the layers.
        loss: costs of final norm, output layer and loss.
    """

    weights: int
    gathered: int
    adapter: int
    gradients: int
    optimizer: int
    layer_costs: Sequence[LayerCosts]
    loss: LossCosts

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.layer_costs)

    @property
    def fixed(self) -> int:
        """Bytes that stay allocated during the run."""
        return self.weights + self.gathered + self.adapter + self.gradients + self.optimizer

    def _kept(self, checkpointed: Collection[int]) -> list[int]:
        """Bytes that each layer keeps for its backward pass."""
        kept = []
        for i, layer in enumerate(self.layer_costs):
            kept.append(layer.entry if i in checkpointed else layer.entry + layer.kept)
        return kept

    def activations(self, checkpointed: Collection[int]) -> int:
        """Peak bytes of activations and working memory with ``checkpointed`` layers, without the loss."""
        most = before = 0
        for layer, kept in zip(self.layer_costs, self._kept(checkpointed), strict=True):
            # its backward pass has all of its activations; later layers' are freed
            most = max(most, before + layer.entry + layer.kept + layer.working)
            before += kept
        return max(most, before)

    def peak(self, checkpointed: Collection[int]) -> int:
        """Peak bytes of a training step with ``checkpointed`` layers."""
        kept = sum(self._kept(checkpointed))
        at_loss = kept + self.layer_costs[-1].entry + self.loss.working
        return self.fixed + max(self.activations(checkpointed), at_loss)

    def fewest(self, budget: int) -> list[int]:
        """Return the fewest layers to checkpoint within ``budget`` bytes; all layers if that is still too much."""
        for count in range(self.layers):
            layers = spread(count, self.layers)
            if self.peak(layers) <= budget:
                return layers
        return list(range(self.layers))


def spread(count: int, layers: int) -> list[int]:
    """Choose ``count`` of ``layers`` layers, spread evenly."""
    return [int(i * layers / count) for i in range(count)]


def plan_memory(
    decoder: Decoder,
    objective: Objective,
    lengths: Sequence[int],
    device: torch.device,
    *,
    optimizer: Any,
    ranks: int = 1,
    targets: int,
    kernels: Kernels,
    shared: Sequence[int] = (),
) -> MemoryPlan:
    """Plan the memory of training. Call it before the model is sharded, wrapped or loaded.

    Args:
        decoder: model with adapters; frozen weights are on the meta device.
        objective: computes the loss from hidden states.
        lengths: tokens of the sequences in the largest micro-batch.
        device: the target.
        optimizer: the optimiser's component in the config.
        ranks: number of ranks that share the frozen weights.
        targets: number of the micro-batch's tokens with a label.
        kernels: fused kernels of ``device``.
        shared: shared tokens of the sequences, see :class:`rocm_ext.data.batches.MicroBatch`.
    """
    adapter = sum(p.nbytes for p in adapter_parameters(decoder).values())
    chunked = copy.copy(objective)
    chunked.chunk_tokens = objective.chunk_for(device)
    buffers = sum(buffer.nbytes for buffer in _distinct(decoder.buffers()))
    layer_costs, loss, tables = simulate(decoder, chunked, lengths, targets, kernels, shared)
    return MemoryPlan(
        weights=frozen_bytes(decoder, ranks) + buffers + tables,
        gathered=_gathered(decoder, ranks),
        adapter=adapter,
        gradients=adapter,
        optimizer=int(adapter * _state_per_byte(optimizer)),
        layer_costs=layer_costs,
        loss=loss,
    )


def frozen_bytes(module: nn.Module, ranks: int = 1) -> int:
    """Bytes of the frozen parameters on a rank; ``ranks`` shard the unquantised parameters."""
    unsharded = 0.0
    for parameter in quantized(module):
        unsharded += getattr(parameter, "stored_bytes", parameter.numel() * _NF4_BYTES)
    return int(unsharded) + shared_bytes(module) // ranks


def held_bytes(decoder: Decoder, ranks: int) -> int:
    """Bytes of the frozen parameters on a rank while the model computes, including gathered ones."""
    return frozen_bytes(decoder, ranks) + _gathered(decoder, ranks)


def shared_bytes(module: nn.Module) -> int:
    """Bytes of the unquantised frozen parameters, which ranks shard."""
    unsharded = {id(parameter) for parameter in quantized(module)}
    total = 0
    for parameter in _distinct(module.parameters()):
        if not parameter.requires_grad and id(parameter) not in unsharded:
            total += parameter.nbytes
    return total


def _distinct(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(t): t for t in tensors}.values())


def _gathered(decoder: Decoder, ranks: int) -> int:
    """Bytes that FSDP2 gathers: embeddings, output layer, the layer that computes and the next one."""
    if ranks == 1:
        return 0
    layers = [shared_bytes(layer) for layer in decoder.layers]  # type: ignore[union-attr]
    return shared_bytes(decoder) - sum(layers) + 2 * max(layers)


def _state_per_byte(component: Any) -> float:
    """Bytes of optimiser state per byte of parameters: 2 for AdamW.

    It is also 2 for an optimiser that cannot step on the CPU (bitsandbytes').
    """
    parameter = nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = config.instantiate(component, [parameter], key="optimizer")
    try:
        optimizer.step()
    except Exception:  # kernels raise anything; LBFGS needs a closure
        return 2.0
    size = 0
    for value in optimizer.state[parameter].values():
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            size += value.nbytes
    return size / parameter.nbytes


def worst_rows(longest: int, tokens: int) -> list[int]:
    """Return the row lengths that fill ``tokens`` tokens with the most attention: rows of ``longest`` and a rest."""
    count, rest = divmod(tokens, longest)
    lengths = [longest] * count
    if rest:
        lengths.append(rest)
    return lengths


def checkpointed_layers(
    setting: bool | int | str, plan: MemoryPlan, budget: int
) -> tuple[list[int], str]:
    """Choose the layers to checkpoint.

    Args:
        setting: ``enable_activation_checkpointing``: False, True, n for every n-th layer, or ``auto``.
        plan: memory by part.
        budget: bytes that this rank may use.

    Returns:
        Indices of the layers, and the reason.

    Raises:
        UserError: the setting is invalid.
    """
    layers = plan.layers
    if setting is False:
        return [], "off in the config"
    if setting is True:
        return list(range(layers)), "on in the config"
    if isinstance(setting, int) and setting >= 1:
        return list(range(0, layers, setting)), f"every {setting}. layer, set in the config"
    if setting != "auto":
        raise UserError(
            f"enable_activation_checkpointing is {setting!r}; expected False, True, a number n >= 1 "
            "(every n-th layer) or auto"
        )
    chosen = plan.fewest(budget)
    return chosen, f"{readable(plan.peak(chosen))} planned of {readable(budget)}"


def apply_checkpointing(decoder: TransformerDecoder, layers: list[int]) -> None:
    """Wrap the ``layers`` of ``decoder`` in torch's checkpoint wrapper."""
    for i in layers:
        decoder.layers[i] = checkpoint_wrapper(decoder.layers[i])  # type: ignore[index]
