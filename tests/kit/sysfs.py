"""Copies of amdgpu's files in sysfs, as in kernels 6.8 to 6.18, for tests and benchmarks.

The set of files follows the kernel (docs.kernel.org/gpu/amdgpu/thermal.html; amdgpu_pm.c hides files that a GPU does
not support) and readings that owners published: ROCm#6035 (gfx1151 under load), listings of MI300X servers.
"""

from collections.abc import Mapping
from pathlib import Path

GIB = 2**30
Files = dict[str, str]


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write the files below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def link_card(root: Path, number: int, device: str) -> None:
    """Write ``/sys/class/drm/cardN`` with a link to its device, as in sysfs, and a connector beside it."""
    card = root / f"sys/class/drm/card{number}"
    card.mkdir(parents=True)
    (card / "device").symlink_to(root / "sys/devices" / device)
    connector = root / f"sys/class/drm/card{number}-DP-1"
    connector.mkdir()
    (connector / "device").symlink_to(card)


def _device(slot: str, files: Mapping[str, str]) -> tuple[str, Files]:
    folder = f"pci0000:00/{slot}"
    own = {"uevent": f"DRIVER=amdgpu\nPCI_SLOT_NAME={slot}\n", "vendor": "0x1002\n", **files}
    return folder, {f"sys/devices/{folder}/{name}": text for name, text in own.items()}


def strix_halo(root: Path) -> Path:
    """One gfx1151 under load, without junction temperature, memory clock and fan; the model is in GTT."""
    device, files = _device(
        "0000:c3:00.0",
        {
            "device": "0x1586\n",
            "revision": "0xc1\n",
            "power/runtime_status": "active\n",
            "gpu_busy_percent": "97\n",
            "mem_info_vram_used": f"{GIB // 4}\n",
            "mem_info_vram_total": f"{GIB // 2}\n",
            "mem_info_gtt_used": f"{61 * GIB}\n",
            "mem_info_gtt_total": f"{120 * GIB}\n",
            "hwmon/hwmon5/name": "amdgpu\n",
            "hwmon/hwmon5/power1_average": "120021000\n",
            "hwmon/hwmon5/power1_label": "PPT\n",
            "hwmon/hwmon5/temp1_input": "89000\n",
            "hwmon/hwmon5/temp1_label": "edge\n",
            "hwmon/hwmon5/freq1_input": "2876000000\n",
            "hwmon/hwmon5/freq1_label": "sclk\n",
            "hwmon/hwmon5/in0_input": "1123\n",
        },
    )
    ids = "# List of AMDGPU IDs\n\n1.0.0\n1586,\tC1,\tRadeon 8060S Graphics\n1586,\tC2,\tRadeon 8050S Graphics\n"
    processor = {"sys/class/hwmon/hwmon3/name": "k10temp\n"}
    processor |= {f"sys/class/hwmon/hwmon3/temp1_{key}": text for key, text in _TCTL.items()}
    write(root, {**files, **processor, "usr/share/libdrm/amdgpu.ids": ids})
    link_card(root, 1, device)
    return root


_TCTL = {"label": "Tctl\n", "input": "97375\n"}
MI300X_SLOTS = ["1b", "3d", "4e", "5f", "9d", "bd", "cd", "dd"]


def mi300x(root: Path) -> Path:
    """Eight MI300X with one partition each, cards numbered in another order than their slots, and a BMC's VGA."""
    write(root, {"sys/devices/pci0000:c0/0000:c2:00.0/vendor": "0x1a03\n"})
    link_card(root, 0, "pci0000:c0/0000:c2:00.0")
    for number, slot in enumerate(MI300X_SLOTS):
        device, files = _device(
            f"0000:{slot}:00.0",
            {
                "device": "0x74a1\n",
                "revision": "0x00\n",
                "product_name": "AMD Instinct MI300X OAM\n",
                "power/runtime_status": "active\n",
                "gpu_busy_percent": f"{number * 10}\n",
                "mem_info_vram_used": f"{number * GIB}\n",
                "mem_info_vram_total": f"{192 * GIB}\n",
                "mem_info_gtt_used": "13524992\n",
                "mem_info_gtt_total": f"{1000 * GIB}\n",
                "hwmon/hwmon7/name": "amdgpu\n",
                "hwmon/hwmon7/power1_input": f"{(140 + number) * 1_000_000}\n",
                "hwmon/hwmon7/temp2_input": f"{40 + number}000\n",
                "hwmon/hwmon7/temp2_label": "junction\n",
                "hwmon/hwmon7/temp3_input": f"{30 + number}000\n",
                "hwmon/hwmon7/temp3_label": "mem\n",
                "hwmon/hwmon7/freq1_input": "2100000000\n",
                "hwmon/hwmon7/freq2_input": "1300000000\n",
            },
        )
        write(root, files)
        link_card(root, 1 + (number * 3 + 5) % 8 * 2, device)
        partition = f"platform/amdgpu_xcp_{number}"
        write(root, {f"sys/devices/{partition}/uevent": f"MODALIAS=platform:amdgpu_xcp_{number}\n"})
        link_card(root, 2 + number * 2, partition)
    return root


def mi50(root: Path) -> Path:
    """One MI50 with a fan, on a kernel without ``power1_input``."""
    device, files = _device(
        "0000:03:00.0",
        {
            "device": "0x66a1\n",
            "revision": "0x02\n",
            "gpu_busy_percent": "100\n",
            "mem_info_vram_used": f"{28 * GIB}\n",
            "mem_info_vram_total": f"{32 * GIB}\n",
            "hwmon/hwmon2/name": "amdgpu\n",
            "hwmon/hwmon2/power1_average": "178000000\n",
            "hwmon/hwmon2/power1_cap": "225000000\n",
            "hwmon/hwmon2/temp1_input": "71000\n",
            "hwmon/hwmon2/temp1_label": "edge\n",
            "hwmon/hwmon2/temp1_crit": "100000\n",
            "hwmon/hwmon2/temp2_input": "93000\n",
            "hwmon/hwmon2/temp2_label": "junction\n",
            "hwmon/hwmon2/temp2_crit": "100000\n",
            "hwmon/hwmon2/temp2_emergency": "105000\n",
            "hwmon/hwmon2/temp3_input": "88000\n",
            "hwmon/hwmon2/temp3_label": "mem\n",
            "hwmon/hwmon2/temp3_crit": "94000\n",
            "hwmon/hwmon2/freq1_input": "1725000000\n",
            "hwmon/hwmon2/freq2_input": "1000000000\n",
            "hwmon/hwmon2/fan1_input": "3321\n",
        },
    )
    write(root, files)
    link_card(root, 0, device)
    return root
