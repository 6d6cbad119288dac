"""Choose what to measure, and the fastest of the measured settings.

All combinations of rows, dtype, attention, checkpointing, 4-bit weights and compilation are some hundreds of
measurements. So the sweep first chooses the number of rows, and then varies one key after another around the fastest
values so far. It misses pairs of keys that pay off only together; most of them involve memory, and ``auto`` chooses
checkpointing anew for every measurement.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import ATTENTION, Lock

PROBES = ("gemm", "unpacking", "bandwidth", "loader", "decoding", "training")  # in the order of the table
COPIES = {  # by name: from where to where
    "device copy": ("device", "device"),
    "to the GPU": ("host", "device"),
    "to the GPU, page-locked": ("pinned", "device"),
    "from the GPU, page-locked": ("device", "pinned"),
    "to the next GPU": ("device", "other"),
}
TUNABLE = "TunableOp"
MARK = "rocm-ext-bench "  # begins the lines of a child; libraries also print to stdout
FOUR_BITS = "model.quantize_base"
GAIN = 1.03  # least speed-up, beyond the spread of both, for which another setting replaces the configured one

Values = Mapping[str, Any]  # arguments of a probe; of training, rows and keys of the config


@dataclass(frozen=True)
class Spec:
    """One run of ``rocm-ext bench``, for its child processes.

    Attributes:
        config: name or file of the config whose model is measured.
        overrides: ``key=value``.
        budget: bytes that a probe may take on the device.
        seconds: the least time of a measurement.
    """

    config: str
    overrides: Sequence[str]
    budget: int
    seconds: float


@dataclass(frozen=True)
class Item:
    """One thing to measure.

    Attributes:
        probe: one of :data:`PROBES`.
        values: the probe's arguments.
        environ: environment variables of the child.
        skip: the reason to leave this out; empty: measure it.
    """

    probe: str
    values: Values
    environ: dict[str, str] = field(default_factory=dict)
    skip: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """The identity of the item."""
        return self.probe, tuple(sorted(self.values.items())), tuple(self.environ.items())


class ProbeResult(TypedDict, total=False):
    """The speed or ratio that a probe measured, its quartiles, and facts of some probes."""

    value: float
    low: float
    high: float
    unit: str
    shape: list[int]
    dtype: str
    seconds: float  # of a step
    context: float  # tokens that attention sees
    peak_memory: int
    planned_memory: int
    checkpointed: int  # layers


class ProbeReply(TypedDict, total=False):
    """A line of the child process: ``ready`` or ``error`` about the spec, and then a measurement without its item."""

    ready: bool
    error: str
    status: str
    result: ProbeResult
    detail: str


@dataclass(frozen=True)
class Measurement:
    """The outcome of one item, a row of the table.

    Attributes:
        item: the measured item.
        status: ok, skipped, failed (the probe raised an error), out of memory, crashed or timeout.
        result: what the probe measured; empty unless ok.
        detail: reason of another status.
    """

    item: Item
    status: str
    result: ProbeResult
    detail: str = ""

    @property
    def speed(self) -> float:
        """The median speed, in ``result["unit"]``."""
        return self.result["value"]

    def beats(self, other: "Measurement") -> bool:
        """Whether this is faster by more than :data:`GAIN` and by more than the spread of both."""
        return self.result["low"] > other.result["high"] and self.speed > GAIN * other.speed


@dataclass(frozen=True)
class Winner:
    """The fastest value of a setting.

    Attributes:
        key: key of a config, or name of an environment variable.
        value: the fastest value.
        reason: the compared speeds.
    """

    key: str
    value: Any
    reason: str


class Sweep:
    """The measurements of one machine: first of the device, then of training steps, one key after another.

    It skips values that ``locked`` forbids; with ``quick`` it has fewer items.
    """

    def __init__(
        self,
        cfg: DictConfig,
        machine: Machine,
        locked: Mapping[str, Lock],
        quick: bool,
        probes: Collection[str] = PROBES,
    ) -> None:
        self._cfg, self._locked, cpu = cfg, locked, machine.backend == "cpu"
        decoding = [Item("decoding", {"slots": slots}) for slots in ((16, 64) if quick else (16, 32, 64, 128, 256))]
        blocks = [
            Item("unpacking", {"kind": kind, **rows})
            for kind in (("Q4_K",) if quick else ("Q4_K", "Q6_K", "Q8_0"))
            for rows in ({}, *({"rows": count} for count in ((2048,) if quick else (256, 2048))))
        ]
        copies = list(COPIES)[: 1 if cpu else 4 + (machine.gpu_count > 1)]
        workers = (0,) if "num_workers" in locked else (0, 2)
        loading = [Item("loader", {"num_workers": count}) for count in workers]
        copying = [Item("bandwidth", {"what": what}) for what in copies]
        device = (*_gemm(machine, quick), *blocks, *copying, *loading, *decoding)
        self._device = [item for item in device if item.probe in probes]
        self._rows = sorted({*((1, 4) if quick else (1, 2, 4, 8, 16)), cfg.batch_size}) if "training" in probes else []
        four_bits = not (quick or cpu) and config.takes(cfg.model, "quantize_base", key="model")
        kernels = [name for name in ATTENTION if name != "efficient" or not cpu]
        self._values: dict[str, Sequence[Any]] = {
            "dtype": dtypes(machine),
            "attention": ["auto", "math", "eager"] if quick else kernels,
            "enable_activation_checkpointing": (False, True) if quick else (False, "auto", True),
            # measured even if a profile locks it: it may be slow, but nobody reports hangs
            FOUR_BITS: (True, False) if four_bits else (),
            "compile": () if quick else (True, "max-autotune"),
        }

    @property
    def most(self) -> int:
        """The largest number of measurements."""
        keys = sum(map(len, self._values.values())) if self._rows else 0
        return len(self._device) + len(self._rows) + keys

    def following(self, done: Iterable[Measurement]) -> list[Item]:
        """The next items; none if all is done or no number of rows could be measured."""
        done = list(done)
        known = {row.item.key for row in done}
        for stage in self._walk(done)[0]:
            if new := [item for item in stage if item.key not in known]:
                return new
        return []

    def winners(self, done: Iterable[Measurement]) -> list[Winner]:
        """The best number of rows, and the values that are faster than the configured ones beyond the noise."""
        return self._walk(done)[1]

    def _walk(self, done: Iterable[Measurement]) -> tuple[list[list[Item]], list[Winner]]:
        """The items of all stages and the winners. A stage varies a key around the best values of the stages before."""
        table = {row.item.key: row for row in done if row.item.probe == "training" and row.status == "ok"}
        sizes = [Item("training", {"rows": rows, "compile": False}) for rows in self._rows]
        stages, won = [self._device, sizes], []
        if not (measured := [table[item.key] for item in sizes if item.key in table]):
            return stages, []
        best = smallest(measured, "rows")
        if len(measured) > 1:
            won.append(Winner("batch_size", best.item.values["rows"], in_words(measured, "rows")))
        for key, values in self._values.items():
            wanted = OmegaConf.select(self._cfg, key, default=False)
            now = best.result.get("dtype") if key == "dtype" else False if key == "compile" else wanted
            lock, stage = self._locked.get(key), []
            for value in (value for value in values if value != now):
                refused = lock is not None and value not in (lock.value, *lock.also)
                skip = f"locked here: {lock.reason} (--risky measures it)" if lock and refused else ""
                stage.append(Item("training", {**best.item.values, key: value}, skip=skip))
            stages.append(stage)
            if tried := [table[item.key] for item in stage if item.key in table]:
                configured = next((row for row in tried if row.item.values[key] == wanted), best)
                best = max([best, *tried], key=lambda row: row.speed)
                if best is not configured and best.beats(configured):
                    gain = f"{best.speed / configured.speed:.2f} times as fast as {wanted} in training steps"
                    if key == FOUR_BITS and "quantize_base" in self._locked:
                        gain += "; the profile's lock opens with hardware_overrides=[quantize_base]"
                    won.append(Winner(key, best.item.values[key], gain))
                else:
                    best = configured
        return stages, won


def dtypes(machine: Machine) -> list[str]:
    """The dtypes that ``machine`` computes natively; any CPU counts as having bf16."""
    cpu = machine.backend == "cpu"
    return ["fp32", *["bf16"] * (machine.bf16 or cpu), *["fp16"] * (not cpu)]


def _gemm(machine: Machine, quick: bool) -> Iterator[Item]:
    libraries: list[tuple[str, dict[str, str]]] = [("default", {})]
    if machine.backend == "rocm":  # both torch and rocBLAS may choose hipBLASLt
        names = ("ROCBLAS_USE_HIPBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")
        libraries = [("rocBLAS", dict.fromkeys(names, "0")), ("hipBLASLt", dict.fromkeys(names, "1"))]
        # tries all kernels of both libraries, which takes a while
        libraries += [] if quick else [(TUNABLE, {"PYTORCH_TUNABLEOP_ENABLED": "1"})]
    for library, environ in libraries:
        for dtype in dtypes(machine):
            for direction in ("forward", "dgrad"):  # LoRA's frozen weights have no wgrad
                yield Item("gemm", {"direction": direction, "dtype": dtype, "library": library}, environ)


def smallest(measured: Sequence[Measurement], what: str) -> Measurement:
    """The measurement with the smallest size within :data:`GAIN` of the fastest."""
    fastest = max(row.speed for row in measured)
    return min((row for row in measured if row.speed * GAIN >= fastest), key=lambda row: row.item.values[what])


def in_words(measured: Iterable[Measurement], what: str) -> str:
    """The speeds in words, by the size ``what``."""
    return "tokens/s: " + ", ".join(f"{row.speed:,.0f} with {row.item.values[what]}" for row in measured)
