"""A decoder's trained layers as PEFT names and lays them out.

PEFT wraps a module once per parameter of ``target_parameters``, in the module's order. The first wrapper is the
innermost; its name has one ``base_layer`` for every wrapper around it.

PEFT changed the layout of experts' adapters in version 0.19.1 for weights [experts, out, in]. Before, it took them for
[experts, in, out], so that A has the rows' size and B the columns'. Both layouts can describe the same update.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from torch import Tensor, nn

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import (
    Adapter,
    ExpertLora,
    ends_with,
    expert_factors,
    expert_loras,
    plain,
    rank_and_alpha,
    trained,
)
from rocm_ext.model.names import (
    LORA_A,
    LORA_B,
    PREFIX,
    TOKEN_ROWS,
    Names,
    TorchtuneNames,
    last_part,
    last_parts,
    our_part,
    peft_part,
    split_peft,
)
from rocm_ext.model.token_rows import TokenRows

NEW_LAYOUT = "0.19.1"  # the first version of PEFT with today's layout


@dataclass(frozen=True)
class PeftLayer:
    """A trained layer with its names.

    Attributes:
        name: the decoder's name of the layer or of the rows of tokens, see :func:`rocm_ext.model.lora.trained`.
        layer: the layer, or the rows.
        weight: Hugging Face's name of the weight that it changes.
        module: PEFT's name of the module that holds its tensors.
        by_parameter: whether PEFT's ``target_parameters`` names the weight. Otherwise its ``target_modules`` names the
            module, or ``trainable_token_indices`` the layer with the rows.
    """

    name: str
    layer: Adapter | TokenRows
    weight: str
    module: str
    by_parameter: bool


def names_of(decoder: Decoder, model_type: str) -> Names:
    """Return the names of a decoder; ``model_type``, torchtune's, decides them for decoders of its builders."""
    if decoder.names is not None:
        return decoder.names
    return TorchtuneNames(model_type, decoder.layers[0].attn)


def trained_layers(decoder: Decoder, names: Names) -> list[PeftLayer]:
    """Return the trained layers of ``decoder``, in its order.

    Raises:
        UserError: ``names`` lack a layer.
    """
    experts = {layer.name: layer for layer in expert_layers(decoder)}
    layers = []
    for name, layer in trained(decoder):
        if isinstance(layer, ExpertLora):
            layers.append(experts[name])
            continue
        module = name.removesuffix(f".{TOKEN_ROWS}")
        is_rows = isinstance(layer, TokenRows)
        weight = f"{module}.weight"
        with explain_errors(f"{weight} belongs to no layer of such a model"):
            weight = names.published(weight)
        published = weight.removesuffix(".weight")
        # `target_modules` cannot name these: PEFT 0.19 would take them for experts
        by_parameter = last_part(module) in decoder.names_of_experts and not is_rows
        layers.append(PeftLayer(name, layer, weight, published, by_parameter))
    return layers


def expert_layers(decoder: nn.Module) -> list[PeftLayer]:
    """Return the LoRA of adapted experts. Only transformers' models have them, by Hugging Face's names."""
    loras = expert_loras(decoder)
    by_module: dict[str, list[str]] = {}
    for weight in parameter_names(decoder):  # in the module's order
        if weight in loras:
            module, _, _ = weight.rpartition(".")
            by_module.setdefault(module, []).append(weight)
    layers = []
    for module, weights in by_module.items():
        for number, weight in enumerate(weights, 1):
            wrapper = module + ".base_layer" * (len(weights) - number)
            layers.append(
                PeftLayer(weight + ExpertLora.SUFFIX, loras[weight], weight, wrapper, True)
            )
    return layers


def parameter_names(decoder: nn.Module) -> list[str]:
    """Return the names of the decoder's parameters, without those of LoRA."""
    return [plain(name) for name, _ in decoder.named_parameters() if ".lora_" not in name]


# ---- settings


def sizes_of(layers: Iterable[PeftLayer]) -> dict[str, tuple[int, float]]:
    """Return r and alpha of the adapted layers, by the names that patterns match in PEFT."""
    sizes = {}
    for layer in layers:
        if not isinstance(layer.layer, TokenRows):
            name = layer.weight if layer.by_parameter else layer.module
            sizes[name] = rank_and_alpha(layer.layer)
    return sizes


def target_modules(layers: Iterable[PeftLayer], decoder: Decoder) -> list[str]:
    """Return ``target_modules``: the ends of the layers' names, or full names if other modules end alike."""
    adapted = set()
    for layer in layers:
        if not layer.by_parameter and not isinstance(layer.layer, TokenRows):
            adapted.add(layer.module)
    ends = {last_part(name) for name in adapted}
    others = {last_part(name) for name in decoder.published_modules - adapted}
    return sorted(adapted if ends & others else ends)


def target_parameters(layers: Iterable[PeftLayer], decoder: Decoder) -> list[str]:
    """Return ``target_parameters``: the ends of the adapted weights' names, or full names if others end alike."""
    adapted = {layer.weight for layer in layers if layer.by_parameter}
    ends = {last_parts(name, 2) for name in adapted}
    others = matching(decoder, ends) - adapted
    modules = {end.partition(".")[0] for end in ends}
    left_out = any(last_part(name) in modules for name in decoder.left_out)
    return sorted(adapted if others or left_out else ends)


def matching(decoder: nn.Module, targets: Iterable[str]) -> set[str]:
    """Return the names of the decoder's parameters that PEFT's ``target_parameters`` matches."""
    names = parameter_names(decoder)
    matched: set[str] = set()
    for target in map(str, targets):
        matched.update(name for name in names if ends_with(name, target))
    return matched


def token_indices(layers: Iterable[PeftLayer]) -> list[int] | dict[str, list[int]]:
    """Return ``trainable_token_indices``: ids of the embeddings, or ids by the ends of layers' names, or nothing."""
    ids = {}
    in_output = False
    for layer in layers:
        if isinstance(layer.layer, TokenRows):
            ids[last_part(layer.module)] = layer.layer.tokens
            in_output |= not layer.layer.embeds
    if len(ids) == 1 and not in_output:
        (only,) = ids.values()
        return only
    return ids


def layout_version() -> str:
    """Return the version of PEFT for written adapters: the installed one, or the first with today's layout."""
    try:
        return version("peft")
    except PackageNotFoundError:
        return NEW_LAYOUT


def is_old(peft_version: str) -> bool:
    """Return whether a version of PEFT has the old layout."""
    release, *_ = re.split("[+@]", peft_version)
    return _numbers(release) < _numbers(NEW_LAYOUT)


def _numbers(release: str) -> list[int]:
    """The first three numbers; a part such as the ``1rc1`` of a release candidate counts as 0."""
    numbers = []
    for part in release.split(".")[:3]:
        is_number = part.isascii() and part.isdigit()
        numbers.append(int(part) if is_number else 0)
    return numbers


# ---- tensors


def to_peft(layers: Sequence[PeftLayer], names: Names) -> dict[str, Tensor]:
    """Return the adapter's tensors on the CPU by PEFT's names, in its order of rows and :func:`layout_version`."""
    old = is_old(layout_version())
    tensors: dict[str, Tensor] = {}
    for peft_layer in layers:
        layer = peft_layer.layer
        module = PREFIX + peft_layer.module
        if isinstance(layer, ExpertLora):
            a = on_cpu(layer.lora_a.weight)
            b = on_cpu(layer.lora_b.weight)
            if old and not layer.transposed:
                a, b = _swapped(a, b, layer.experts)
            tensors |= {module + LORA_A: a, module + LORA_B: b}
            continue
        ours = peft_layer.name.removesuffix(f".{TOKEN_ROWS}")
        for key in layer.adapter_params():
            part = peft_part(f"{peft_layer.name}.{key}")
            tensor = on_cpu(layer.get_parameter(key))
            if part != LORA_A:  # it has no output rows
                tensor = names.published_rows(f"{ours}.weight", tensor)
            tensors[module + part] = tensor
    return tensors


def on_cpu(parameter: Tensor) -> Tensor:
    """Return a copy of a parameter's values on the CPU."""
    return parameter.detach().cpu().clone()


def from_peft(
    state: Mapping[str, Tensor], decoder: Decoder, names: Names, config
) -> dict[str, Tensor]:
    """Return the adapter's tensors by the decoder's names, in its order of rows and today's layout.

    Args:
        state: tensors by PEFT's names.
        decoder: model that takes the adapter.
        names: the decoder's names.
        config: the adapter's :class:`~rocm_ext.model.adapters.peft_files.PeftConfig`.

    Raises:
        UserError: experts of the model have no adapter, or one of another size, or a tensor belongs to no layer.
    """
    experts, others = split_experts(state, decoder, config)
    result: dict[str, Tensor] = {}
    for weight, (a, b, _) in experts.items():
        name = weight + ExpertLora.SUFFIX
        result |= {f"{name}.lora_a.weight": a, f"{name}.lora_b.weight": b}
    for name, tensor in others.items():
        module, part = split_peft(name)
        published = f"{module}.weight"
        with explain_errors(
            f"{published} {list(tensor.shape)} belongs to no layer of such a model"
        ):
            weight = names.ours(published)
            if part != LORA_A:  # it has no output rows
                tensor = names.our_rows(published, tensor)
        result[weight.removesuffix(".weight") + our_part(part)] = tensor
    return result


class ExpertUpdate(NamedTuple):
    """A and B of experts' LoRA in today's layout, and the layer that they are for."""

    a: Tensor
    b: Tensor
    layer: ExpertLora


def split_experts(
    state: Mapping[str, Tensor], decoder: nn.Module, config
) -> tuple[dict[str, ExpertUpdate], dict[str, Tensor]]:
    """Return the experts' part of an adapter by the names of the weights, and the other tensors without PEFT's prefix.

    Args:
        state: tensors by PEFT's names.
        decoder: model that takes the adapter.
        config: the adapter's :class:`~rocm_ext.model.adapters.peft_files.PeftConfig`. If an expert has as many inputs
            as outputs, both layouts have the same shapes, and PEFT's version decides.

    Raises:
        UserError: a tensor is missing, or has another shape.
    """
    others = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    updates = {}
    for peft_layer in expert_layers(decoder):
        layer = peft_layer.layer
        assert isinstance(layer, ExpertLora)
        name_a = peft_layer.module + LORA_A
        name_b = peft_layer.module + LORA_B
        refuse(f"missing {name}" for name in (name_a, name_b) if name not in others)
        a = others.pop(name_a)
        b = others.pop(name_b)
        rank, _ = config.of(peft_layer.weight)
        inner = layer.experts * rank
        shapes = a.shape, b.shape
        fits = shapes == ((inner, layer.in_dim), (layer.out_dim, inner))
        fits_old = shapes == ((inner, layer.out_dim), (layer.in_dim, inner))
        both_fit = layer.in_dim == layer.out_dim
        if fits_old and not layer.transposed and (not both_fit or is_old(config.version)):
            a, b = _swapped(a, b, layer.experts)
        elif not fits:
            raise UserError(f"{name_a} is {list(a.shape)}, expected {[inner, layer.in_dim]}")
        updates[peft_layer.weight] = ExpertUpdate(a, b, layer)
    return updates, others


def updates_by_weight(adapter: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group a PEFT adapter's tensors by the base weight they change, then by part."""
    updates: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        module, part = split_peft(name)
        weight = f"{module.removeprefix(PREFIX)}.weight"
        updates.setdefault(weight, {})[part] = tensor
    return updates


def _swapped(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Write every expert's B A as (A' B')ᵀ, with A' from B and B' from A.

    Args:
        a, b: [experts r, in] and [out, r experts].
        experts: number of experts.

    Returns:
        [experts r, out] and [in, r experts].
    """
    a_by_expert, b_by_expert = expert_factors(a, b, experts)  # [experts, r, in], [experts, out, r]
    new_a = b_by_expert.transpose(1, 2)  # [experts, r, out]
    new_b = a_by_expert.permute(2, 1, 0)  # [in, r, experts]
    return new_a.flatten(0, 1), new_b.flatten(1)
