"""The machine's speeds and the fastest settings, from measurements."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.bench.probes import longest_row, probe_config
from rocm_ext.bench.sweep import GAIN, TUNABLE, Measurement, Sweep, Winner, in_words, smallest
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
    copies, products = _ok(measurements, "bandwidth", what="device copy"), _products(measurements)
    if not copies or not products:
        return {}
    flops = {}
    for name in dict.fromkeys(product.item.values["dtype"] for product in products):
        both = [_ok(products, "gemm", dtype=name, direction=direction) for direction in ("forward", "dgrad")]
        best = [max(product.speed for product in of_direction) for of_direction in both if of_direction]
        flops[name] = 1 / fmean(1 / speed for speed in best)  # training computes equally many FLOPs in both directions
    known: dict[str, Any] = {
        "flops": flops,
        "bandwidth": median(copy.speed for copy in copies),
        **assumed(load_profile(cfg.hardware).reached),
    }
    roofline = Figures("", True, **known)
    shape = build_model(cfg.model, dtype, 0, torch.device("meta"))
    choose_attention(shape, cfg.attention)
    # steps as configured but not compiled, because the figures are of single kernels
    steps = [step for step in _ok(measurements, "training", compile=False) if len(step.item.values) == 2]
    if steps:
        fastest = max(steps, key=attrgetter("speed"))
        count, longest = fastest.item.values["rows"], longest_row(cfg)
        planner = TrainingPlanner(
            probe_config(cfg, fastest.item.values, []),
            shape,
            objective_of(config.instantiate(cfg.loss, key="loss")),
            shape.tok_embeddings.weight.dtype,
            device,
            rows=workload.Workload(longest, longest, 1.0, count, "random"),
            ranks=1,
            speeds=lambda: roofline,
            kernels=Kernels.on(device, "bf16" in flops, cfg.attention),
        )
        planned = planner.choice(count * longest, range(fastest.result["checkpointed"]), 0).step
        known["efficiency"] = planned.seconds / fastest.result["seconds"]
    if decoded := _ok(measurements, "decoding"):
        fastest = max(decoded, key=attrgetter("speed"))
        with torch.no_grad():
            sampler = shape.sampler()
        seconds = decode_seconds(sampler, fastest.item.values["slots"], fastest.result["context"], roofline)
        known["decode_efficiency"] = seconds / fastest.result["seconds"]
    return known


def winners(measurements: Sequence[Measurement], sweep: Sweep) -> list[Winner]:
    """The fastest settings, if the difference exceeds the noise."""
    decoded = _ok(measurements, "decoding")
    won = [*_library(measurements), *sweep.winners(measurements)]
    if len(decoded) > 1:
        slots = smallest(decoded, "slots").item.values["slots"]
        won.append(Winner("engine.slots", slots, in_words(decoded, "slots")))
    return won


def _library(measurements: Sequence[Measurement]) -> list[Winner]:
    """The variables that choose the faster BLAS library."""
    seconds: dict[str, float] = {}
    products = _products(measurements)
    dtype = "bf16" if any(product.item.values["dtype"] == "bf16" for product in products) else "fp32"
    for product in _ok(products, "gemm", dtype=dtype):
        library = product.item.values["library"]
        seconds[library] = seconds.get(library, 0.0) + 1 / product.speed
    if len(seconds) < 2:
        return []
    best, worst = min(seconds, key=seconds.__getitem__), max(seconds, key=seconds.__getitem__)
    gain = seconds[worst] / seconds[best]
    if gain < GAIN:
        return []
    reason = f"{best} is {gain:.2f} times as fast as {worst} in {dtype}"
    environ = _ok(products, "gemm", library=best)[0].item.environ
    return [Winner(name, value, reason) for name, value in environ.items()]


def _products(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The measured products without TunableOp's: it tunes for every new shape, and micro-batches have many."""
    return [row for row in _ok(measurements, "gemm") if row.item.values["library"] != TUNABLE]


def _ok(table: Iterable[Measurement], probe: str, /, **values: Any) -> list[Measurement]:
    """The successful measurements of a probe with these values."""
    rows = (row for row in table if row.status == "ok" and row.item.probe == probe)
    return [row for row in rows if values.items() <= row.item.values.items()]
