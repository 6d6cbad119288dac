"""Totals over the finished cycles of a run.

All of them follow from the cycles' files, so a resumed run has the same totals as an undisturbed one. A run reads the
files once, when it starts. After that a cycle reads only its own files, however many cycles came before. What grows is
the text of ``summary.json``, by about a kilobyte per cycle.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from rocm_ext.files import read_json, replace_text
from rocm_ext.raft.cycles import Bar, Cycle, Filter, pass_rates
from rocm_ext.ranks import Ranks
from rocm_ext.runs.reader import PHASES
from rocm_ext.train.metrics import Metrics, read_metrics


class History:
    """The finished cycles of a run.

    Args:
        out: the run's output folder.
        bar: what an answer needs to pass.
        ranks: all processes of the run. All hold the same data; the main one writes ``metrics.jsonl`` and
            ``summary.json``.

    Attributes:
        last_asked: for each prompt asked so far, the last cycle that asked it and the share of its answers that
            passed.
        trained: numbers of the trained cycles, in order; skipped ones are missing.
        steps: number of optimiser steps of all trained cycles.
        rows: entries of ``summary.json``, by cycle.
    """

    def __init__(self, out: Path, bar: Bar, ranks: Ranks) -> None:
        self.out, self._bar, self._ranks = out, bar, ranks
        self.last_asked: dict[str, tuple[int, float]] = {}
        self.trained: list[int] = []
        self.steps = 0
        self._seconds: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._metrics: Metrics | None = None
        if ranks.is_main:
            # a phase that is not complete writes its line again, with the work of all processes
            self._metrics = Metrics(
                out / "metrics.jsonl", lambda line: Cycle(out, line["cycle"]).phases.get(line["phase"], True)
            )
            for line in read_metrics(out / "metrics.jsonl"):
                self._add_seconds(line)
        last = 0
        for number in count(1):
            if not (cycle := Cycle(out, number)).done:
                break
            self.add(cycle)
            last = number
        self._summary = out / "summary.json"
        written = (read_json(self._summary) or {"cycles": []})["cycles"]
        whole = [row for row in written if row["cycle"] <= last and Cycle(out, row["cycle"]).agrees_with(row)]
        self.rows: dict[int, dict[str, Any]] = {row["cycle"]: row for row in whole}
        self._texts = {number: _text(row) for number, row in self.rows.items()}

    def add(self, cycle: Cycle) -> None:
        """Add a trained or skipped cycle to ``last_asked``, ``trained`` and ``steps``."""
        for prompt, rate in pass_rates(cycle.results(), self._bar).items():
            self.last_asked[prompt] = cycle.number, rate
        if cycle.trained and cycle.number not in self.trained:
            self.trained.append(cycle.number)
            self.steps += cycle.training()["steps"]

    def trained_before(self, cycle: int) -> list[int]:
        """Return the numbers of the trained cycles before ``cycle``, in order."""
        return [number for number in self.trained if number < cycle]

    def source(self, cycle: int) -> int:
        """Return the cycle whose adapter ``cycle`` samples with: the last trained one before it, or 0."""
        return max(self.trained_before(cycle), default=0)

    def _add_seconds(self, line: Mapping[str, Any]) -> None:
        self._seconds[line["cycle"]][line["phase"]] += line["seconds"]

    def logged(self, cycle: int, phase: str) -> bool:
        """Return whether ``metrics.jsonl`` has a line of this phase, on the main rank."""
        return phase in self._seconds[cycle]

    def log(self, cycle: int, phase: str, values: Mapping[str, Any]) -> None:
        """Write a line of ``metrics.jsonl``, and add its seconds to the phase's time in the cycle.

        Args:
            cycle: number of the cycle.
            phase: ``sample``, ``train``, ``eval`` or a phase of a subclass.
            values: measurements of the phase, among them ``seconds``.
        """
        if self._metrics is not None:
            line = {"cycle": cycle, "phase": phase, **values}
            self._metrics.write(**line)
            self._add_seconds(line)

    def summarize(self, cycle: Cycle, filter_: Filter) -> None:
        """Add a finished cycle to ``summary.json``.

        Args:
            cycle: the newest cycle.
            filter_: the filter that selected its answers; the entry has the filter's counts.
        """
        number, row = cycle.number, None
        if self._ranks.is_main:
            seconds = {phase: self._seconds[number].get(phase, 0) for phase in PHASES}
            row = cycle.row(self._bar, filter_) | {"seconds": seconds}
        self.rows[number] = self._ranks.agree(row)
        self._texts[number] = _text(self.rows[number])
        self.write(number)

    def until(self, cycle: int) -> list[dict[str, Any]]:
        """Return the entries of the cycles up to ``cycle``, in order."""
        return [row for number, row in sorted(self.rows.items()) if number <= cycle]

    def write(self, last: int) -> None:
        """Write ``summary.json`` with the cycles up to ``last``, in the format of ``json.dumps(…, indent=2)``."""
        if not self._ranks.is_main:
            return
        rows = ",\n".join(text for number, text in sorted(self._texts.items()) if number <= last)
        replace_text(self._summary, f'{{\n  "cycles": [\n{rows}\n  ]\n}}\n')


def _text(row: Mapping[str, Any]) -> str:
    # each entry is encoded once, because a thousand cycles take a megabyte
    return textwrap.indent(json.dumps(row, indent=2), "    ")
