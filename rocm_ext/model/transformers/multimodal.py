"""The text part of transformers' multimodal models: found by its class, with its names in the whole model."""

from dataclasses import dataclass
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_MAPPING

from rocm_ext.base.errors import UserError


@dataclass(frozen=True)
class TextPart:
    """The text part of a multimodal model.

    Attributes:
        body: name of the model without its output layer.
        parts: names of the parts that do not compute on text, such as ``model.vision_tower``.
        modules: names of all modules in these parts.
    """

    body: str
    parts: tuple[str, ...]
    modules: frozenset[str]

    def lacks(self, name: str) -> bool:
        """Whether the weight ``name`` belongs to another part."""
        return any(name == part or name.startswith(f"{part}.") for part in self.parts)


def is_multimodal(config: Any) -> bool:
    """Whether transformers' ``config`` describes more than a text model."""
    return config.get_text_config() is not config


def take_text(model: Any) -> TextPart | None:
    """Remove all parts of ``model`` that do not compute on text.

    Args:
        model: transformers' model.

    Returns:
        Its text part; None if ``model`` is a text model.

    Raises:
        UserError: the text part is not a causal decoder of its own beside the other parts.
    """
    if not is_multimodal(model.config):
        return None
    text = model.config.get_text_config()
    kind = MODEL_MAPPING.get(type(text), None)
    bodies = [name for name, module in model.named_modules() if type(module) is kind]
    head = next((name for name, module in model.named_children() if module is model.get_output_embeddings()), None)
    if model.config.is_encoder_decoder or len(bodies) != 1 or head is None:
        raise UserError(
            f"{type(model).__name__} takes images or sound, and its text part ({text.model_type}) is not a decoder "
            "that can be trained alone"
        )
    parts: list[str] = []
    modules: set[str] = set()
    before, *path = _on_the_way(bodies[0])
    for inner in path:
        owner = model.get_submodule(before)
        kept = {inner.rpartition(".")[2], head if not before else ""}
        for name, child in list(owner.named_children()):
            if name not in kept:
                parts.append(_join(before, name))
                modules.update(_join(parts[-1], below) for below, _ in child.named_modules())
                del owner._modules[name]
        for name in [name for name, _ in owner.named_parameters(recurse=False)]:
            parts.append(_join(before, name))
            del owner._parameters[name]
        before = inner
    return TextPart(bodies[0], tuple(parts), frozenset(modules))


def _on_the_way(name: str) -> list[str]:
    """``a.b`` -> ``["", "a", "a.b"]``."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _join(owner: str, name: str) -> str:
    return ".".join(filter(None, (owner, name)))


def check_causal(model: Any) -> None:
    """Check that no token attends to later ones.

    Raises:
        UserError: it does, as in PaliGemma's prompts and in models of embeddings.
    """
    ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    if ways and ways != "vision":
        raise UserError(
            f"{type(model).__name__} attends to later tokens, too (use_bidirectional_attention); only causal language "
            "models are supported"
        )
