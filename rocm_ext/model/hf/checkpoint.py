"""A checkpoint in transformers' names and shapes, and the text part of a multimodal model."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.model.names import last_part
from rocm_ext.model.weights.checkpointer import State, check_stored, check_tied, on_meta

# layers that predict further tokens (MTP), among the tensors that transformers leaves out
_AHEAD = re.compile(r"(^|\.)mtp|\.layers\.\d+\.")
_OF_TABLES = r"rotary_emb\.inv_freq$"  # old files have them; config.json decides them


class WeightNames:
    """Translates a checkpoint's tensor names to names in transformers' ``model``, which has no weights."""

    def __init__(self, model) -> None:
        self.model = model
        self._known = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        ignored = [_OF_TABLES, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
        self._ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignored))

    @property
    def of_experts(self) -> frozenset[str]:
        """Ends of the names of layers that transformers joins to experts' weights, such as ``gate_proj``."""
        ends = set()
        for entry in self._converters:
            for source in entry.source_patterns:
                if ".experts.*." in source:
                    ends.add(last_part(source.removesuffix(".weight")))
        return frozenset(ends)

    def ignored(self, name: str) -> bool:
        """Whether transformers leaves out the tensor ``name``."""
        return name not in self._known and bool(self._ignored.search(name))

    def is_float(self, name: str) -> bool:
        """Whether the module's tensor ``name`` has a floating-point dtype; True for unknown names."""
        return name not in self._known or self._known[name].is_floating_point()

    def of(self, name: str) -> tuple[str, str | None]:
        """Return the module's name of the tensor ``name``, and the pattern of its converter, if it has one."""
        prefix = self.model.base_model_prefix
        new, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._known
        )
        if new not in self._known and name in self._known:
            return rename_source_key(name, [], [], prefix, self._known)
        return new, pattern

    def renamed(self, name: str) -> str:
        """Return the name of a tensor for converters, after transformers' renamings."""
        return self.bare(apply_renamings(name, self._renamings))

    def bare(self, name: str) -> str:
        """Return a name without the prefix that a base model's checkpoint lacks."""
        return name.removeprefix(f"{self.model.base_model_prefix}.")

    def converter(self, pattern: str) -> WeightConverter:
        """Return a copy of the converter with the source ``pattern``."""
        found = (entry for entry in self._converters if pattern in entry.source_patterns)
        return deepcopy(next(found))


class Converted(Mapping[str, Tensor]):
    """A checkpoint's tensors by transformers' names; weights of several tensors are joined at every access.

    Args:
        names: translates the checkpoint's names.
        state: tensors by the checkpoint's names.
        tied: names of the weights of output layer and embeddings if they are tied, or else None. The output
            layer's copy in ``state`` is left out.

    Attributes:
        ahead: the checkpoint's names of tensors that predict further tokens (MTP), which the model lacks.

    Raises:
        UserError: two tensors are the same weight, or a tied weight is stored with other values.
    """

    def __init__(self, names: WeightNames, state: State, tied: tuple[str, str] | None) -> None:
        self._model = names.model
        self._names = names
        self._state = state
        self._shapes = on_meta(state)
        # the patterns and tensors by their converter's first target
        self._sources: dict[str, list[tuple[str | None, str]]] = {}
        self._first: dict[str, str] = {}  # the converter's first target, by each of its targets
        self.ahead: list[str] = []
        for name in sorted(state, key=dot_natural_key):
            if self._names.ignored(name):
                if _AHEAD.search(name):
                    self.ahead.append(name)
                continue
            new, pattern = self._names.of(name)
            if self._names.is_float(new):
                check_stored(name, self._shapes[name])
            sources = self._sources.setdefault(new, [])
            sources.append((pattern, name))
            if pattern is None and len(sources) > 1:
                raise UserError(
                    f"the checkpoint has {sources[0][1]} and {name}, which are one weight of this model"
                )
            for target in self._targets(new, pattern):
                self._first[target] = new
        if tied is not None and tied[0] in self._first:
            output, embeddings = tied
            if embeddings in self._first:
                check_tied(self[output], self[embeddings])
            del self._first[output]

    def _targets(self, new: str, pattern: str | None) -> list[str]:
        if pattern is None:
            return [new]
        first, *others = self._names.converter(pattern).target_patterns
        return [new, *(new.replace(first, other) for other in others)]

    def __getitem__(self, name: str) -> Tensor:
        first = self._first[name]
        pattern, source = self._sources[first][0]
        if pattern is None:
            return self._state[source]
        converter = self._names.converter(pattern)
        for pattern, source in self._sources[first]:
            converter.add_tensor(first, source, str(pattern), self._state[source])  # type: ignore[arg-type]
        with explain_errors(f"checkpointer: {name} cannot be made of {source} and others"):
            made = converter.convert(first, model=self._model, config=self._model.config)
        if name not in made:
            raise UserError(
                f"checkpointer: transformers makes {', '.join(made)} of {source}, but not {name}"
            )
        value = made[name]
        return value[0] if isinstance(value, list) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._first)

    def __len__(self) -> int:
        return len(self._first)

    def group(self, name: str) -> tuple[list[str], list[str]]:
        """Return the weights that share tensors with ``name``, and the checkpoint's names of these tensors."""
        first = self._first[name]
        pattern, _ = self._sources[first][0]
        names = [source for _, source in self._sources[first]]
        return self._targets(first, pattern), names

    def taken_apart(self, weights: State) -> dict[str, Tensor]:
        """Return the checkpoint's tensors that make up a group's ``weights``, or raise a UserError."""
        name = next(iter(weights))
        first = self._first[name]
        pattern, source = self._sources[first][0]
        if pattern is None:
            return {source: weights[name]}
        expected = {}
        for _, stored in self._sources[first]:
            expected[self._names.renamed(stored)] = stored
        # some converters have no reverse
        with explain_errors(f"{name} cannot be taken apart into {source} and others"):
            back = self._names.converter(pattern).reverse_transform()
            for target, weight in weights.items():
                key, matched = back.rename_source_key(target)
                back.add_tensor(key, target, str(matched), weight)  # type: ignore[arg-type]
            made = back.convert(key, model=self._model, config=self._model.config)  # type: ignore[attr-defined]
        pieces = {}
        for key, value in made.items():
            piece = value[0] if isinstance(value, list) else value
            pieces[self._names.bare(key)] = piece
        if pieces.keys() != expected.keys():
            raise UserError(
                f"{name} is made of {source} and others, but transformers takes it apart into {min(made)}"
            )
        tensors = {}
        for key, piece in pieces.items():
            stored = expected[key]
            like = self._shapes[stored]
            if piece.shape != like.shape:
                raise UserError(
                    f"transformers makes {stored} {list(piece.shape)} of {name}, not the checkpoint's"
                )
            tensors[stored] = piece.to(like.dtype)
        return tensors

    def on_meta(self) -> dict[str, Tensor]:
        """Return all tensors without their values, at no cost of memory."""
        state = self._state
        self._state = self._shapes
        try:
            return dict(self)
        finally:
            self._state = state


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint holds, by their names in ``model``, such as a router's correction."""
    buffers = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}"] = buffer
    return buffers


def keep_precision(model, dtype: torch.dtype) -> None:
    """Convert weights to fp32 that transformers always keeps so, such as routers' corrections.

    The other weights have ``dtype``.
    """
    kept = model._get_dtype_plan(dtype)
    if not kept:
        return
    pattern, _, _ = build_glob_alternation(list(kept))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if pattern.search(name):
            tensor.data = tensor.data.float()


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


def take_text(model) -> TextPart | None:
    """Remove all parts of ``model`` that do not compute on text; return the text part, or None for a text model.

    Raises:
        UserError: the text part is not a separate causal decoder.
    """
    text = model.config.get_text_config()
    if text is model.config:
        return None
    kind = MODEL_MAPPING.get(type(text), None)
    bodies = [name for name, module in model.named_modules() if type(module) is kind]
    output = model.get_output_embeddings()
    heads = [name for name, module in model.named_children() if module is output]
    if model.config.is_encoder_decoder or len(bodies) != 1 or not heads:
        raise UserError(
            f"{type(model).__name__} takes images or sound, and its text part ({text.model_type}) is not a decoder "
            "that can be trained alone"
        )
    parts = []
    modules = set()
    before = ""  # the path of the module that holds the next one on the way to the body
    for inner in bodies[0].split("."):
        owner = model.get_submodule(before.removesuffix("."))
        kept = {inner}
        if owner is model:
            kept.add(heads[0])
        for name, child in list(owner.named_children()):
            if name not in kept:
                part = before + name
                parts.append(part)
                for below, _ in child.named_modules(prefix=part):
                    modules.add(below)
                del owner._modules[name]
        for name, _ in list(owner.named_parameters(recurse=False)):
            parts.append(before + name)
            del owner._parameters[name]
        before += f"{inner}."
    return TextPart(bodies[0], tuple(parts), frozenset(modules))


def check_causal(model) -> None:
    """Refuse models whose tokens attend to later ones, such as PaliGemma and embedding models."""
    ways = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    if ways and ways != "vision":
        raise UserError(
            f"{type(model).__name__} attends to later tokens (use_bidirectional_attention); only causal language "
            "models are supported"
        )
