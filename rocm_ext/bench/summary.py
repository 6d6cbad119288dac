"""What measurements show: the machine's speeds and the fastest settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.bench.runner import Measurement
from rocm_ext.bench.training import longest_row, probe_config
from rocm_ext.generation.decoder import Decoder
from rocm_ext.model.attention import choose_attention, use_packed_attention
from rocm_ext.model.build import build_model
from rocm_ext.objectives import objective_of
from rocm_ext.plan import workload
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.planner import TrainingPlanner, decode_seconds
from rocm_ext.plan.speeds import Figures

_GAIN = 1.03  # least speed-up, beyond the spread of both, for which another setting replaces the configured one


def figures(
    measurements: Sequence[Measurement], cfg: DictConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """The machine's speeds, as arguments of :class:`rocm_ext.plan.speeds.Figures`.

    Empty where matrix products or copies were not measured.
    """
    flops = {}
    copies = [each.result["value"] for each in _ok(measurements, "bandwidth", what="device copy")]
    if not copies or not _ok(measurements, "gemm"):
        return {}
    for name in dict.fromkeys(each.item.values["dtype"] for each in _ok(measurements, "gemm")):
        best = [
            max(r.result["value"] for r in _ok(measurements, "gemm", dtype=name, direction=direction))
            for direction in ("forward", "dgrad")
            if _ok(measurements, "gemm", dtype=name, direction=direction)
        ]
        flops[name] = 1 / fmean(1 / value for value in best)  # training computes equally many FLOPs in each direction
    known: dict[str, Any] = {"flops": flops, "bandwidth": median(copies)}
    roofline = Figures("", True, **known)
    shape = build_model(cfg.model, dtype, 0, torch.device("meta"))
    use_packed_attention(shape)
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
    measured = _ok(measurements, "training", compile=False, base="as configured")
    if not measured:
        return {}
    fastest = max(measured, key=_value)
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
    fastest = max(measured, key=_value)
    with torch.no_grad():
        decoder = Decoder(shape)
    expected = decode_seconds(decoder, fastest.item.values["slots"], fastest.result["context"], roofline)
    return {"decode_efficiency": expected / fastest.result["seconds"]}


@dataclass(frozen=True)
class Winner:
    """The fastest value of a setting.

    Attributes:
        key: in a config, or the name of an environment variable.
        value: the fastest.
        reason: the speeds that were compared.
    """

    key: str
    value: Any
    reason: str


def winners(measurements: Sequence[Measurement], cfg: DictConfig) -> list[Winner]:
    """The fastest settings, where the difference exceeds the noise."""
    found = [
        *_library(measurements),
        *_loader(measurements, cfg),
        _compile(measurements),
        _size(measurements, "training", "rows", "batch_size"),
        _size(measurements, "decoding", "slots", "engine.slots"),
    ]
    return [winner for winner in found if winner is not None]


def _library(measurements: Sequence[Measurement]) -> list[Winner]:
    """The variables that choose the faster BLAS library in forward and dgrad; LoRA's frozen weights have no wgrad."""
    seconds: dict[str, float] = {}
    dtypes = [each.item.values["dtype"] for each in _ok(measurements, "gemm")]
    dtype = "bf16" if "bf16" in dtypes else "fp32"
    for each in _ok(measurements, "gemm", dtype=dtype):
        if each.item.values["direction"] != "wgrad":
            library = each.item.values["library"]
            seconds[library] = seconds.get(library, 0.0) + 1 / _value(each)
    if len(seconds) < 2:
        return []
    best, worst = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    gain = seconds[worst] / seconds[best]
    if gain < _GAIN:
        return []
    (environ,) = {tuple(r.item.environ.items()) for r in _ok(measurements, "gemm", library=best)}
    reason = f"{best} is {gain:.2f} times as fast as {worst} in forward and dgrad, {dtype}"
    return [Winner(name, value, reason) for name, value in environ]


def _loader(measurements: Sequence[Measurement], cfg: DictConfig) -> list[Winner]:
    measured = _ok(measurements, "loader")
    now = _ok(measurements, "loader", num_workers=cfg.num_workers, pin_memory=cfg.pin_memory)
    if not measured or not now:
        return []
    best, current = max(measured, key=_value), now[0]
    training = max(map(_value, _ok(measurements, "training")), default=0.0)
    if _value(current) > 20 * training > 0 or not _beats(best, current):
        return []  # loading takes less than a twentieth of a step
    reason = f"loads {_value(best) / _value(current):.2f} times as fast as {current.item.values}"
    return [Winner(key, best.item.values[key], reason) for key in ("num_workers", "pin_memory")]


def _compile(measurements: Sequence[Measurement]) -> Winner | None:
    for compiled in _ok(measurements, "training", compile=True):
        for plain in _ok(
            measurements, "training", compile=False, base="as configured", rows=compiled.item.values["rows"]
        ):
            faster, slower = (compiled, plain) if _value(compiled) > _value(plain) else (plain, compiled)
            if _beats(faster, slower):
                gain = _value(compiled) / _value(plain)
                return Winner("compile", faster is compiled, f"compiled steps are {gain:.2f} times as fast")
    return None


def _size(measurements: Sequence[Measurement], probe: str, what: str, key: str) -> Winner | None:
    """The smallest size within :data:`_GAIN` of the fastest."""
    plain = {"compile": False, "base": "as configured"} if probe == "training" else {}
    measured = _ok(measurements, probe, **plain)
    if len(measured) < 2:
        return None
    fastest = max(measured, key=_value)
    chosen = min((r for r in measured if _value(r) * _GAIN >= _value(fastest)), key=lambda r: r.item.values[what])
    told = ", ".join(f"{_value(r):,.0f} with {r.item.values[what]}" for r in measured)
    return Winner(key, chosen.item.values[what], f"tokens/s: {told}")


def _ok(table: Iterable[Measurement], probe: str, /, **values: Any) -> list[Measurement]:
    """The successful measurements of a probe that have these values."""
    return [
        each
        for each in table
        if each.status == "ok" and each.item.probe == probe and values.items() <= each.item.values.items()
    ]


def _value(measurement: Measurement) -> float:
    return measurement.result["value"]


def _beats(best: Measurement, other: Measurement) -> bool:
    return best.result["low"] > other.result["high"] and _value(best) > _GAIN * _value(other)
