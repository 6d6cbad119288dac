"""Rows of the embeddings and of the output layer that train with LoRA: PEFT's ``trainable_token_indices``.

New tokens, such as ``<tool_call>``, have untrained rows, and LoRA on the layers between cannot change them. Like PEFT,
this stores the rows in fp32, and not their difference to the base model's.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.data.encoder import TOKENIZER, TextEncoder
from rocm_ext.model.names import EMBEDDINGS, OUTPUT, TOKEN_ROWS, last_part
from rocm_ext.model.weights.quantized import frozen


class TokenRows(nn.Module):
    """Trained rows that replace rows of the embeddings, the output layer, or both where they are tied.

    Args:
        tokens: ids of the rows, in order, without repetition.
        layer: the layer with the base model's rows.

    Attributes:
        disabled: whether the layers compute with the base model's rows.
        embeds: whether the rows are the embeddings', also where the output layer is tied to them.
    """

    NAME = TOKEN_ROWS  # name of this module in its layers
    ids: Tensor

    def __init__(self, tokens: list[int], layer) -> None:
        super().__init__()
        self.tokens = tokens
        self.disabled = False
        self.embeds = isinstance(layer, nn.Embedding)
        self._layer = (layer,)  # a tuple keeps it out of torch's list of parts
        _, width = layer.weight.shape
        self.weight = nn.Parameter(layer.weight.new_empty(len(tokens), width))
        self.register_buffer("ids", torch.tensor(tokens, device="cpu"), persistent=False)

    def adapter_params(self) -> list[str]:
        """Return the names of the trainable parameters."""
        return ["weight"]

    @torch.no_grad()
    def reset(self) -> None:
        """Take the base model's rows. With sharded weights every rank calls this."""
        weight = self._layer[0].weight
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        self.weight.copy_(F.embedding(self.ids, weight))

    def embedded(self, tokens: Tensor, base: Tensor, scale=None) -> Tensor:
        """Replace embeddings of ``tokens`` [...] by the trained rows.

        ``base`` [..., d] are the base model's embeddings, ``scale`` is a factor of embeddings (Gemma 3).
        """
        if self.disabled:
            return base
        tokens = tokens.to(self.ids.dtype).contiguous()
        last = len(self.tokens) - 1
        at = torch.searchsorted(self.ids, tokens).clamp_(max=last)
        same = self.ids[at] == tokens
        rows = F.embedding(at, self.weight).to(base.dtype)  # an arbitrary row for other tokens
        if isinstance(scale, Tensor):
            scale = scale.to(rows.dtype)
        if scale is not None:
            rows = rows * scale
        return torch.where(same[..., None], rows, base)

    def logits(self, hidden: Tensor, base: Tensor) -> Tensor:
        """Replace logits in ``base`` [..., v] by the trained rows' logits of ``hidden`` [..., d]."""
        if self.disabled:
            return base
        values = F.linear(hidden, self.weight.to(hidden.dtype))  # [..., rows]
        return base.index_copy_(-1, self.ids, values)

    @torch.no_grad()
    def copy(self) -> "TokenRows":
        """Return a copy for sampling, which changes only in :meth:`refresh`."""
        made = TokenRows(self.tokens, self._layer[0])
        made.weight = frozen(self.weight.detach().clone())
        made.ids = self.ids
        return made

    def refresh(self, layers: list["TokenRows"]) -> None:
        """Copy the values under training, in place."""
        self.weight.copy_(layers[0].weight)


def attach(rows: TokenRows, layer: nn.Module, tied=None) -> None:
    """Let the embeddings or the output layer, and the layer ``tied`` to it, compute with ``rows``."""
    layer.add_module(TokenRows.NAME, rows)
    changed = [layer]
    if tied is not None:
        vars(tied)[TokenRows.NAME] = rows  # not a submodule, so that torch registers the rows once
        changed.append(tied)
    for part in changed:
        kind: Any = type(part)
        part.__class__ = _with_rows(kind)  # keeps parameters, names and hooks


@cache
def _with_rows(kind) -> type:
    # torchtune's TiedLinear is no module
    name = "forward" if issubclass(kind, nn.Module) else "__call__"
    compute = getattr(kind, name)

    def embed(self, tokens: Tensor) -> Tensor:
        scale = getattr(self, "embed_scale", None)
        return self.token_rows.embedded(tokens, compute(self, tokens), scale)

    def output(self, hidden: Tensor) -> Tensor:
        return self.token_rows.logits(hidden, compute(self, hidden))

    with_rows = embed if issubclass(kind, nn.Embedding) else output
    parts: dict[str, Any] = {name: with_rows}
    if name == "__call__":  # the objective asks a head for them
        parts["parameters"] = lambda self: self.token_rows.parameters()
    return type(kind.__name__, (kind,), parts)


def token_rows(model: nn.Module) -> Iterator[tuple[str, TokenRows]]:
    """Yield the trained rows of ``model`` with the name of the first layer that has them."""
    for name, module in model.named_modules():
        if isinstance(module, TokenRows):
            yield name.removesuffix(f".{TokenRows.NAME}"), module


def train_tokens(decoder, wanted, folder: Path) -> None:
    """Put :class:`TokenRows` into a decoder that has no weights yet.

    Args:
        decoder: the model.
        wanted: ``trainable_tokens`` of :func:`rocm_ext.model.from_checkpoint`.
        folder: the model's folder, with its ``tokenizer.json``.

    Raises:
        UserError: the tokenizer lacks a token, a token has no row, or a layer cannot have such rows.
    """
    if not isinstance(wanted, Mapping):
        wanted = dict.fromkeys((EMBEDDINGS, OUTPUT), wanted)
    numbers = {}
    for name, tokens in wanted.items():
        numbers[str(name)] = _numbers(tokens, folder, decoder)
    if not numbers or not all(numbers.values()):
        raise UserError("trainable_tokens is empty; expected null or some tokens")
    tied = decoder.output_layer if is_tied(decoder) else None
    for name, tokens in by_layer(decoder, numbers).items():
        layer = _layers(decoder)[name]
        for part in (layer, tied):
            refuse(f"trainable_tokens {problem}" for problem in _problems(part, tokens))
        attach(TokenRows(tokens, layer), layer, tied)


def _problems(layer, tokens: list[int]) -> Iterator[str]:
    """Yield the reasons why PEFT does not support such rows in a layer."""
    if hasattr(layer, "lora_a"):
        yield (
            f"trains rows of {OUTPUT}, which target_modules adapts, and PEFT does not combine them; "
            f"leave it out of target_modules, or set trainable_tokens={{{EMBEDDINGS}: {tokens}}}"
        )
    if getattr(layer, "bias", None) is not None:
        yield "cannot train the output layer, because it has a bias, which PEFT leaves out with such rows"
    kind = type(layer)
    if isinstance(layer, nn.Embedding):
        only_scales = kind.forward is nn.Embedding.forward or hasattr(layer, "embed_scale")
        if not only_scales:
            yield f"does not support embeddings of the class {kind.__name__}"
    elif "weight" in getattr(layer, "_parameters", ()) and kind.forward is not nn.Linear.forward:
        yield f"does not support output layers of the class {kind.__name__}"


def by_layer(decoder, given: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Return sorted ids by :data:`EMBEDDINGS` and :data:`OUTPUT`; tied layers count as :data:`EMBEDDINGS`.

    ``given`` has ids by the ends of layers' names, as in PEFT's dictionaries. Other layers are refused, and different
    tokens for tied layers.
    """
    if not given:
        return {}
    known = {EMBEDDINGS: EMBEDDINGS, OUTPUT: OUTPUT}
    for layer, name in layer_names(decoder).items():
        known[last_part(name)] = layer
    strange = (name for name in given if last_part(name) not in known)
    refuse(f"trainable_tokens has {name!r}; expected {EMBEDDINGS} or {OUTPUT}" for name in strange)
    ids = {}
    for name, tokens in given.items():
        ids[known[last_part(name)]] = sorted(tokens)
    if is_tied(decoder) and OUTPUT in ids:
        output_ids = ids.pop(OUTPUT)
        if output_ids != ids.get(EMBEDDINGS):
            raise UserError(
                f"trainable_tokens: {OUTPUT} is {EMBEDDINGS} in this model; give both the same tokens"
            )
    return ids


def trained_tokens(decoder) -> dict[str, list[int]]:
    """Return the ids of trained rows by layer, see :func:`by_layer`."""
    ids = {}
    for name, layer in _layers(decoder).items():
        if hasattr(layer, TOKEN_ROWS):
            ids[name] = layer.token_rows.tokens
    return ids


def layer_names(decoder) -> dict[str, str]:
    """Return the published names of :data:`EMBEDDINGS` and :data:`OUTPUT`."""
    names = {module: name for name, module in decoder.named_modules()}
    embeddings = names[decoder.tok_embeddings]
    output = names.get(decoder.output_layer, "output")
    published = {}
    for layer, name in ((EMBEDDINGS, embeddings), (OUTPUT, output)):
        published[layer] = decoder.names.published(f"{name}.weight").removesuffix(".weight")
    return published


def is_tied(decoder) -> bool:
    """Return whether the output layer of ``decoder`` is its embeddings."""
    head = getattr(decoder.output_layer, "tied_module", decoder.output_layer)
    return getattr(head, "weight", None) is decoder.tok_embeddings.weight


def _layers(decoder) -> dict[str, Any]:
    layers = {EMBEDDINGS: decoder.tok_embeddings}
    if not is_tied(decoder):
        layers[OUTPUT] = decoder.output_layer
    return layers


def _numbers(tokens, folder: Path, decoder) -> list[int]:
    """Return the ids of tokens, which are texts or ids."""
    given = [tokens] if isinstance(tokens, str | int) else list(tokens or ())
    texts = [token for token in given if isinstance(token, str)]
    if texts and not (folder / TOKENIZER).is_file():
        raise UserError(
            f"trainable_tokens has {texts[0]!r}, and {folder} has no {TOKENIZER}; give ids, or download the model"
        )
    encoder = TextEncoder(folder / TOKENIZER) if texts else None
    rows = decoder.tok_embeddings.num_embeddings
    numbers = set()
    for token in given:
        number = token
        if encoder is not None and isinstance(token, str):
            ids = encoder.encode(token)
            if len(ids) != 1:
                raise UserError(
                    f"trainable_tokens has {token!r}, which is {len(ids)} tokens of {folder / TOKENIZER}; add it once "
                    "with transformers (add_tokens, resize_token_embeddings), or name one of the tokenizer's"
                )
            (number,) = ids
        if type(number) is not int or number < 0:
            raise UserError(f"trainable_tokens has {token!r}; expected a token's text or its id")
        if number >= rows:
            raise UserError(
                f"trainable_tokens has {token!r}, id {number}, but the model's embeddings have {rows} rows; add rows "
                "once with transformers (resize_token_embeddings), or use one of the spare ids"
            )
        numbers.add(number)
    return sorted(numbers)
