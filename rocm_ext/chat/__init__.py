"""A conversation with a model, streamed from the recipes' sampler."""

from rocm_ext.chat.conversation import Chat, Reply, open_chat
from rocm_ext.chat.stream import Reasoning, TextStream

__all__ = ["Chat", "Reasoning", "Reply", "TextStream", "open_chat"]
