"""What the finished cycles of a run add up to.

Everything here is in the cycles' files, so a resumed run knows what a run that was never stopped knows. It is read
once, when the run begins; from then on a cycle costs the same work however many came before.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from rocm_ext.files import replace_text
from rocm_ext.raft.cycles import Cycle, Filter, pass_rates
from rocm_ext.ranks import Ranks
from rocm_ext.runs.reader import PHASES
from rocm_ext.train.metrics import Metrics


class History:
    """The cycles of a run, as they are finished.

    Args:
        out: the run's folder.
        threshold: the reward from which an answer passes.
        ranks: the main one writes ``metrics.jsonl`` and ``summary.json``; all know the same.

    Attributes:
        last_asked: of each prompt that was asked, the cycle that asked it last and the share of answers that passed.
        steps: optimiser steps of all trained cycles.
        rows: entries of ``summary.json``, by cycle.
    """

    def __init__(self, out: Path, threshold: float, ranks: Ranks) -> None:
        self.out, self._threshold, self._ranks = out, threshold, ranks
        self.last_asked: dict[str, tuple[int, float]] = {}
        self.steps = 0
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0))
        self._metrics = Metrics(out / "metrics.jsonl", self._note) if ranks.is_main else None
        self._summary = out / "summary.json"
        written = json.loads(self._summary.read_text())["cycles"] if self._summary.exists() else []
        self.rows: dict[int, dict[str, Any]] = {row["cycle"]: row for row in written}
        self._texts = {number: _text(row) for number, row in self.rows.items()}
        for number in count(1):
            if not (cycle := Cycle(out, number)).trained:
                break
            self.add(cycle)

    def add(self, cycle: Cycle) -> None:
        """Count a cycle that has been trained."""
        for prompt, rate in pass_rates(cycle.results(), self._threshold).items():
            self.last_asked[prompt] = cycle.number, rate
        self.steps += cycle.training()["steps"]

    def _note(self, line: Mapping[str, Any]) -> bool:
        self._seconds[line["cycle"]][line["phase"]] += line["seconds"]
        return True

    def log(self, cycle: int, phase: str, values: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl``."""
        if self._metrics is not None:
            line = {"cycle": cycle, "phase": phase, **values}
            self._metrics.write(**line)
            self._note(line)

    def summarize(self, cycle: Cycle, filter_: Filter) -> None:
        """Enter a finished cycle into ``summary.json``.

        Args:
            cycle: the newest.
            filter_: what chose its answers; gives the counts.
        """
        number, row = cycle.number, None
        if self._ranks.is_main:
            row = cycle.row(self._threshold, filter_) | {"seconds": dict(self._seconds[number])}
        self.rows[number] = self._ranks.agree(row)
        self._texts[number] = _text(self.rows[number])
        self.write(number)

    def until(self, cycle: int) -> list[dict[str, Any]]:
        """The entries of the cycles up to ``cycle``, in order."""
        return [row for number, row in sorted(self.rows.items()) if number <= cycle]

    def write(self, last: int) -> None:
        """``summary.json`` with the cycles up to ``last``: the bytes of ``json.dumps(…, indent=2)``."""
        if not self._ranks.is_main:
            return
        rows = ",\n".join(text for number, text in sorted(self._texts.items()) if number <= last)
        replace_text(self._summary, f'{{\n  "cycles": [\n{rows}\n  ]\n}}\n')


def _text(row: Mapping[str, Any]) -> str:
    # encoded once: a thousand cycles are a megabyte
    return textwrap.indent(json.dumps(row, indent=2), "    ")
