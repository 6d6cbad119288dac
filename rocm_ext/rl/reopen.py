"""What a resumed run does again because its settings changed.

A resumed run may change the keys in :data:`rocm_ext.rl.cycles.CHANGEABLE`. Trained cycles stay as they are. The
change applies to the skipped cycles since the last trained one, to the cycle that was stopped before its answers were
selected, and to evaluations: all adapters of a run are measured under the same settings. A cycle whose adapter was
removed loses its score.
"""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base.files import disk_errors
from rocm_ext.base.log import log
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.rl.cycles import CHANGEABLE, Cycle
from rocm_ext.rl.records import phase_records


def reopen(out: Path, begun: Mapping[str, Any], cfg: DictConfig, ranks: Ranks) -> None:
    """Prepare the records of a run for changed settings; without a change, do nothing.

    An answer stays if it would be the same under the new settings: with another ``max_new_tokens`` an answer that ended
    by itself within both limits. Another ``verifier`` judges all answers again. Call this before the new config is
    recorded: a kill in between then loses nothing.

    Args:
        out: the run's output folder.
        begun: recorded config of the run.
        cfg: config of the resumed run.
        ranks: all processes of the run.

    Raises:
        UserError: the disk is full, or a record is damaged.
    """
    was, now = begun, OmegaConf.to_container(cfg)
    changed = {key for key in CHANGEABLE if was.get(key, now[key]) != now[key]}  # type: ignore[index, call-overload]
    if not changed:
        return
    log.info("changed: %s", ", ".join(sorted(changed)))
    for number, phase, marks in ranks.agree(_affected(out, changed)):
        if ranks.is_main:
            for mark in marks:  # first, so that a kill leaves no phase that counts as complete
                mark.unlink(missing_ok=True)
        ranks.barrier()
        samples, verdicts = phase_records(Cycle(out, number).phase(phase), ranks, number, phase)
        if "max_new_tokens" in changed:
            limit = min(was["max_new_tokens"], cfg.max_new_tokens)
            samples.drop(lambda record: record["finish_reason"] == "length" or len(record["tokens"]) > limit)  # noqa: B023
        left = {} if "verifier" in changed else samples.records
        verdicts.drop(lambda record: (record["prompt_id"], record["sample"]) not in left)  # noqa: B023


def _affected(out: Path, changed: set[str]) -> list[tuple[int, str, list[Path]]]:
    """Return the affected phases: cycle, ``sample`` or ``eval``, and the files that say that the phase is complete."""
    cycles = [Cycle(out, number) for number in _numbers(out)]
    last = max((cycle.number for cycle in cycles if cycle.trained), default=0)
    phases = [
        (cycle.number, "sample", [cycle.kept, cycle.selection])
        for cycle in cycles
        if cycle.number > last and (cycle.skipped or not cycle.selected)
    ]
    if changed & {"max_new_tokens", "verifier"}:
        phases += [(cycle.number, "eval", [cycle.eval]) for cycle in cycles if cycle.phase("eval").exists()]
    return phases


def discard_after(out: Path, cycle: int) -> None:
    """Remove the untrained cycles after ``cycle``: an older adapter than that of ``cycle`` sampled them."""
    for number in _numbers(out):
        if number > cycle and not Cycle(out, number).trained:
            with disk_errors(folder := Cycle(out, number).folder):
                shutil.rmtree(folder)


def _numbers(out: Path) -> list[int]:
    names = (path.name for path in out.glob("cycle_*") if path.is_dir())
    return sorted(int(name[6:]) for name in names if re.fullmatch(r"cycle_(0|[1-9]\d*)", name))
