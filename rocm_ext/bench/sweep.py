"""Choose what to measure, and the fastest of the measured settings.

All combinations of rows, dtype, attention, checkpointing, 4-bit weights and compilation are some hundreds of
measurements. So the sweep first chooses the number of rows, and then varies one key after another around the fastest
values so far. It misses pairs of keys that pay off only together; most of them involve memory, and ``auto`` chooses
checkpointing anew for every measurement.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import ATTENTION, Lock

PROBES = ("gemm", "bandwidth", "loader", "decoding", "training")  # in the order of the table
COPIES = {  # name: from where to where
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
        skip: the reason to leave this out, if there is one.
    """

    probe: str
    values: Values
    environ: dict[str, str] = field(default_factory=dict)
    skip: str = ""


class ProbeResult(TypedDict, total=False):
    """The speed that a probe measured, its quartiles, and facts of some probes."""

    value: float
    low: float
    high: float
    unit: str
    shape: list[int]
    dtype: str
    seconds: float  # the median of a call or step
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
        apart = self.result["low"] > other.result["high"]
        return apart and self.speed > GAIN * other.speed


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
        self._cfg = cfg
        self._locked = locked
        cpu = machine.backend == "cpu"
        slots_at_once = (16, 64) if quick else (16, 32, 64, 128, 256)
        rows_at_once = (1, 4) if quick else (1, 2, 4, 8, 16)
        device = [*_gemm(machine, quick), *_bandwidth(machine)]
        for workers in (0,) if "num_workers" in locked else (0, 2):
            device.append(Item("loader", {"num_workers": workers}))
        for slots in slots_at_once:
            device.append(Item("decoding", {"slots": slots}))
        self._device = [item for item in device if item.probe in probes]
        self._rows: list[int] = []
        if "training" in probes:
            self._rows = sorted({*rows_at_once, cfg.batch_size})
        self._values: dict[str, Sequence[Any]] = {
            "dtype": dtypes(machine),
            "attention": ["auto", "math", "eager"],
            "enable_activation_checkpointing": (False, True),
        }
        if not quick:
            self._values["attention"] = [
                name for name in ATTENTION if name != "efficient" or not cpu
            ]
            self._values["enable_activation_checkpointing"] = (False, "auto", True)
            if not cpu and config.takes(cfg.model, "quantize_base", key="model"):
                # measured even if a profile locks it: it may be slow, but nobody reports hangs
                self._values[FOUR_BITS] = (True, False)
            self._values["compile"] = (True, "max-autotune")

    @property
    def most(self) -> int:
        """The largest number of measurements."""
        if not self._rows:
            return len(self._device)
        steps = len(self._rows) + sum(map(len, self._values.values()))
        return len(self._device) + steps

    def run(self, measure: Callable[[Item], Measurement]) -> list[Winner]:
        """Measure all items, each key of the config around the best values so far.

        Returns:
            The best number of rows, and the values that are faster than the configured ones beyond the noise.
        """
        for item in self._device:
            measure(item)
        won: list[Winner] = []
        sizes = [Item("training", {"rows": rows, "compile": False}) for rows in self._rows]
        tried = _succeeded(measure, sizes)
        if not tried:
            return won
        best = smallest(tried, "rows")
        if len(tried) > 1:
            won.append(Winner("batch_size", best.item.values["rows"], in_words(tried, "rows")))
        for key, values in self._values.items():
            tried = _succeeded(measure, self._others(key, values, best))
            if not tried:
                continue
            wanted = self._configured(key)
            configured = best
            for row in tried:
                if row.item.values[key] == wanted:
                    configured = row
            fastest = max([best, *tried], key=lambda row: row.speed)
            if fastest is configured or not fastest.beats(configured):
                best = configured
                continue
            best = fastest
            reason = (
                f"{best.speed / configured.speed:.2f} times as fast as {wanted} in training steps"
            )
            if key == FOUR_BITS and "quantize_base" in self._locked:
                reason += "; the profile's lock opens with hardware_overrides=[quantize_base]"
            won.append(Winner(key, best.item.values[key], reason))
        return won

    def _configured(self, key: str) -> Any:
        value = OmegaConf.select(self._cfg, key, default=False)
        undecided = key == "compile" and value == "auto"
        return False if undecided else value

    def _others(self, key: str, values: Sequence[Any], best: Measurement) -> list[Item]:
        """Training steps with the other values of ``key`` than that of the best steps so far."""
        current = self._configured(key)
        if key == "dtype":
            current = best.result.get("dtype")
        elif key == "compile":
            current = False
        lock = self._locked.get(key)
        items = []
        for value in values:
            if value == current:
                continue
            skip = ""
            if lock and value not in (lock.value, *lock.also):
                skip = f"locked here: {lock.reason} (--risky measures it)"
            changed = {**best.item.values, key: value}
            items.append(Item("training", changed, skip=skip))
        return items


def _succeeded(measure: Callable[[Item], Measurement], items: Iterable[Item]) -> list[Measurement]:
    outcomes = [measure(item) for item in items]
    return [outcome for outcome in outcomes if outcome.status == "ok"]


def dtypes(machine: Machine) -> list[str]:
    """The dtypes that ``machine`` computes natively; any CPU counts as having bf16."""
    if machine.backend == "cpu":
        return ["fp32", "bf16"]
    return ["fp32", "bf16", "fp16"] if machine.bf16 else ["fp32", "fp16"]


def _gemm(machine: Machine, quick: bool) -> Iterator[Item]:
    libraries: dict[str, dict[str, str]] = {"default": {}}
    if machine.backend == "rocm":  # both torch and rocBLAS may choose hipBLASLt
        names = ("ROCBLAS_USE_HIPBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")
        libraries = {"rocBLAS": dict.fromkeys(names, "0"), "hipBLASLt": dict.fromkeys(names, "1")}
        if not quick:  # tries all kernels of both libraries, which takes a while
            libraries[TUNABLE] = {"PYTORCH_TUNABLEOP_ENABLED": "1"}
    for library, environ in libraries.items():
        for dtype in dtypes(machine):
            for direction in ("forward", "dgrad"):  # LoRA's frozen weights have no wgrad
                values = {"direction": direction, "dtype": dtype, "library": library}
                yield Item("gemm", values, environ)


def _bandwidth(machine: Machine) -> Iterator[Item]:
    names = list(COPIES)
    if machine.backend == "cpu":
        names = names[:1]
    elif machine.gpu_count < 2:
        names.remove("to the next GPU")
    for name in names:
        yield Item("bandwidth", {"what": name})


def smallest(measured: Sequence[Measurement], what: str) -> Measurement:
    """The measurement with the smallest size within :data:`GAIN` of the fastest."""
    fastest = max(row.speed for row in measured)
    good = [row for row in measured if row.speed * GAIN >= fastest]
    return min(good, key=lambda row: row.item.values[what])


def in_words(measured: Iterable[Measurement], what: str) -> str:
    """The speeds in words, by the size ``what``."""
    speeds = [f"{row.speed:,.0f} with {row.item.values[what]}" for row in measured]
    return f"tokens/s: {', '.join(speeds)}"
