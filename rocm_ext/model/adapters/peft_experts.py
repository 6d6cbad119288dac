"""Adapters of fused experts in PEFT's format: names, layouts and ``target_parameters``.

PEFT wraps a module once per adapted parameter, in the module's order. The first wrapper is the innermost; its name has
one ``base_layer`` for every wrapper around it.

PEFT changed the layout in version 0.19.1 for weights [experts, out, in]. Before, it took them for [experts, in, out],
so that A has the rows' size and B the columns'. Both layouts can describe the same update.
"""

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor, nn

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import ExpertLora, adapters, changed_weights, ends_with, expert_factors, plain

NEW_LAYOUT = "0.19.1"  # the first version of PEFT with today's layout


def layout_version() -> str:
    """Return the version of PEFT for written adapters: the installed one, or the first with today's layout."""
    try:
        return version("peft")
    except PackageNotFoundError:
        return NEW_LAYOUT


def is_old(peft_version: str) -> bool:
    """Return whether a version of PEFT has the old layout."""
    parts = peft_version.split("+")[0].split("@")[0].split(".")[:3]
    numbers = [int(part) if part.isascii() and part.isdigit() else 0 for part in parts]
    return numbers < [int(part) for part in NEW_LAYOUT.split(".")]


def expert_loras(decoder: nn.Module) -> dict[str, ExpertLora]:
    """Return the LoRA of adapted experts' weights by the weights' names, such as ``…experts.gate_up_proj``."""
    return {name: layer for name, layer in changed_weights(decoder).items() if isinstance(layer, ExpertLora)}


def by_parameter(decoder: Decoder) -> set[str]:
    """Return the adapted linear layers that ``target_modules`` cannot name: PEFT 0.19 would take them for experts."""
    return {name for name in linears(decoder) if name.rpartition(".")[2] in decoder.names_of_experts}


def linears(decoder: nn.Module) -> set[str]:
    """Return the names of the adapted linear layers."""
    return {name for name, layer in adapters(decoder) if not isinstance(layer, ExpertLora)}


def modules(decoder: Decoder) -> set[str]:
    """Return the names of PEFT's modules whose adapters ``target_parameters`` names."""
    return {theirs for theirs, _ in _names(decoder).values()} | by_parameter(decoder)


def target_parameters(decoder: Decoder) -> list[str]:
    """Return ``target_parameters``: the ends of the adapted weights' names, or full names if others end alike."""
    adapted = expert_loras(decoder).keys() | {f"{name}.weight" for name in by_parameter(decoder)}
    ends = {".".join(name.split(".")[-2:]) for name in adapted}
    others = matching(decoder, ends) - adapted
    modules = {end.partition(".")[0] for end in ends}
    others |= {name for name in decoder.left_out if name.rpartition(".")[2] in modules}
    return sorted(adapted if others else ends)


def matching(decoder: nn.Module, targets: Iterable[str]) -> set[str]:
    """Return the names of the decoder's parameters that PEFT's ``target_parameters`` matches."""
    return {name for name in _parameters(decoder) if any(ends_with(name, str(target)) for target in targets)}


def to_peft(state: Mapping[str, Tensor], decoder: nn.Module) -> dict[str, Tensor]:
    """Convert the experts' part of an adapter to PEFT's names and the layout of :func:`layout_version`."""
    old = is_old(layout_version())
    result: dict[str, Tensor] = {}
    for ours, (theirs, layer) in _names(decoder).items():
        a, b = state[f"{ours}.lora_a.weight"], state[f"{ours}.lora_b.weight"]
        if old and not layer.transposed:
            a, b = _swapped(a, b, layer.experts)
        result |= {f"{theirs}.lora_A.weight": a, f"{theirs}.lora_B.weight": b}
    return result


def from_peft(state: Mapping[str, Tensor], decoder: nn.Module, config: Any) -> tuple[dict[str, Tensor], set[str]]:
    """Convert the experts' part of an adapter from PEFT's names and layout.

    Args:
        state: weights by the names of PEFT's modules, without its prefix.
        decoder: model that takes the adapter.
        config: the adapter's :class:`~rocm_ext.model.adapters.peft_files.PeftConfig`. If an expert has as many inputs
            as outputs, both layouts have the same shapes, and PEFT's version decides.

    Returns:
        Weights by this library's names, and their names in ``state``.
    """
    result: dict[str, Tensor] = {}
    used: set[str] = set()
    for ours, (theirs, layer) in _names(decoder).items():
        names = f"{theirs}.lora_A.weight", f"{theirs}.lora_B.weight"
        refuse(f"missing {name}" for name in names if name not in state)
        a, b = (state[name] for name in names)
        used.update(names)
        inner = layer.experts * config.of(ours.removesuffix(ExpertLora.SUFFIX))[0]
        square = layer.in_dim == layer.out_dim
        fits = a.shape == (inner, layer.in_dim) and b.shape == (layer.out_dim, inner)
        swapped = a.shape == (inner, layer.out_dim) and b.shape == (layer.in_dim, inner)
        if swapped and not layer.transposed and (not square or is_old(config.version)):
            a, b = _swapped(a, b, layer.experts)
        elif not fits:
            raise UserError(f"{names[0]} is {list(a.shape)}, expected {[inner, layer.in_dim]}")
        result |= {f"{ours}.lora_a.weight": a, f"{ours}.lora_b.weight": b}
    return result, used


def _names(decoder: nn.Module) -> dict[str, tuple[str, ExpertLora]]:
    """Return PEFT's module name and the LoRA, by the LoRA's name."""
    by_module: dict[str, list[str]] = {}
    loras = expert_loras(decoder)
    for name in _parameters(decoder):  # in the module's order
        if name in loras:
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return {
        f"{name}{ExpertLora.SUFFIX}": (module + ".base_layer" * (len(names) - 1 - i), loras[name])
        for module, names in by_module.items()
        for i, name in enumerate(names)
    }


def _parameters(decoder: nn.Module) -> list[str]:
    return [plain(name) for name, _ in decoder.named_parameters() if ".lora_" not in name]


def _swapped(a: Tensor, b: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Write every expert's B A as (A' B')ᵀ, with A' from B and B' from A."""
    by_expert, columns = expert_factors(a, b, experts)  # [experts, r, in], [experts, out, r]
    return columns.transpose(1, 2).reshape(-1, b.shape[0]), by_expert.permute(2, 1, 0).reshape(a.shape[1], -1)
