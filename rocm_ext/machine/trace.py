"""``profile_steps``: a run records some of its steps with torch's profiler.

There are three kinds of steps: training steps without the loading of data, the prefill of prompts, and decoding steps.
Every rank writes two files per kind to ``output_dir/profile``: a trace for https://ui.perfetto.dev, and torch's table
of the operators.
"""

import contextlib
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from rocm_ext.base.errors import UserError, one_line
from rocm_ext.base.files import replace_file, replace_text
from rocm_ext.base.log import log
from rocm_ext.base.types import Json

TRAINING, PREFILL, DECODING = "training", "prefill", "decoding"
FOLDER = "profile"
# Steps that are not recorded: the first ones compile, allocate, choose kernels and capture graphs.
WARM_UP = {TRAINING: 3, PREFILL: 1, DECODING: 3}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events, in Chrome's trace format
_MOST_EVENTS = 500_000  # a trace's limit; browsers open about a million


@dataclass
class _Recording:
    """The steps of one kind.

    Attributes:
        seen: steps done, including the warm-up.
        parts: the traces of the recorded steps, in Chrome's format.
        table: torch's table of the operators in the last step.
    """

    seen: int = 0
    parts: list[Json] = field(default_factory=list)
    table: str = ""

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
        """Context that records the first ``steps`` steps per kind after the warm-up.

        It writes a kind's files once the kind is complete, or at the end. If the profiler or the writing fails, it logs
        a warning and the run continues.

        Args:
            folder: folder of the files.
            steps: number of steps per kind; 0 records nothing.
            device: device of the steps.
            rank: this rank, for the files' names.
        """
        self._folder = folder
        self._steps = steps
        self._device = device
        self._rank = rank
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
        if recording is not None:
            recording.seen += 1
        # the last step of the warm-up is recorded and dropped: the profiler's first step is slow
        if recording is None or recording.seen < WARM_UP[kind]:
            yield
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch 2.13 prints two lines per recording
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if on_gpu:
            activities.append(ProfilerActivity.CUDA)
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
                events = recording.parts[-1]["traceEvents"]
                by = "self_cpu_time_total"
                if any(event.get("cat") in _ON_GPU for event in events):
                    by = "self_device_time_total"
                recording.table = profiler.key_averages().table(sort_by=by, row_limit=30)
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(kind, error)
        if len(recording.parts) == self._steps or recording.events > _MOST_EVENTS:
            self._finish(kind)

    def _exported(self, profiler: torch.profiler.profile) -> Json:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".rank{self._rank}.tmp"
        try:
            profiler.export_chrome_trace(str(path))
            return json.loads(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)

    def _give_up(self, kind: str, error: Exception) -> None:
        self._open.pop(kind, None)
        log.warning(
            "profile_steps: %s is not recorded, the run continues: %s", kind, one_line(error)
        )

    def _close(self) -> None:
        """Write the incomplete kinds, and log why they are incomplete."""
        for kind, recording in list(self._open.items()):
            if recording.parts:
                self._finish(kind)
            elif recording.seen or kind == TRAINING:
                why = f"this run did {recording.seen} such steps, and {WARM_UP[kind]} come before as warm-up"
                log.warning("profile_steps: nothing of %s is recorded, because %s", kind, why)

    def _finish(self, kind: str) -> None:
        recording = self._open.pop(kind, None)
        if recording is None:  # given up
            return
        count = len(recording.parts)
        name = f"{kind}.rank{self._rank}"
        path = self._folder / f"{name}.trace.json.gz"
        events = []
        for number, part in enumerate(recording.parts):
            for event in part["traceEvents"]:
                # arrows; every recording numbers them from 1
                if event.get("ph") in ("s", "t", "f"):
                    event = {**event, "id": f"{number}.{event['id']}"}
                events.append(event)
        trace = {**recording.parts[0], "traceEvents": events}
        for private in ("host_name", "traceName"):
            trace.pop(private, None)
        try:
            with replace_file(path) as aside, gzip.open(aside, "wt", compresslevel=4) as file:
                json.dump(trace, file)
            replace_text(self._folder / f"{name}.txt", recording.table)
        except UserError as error:
            self._give_up(kind, error)
            return
        if count < self._steps:
            why = "the run ended"
            if recording.events > _MOST_EVENTS:
                why = "the trace would become too large"
            steps = f"{count} of {self._steps} steps of {kind}"
            log.info("profile_steps: %s are recorded: %s", steps, why)
        first = WARM_UP[kind] + 1
        which = f"step {first}" if count == 1 else f"steps {first} to {first + count - 1}"
        total, busy = seconds(events, kind)
        share = f", {busy / total:.0%} of them in kernels of the GPU" if busy else ""
        if self._device.type == "cuda" and not busy:
            log.warning(
                "profile_steps: torch's profiler saw no kernel of the GPU, as some builds for ROCm do "
                "(github.com/pytorch/kineto/pull/1338); the table is of the host's operators"
            )
        where = f"open {path} in https://ui.perfetto.dev; {name}.txt next to it lists the operators by time"
        log.info("profile of %s, %s, %.3g s%s: %s", kind, which, total, share, where)


def seconds(events: list[Json], kind: str) -> tuple[float, float]:
    """Seconds of the recorded steps, and the part of them in which a kernel or copy of a GPU ran.

    An annotation whose name begins with ``kind`` spans a step.
    """
    steps = []
    kernels = []
    for event in events:
        category = event.get("cat")
        if "dur" in event and category in _ON_GPU:
            kernels.append(event)
        elif "dur" in event and category == "user_annotation" and event["name"].startswith(kind):
            steps.append(event)
    kernels.sort(key=lambda event: event["ts"])
    total = busy = 0.0
    for step in steps:
        total += step["dur"]
        reached = step["ts"]  # the busy time up to here is counted
        end = step["ts"] + step["dur"]
        for kernel in kernels:
            begin = max(kernel["ts"], reached)
            until = min(kernel["ts"] + kernel["dur"], end)
            if until > begin:
                busy += until - begin
                reached = until
    return total / 1e6, busy / 1e6
