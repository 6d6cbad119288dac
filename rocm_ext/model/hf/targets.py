"""LoRA on a transformers model's linear layers and fused experts, by PEFT's names."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from torch import nn

from rocm_ext.base.errors import UserError, nearest
from rocm_ext.model.hf.experts import experts_of
from rocm_ext.model.lora import ExpertLora, Sizes, adapted_linear, ends_with
from rocm_ext.model.names import last_part, last_parts

ALL = "all-linear"
ALL_EXPERTS = "all-experts"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)")


def put_in(
    model: nn.Module,
    layers: str,
    targets: Iterable[str] | str | None,
    adapted: Callable[..., nn.Module],
    sizes: Sizes,
) -> list[str]:
    """Replace linear layers by adapted ones with the same parameters; return their names.

    Args:
        model: transformers' model.
        layers: name of its list of layers.
        targets: names or ends of names, as in PEFT; None or ``all-linear``: every linear layer of the decoder's layers
            but routers. Empty means none.
        adapted: builds a layer from ``in_dim``, ``out_dim``, ``rank``, ``alpha`` and ``use_bias``.
        sizes: LoRA's r and alpha.

    Raises:
        UserError: a target matches no layer, or a layer that cannot be adapted or stored in 4 bits.
    """
    linears = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            linears[name] = module
    if targets is None or targets == ALL:
        inside = (name for name in linears if name.startswith(f"{layers}."))
        names = [name for name in inside if not _left_out(model, name)]
        if not names:
            raise UserError(f"no linear layer of {type(model).__name__} can be adapted")
    else:
        names = _matches(model, linears, listed(targets))
    for name in names:
        linear = linears[name]
        out, width = linear.weight.shape
        layer = adapted_linear(adapted, sizes, name, width, out, linear.bias is not None)
        layer.weight = linear.weight
        layer.bias = linear.bias
        model.set_submodule(name, layer)
    return names


def listed(targets: Iterable[str] | str) -> list[str]:
    """Return a config's names of layers or parameters as a list."""
    return [targets] if isinstance(targets, str) else list(map(str, targets))


def put_in_experts(model: nn.Module, targets, sizes: Sizes, adapted: Iterable[str]) -> list[str]:
    """Put LoRA on fused weights of experts, which :mod:`rocm_ext.model.hf.experts` multiplies; return their names.

    Args:
        model: transformers' model.
        targets: names or ends of names of parameters, as in PEFT's ``target_parameters``; ``all-experts``: all such
            weights.
        sizes: LoRA's r and alpha.
        adapted: linear layers with LoRA; ``targets`` may also name their weights.

    Raises:
        UserError: a target matches no parameter, or a parameter that is not a fused weight of experts.
    """
    experts = fused_experts(model)
    if targets == ALL_EXPERTS:
        names = list(experts)
        if not names:
            raise UserError(
                f"target_parameters is {targets}, but {type(model).__name__} has no fused experts to adapt"
            )
    else:
        known = {f"{name}.weight" for name in adapted}
        names = _matching_parameters(model, list(experts), listed(targets), known)
    for name in names:
        module, key = experts[name]
        rank, alpha = sizes.of(name)
        shape = module.get_parameter(key).shape
        lora = ExpertLora(shape, bool(module.is_transposed), rank, alpha)
        module.add_module(f"{key}{ExpertLora.SUFFIX}", lora)
    return names


def fused_experts(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the fused weights of experts that LoRA can adapt: module and attribute, by the weight's name."""
    fused = {}
    for name, module in experts_of(model).items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3:
                fused[f"{name}.{key}"] = module, key
    return fused


def _matching_parameters(
    model: nn.Module, experts: list[str], targets: list[str], adapted: set[str]
) -> list[str]:
    if not targets:
        raise UserError(
            f"target_parameters is empty; expected null, {ALL_EXPERTS} or names of experts' weights"
        )
    every = [name for name, _ in model.named_parameters()]
    matched: set[str] = set()
    for target in targets:
        matching = [name for name in every if ends_with(name, target)]
        if not matching:
            ends = sorted({last_parts(name, 2) for name in experts})
            raise UserError(
                f"target_parameters has {target!r}, which is no parameter{nearest(target, ends)}"
            )
        others = [name for name in matching if name not in adapted and name not in experts]
        if others:
            owner, _ = _owner_of(model, others[0])
            raise UserError(
                f"target_parameters has {target!r}, but {others[0]} of {owner.__name__} is no fused weight of experts "
                "that LoRA can adapt; target_modules adapts linear layers"
            )
        matched.update(matching)
    return [name for name in experts if name in matched]


def frozen_kinds(model: nn.Module, adapted: Iterable[str]) -> Counter[str]:
    """Count the weight matrices without LoRA by the ends of their names; ``adapted`` names layers with LoRA."""
    known = set(adapted)
    kinds = Counter[str]()
    for name, parameter in model.named_parameters():
        layer = name.removesuffix(".weight")
        is_matrix = parameter.ndim >= 2 and not name.endswith("bias")
        has_lora = ".lora_" in name or layer in known
        if is_matrix and not has_lora:
            kinds[last_parts(layer, 2)] += 1
    return kinds


def _left_out(model: nn.Module, name: str) -> bool:
    kind, leaf = _owner_of(model, name)
    return leaf in _ROUTERS or "router" in kind.__name__.lower() or leaf in _read_past(kind)


def _owner_of(model: nn.Module, name: str) -> tuple[Any, str]:
    """Return the class of the module that has the part ``name``, and the part's name in it."""
    owner, _, leaf = name.rpartition(".")
    return type(model.get_submodule(owner)), leaf


@cache
def _read_past(kind: type) -> frozenset[str]:
    """Return the parts whose weights a module's code reads directly, for fused kernels: LoRA has no effect on them."""
    try:
        return frozenset(_READ.findall(inspect.getsource(kind)))
    except (OSError, TypeError):  # a class without a file
        return frozenset()


def _matches(model: nn.Module, linears: dict[str, nn.Linear], targets: list[str]) -> list[str]:
    matched: set[str] = set()
    for target in targets:
        matching = [name for name in linears if ends_with(name, target)]
        for name in matching:
            kind, leaf = _owner_of(model, name)
            if leaf in _read_past(kind):
                raise UserError(
                    f"target_modules has {target!r}, but the model reads the weight of {name} past LoRA"
                )
        if not matching:
            problem = f"no layer{nearest(target, set(map(last_part, linears)))}"
            if any(ends_with(name, target) for name, _ in model.named_modules()):
                problem = "no linear layer, or shares its weights"
            raise UserError(f"target_modules has {target!r}, which is {problem}")
        matched.update(matching)
    return [name for name in linears if name in matched]
