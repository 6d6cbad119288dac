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
from rocm_ext.model.attention import use_packed_attention
from rocm_ext.model.build import build_model
from rocm_ext.objectives import objective_of
from rocm_ext.plan import workload
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.planner import TrainingPlanner, decode_seconds
from rocm_ext.plan.speeds import Figures

_GAIN = 1.03  # least speed-up, beyond the spread of both, for which another setting replaces the configured one


def figures(rows: Sequence[Measurement], cfg: DictConfig, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The machine's speeds, as arguments of :class:`rocm_ext.plan.speeds.Figures`.

    Empty where matrix products or copies were not measured.
    """
    flops = {}
    copies = [row.result["value"] for row in _ok(rows, "bandwidth", what="device copy")]
    if not copies or not _ok(rows, "gemm"):
        return {}
    for name in dict.fromkeys(row.item.values["dtype"] for row in _ok(rows, "gemm")):
        best = [
            max(r.result["value"] for r in _ok(rows, "gemm", dtype=name, direction=direction))
            for direction in ("forward", "dgrad")
            if _ok(rows, "gemm", dtype=name, direction=direction)
        ]
        flops[name] = 1 / fmean(1 / value for value in best)  # training computes equally many FLOPs in each direction
    known: dict[str, Any] = {"flops": flops, "bandwidth": median(copies)}
    roofline = Figures("", True, **known)
    shape = build_model(cfg.model, dtype, 0, torch.device("meta"))
    use_packed_attention(shape)
    known |= _training_efficiency(rows, cfg, shape, device, roofline)
    return known | _decoding_efficiency(rows, shape, roofline)


def _training_efficiency(
    rows: Sequence[Measurement], cfg: DictConfig, shape: TransformerDecoder, device: torch.device, roofline: Figures
) -> dict[str, float]:
    """The share of the roofline that a training step reaches."""
    measured = _ok(rows, "training", compile=False, base="as configured")
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
        kernels=Kernels.on(device, "bf16" in roofline.flops),
    )
    choice = planner.choice(count * longest, range(fastest.result["checkpointed"]), 0)
    return {"efficiency": choice.step.seconds / fastest.result["seconds"]}


def _decoding_efficiency(rows: Sequence[Measurement], shape: TransformerDecoder, roofline: Figures) -> dict[str, float]:
    """The share of the roofline that a decoding step reaches."""
    measured = _ok(rows, "decoding")
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


def winners(rows: Sequence[Measurement], cfg: DictConfig) -> list[Winner]:
    """The fastest settings, where the difference exceeds the noise."""
    found = [_library(rows), *_loader(rows, cfg), _compile(rows), _size(rows, "training", "rows", "batch_size")]
    found.append(_size(rows, "decoding", "slots", "engine.slots"))
    return [winner for winner in found if winner is not None]


def _library(rows: Sequence[Measurement]) -> Winner | None:
    """The faster BLAS library in forward and dgrad; LoRA's frozen weights have no wgrad."""
    seconds: dict[str, float] = {}
    dtypes = [row.item.values["dtype"] for row in _ok(rows, "gemm")]
    dtype = "bf16" if "bf16" in dtypes else "fp32"
    for row in _ok(rows, "gemm", dtype=dtype):
        if row.item.values["direction"] != "wgrad":
            library = row.item.values["library"]
            seconds[library] = seconds.get(library, 0.0) + 1 / _value(row)
    if len(seconds) < 2:
        return None
    best, worst = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    gain = seconds[worst] / seconds[best]
    if gain < _GAIN:
        return None
    (environ,) = {tuple(r.item.environ.items()) for r in _ok(rows, "gemm", library=best)}
    ((name, value),) = environ
    return Winner(name, value, f"{best} is {gain:.2f} times as fast as {worst} in forward and dgrad, {dtype}")


def _loader(rows: Sequence[Measurement], cfg: DictConfig) -> list[Winner]:
    measured = _ok(rows, "loader")
    now = _ok(rows, "loader", num_workers=cfg.num_workers, pin_memory=cfg.pin_memory)
    if not measured or not now:
        return []
    best, current = max(measured, key=_value), now[0]
    training = max(map(_value, _ok(rows, "training")), default=0.0)
    if _value(current) > 20 * training > 0 or not _beats(best, current):
        return []  # loading takes less than a twentieth of a step
    reason = f"loads {_value(best) / _value(current):.2f} times as fast as {current.item.values}"
    return [Winner(key, best.item.values[key], reason) for key in ("num_workers", "pin_memory")]


def _compile(rows: Sequence[Measurement]) -> Winner | None:
    for compiled in _ok(rows, "training", compile=True):
        for plain in _ok(rows, "training", compile=False, base="as configured", rows=compiled.item.values["rows"]):
            faster, slower = (compiled, plain) if _value(compiled) > _value(plain) else (plain, compiled)
            if _beats(faster, slower):
                gain = _value(compiled) / _value(plain)
                return Winner("compile", faster is compiled, f"compiled steps are {gain:.2f} times as fast")
    return None


def _size(rows: Sequence[Measurement], probe: str, what: str, key: str) -> Winner | None:
    """The smallest size within :data:`_GAIN` of the fastest."""
    plain = {"compile": False, "base": "as configured"} if probe == "training" else {}
    measured = _ok(rows, probe, **plain)
    if len(measured) < 2:
        return None
    fastest = max(measured, key=_value)
    chosen = min((r for r in measured if _value(r) * _GAIN >= _value(fastest)), key=lambda r: r.item.values[what])
    told = ", ".join(f"{_value(r):,.0f} with {r.item.values[what]}" for r in measured)
    return Winner(key, chosen.item.values[what], f"tokens/s: {told}")


def _ok(table: Iterable[Measurement], probe: str, /, **values: Any) -> list[Measurement]:
    """The successful measurements of a probe that have these values."""
    return [
        row
        for row in table
        if row.status == "ok" and row.item.probe == probe and values.items() <= row.item.values.items()
    ]


def _value(row: Measurement) -> float:
    return row.result["value"]


def _beats(best: Measurement, other: Measurement) -> bool:
    return best.result["low"] > other.result["high"] and _value(best) > _GAIN * _value(other)
