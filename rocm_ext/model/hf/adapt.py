"""LoRA layers in place of a transformers model's linear layers, by PEFT's names."""

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from rocm_ext.errors import UserError, nearest

ALL = "all-linear"
_ROUTERS = ("gate", "router", "shared_expert_gate")
# their fused kernels read the weights past the layer
_PAST_THE_LAYER = frozenset({"out_proj", "conv1d"})


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
        UserError: a target matches no layer, or one that cannot be adapted.
    """
    found = dict(_linears(model))
    if targets is None or targets == ALL:
        names = [name for name in found if name.startswith(f"{layers}.") and not _left_out(model, name)]
    else:
        names = _matches(model, found, [targets] if isinstance(targets, str) else [str(each) for each in targets])
    for name in names:
        linear = found[name]
        layer = adapted(linear.in_features, linear.out_features, use_bias=linear.bias is not None)
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
    kind = type(model.get_submodule(owner)).__name__.lower()
    return leaf in _ROUTERS or "router" in kind or _read_past(kind, leaf)


def _read_past(kind: str, leaf: str) -> bool:
    return "mamba" in kind and leaf in _PAST_THE_LAYER


def _matches(model: nn.Module, found: dict[str, nn.Linear], targets: list[str]) -> list[str]:
    if not targets:
        raise UserError(f"target_modules is empty; expected {ALL} or names of linear layers")
    every = [name for name, _ in model.named_modules()]
    names: set[str] = set()
    for target in targets:
        matching = [name for name in found if name == target or name.endswith(f".{target}")]
        for name in matching:
            owner, _, leaf = name.rpartition(".")
            if _read_past(type(model.get_submodule(owner)).__name__.lower(), leaf):
                raise UserError(f"target_modules has {target!r}, but kernels of {name} read its weight past LoRA")
        if not matching:
            known = sorted({name.rpartition(".")[2] for name in found})
            if any(name == target or name.endswith(f".{target}") for name in every):
                raise UserError(f"target_modules has {target!r}, which is no linear layer of its own weights")
            raise UserError(f"target_modules has {target!r}, which is no layer{nearest(target, known)}")
        names.update(matching)
    return [name for name in found if name in names]
