"""LoRA layers in place of a transformers model's linear layers, by PEFT's names."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn

from rocm_ext.errors import UserError, nearest, one_line

ALL = "all-linear"
_ROUTERS = ("gate", "router", "shared_expert_gate")
_READ = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)")


def put_in(
    model: nn.Module, layers: str, output: str, targets: Iterable[str] | str | None, adapted: Callable[..., nn.Module]
) -> list[str]:
    """Replace linear layers by adapted ones with the same parameters.

    Args:
        model: transformers' model.
        layers: name of its list of layers.
        output: name of its output layer.
        targets: names or ends of names, as PEFT matches them; None or ``all-linear``: every linear layer of the
            decoder's layers but routers.
        adapted: builds a layer from ``in_dim``, ``out_dim`` and ``use_bias``.

    Returns:
        The names of the adapted layers.

    Raises:
        UserError: a target matches no layer, or one that cannot be adapted or stored in 4 bits.
    """
    found = dict(_linears(model))
    if targets is None or targets == ALL:
        names = [name for name in found if name.startswith(f"{layers}.") and not _left_out(model, name)]
    else:
        names = _matches(model, found, [targets] if isinstance(targets, str) else [str(each) for each in targets])
    for name in names:
        linear = found[name]
        try:
            layer = adapted(linear.in_features, linear.out_features, use_bias=linear.bias is not None)
        except (AssertionError, NotImplementedError) as error:
            shape = f"[{linear.out_features}, {linear.in_features}]"
            raise UserError(
                f"quantize_base: {name} {shape} cannot be stored in 4 bits ({one_line(error)}); leave it out of "
                "target_modules, or set quantize_base: False"
            ) from error
        layer.weight, layer.bias = linear.weight, linear.bias
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, layer)
    if not names:
        raise UserError(f"no linear layer of {type(model).__name__} can be adapted")
    return names


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)


def _left_out(model: nn.Module, name: str) -> bool:
    owner, _, leaf = name.rpartition(".")
    kind: Any = type(model.get_submodule(owner))
    return leaf in _ROUTERS or "router" in kind.__name__.lower() or leaf in _read_past(kind)


@cache
def _read_past(kind: type) -> frozenset[str]:
    """Return the parts whose weights the code of a module reads itself, as fused kernels need; LoRA has no effect."""
    try:
        return frozenset(_READ.findall(inspect.getsource(kind)))
    except (OSError, TypeError):  # a class without a file
        return frozenset()


def _matches(model: nn.Module, found: dict[str, nn.Linear], targets: list[str]) -> list[str]:
    if not targets:
        raise UserError(f"target_modules is empty; expected {ALL} or names of linear layers")
    every = [name for name, _ in model.named_modules()]
    names: set[str] = set()
    for target in targets:
        matching = [name for name in found if name == target or name.endswith(f".{target}")]
        for name in matching:
            owner, _, leaf = name.rpartition(".")
            kind: Any = type(model.get_submodule(owner))
            if leaf in _read_past(kind):
                raise UserError(f"target_modules has {target!r}, but the model reads the weight of {name} past LoRA")
        if not matching:
            known = sorted({name.rpartition(".")[2] for name in found})
            if any(name == target or name.endswith(f".{target}") for name in every):
                raise UserError(f"target_modules has {target!r}, which is no linear layer of its own weights")
            raise UserError(f"target_modules has {target!r}, which is no layer{nearest(target, known)}")
        names.update(matching)
    return [name for name in found if name in names]
