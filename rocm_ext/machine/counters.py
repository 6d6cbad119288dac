"""Counters of the GPUs and of the host: load, memory, power, temperature, clocks.

AMD's come from the kernel's files (sysfs and hwmon), because amd-smi reads nothing on gfx1151 (ROCm#6035); NVIDIA's
from NVML, where the package nvidia-ml-py is installed; the host's from psutil. This needs no root, no torch and no HIP.
A reading leaves out unreadable and impossible values: a kernel may answer EBUSY, EPERM, EOPNOTSUPP, ENODATA or EIO, a
GPU that is powered off reports 65535 W or 511 °C, and files come and go with the driver.
"""

import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import psutil

from rocm_ext.base.errors import one_line
from rocm_ext.machine.sysfs import (
    AMD,
    HOTTEST,
    Sensor,
    cards,
    hottest,
    listing,
    read_number,
    read_text,
    temperatures,
)

log = logging.getLogger("rocm_ext")
HARDWARE_LOG = "hardware.jsonl"  # in a run's folder; a line is what Counters.read() gives

_Values = dict[str, float | None]  # unreadable counters are None
_NvidiaGpu = tuple[str, str, Callable[[], _Values]]  # PCI address, name and reader
_TAIL = 1 << 20  # bytes; a line is a few kB at most
# seconds to wait for the last reading; the files of a GPU that hangs may block for long
_PATIENCE = 2

_NO_PYNVML = (
    "an NVIDIA driver is here, but the package that reads its counters is missing: pip install nvidia-ml-py "
    "(or torchtune-rocm[nvidia])"
)
# the second on WSL2
_NVIDIA = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
_ID_FILES = ("usr/share/libdrm/amdgpu.ids", "opt/amdgpu/share/libdrm/amdgpu.ids")
_MEMORY = ("vram_used", "vram_total", "gtt_used", "gtt_total")
_MOST = {  # larger values are impossible
    **dict.fromkeys(_MEMORY, 2**50),
    "busy": 100,  # percent
    "power": 10_000,  # W
    "power_limit": 10_000,
    "temperature": HOTTEST,  # °C
    "temperature_limit": HOTTEST,
    "memory_temperature": HOTTEST,
    "memory_temperature_limit": HOTTEST,
    **dict.fromkeys(["clock", "memory_clock"], 10_000),  # MHz
    "fan": 60_000,  # revolutions per minute
}


class Reading(TypedDict):
    """A line of ``hardware.jsonl``, without the values that could not be read.

    Attributes:
        time: Unix seconds.
        gpus: in the order of their PCI addresses, with this address as ``id``, and ``name``; ``busy`` in percent;
            ``vram_used``, ``vram_total``, ``gtt_used`` and ``gtt_total`` in bytes; ``power`` in W; ``temperature`` of
            the hottest spot (of an integrated GPU, the processor included) and ``memory_temperature`` in °C; each of
            these three with ``_limit``, at which the hardware slows down; ``clock`` and ``memory_clock`` in MHz;
            ``fan`` in revolutions per minute.
        host: ``cpu`` in percent of all cores; ``memory_used``, ``memory_total``, ``swap_used`` and the resident
            ``process_memory`` in bytes.
    """

    time: float
    gpus: list[dict[str, str | float]]
    host: dict[str, float]


class Counters:
    """The counters of this machine.

    On unified memory ``gtt_used`` may leave out HIP's allocations (ROCm#5444); the host's ``memory_used`` counts them.

    Use it in the thread that made it: psutil counts processor time per thread.

    Args:
        root: folder with ``sys``; any folder but ``/`` is a copy, which holds AMD GPUs only.
        process: whether to read this process's memory.

    Attributes:
        notes: messages for the user, to print once.
    """

    def __init__(self, root: Path = Path("/"), process: bool = False) -> None:
        self.root = root
        self.notes: list[str] = []
        self._known: dict[tuple[str, ...], str] = {}  # names by PCI device and revision
        self._live = root == Path("/")  # a copy describes another machine
        self._nvidia = self._open_nvml() if self._live and _has_nvidia() else []
        self._process = _attempt(psutil.Process) if process else None
        _attempt(psutil.cpu_percent)  # the next call returns the share since this one
        self._cpu_asked = time.monotonic()

    def read(self) -> Reading:
        """Take a reading."""
        gpus = []
        sensors = temperatures(self.root)
        for card in cards(self.root):
            # another vendor's GPU and a partition of a listed GPU have no such vendor
            if read_text(card / "device/vendor") == AMD:
                gpus.append(self._amd(card, sensors))
        for address, name, counters in self._nvidia:
            gpus.append({"id": address, "name": name, **_plausible(counters())})
        gpus.sort(key=lambda gpu: str(gpu["id"]).zfill(16))
        now = round(time.time(), 3)
        return {"time": now, "gpus": gpus, "host": self._host()}

    def _amd(self, card: Path, sensors: list[Sensor]) -> dict[str, str | float]:
        device = card / "device"
        slot = re.search(
            r"^PCI_SLOT_NAME=([0-9a-f:.]+)$", read_text(device / "uevent"), re.MULTILINE
        )
        name = "".join(filter(str.isprintable, self._name(device)))
        address = slot[1] if slot else card.name
        values = _read_amd(device) | _heat(sensors, card.name)
        return {"id": address, "name": name, **_plausible(values)}

    def _name(self, device: Path) -> str:
        product = read_text(device / "product_name")  # Instinct only
        if product:
            return product
        number, revision = (
            read_text(device / file).removeprefix("0x").upper() for file in ("device", "revision")
        )
        if (number, revision) not in self._known:
            name = f"AMD GPU {number}".strip()
            line = rf"^{re.escape(number)},\s*{re.escape(revision)},\s*(.+)$"
            for path in _ID_FILES:
                match = re.search(line, read_text(self.root / path), re.MULTILINE | re.IGNORECASE)
                if match:
                    name = match[1].strip()
                    break
            self._known[number, revision] = name
        return self._known[number, revision]

    def _open_nvml(self) -> list[_NvidiaGpu]:
        """PCI address, name and reader of the NVIDIA GPUs."""
        gpus = []
        try:
            import pynvml

            pynvml.nvmlInit()
            for index in range(pynvml.nvmlDeviceGetCount()):
                gpu = _attempt(partial(_nvidia_gpu, pynvml, index))
                if gpu:
                    gpus.append(gpu)
                else:
                    self.notes.append(f"NVIDIA GPU {index} does not answer")
        except ImportError:
            self.notes.append(_NO_PYNVML)
        except Exception as error:
            # NVMLError, or an error of ctypes where the library has another version
            self.notes.append(f"the counters of the NVIDIA GPUs cannot be read: {one_line(error)}")
        return gpus

    def _host(self) -> dict[str, float]:
        if not self._live:
            return {}
        values = {}
        now = time.monotonic()
        if now - self._cpu_asked >= 0.05:  # processor time is counted in hundredths of a second
            values["cpu"] = _attempt(psutil.cpu_percent)
            self._cpu_asked = now
        memory = _attempt(psutil.virtual_memory)
        if memory:
            values["memory_used"] = memory.total - memory.available
            values["memory_total"] = memory.total
        values["swap_used"] = _attempt(lambda: psutil.swap_memory().used)
        process = self._process
        if process:
            values["process_memory"] = _attempt(lambda: process.memory_info().rss)
        return {key: value for key, value in values.items() if value is not None}


def _read_amd(device: Path) -> _Values:
    """Files and units: docs.kernel.org/gpu/amdgpu/thermal.html and driver-misc.html."""
    values: _Values = {key: read_number(device / f"mem_info_{key}") for key in _MEMORY}
    # older kernels wake it up: rocm-systems#8024
    if read_text(device / "power/runtime_status") == "suspended":
        return values
    values["busy"] = read_number(device / "gpu_busy_percent")
    monitors = listing(device / "hwmon")
    if not monitors:
        return values
    hwmon = device / "hwmon" / monitors[0]
    values["power"] = _scaled(hwmon / "power1_average", 1e6)  # most GPUs have only one of these
    if values["power"] is None:
        values["power"] = _scaled(hwmon / "power1_input", 1e6)
    values["power_limit"] = _scaled(hwmon / "power1_cap", 1e6)
    values["clock"] = _scaled(hwmon / "freq1_input", 1e6)
    values["memory_clock"] = _scaled(hwmon / "freq2_input", 1e6)
    values["fan"] = read_number(hwmon / "fan1_input")
    return values


def _heat(sensors: list[Sensor], card: str) -> _Values:
    """The temperatures of a GPU and its memory, each with its limit. A GPU that sleeps has none."""
    values: _Values = {}
    near = [sensor for sensor in sensors if sensor.device in (card, "cpu")]
    if all(sensor.device == "cpu" for sensor in near):
        return values
    named = {"temperature": hottest(near)}
    for sensor in near:
        if sensor.label == "mem":
            named["memory_temperature"] = sensor
    for name, decisive in named.items():
        if decisive:
            values[name] = decisive.celsius
            values[f"{name}_limit"] = decisive.limit
    return values


def _scaled(path: Path, unit: float) -> float | None:
    number = read_number(path)
    return None if number is None else number / unit


def _has_nvidia() -> bool:
    if os.name == "nt":
        return shutil.which("nvidia-smi") is not None
    return any(map(os.path.exists, _NVIDIA))


def _nvidia_gpu(nvml: Any, index: int) -> _NvidiaGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def read() -> _Values:
        return {
            "busy": _attempt(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "vram_used": _attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "vram_total": _attempt(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "power": _attempt(lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            "temperature": _attempt(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "clock": _attempt(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock": _attempt(
                lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            ),
        }

    # 00000000:0F:00.0, with four zeros too many
    address = _string(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return address[-12:], _string(nvml.nvmlDeviceGetName(handle)), read


def _string(text: str | bytes) -> str:
    """Decode ``text``: some releases of pynvml return bytes."""
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _attempt(read: Callable[[], Any]) -> Any:
    """The result of ``read``, or None if it fails: no counter may stop a run."""
    try:
        return read()
    except Exception:
        return None


def _plausible(values: _Values) -> dict[str, float]:
    """``values`` without the unreadable and impossible ones."""
    plausible = {}
    for key, value in values.items():
        if isinstance(value, int | float) and 0 <= value <= _MOST[key]:
            plausible[key] = round(value, 3)
    return plausible


# ---------------------------------------------------------------------------------------------------- log
class HardwareLog:
    """A file of readings, one JSON object per line. It holds complete lines only.

    Args:
        path: the file, new or existing. The log removes an incomplete last line, which a killed program leaves.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - closed by __exit__
        end = self._file.seek(0, os.SEEK_END)
        start = max(0, end - _TAIL)
        self._file.seek(start)
        tail = self._file.read(_TAIL) or b""
        self._file.truncate(start + tail.rfind(b"\n") + 1)

    def __enter__(self) -> "HardwareLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, reading: Reading) -> None:
        """Append one line.

        Raises:
            OSError: the line cannot be written, for example on a full disk; no part of it stays in the file.
        """
        line = json.dumps(reading).encode() + b"\n"
        size = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError:
            self._file.truncate(size)
            raise


@contextmanager
def recording(
    folder: Path, seconds: float | None, root: Path = Path("/"), name: str = HARDWARE_LOG
) -> Iterator[None]:
    """Context in which a thread writes readings to a file.

    A failure of the thread does not stop the run. The thread draws no random numbers and does not use torch.

    Args:
        folder: folder of the log; the thread continues an existing log.
        seconds: interval of the readings. None writes nothing.
        root: folder with ``sys``.
        name: name of the file.
    """
    if seconds is None:
        yield
        return
    stop = threading.Event()
    path = folder / name

    def record() -> None:
        counters = Counters(root, process=True)
        for note in counters.notes:
            log.info("%s", note)
        try:
            with HardwareLog(path) as file:
                file.write(counters.read())
                while not stop.wait(seconds):
                    file.write(counters.read())
        except OSError as error:
            log.warning(
                "%s: %s; hardware is no longer recorded, the run continues",
                path,
                error.strerror or error,
            )

    thread = threading.Thread(target=record, name="hardware counters", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(_PATIENCE)


def log_of(machine: int) -> str:
    """Return the name of a machine's log in a run's folder; machine 0 writes ``hardware.jsonl``."""
    return f"hardware.machine{machine}.jsonl" if machine else HARDWARE_LOG


def remove_logs(folder: Path) -> None:
    """Remove the logs of all machines from a run's folder."""
    for path in [folder / HARDWARE_LOG, *folder.glob("hardware.machine*.jsonl")]:
        path.unlink(missing_ok=True)
