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

ALL, ALL_EXPERTS = "all-linear", "all-experts"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)")


def put_in(
    model: nn.Module, layers: str, targets: Iterable[str] | str | None, adapted: Callable[..., nn.Module], sizes: Sizes
) -> list[str]:
    """Replace linear layers by adapted ones with the same parameters; return their names.

    Args:
        model: transformers' model.
        layers: name of its list of layers.
        targets: names or ends of names, as in PEFT; None or ``all-linear``: every linear layer of the decoder's layers
            but routers; empty: none.
        adapted: builds a layer from ``in_dim``, ``out_dim``, ``rank``, ``alpha`` and ``use_bias``.
        sizes: LoRA's r and alpha.

    Raises:
        UserError: a target matches no layer, or a layer that cannot be adapted or stored in 4 bits.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if targets is None or targets == ALL:
        names = [name for name in linears if name.startswith(f"{layers}.") and not _left_out(model, name)]
    else:
        names = _matches(model, linears, [targets] if isinstance(targets, str) else list(map(str, targets)))
    for name in names:
        linear = linears[name]
        layer = adapted_linear(adapted, sizes, name, linear.in_features, linear.out_features, linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        model.set_submodule(name, layer)
    if not names and (targets is None or targets == ALL):
        raise UserError(f"no linear layer of {type(model).__name__} can be adapted")
    return names


def put_in_experts(model: nn.Module, targets: Any, sizes: Sizes, adapted: Iterable[str]) -> list[str]:
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
    known = {f"{name}.weight" for name in adapted}
    names = list(experts) if targets == ALL_EXPERTS else _matching_parameters(model, list(experts), targets, known)
    if not names and targets == ALL_EXPERTS:
        raise UserError(f"target_parameters is {targets}, but {type(model).__name__} has no fused experts to adapt")
    for name in names:
        module, key = experts[name]
        lora = ExpertLora(module.get_parameter(key).shape, bool(module.is_transposed), *sizes.of(name))
        module.add_module(f"{key}{ExpertLora.SUFFIX}", lora)
    return names


def fused_experts(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the fused weights of experts that LoRA can adapt: module and attribute, by the weight's name."""
    return {
        f"{name}.{key}": (module, key)
        for name, module in experts_of(model).items()
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


def _matching_parameters(model: nn.Module, experts: list[str], targets: Any, adapted: set[str]) -> list[str]:
    targets = [targets] if isinstance(targets, str) else list(map(str, targets))
    if not targets:
        raise UserError(f"target_parameters is empty; expected null, {ALL_EXPERTS} or names of experts' weights")
    every = [name for name, _ in model.named_parameters()]
    for target in targets:
        matching, problem = [name for name in every if ends_with(name, target)], ""
        if not matching:
            known = sorted({".".join(name.split(".")[-2:]) for name in experts})
            problem = f"which is no parameter{nearest(target, known)}"
        elif other := next((name for name in matching if name not in adapted.union(experts)), None):
            module = type(model.get_submodule(other.rpartition(".")[0])).__name__
            problem = (
                f"but {other} of {module} is no fused weight of experts that LoRA can adapt; target_modules adapts "
                "linear layers"
            )
        if problem:
            raise UserError(f"target_parameters has {target!r}, {problem}")
    return [name for name in experts if any(ends_with(name, target) for target in targets)]


def frozen_kinds(model: nn.Module, adapted: Iterable[str]) -> Counter[str]:
    """Count the weight matrices without LoRA by the ends of their names; ``adapted`` names layers with LoRA."""
    known = set(adapted)
    matrices = [name for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith("bias")]
    frozen = [name.removesuffix(".weight") for name in matrices if ".lora_" not in name]
    return Counter(".".join(name.split(".")[-2:]) for name in frozen if name not in known)


def _left_out(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    kind: Any = type(model.get_submodule(owner))
    return leaf in _ROUTERS or "router" in kind.__name__.lower() or leaf in _read_past(kind)


@cache
def _read_past(kind: type) -> frozenset[str]:
    """Return the parts whose weights a module's code reads directly, for fused kernels: LoRA has no effect on them."""
    try:
        return frozenset(_READ.findall(inspect.getsource(kind)))
    except (OSError, TypeError):  # a class without a file
        return frozenset()


def _matches(model: nn.Module, linears: dict[str, nn.Linear], targets: list[str]) -> list[str]:
    every = [name for name, _ in model.named_modules()]
    names: set[str] = set()
    for target in targets:
        matching, problem = [name for name in linears if ends_with(name, target)], ""
        for name in matching:
            owner, _, leaf = name.rpartition(".")
            kind: Any = type(model.get_submodule(owner))
            if leaf in _read_past(kind):
                problem = problem or f"but the model reads the weight of {name} past LoRA"
        if not matching:
            problem = f"which is no layer{nearest(target, {name.rpartition('.')[2] for name in linears})}"
            if any(ends_with(name, target) for name in every):
                problem = "which is no linear layer, or shares its weights"
        if problem:
            raise UserError(f"target_modules has {target!r}, {problem}")
        names.update(matching)
    return [name for name in linears if name in names]
