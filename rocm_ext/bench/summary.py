"""The machine's speeds and the fastest settings, from measurements."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.base.types import Config
from rocm_ext.bench.probes import longest_row, probe_config
from rocm_ext.bench.sweep import GAIN, TUNABLE, Measurement, Winner, in_words, smallest
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

    ``efficiency`` and ``decode_efficiency`` are the shares of the roofline that a training and a decoding step reach.
    Empty if matrix products or copies were not measured.
    """
    copies = _ok(measurements, "bandwidth", what="device copy")
    products = _products(measurements)
    if not copies or not products:
        return {}
    known: dict[str, Any] = {
        "flops": _flops(products),
        "bandwidth": median(copy.speed for copy in copies),
        **assumed(load_profile(cfg.hardware).reached),
    }
    roofline = Figures("", True, **known)
    shape = build_model(cfg.model, dtype, 0, torch.device("meta"))
    choose_attention(shape, cfg.attention)
    # steps as configured but not compiled, because the figures are of single kernels
    uncompiled = _ok(measurements, "training", compile=False)
    steps = [step for step in uncompiled if len(step.item.values) == 2]
    if steps:
        step = max(steps, key=attrgetter("speed"))
        known["efficiency"] = (
            _planned_seconds(step, cfg, shape, device, roofline) / step.result["seconds"]
        )
    decoded = _ok(measurements, "decoding")
    if decoded:
        step = max(decoded, key=attrgetter("speed"))
        with torch.no_grad():
            sampler = shape.sampler()
        seconds = decode_seconds(
            sampler, step.item.values["slots"], step.result["context"], roofline
        )
        known["decode_efficiency"] = seconds / step.result["seconds"]
    return known


def _flops(products: Sequence[Measurement]) -> dict[str, float]:
    """FLOP/s by dtype; training computes equally many FLOPs in both directions."""
    flops = {}
    for name in dict.fromkeys(product.item.values["dtype"] for product in products):
        times = []
        for direction in ("forward", "dgrad"):
            measured = _ok(products, "gemm", dtype=name, direction=direction)
            if measured:
                times.append(1 / max(product.speed for product in measured))
        flops[name] = 1 / fmean(times)
    return flops


def _planned_seconds(
    step: Measurement, cfg: DictConfig, shape: Any, device: torch.device, roofline: Figures
) -> float:
    """Seconds that a measured training step would take at the speeds of single kernels."""
    count, longest = step.item.values["rows"], longest_row(cfg)
    planner = TrainingPlanner(
        probe_config(cfg, step.item.values, []),
        shape,
        objective_of(config.instantiate(cfg.loss, key="loss")),
        shape.tok_embeddings.weight.dtype,
        device,
        rows=workload.Workload(longest, longest, 1.0, count, "random"),
        ranks=1,
        speeds=lambda: roofline,
        kernels=Kernels.on(device, "bf16" in roofline.flops, cfg.attention),
    )
    checkpointed = range(step.result["checkpointed"])
    return planner.choice(count * longest, checkpointed, 0).step.seconds


def winners(measurements: Sequence[Measurement], of_training: Sequence[Winner]) -> list[Winner]:
    """The fastest settings, if the difference exceeds the noise; the sweep has found those ``of_training``."""
    decoded = _ok(measurements, "decoding")
    won = [*_library(measurements), *of_training]
    if len(decoded) > 1:
        slots = smallest(decoded, "slots").item.values["slots"]
        won.append(Winner("engine.slots", slots, in_words(decoded, "slots")))
    return won


def settings(
    measurements: Sequence[Measurement], winners: Sequence[Winner], configured: Any
) -> Config:
    """The winners' values by key. Where no ``compile`` won: the ``configured`` one, or False if that failed."""
    values = {winner.key: winner.value for winner in winners}
    tried = [row for row in measurements if row.item.values.get("compile")]
    if any(row.status != "skipped" for row in tried):
        worked = [row.item.values["compile"] for row in tried if row.status == "ok"]
        values.setdefault("compile", configured if configured in worked else False)
    return values


def _library(measurements: Sequence[Measurement]) -> list[Winner]:
    """The variables that choose the faster BLAS library."""
    seconds: dict[str, float] = {}
    products = _products(measurements)
    dtype = "bf16" if _ok(products, "gemm", dtype="bf16") else "fp32"
    for product in _ok(products, "gemm", dtype=dtype):
        library = product.item.values["library"]
        seconds[library] = seconds.get(library, 0.0) + 1 / product.speed
    if len(seconds) < 2:
        return []
    best = min(seconds, key=seconds.__getitem__)
    worst = max(seconds, key=seconds.__getitem__)
    gain = seconds[worst] / seconds[best]
    if gain < GAIN:
        return []
    reason = f"{best} is {gain:.2f} times as fast as {worst} in {dtype}"
    environ = _ok(products, "gemm", library=best)[0].item.environ
    return [Winner(name, value, reason) for name, value in environ.items()]


def _products(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measured products without TunableOp's: it tunes for every new shape, and micro-batches have many."""
    products = _ok(measurements, "gemm")
    return [product for product in products if product.item.values["library"] != TUNABLE]


def _ok(table: Iterable[Measurement], probe: str, /, **values: Any) -> list[Measurement]:
    """The successful measurements of a probe with these values."""
    rows = [row for row in table if row.status == "ok" and row.item.probe == probe]
    return [row for row in rows if values.items() <= row.item.values.items()]
