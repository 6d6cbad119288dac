"""What other trainers call roles, flags of messages and columns, and how such rows become ours, without torch."""

from collections.abc import Mapping
from typing import Any

ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant", "developer": "system"}
ROLES |= dict.fromkeys(("function", "ipython", "observation", "tool_response"), "tool")
FLAGS = {  # 0 or false keeps a message out of the loss -> whether its author's trainer reads it in all roles
    "weight": False,  # OpenAI, mistral-finetune
    "loss": False,  # ms-swift
    "step_loss_mask": False,  # slime
    "loss_mask": True,
    "loss_weight": True,  # LLaMA-Factory
    "train": True,  # axolotl, as is the next
    "training": True,
    "trainable": True,  # Tinker
}
DETAILS = ("train_detail", "training_detail")  # axolotl: parts of a message


def role_of(message: Any) -> str | None:
    """Return our name for the role of a row's message; None if it has none that is known."""
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    return ROLES.get(role) if isinstance(role, str) else None


def masked(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Return whether the loss excludes a message, by its role and its :data:`FLAGS`.

    Raises:
        ValueError: a flag is neither 0 nor 1, two contradict each other, or one asks for what is not supported.
    """
    if detail := next((key for key in DETAILS if message.get(key) is not None), None):
        raise ValueError(f"{where}: {detail} trains on parts of a message, which is not supported; {detail} must go")
    flags = {key: message[key] for key in FLAGS if message.get(key) is not None}
    for key, value in flags.items():
        if value not in (0, 1):
            raise ValueError(f"{where}: {key} must be 0 or 1, found {value!r}")
        if value and FLAGS[key] and role != "assistant":
            raise ValueError(f"{where}: {key} is {value!r}, but the loss can only cover the assistant's turns")
    if len({bool(value) for value in flags.values()}) > 1:
        raise ValueError(f"{where}: {' and '.join(flags)} contradict each other")
    return role != "assistant" or 0 in flags.values()


def string(value: Any, what: str) -> str:
    """Return ``value`` if it is a string.

    Raises:
        ValueError: it is not; the message calls it ``what``.
    """
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a string, found {type(value).__name__}")
    return value
