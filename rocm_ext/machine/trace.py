"""``profile_steps``: a run records some of its steps with torch's profiler.

Only the steps themselves are recorded: training steps without the data's loading, and of sampling the prefill of
prompts and the decoding steps. Each of these kinds has files of its own in ``output_dir/profile``, for each rank: a
trace that https://ui.perfetto.dev opens, and a summary.
"""

import contextlib
import gzip
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import replace_file, replace_text
from rocm_ext.base.log import log

TRAINING, PREFILL, DECODING = "training", "prefill", "decoding"
FOLDER = "profile"
# Steps that are not recorded: the first ones compile, allocate, choose kernels and capture graphs.
WARM_UP = {TRAINING: 3, PREFILL: 1, DECODING: 3}
_SLOWEST = 8  # operators that a run names
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events, in Chrome's trace format
_MOST_EVENTS = 500_000  # of a trace; browsers open about a million


@dataclass
class _Recording:
    """The steps of one kind.

    Attributes:
        seen: steps done, with those of the warm-up.
        parts: the traces of the recorded steps.
        averages: what torch's profiler says of each operator, of all recorded steps.
    """

    seen: int = 0
    parts: list[dict[str, Any]] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)

    @property
    def events(self) -> int:
        """Number of recorded events."""
        return sum(len(part["traceEvents"]) for part in self.parts)


class Trace:
    """Records steps inside :meth:`on`; elsewhere :meth:`part` does nothing."""

    def __init__(self) -> None:
        self._open: dict[str, _Recording] = {}  # the kinds that are not complete
        self._device = torch.device("cpu")

    @contextlib.contextmanager
    def on(self, folder: Path, steps: int, device: torch.device, rank: int) -> Iterator[None]:
        """Context in which the first ``steps`` steps of each kind after its warm-up are recorded.

        A kind's files are written as soon as it is complete, or at the end. If they cannot be written, or the profiler
        fails, a warning says so, and the run continues.

        Args:
            folder: where to write.
            steps: number of steps of each kind; 0: record nothing.
            device: what the steps run on.
            rank: part of the files' names.
        """
        self._folder, self._steps, self._device, self._rank = folder, steps, device, rank
        self._open = {kind: _Recording() for kind in WARM_UP} if steps else {}
        try:
            yield
        except Exception:
            self._close()
            raise
        else:
            self._close()
        finally:
            self._open = {}

    @contextlib.contextmanager
    def part(self, kind: str) -> Iterator[None]:
        """Context of one step of ``kind``."""
        recording = self._open.get(kind)
        if recording is None:
            yield
            return
        recording.seen += 1
        if recording.seen < WARM_UP[kind]:
            yield
            return
        # the last step of the warm-up is recorded, too, and dropped: the profiler's own first step is slow
        with self._profiled(kind, recording):
            yield
        if len(recording.parts) == self._steps or recording.events > _MOST_EVENTS:
            self._finish(kind)

    @contextlib.contextmanager
    def _profiled(self, kind: str, recording: _Recording) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.13 prints two lines for each recording
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        profiler = torch.profiler.profile(activities=activities, record_shapes=True)
        try:
            profiler.start()
        except RuntimeError as error:
            self._give_up(kind, error)
            yield
            return
        try:
            with torch.profiler.record_function(f"{kind} {recording.seen}"):
                yield
                if on_gpu:
                    torch.cuda.synchronize(self._device)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                profiler.stop()
            raise
        try:
            profiler.stop()
            if recording.seen > WARM_UP[kind]:
                recording.parts.append(self._exported(profiler))
                recording.averages += profiler.key_averages()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(kind, error)

    def _exported(self, profiler: torch.profiler.profile) -> dict[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".rank{self._rank}.tmp"
        try:
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)

    def _give_up(self, kind: str, error: Exception) -> None:
        self._open.pop(kind, None)
        log.warning("profile_steps: %s is not recorded, the run continues: %s", kind, one_line(error))

    def _close(self) -> None:
        """Write the kinds that are not complete, and say why they are not."""
        for kind, recording in list(self._open.items()):
            if recording.parts:
                self._finish(kind)
            elif recording.seen or kind == TRAINING:
                log.warning(
                    "profile_steps: nothing of %s is recorded, because this run did %d such steps, and %d come before "
                    "as warm-up",
                    kind,
                    recording.seen,
                    WARM_UP[kind],
                )

    def _finish(self, kind: str) -> None:
        recording = self._open.pop(kind, None)
        if recording is None:  # given up
            return
        first, count = WARM_UP[kind] + 1, len(recording.parts)
        summary = {"steps": count, "first": first, **summarize(recording.parts, recording.averages, kind)}
        path = self._folder / f"{kind}.rank{self._rank}.trace.json.gz"
        try:
            with replace_file(path) as aside, gzip.open(aside, "wt", compresslevel=4) as file:
                json.dump(_merged(recording.parts), file)
            replace_text(self._folder / f"{kind}.rank{self._rank}.json", json.dumps(summary, indent=2) + "\n")
        except UserError as error:
            self._give_up(kind, error)
            return
        if count < self._steps:
            why = "the trace would become too large" if recording.events > _MOST_EVENTS else "the run ended"
            log.info("profile_steps: %d of %d steps of %s are recorded: %s", count, self._steps, kind, why)
        if self._device.type == "cuda" and not summary["kernels"]:
            log.warning(
                "profile_steps: torch's profiler saw no kernel of the GPU, as some builds for ROCm do "
                "(github.com/pytorch/kineto/pull/1338); these are the host's operators"
            )
        log.info("%s", describe(kind, summary, path))


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the traces of several steps."""
    events = []
    for number, part in enumerate(parts):
        for event in part["traceEvents"]:
            if event.get("ph") in ("s", "t", "f"):  # arrows; each recording numbers its own from 1
                event = {**event, "id": f"{number}.{event['id']}"}
            events.append(event)
    head = {key: value for key, value in parts[0].items() if key not in ("host_name", "traceName")}
    return {**head, "traceEvents": events}


def summarize(parts: Sequence[Mapping[str, Any]], averages: Iterable[Any], kind: str) -> dict[str, Any]:
    """Say where the time of recorded steps went.

    Args:
        parts: the trace of each step, in which an annotation whose name begins with ``kind`` spans the step.
        averages: the ``key_averages()`` of torch's profiler, of all steps.
        kind: see ``parts``.

    Returns:
        ``seconds`` of all steps; ``kernels``: whether the GPU's kernels are recorded; ``slowest``: the operators whose
        kernels, or which themselves on the host, took the most time without the operators inside of them: ``name``,
        ``calls``, ``seconds`` and ``share``; ``idle``: share in which no kernel ran, None without kernels; ``python``:
        share in which the host was outside of operators.
    """
    total = busy = 0.0  # microseconds
    for part in parts:
        events = [event for event in part["traceEvents"] if "dur" in event]
        names = (event for event in events if event.get("cat") == "user_annotation")
        step = next(event for event in names if event["name"].startswith(kind))
        total += step["dur"]
        busy += _covered([event for event in events if event.get("cat") in _ON_GPU], step)
    averages = [operator for operator in averages if operator.device_type == DeviceType.CPU]
    kernels = busy > 0
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for operator in averages:
        calls[operator.key] += operator.count
        times[operator.key] += operator.self_device_time_total if kernels else operator.self_cpu_time_total
    python = sum(operator.self_cpu_time_total for operator in averages if operator.key.startswith(kind))
    slowest = [(name, time) for name, time in times.most_common() if time and not name.startswith(kind)][:_SLOWEST]
    return {
        "seconds": total / 1e6,
        "kernels": kernels,
        "slowest": [
            {"name": name, "share": time / total, "calls": calls[name], "seconds": time / 1e6} for name, time in slowest
        ],
        "idle": 1 - busy / total if kernels else None,
        "python": python / total,
    }


def _covered(events: Iterable[Mapping[str, Any]], step: Mapping[str, Any]) -> float:
    """Return how long at least one of ``events`` went on during ``step``, in microseconds."""
    covered, reached, end_of_step = 0.0, step["ts"], step["ts"] + step["dur"]
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        begin, end = max(begin, reached), min(end, end_of_step)
        if end > begin:
            covered += end - begin
            reached = end
    return covered


def describe(kind: str, summary: Mapping[str, Any], path: Path) -> str:
    """Return what a run logs of its profile: the slowest operators, and the time without any.

    Args:
        kind: what was recorded.
        summary: result of :func:`summarize`, with ``steps`` and ``first``.
        path: the trace.
    """
    steps, first = summary["steps"], summary["first"]
    which = f"step {first}" if steps == 1 else f"steps {first} to {first + steps - 1}"
    lines = [f"profile of {kind}, {which}, {summary['seconds']:.3g} s; open {path} in https://ui.perfetto.dev"]
    lines += [
        f"  {operator['share']:4.0%}  {operator['name'][:90]}, {operator['calls']:,} calls"
        for operator in summary["slowest"]
    ]
    if summary["idle"] is not None:
        lines.append(f"  {summary['idle']:4.0%}  no kernel ran")
    lines.append(f"  {summary['python']:4.0%}  of the host's time was outside of operators")
    return "\n".join(lines)
