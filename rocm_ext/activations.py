"""Activation checkpointing: none, full, every n-th layer, or as few layers as memory allows.

A checkpointed layer keeps its input alone and is computed again in the backward pass: memory for a
third more compute. What a layer would keep is measured, not estimated from a formula.
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtune.modules import TransformerDecoder

from rocm_ext.attention import Lengths, PackedAttention
from rocm_ext.errors import UserError
from rocm_ext.lora import adapter_parameters

GIB = 2**30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a training step needs at its peak, by part; per rank.

    Attributes:
        weights: the frozen base model, sharded over the ranks.
        adapters: parameters, gradients and two AdamW moments, in fp32.
        kept: activations of one layer that is not checkpointed.
        entry: the input of one layer, all that a checkpointed one keeps.
        loss: one chunk of logits with its gradient, and the hidden states around it.
        layers: transformer layers.
    """

    weights: int
    adapters: int
    kept: int
    entry: int
    loss: int
    layers: int

    def peak(self, checkpointed: int) -> int:
        """Bytes with ``checkpointed`` of the layers checkpointed; one of those is recomputed at a time."""
        activations = (self.layers - checkpointed) * self.kept + checkpointed * self.entry
        return self.weights + self.adapters + activations + max(self.loss, self.kept if checkpointed else 0)

    def fewest(self, budget: int) -> int:
        """How many layers must be checkpointed to stay within ``budget`` bytes; all of them if none suffices."""
        return next((n for n in range(self.layers + 1) if self.peak(n) <= budget), self.layers)


def plan_memory(decoder: TransformerDecoder, tokens: int, dtype: torch.dtype, chunk: int, ranks: int) -> MemoryPlan:
    """Plan a step with micro-batches of ``tokens`` tokens. Call it before the model is sharded or wrapped.

    Args:
        decoder: with adapters; frozen weights may be on the meta device.
        tokens: of one micro-batch.
        dtype: of weights and activations.
        chunk: tokens whose logits exist at once.
        ranks: over how many the frozen weights are sharded.
    """
    adapter = sum(p.numel() for p in adapter_parameters(decoder).values())
    frozen = sum(p.numel() for p in decoder.parameters() if not p.requires_grad)
    vocabulary, width = decoder.tok_embeddings.weight.shape
    entry = tokens * width * dtype.itemsize
    return MemoryPlan(
        weights=frozen * dtype.itemsize // ranks,
        adapters=adapter * 4 * 4,
        kept=int(tokens * bytes_per_token(decoder.layers[0], width, dtype)),  # type: ignore[arg-type]
        entry=entry,
        # a chunk's logits, their fp32 copy and its softmax; hidden states, those selected, and two gradients
        loss=min(chunk, tokens) * vocabulary * (2 * dtype.itemsize + 8) + 4 * entry,
        layers=len(decoder.layers),
    )


def bytes_per_token(layer: nn.Module, width: int, dtype: torch.dtype) -> float:
    """What autograd keeps of one layer's forward pass, per token. Measured on the meta device."""
    tokens = 256
    probe = copy.deepcopy(layer).to("meta")
    own = {p.untyped_storage()._cdata for p in probe.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)  # a freed storage's address would be counted once for two tensors
        return tensor

    alive: list[Tensor] = []
    x = torch.empty(1, tokens, width, dtype=dtype, device="meta", requires_grad=True)
    mask = Lengths((tokens,)) if isinstance(getattr(layer, "attn", None), PackedAttention) else None
    positions = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        probe(x, mask=mask, input_pos=positions)
    return sum(kept.values()) / tokens


def checkpointed_layers(setting: bool | int | str, plan: MemoryPlan, budget: int) -> tuple[list[int], str]:
    """Which layers to checkpoint under ``enable_activation_checkpointing: setting``, and why.

    Args:
        setting: False, True, n for every n-th layer, or ``auto``.
        plan: memory by part.
        budget: bytes that this rank may use.

    Raises:
        UserError: for any other setting.
    """
    layers = plan.layers
    if setting is False:
        return [], "off in the config"
    if setting is True:
        return list(range(layers)), "on in the config"
    if isinstance(setting, int) and setting >= 1:
        return list(range(0, layers, setting)), f"every {setting}. layer, as the config says"
    if setting != "auto":
        raise UserError(
            f"enable_activation_checkpointing is {setting!r}; expected False, True, a number n >= 1 "
            "(every n-th layer) or auto"
        )
    count = plan.fewest(budget)
    peak = plan.peak(count)
    why = f"{peak / GIB:.1f} GiB planned of {budget / GIB:.1f} GiB"
    if peak > budget:
        why += "; likely too much, lower batch_size, tokens_per_micro_batch or tokenizer.max_seq_len"
    return [int(i * layers / count) for i in range(count)], why


def apply_checkpointing(decoder: TransformerDecoder, layers: list[int]) -> None:
    """Wrap the ``layers`` of ``decoder``."""
    for i in layers:
        decoder.layers[i] = checkpoint_wrapper(decoder.layers[i])  # type: ignore[index]
