"""What measurements show: the machine's speeds and the fastest settings."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.bench.sweep import GAIN, Measurement, Sweep, Winner, in_words, smallest
from rocm_ext.bench.training import longest_row, probe_config
from rocm_ext.losses import objective_of
from rocm_ext.machine.profile import load_profile
from rocm_ext.model.attention import choose_attention
from rocm_ext.model.build import build_model
from rocm_ext.plan import workload
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.planner import TrainingPlanner, decode_seconds
from rocm_ext.plan.speeds import Figures, assumed


def figures(
    measurements: Sequence[Measurement], cfg: DictConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The machine's speeds, as arguments of :class:`rocm_ext.plan.speeds.Figures`.

    Empty where matrix products or copies were not measured.
    """
    flops = {}
    copies = [each.speed for each in _ok(measurements, "bandwidth")]
    if not copies or not _ok(measurements, "gemm"):
        return {}
    for name in dict.fromkeys(each.item.values["dtype"] for each in _ok(measurements, "gemm")):
        best = [
            max(each.speed for each in _ok(measurements, "gemm", dtype=name, direction=direction))
            for direction in ("forward", "dgrad")
            if _ok(measurements, "gemm", dtype=name, direction=direction)
        ]
        flops[name] = 1 / fmean(1 / value for value in best)  # training computes equally many FLOPs in each direction
    known: dict[str, Any] = {"flops": flops, "bandwidth": median(copies), **assumed(load_profile(cfg.hardware).reached)}
    roofline = Figures("", True, **known)
    shape = build_model(cfg.model, dtype, 0, torch.device("meta"))
    choose_attention(shape, cfg.attention)
    known |= _training_efficiency(measurements, cfg, shape, device, roofline)
    return known | _decoding_efficiency(measurements, shape, roofline)


def _training_efficiency(
    measurements: Sequence[Measurement],
    cfg: DictConfig,
    shape: TransformerDecoder,
    device: torch.device,
    roofline: Figures,
) -> dict[str, float]:
    """The share of the roofline that a training step reaches."""
    measured = [each for each in _ok(measurements, "training") if _plain(each)]
    if not measured:
        return {}
    fastest = max(measured, key=attrgetter("speed"))
    count, longest = fastest.item.values["rows"], longest_row(cfg)
    planner = TrainingPlanner(
        probe_config(cfg, fastest.item.values, []),
        shape,
        objective_of(config.instantiate(cfg.loss, key="loss")),
        shape.tok_embeddings.weight.dtype,
        device,
        rows=workload.Workload(longest, longest, 1.0, count, "random"),
        ranks=1,
        figures=lambda: roofline,
        kernels=Kernels.on(device, "bf16" in roofline.flops, cfg.attention),
    )
    choice = planner.choice(count * longest, range(fastest.result["checkpointed"]), 0)
    return {"efficiency": choice.step.seconds / fastest.result["seconds"]}


def _decoding_efficiency(
    measurements: Sequence[Measurement], shape: TransformerDecoder, roofline: Figures
) -> dict[str, float]:
    """The share of the roofline that a decoding step reaches."""
    measured = _ok(measurements, "decoding")
    if not measured:
        return {}
    fastest = max(measured, key=attrgetter("speed"))
    with torch.no_grad():
        sampler = shape.sampler()
    expected = decode_seconds(sampler, fastest.item.values["slots"], fastest.result["context"], roofline)
    return {"decode_efficiency": expected / fastest.result["seconds"]}


def winners(measurements: Sequence[Measurement], sweep: Sweep) -> list[Winner]:
    """The fastest settings, where the difference exceeds the noise."""
    return [*_library(measurements), *sweep.winners(measurements), *_slots(measurements)]


def _library(measurements: Sequence[Measurement]) -> list[Winner]:
    """The variables that choose the faster BLAS library in forward and dgrad; LoRA's frozen weights have no wgrad."""
    seconds: dict[str, float] = {}
    dtypes = [each.item.values["dtype"] for each in _ok(measurements, "gemm")]
    dtype = "bf16" if "bf16" in dtypes else "fp32"
    for each in _ok(measurements, "gemm", dtype=dtype):
        if each.item.values["direction"] != "wgrad":
            library = each.item.values["library"]
            seconds[library] = seconds.get(library, 0.0) + 1 / each.speed
    if len(seconds) < 2:
        return []
    best, worst = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    gain = seconds[worst] / seconds[best]
    if gain < GAIN:
        return []
    (environ,) = {tuple(r.item.environ.items()) for r in _ok(measurements, "gemm", library=best)}
    reason = f"{best} is {gain:.2f} times as fast as {worst} in forward and dgrad, {dtype}"
    return [Winner(name, value, reason) for name, value in environ]


def _slots(measurements: Sequence[Measurement]) -> list[Winner]:
    measured = _ok(measurements, "decoding")
    if len(measured) < 2:
        return []
    return [Winner("engine.slots", smallest(measured, "slots").item.values["slots"], in_words(measured, "slots"))]


def _plain(measurement: Measurement) -> bool:
    """Whether a training step was measured as configured, but not compiled, which figures of kernels describe."""
    return measurement.item.values.keys() == {"rows", "compile"} and not measurement.item.values["compile"]


def _ok(table: Iterable[Measurement], probe: str, /, **values: Any) -> list[Measurement]:
    """The successful measurements of a probe that have these values."""
    return [
        each
        for each in table
        if each.status == "ok" and each.item.probe == probe and values.items() <= each.item.values.items()
    ]
