"""An anonymous record of a measurement, for others who plan for such a machine."""

import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_text
from rocm_ext.machine.detect import Machine, host_memory, parse_version
from rocm_ext.machine.shared_records import FORMAT, SharedRecord, cpu_name
from rocm_ext.model.build import build_model

_RESULT = ("value", "low", "high", "unit")


def share(content: dict[str, Any], cfg: DictConfig, machine: Machine, path: Path) -> str:
    """Write a record of a measurement.

    Args:
        content: content of ``bench.json``.
        cfg: config whose model was measured.
        machine: machine that was measured.
        path: path of the new file.

    Returns:
        What the record holds and what to do with it, for the user.

    Raises:
        UserError: the measurement lacks what ``rocm-ext plan`` needs, or the file cannot be written.
    """
    if not content["figures"]:
        raise UserError(f"--share {path}: nothing to share without gemm and bandwidth")
    record = _record(content, cfg, machine)
    SharedRecord.from_dict(record, "the record")
    replace_text(path, json.dumps(record, indent=1) + "\n")
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return (
        f"wrote {path}, a record of this machine without names, paths and serial numbers. It holds:\n"
        f"  machine: {record['machine']['name']}, {record['machine']['memory']} GiB\n"
        f"  versions: {versions}\n"
        f"  model: {record['config'] or 'one of your own'}, {record['model']}\n"
        f"  {len(record['probes'])} measurements with their quartiles, the speeds for plan, and the fastest settings\n"
        "Nothing was uploaded. Read it, and attach it to an issue of torchtune-rocm: later versions then plan with it "
        "for such machines."
    )


def _record(content: dict[str, Any], cfg: DictConfig, machine: Machine) -> dict[str, Any]:
    """Only what is named here gets into the record: messages and overrides may hold paths."""
    on_cpu = machine.backend == "cpu"
    memory = host_memory(Path("/"), "MemTotal") if on_cpu else machine.total_memory
    known = {path.stem for recipe in registry.recipes().values() for path in recipe.configs}
    return {
        "format": FORMAT,
        "date": content["date"],
        "machine": {
            "backend": machine.backend,
            "system": machine.system,
            "arch": machine.arch,
            "name": cpu_name() if on_cpu else machine.name or "unknown",
            "count": max(1, machine.gpu_count),
            "cores": os.cpu_count() if on_cpu else None,
            "memory": round(memory / 2**30, 1),
        },
        "versions": _versions(machine),
        "config": content["config"] if content["config"] in known else None,
        "model": _shape(cfg),
        "quick": content["quick"],
        "cores_of_other_programs": content["cores_of_other_programs"],
        "figures": content["figures"],
        "settings": content["settings"],
        "probes": [
            {
                "probe": row["item"]["probe"],
                "values": row["item"]["values"],
                "status": row["status"],
                **{key: row["result"][key] for key in _RESULT if row["status"] == "ok"},
            }
            for row in content["rows"]
        ],
    }


def _versions(machine: Machine) -> dict[str, str]:
    numbers = ".".join(map(str, parse_version(machine.kernel)))  # the rest may be the user's own words
    # Ubuntu's number of the build, and its flavour
    build = re.match(r"[0-9.]+(-[0-9]+-(?:generic|oem|lowlatency|hwe|azure|aws|gcp))$", machine.kernel)
    found = {
        "torch": re.sub(r"\+(?!cpu|cu\d|rocm\d|git[0-9a-f]).*", "", machine.torch),
        "rocm": machine.rocm,
        "cuda": torch.version.cuda,
        "kernel": f"{numbers}{build[1] if build else ''}",
        "torchtune": _installed("torchtune"),
        "torchtune-rocm": _installed("torchtune-rocm"),
    }
    return {name: value for name, value in found.items() if value}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _shape(cfg: DictConfig) -> str:
    decoder = build_model(cfg.model, torch.bfloat16, 0, torch.device("meta"))
    total = sum(p.numel() for p in decoder.parameters()) / 1e6
    words = decoder.tok_embeddings
    return (
        f"{total:.0f} million parameters, {len(decoder.layers)} layers of width {words.embedding_dim}, "
        f"{words.num_embeddings} tokens"
    )
