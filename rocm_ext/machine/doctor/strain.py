"""Checks of what the machine does now: its power, its heat, and who holds the GPU's memory.

A check returns its finding; None, where it does not apply.
"""

from rocm_ext.machine.budget import gib
from rocm_ext.machine.detect import parse_version
from rocm_ext.machine.doctor.facts import Facts
from rocm_ext.machine.doctor.recorded import Finding, ok, warning
from rocm_ext.machine.sysfs import Sensor

NEAR = 5  # °C below a limit
NAMED = 2**30  # bytes; smaller holders, such as a desktop's programs, stay unnamed
LEFT = 2**31  # bytes of a GPU that need no process: the driver's own, a login screen's
# Modes of the firmware that limit power, and clocks that do not follow the load
_SLOW_MODES = ("low-power", "quiet", "cool", "balanced")
_SLOW_CLOCKS = ("low", "profile_standard", "profile_min_sclk", "profile_min_mclk")
_HOTTER = (
    "reported of Strix Halo: 28 TFLOPS in bf16 at 85 W (Balanced), 37 at 120 W (Performance). Performance needs good "
    "cooling: 85 W already gave 98 to 102 °C after hours, and a ROG Flow Z13 switched itself off (amd-debug-tools#47)"
)
_THROTTLES = (
    "at its limit the hardware slows down; an owner's EVO-X2 lost a sixth of its speed after two hours, and was reset "
    "after 45"
)
_KEPT = (
    "a process that was killed may leave its memory to the driver until a reboot (halogen#79, #34). Only root sees "
    "what other users' processes hold"
)
_TIMEOUT = (
    "longer kernels may reset the GPU under other programs, such as the desktop (LLMKube#886, InvokeAI#9539). If dmesg "
    "tells of ring timeouts, boot with amdgpu.lockup_timeout=20000"
)


def power(facts: Facts) -> Finding | None:
    """Whether fixed clocks, a power cap or the firmware's mode make the GPU slow."""
    if not facts.amd_linux:
        return None
    settings = []
    for card in facts.cards:
        if card.level in _SLOW_CLOCKS:
            file = f"/{card.folder}/power_dpm_force_performance_level"
            why = "the driver holds the clocks low, whatever the load"
            return warning(f"clocks: {card.level}", why, f"echo auto | sudo tee {file}")
        if card.cap and card.usual_cap and card.cap < card.usual_cap:
            file = f"/{card.folder}/hwmon/hwmon*/power1_cap"
            why = "the GPU slows down to stay below this cap; where it is against heat, leave it"
            fix = f"echo {card.usual_cap}000000 | sudo tee {file}"
            return warning(f"{card.cap} of {card.usual_cap} W", why, fix)
        if card.cap:
            settings.append(f"{card.cap} W")
    if facts.unified:
        hot = any(map(_near, facts.files.sensors))
        for file, (mode, modes) in list(facts.files.power_modes.items())[:1]:  # a button decides
            offers = "performance" in (modes or "performance").split()
            if mode in _SLOW_MODES and offers and not hot:
                return warning(mode, _HOTTER, f"echo performance | sudo tee /{file}")
            settings.append(mode)
    return ok(", ".join(dict.fromkeys(settings))) if settings else None


def heat(facts: Facts) -> Finding | None:
    """Whether a sensor is at or near its limit: of each kind, the one of the hottest GPU."""
    shown = {}
    for sensor in sorted(facts.files.sensors, key=lambda sensor: sensor.celsius):
        limit = "" if sensor.limit is None else f" of {sensor.limit:.0f}"
        shown[sensor.label] = f"{sensor.label} {sensor.celsius:.0f}{limit} °C"
    if not shown:
        return None
    found = ", ".join(shown.values())
    if any(map(_near, facts.files.sensors)):
        fix = "clean the cooler, raise its fans' speed, or lower the power; rocm-ext monitor shows the temperature"
        return warning(found, _THROTTLES, fix)
    return ok(found)


def _near(sensor: Sensor) -> bool:
    return sensor.limit is not None and sensor.celsius > sensor.limit - NEAR


def memory_in_use(facts: Facts) -> Finding | None:
    """Who holds the GPUs' memory; on unified memory, GTT."""
    if not facts.amd_linux or not any(card.used for card in facts.cards):
        return None
    used = sum(card.used for card in facts.cards)
    processes = facts.files.processes
    held = sum(process.memory for process in processes)
    named = []
    for process in processes:
        if process.memory >= NAMED:
            named.append(f"{process.name or process.pid} {gib(process.memory)}")
    found = f"{gib(used)}: {', '.join(named)}" if named else gib(used)
    if used - held > LEFT * len(facts.cards):
        user = facts.recorded.user
        look = "sudo $(which rocm-ext) doctor; if nobody holds it, "
        if facts.recorded.container:
            look = "look at it on the host; if nobody holds it, "
        elif user and user.root:
            look = ""
        found += f"; no process seen here holds {gib(used - held)}"
        return warning(found, _KEPT, f"{look}sudo reboot")
    return ok(found)


def other_processes(facts: Facts) -> Finding | None:
    """The programs that compute on AMD's GPUs, with their memory."""
    if not facts.amd_linux:
        return None
    programs = []
    numbers = []
    for process in facts.files.processes:
        if process.computes:
            program = f"{process.pid} {process.name}".strip()
            programs.append(f"{program}: {gib(process.memory)}" if process.memory else program)
            numbers.append(str(process.pid))
    if not programs:
        return ok("none on the GPU")
    why = "they take the GPU's memory and time"
    if facts.intended.unified:
        why += "; overcommitting memory tends to hang the driver"
    return warning(", ".join(programs), why, f"wait for them, or: kill {' '.join(numbers)}")


def lockup_timeout(facts: Facts) -> Finding | None:
    """How long the driver waits for the GPU before it resets it."""
    if not facts.amd_linux:
        return None
    given = facts.files.lockup_timeout
    if given.strip("0,"):
        return ok(f"{given} ms")
    kernel = parse_version(facts.machine.kernel)
    default = "default"
    if kernel and not facts.files.driver:
        default = "2 s, the default" if kernel >= (7,) else "10 s, the default"
    return ok(default, _TIMEOUT)
