"""Which training settings to measure next, and which of those measured are the fastest.

All combinations of rows, dtype, attention, checkpointing and compilation are some hundreds of measurements. So first
the number of rows is found, and then one key after another is varied around the fastest values so far. What this
misses are pairs of keys that pay off only together; most such pairs involve memory, and checkpointing as configured
(``auto``) is chosen anew for each measurement.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig

from rocm_ext.bench.runner import Measurement
from rocm_ext.bench.spec import Item, dtypes, refused
from rocm_ext.machine.choices import ATTENTION
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import Lock

GAIN = 1.03  # least speed-up, beyond the spread of both, for which another setting replaces the configured one
# TunableOp measures all kernels of a matrix product when it meets its shape for the first time
TUNABLE_OP = {"PYTORCH_TUNABLEOP_ENABLED": "1"}
_TUNED = re.compile("gfx9(08|0a|4|5)")  # CDNA: its libraries have many kernels for a shape


@dataclass(frozen=True)
class Winner:
    """The fastest value of a setting.

    Attributes:
        key: key of a config, or the name of an environment variable.
        value: the fastest.
        reason: the speeds that were compared.
    """

    key: str
    value: Any
    reason: str


class Sweep:
    """The settings of a training step, one key after another.

    Args:
        cfg: config of the training.
        machine: machine to measure.
        locked: settings that are not measured.
        quick: measure fewer.
    """

    def __init__(self, cfg: DictConfig, machine: Machine, locked: Mapping[str, Lock], quick: bool) -> None:
        self._cfg, self._locked = cfg, locked
        self._sizes = sorted({*((1, 4) if quick else (1, 2, 4, 8, 16)), cfg.batch_size})
        cpu = machine.backend == "cpu"
        kernels = [name for name in ATTENTION if name != "efficient" or not cpu]
        if quick:
            kernels = ["auto", "math", "eager"]
        checkpointing = (False, True) if quick else (False, "auto", True)
        self._values: dict[str, Sequence[Any]] = {
            "dtype": dtypes(machine),
            "attention": kernels,
            "enable_activation_checkpointing": checkpointing,
        }
        if not quick:
            self._values |= {"compile": (True, "max-autotune"), "quantize_base": (True,)}
        self._tunes = bool(not quick and machine.backend == "rocm" and _TUNED.match(machine.arch or ""))

    @property
    def most(self) -> int:
        """Measurements at most."""
        return len(self._sizes) + sum(map(len, self._values.values())) + self._tunes

    def following(self, done: Iterable[Measurement]) -> list[Item]:
        """What to measure next; nothing if all is done or no size could be measured."""
        done = list(done)
        known = {_key(each.item) for each in done}
        for stage in self._walk(done)[0]:
            if new := [item for item in stage if _key(item) not in known]:
                return new
        return []

    def winners(self, done: Iterable[Measurement]) -> list[Winner]:
        """The best number of rows, and the values that are faster than the configured ones beyond the noise."""
        return self._walk(done)[1]

    def _walk(self, done: Iterable[Measurement]) -> tuple[list[list[Item]], list[Winner]]:
        """The items of all stages, each around the best values of the stages before, and the winners."""
        table = {_key(each.item): each for each in done if each.item.probe == "training" and each.status == "ok"}
        sizes = [Item("training", {"rows": rows, "compile": False}) for rows in self._sizes]
        stages, won = [sizes], []
        if not (measured := [table[_key(item)] for item in sizes if _key(item) in table]):
            return stages, []
        best = smallest(measured, "rows")
        if len(measured) > 1:
            won.append(Winner("batch_size", best.item.values["rows"], in_words(measured, "rows")))
        for key, values in self._values.items():
            stage = [self._item(best, key, each) for each in self._others(key, values, best)]
            stages.append(stage)
            tried = [table[_key(item)] for item in stage if _key(item) in table]
            if tried and key != "quantize_base":  # a 4-bit base is another model, so it is measured and never chosen
                best, winners = self._choice(key, best, tried)
                won += winners
        if self._tunes:
            tuned = Item("training", dict(best.item.values), TUNABLE_OP)
            stages.append([tuned])
            if (faster := table.get(_key(tuned))) and beats(faster, best):
                gain = f"{speed(faster) / speed(best):.2f} times as fast; each further length of rows is tuned anew"
                won += [Winner(name, on, gain) for name, on in TUNABLE_OP.items()]
        return stages, won

    def _others(self, key: str, values: Sequence[Any], best: Measurement) -> list[Any]:
        now = best.result.get("dtype") if key == "dtype" else False if key == "compile" else self._cfg.get(key)
        return [each for each in values if each != now]

    def _item(self, best: Measurement, key: str, wanted: Any) -> Item:
        changed = {key: wanted}
        base = {**best.item.values, "compile": False} if key == "quantize_base" else best.item.values
        return Item("training", {**base, **changed}, skip=refused(changed, self._locked))

    def _choice(self, key: str, best: Measurement, tried: list[Measurement]) -> tuple[Measurement, list[Winner]]:
        """The best measurement after a stage, and the winner unless it is the configured value."""
        configured = next((each for each in tried if each.item.values[key] == self._cfg.get(key)), best)
        fastest = max([best, *tried], key=speed)
        if fastest is configured or not beats(fastest, configured):
            return configured, []
        told = f"{speed(fastest) / speed(configured):.2f} times as fast as {self._cfg.get(key)} in training steps"
        return fastest, [Winner(key, fastest.item.values[key], told)]


def speed(measurement: Measurement) -> float:
    """The speed."""
    return measurement.result["value"]


def beats(best: Measurement, other: Measurement) -> bool:
    """Whether ``best`` is faster by more than :data:`GAIN` and than the spread of both."""
    return best.result["low"] > other.result["high"] and speed(best) > GAIN * speed(other)


def smallest(measured: Sequence[Measurement], what: str) -> Measurement:
    """The measurement with the smallest size within :data:`GAIN` of the fastest."""
    fastest = max(map(speed, measured))
    return min((each for each in measured if speed(each) * GAIN >= fastest), key=lambda each: each.item.values[what])


def in_words(measured: Iterable[Measurement], what: str) -> str:
    """The speeds in words, by the size ``what``."""
    return "tokens/s: " + ", ".join(f"{speed(each):,.0f} with {each.item.values[what]}" for each in measured)


def _key(item: Item) -> tuple[Any, ...]:
    return item.probe, tuple(sorted(item.values.items())), tuple(item.environ.items())
