"""Whether a run compiles its layers with ``compile: auto``: by torch's version, and by a trial of a small layer."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from rocm_ext.base.importing import COMPONENT
from rocm_ext.machine import trials
from rocm_ext.machine.bench_file import of_this_machine
from rocm_ext.machine.detect import Machine, parse_version
from rocm_ext.machine.profile import Profile
from rocm_ext.model.attention import Lengths
from rocm_ext.model.build import build_model
from rocm_ext.model.names import replace_parameter

AUTO = "auto"
_WHAT = "a compiled layer"
_SHAPE = Path(__file__).parent / "shapes" / "Qwen" / "Qwen3-0.6B"
# packed sequences; a graph for one width must also serve another one
_ROWS = ((300, 212), (500, 140))


def choose_compile(
    cfg: DictConfig, profile: Profile, machine: Machine, here: bool = True
) -> tuple[Any, str]:
    """Choose ``compile`` for a new run of a config with ``auto``.

    Args:
        cfg: config of the run.
        profile: its hardware profile.
        machine: this machine.
        here: whether the run is on this machine. For others the answer is False.

    Returns:
        The value and the reason.
    """
    lock = profile.locked.get("compile")
    if lock and "compile" not in cfg.hardware_overrides:
        return lock.value, lock.reason
    if cfg.get("router_replay"):
        return False, "router_replay does not work in compiled layers"
    if not here:
        return False, "only a run on that machine can try it"
    if cfg.device == "cpu" or machine.backend == "cpu":
        return False, "the device is a CPU"
    bench = of_this_machine(machine)
    if bench and "compile" in bench.settings:
        return bench.settings["compile"], f"measured {bench.date} by rocm-ext bench"
    if machine.arch == "gfx1151" and parse_version(machine.torch) < (2, 11):
        return False, f"it froze gfx1151 before torch 2.11, and this is {machine.torch}"
    failure = trials.failure("compile", _WHAT, __name__)
    return not failure, failure or f"{_WHAT} was right and faster in a trial"


def in_words(value: Any, why: str) -> str:
    """Return the line of a choice for the log and for plans."""
    return f"compile {value} ({why})" if value else f"compile off: {why}"


# ---- the trial


def trial(device: torch.device) -> str:
    """Compare the gradients of a compiled layer with the plain layer's: return what is wrong or slower, or ""."""
    layer = _layer(device)
    width = layer.sa_norm.scale.numel()
    compiled = torch.compile(layer, dynamic=True)  # as training compiles layers
    rng = torch.Generator().manual_seed(1)
    trained = [p for p in layer.parameters() if p.requires_grad]
    pairs: list[tuple[trials.Call, trials.Call]] = []
    for lengths in _ROWS:
        values = torch.randn(2, 1, sum(lengths), width, generator=rng)
        x, upstream = values.to(device, torch.bfloat16)
        positions = torch.cat(list(map(torch.arange, lengths)))[None].to(device)
        gradients = partial(
            _gradients,
            leaves=[x.requires_grad_(), *trained],
            upstream=upstream,
            lengths=lengths,
            positions=positions,
        )
        norms = [gradient.norm() for gradient in gradients(layer)]
        joined = partial(_joined, gradients, norms)
        pairs.append((partial(joined, compiled), partial(joined, layer)))
    # attention may sum in another order in every call
    return trials.compare(_WHAT, pairs, 0.05, repeats=False)


def _layer(device: torch.device) -> Any:
    """Build a layer of Qwen3-0.6B with random weights, and with LoRA that is not zero."""
    settings = {COMPONENT: "rocm_ext.model.from_checkpoint", "checkpoint_dir": str(_SHAPE)}
    decoder = build_model(OmegaConf.create(settings), torch.bfloat16, 0, device)
    layer = decoder.layers[0]
    rng = torch.Generator().manual_seed(0)
    for name, parameter in list(layer.named_parameters()):
        value = torch.ones(parameter.shape)
        if parameter.ndim > 1:
            value.normal_(std=0.02, generator=rng)
        value = value.to(device, parameter.dtype)
        replace_parameter(layer, name, nn.Parameter(value, parameter.requires_grad))
    return layer


def _gradients(
    layer: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    upstream: Tensor,
    lengths: tuple[int, ...],
    positions: Tensor,
) -> Sequence[Tensor]:
    """Compute a layer on the packed sequences ``leaves[0]`` [1, s, d], and the gradients of ``leaves``."""
    out = layer(leaves[0], mask=Lengths(lengths), input_pos=positions)
    # zeros where none arrives, as in layers that torch 2.11 compiled (pytorch#180642)
    return torch.autograd.grad(out, leaves, upstream, materialize_grads=True)


def _joined(
    gradients: Callable[..., Sequence[Tensor]],
    norms: Sequence[Tensor],
    layer: Callable[..., Tensor],
) -> Tensor:
    """Return a layer's gradients as one tensor, in which all have the same weight."""
    parts = []
    for gradient, norm in zip(gradients(layer), norms, strict=True):
        parts.append((gradient / norm).float().flatten())
    return torch.cat(parts)


if __name__ == "__main__":
    trials.main(trial)
