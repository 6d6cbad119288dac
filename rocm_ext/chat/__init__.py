"""A conversation with a model, streamed from the recipes' sampler."""

from rocm_ext.chat.conversation import Answer, Chat, open_chat
from rocm_ext.chat.stream import Reasoning, TextStream

__all__ = ["Answer", "Chat", "Reasoning", "TextStream", "open_chat"]
