"""Activation checkpointing: none, full, every n-th layer, or as few layers as memory allows.

A checkpointed layer keeps only its input. The backward pass computes the layer again, which saves memory for a
third more compute.
"""

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtune.modules import TransformerDecoder

from rocm_ext.base.errors import UserError
from rocm_ext.plan.memory import MemoryPlan, readable


def checkpointed_layers(setting: bool | int | str, plan: MemoryPlan, budget: int) -> tuple[list[int], str]:
    """Choose the layers to checkpoint.

    Args:
        setting: ``enable_activation_checkpointing``: False, True, n for every n-th layer, or ``auto``.
        plan: memory by part.
        budget: bytes that this rank may use.

    Returns:
        Indices of the layers, and the reason.

    Raises:
        UserError: any other setting.
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
