"""The measured config with the fastest settings, as a YAML that a recipe runs."""

import re
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.registry import Recipe
from rocm_ext.bench.sweep import Winner
from rocm_ext.bench.training import longest_row
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import Profile

_DOWNLOAD = re.compile("# *(tune download|rocm-ext pocket) ")  # a run without its model's folder names this command


def run_config(
    cfg: DictConfig, recipe: Recipe, name: str, path: Path, won: Iterable[Winner], profile: Profile, machine: Machine
) -> str:
    """Write down ``cfg`` with the fastest settings: each key whose value is neither the recipe's nor the profile's.

    A step keeps its rows, so that the settings change the speed and, for dtype, the rounding.

    Args:
        cfg: the whole config that was measured, of any recipe.
        recipe: recipe that runs the config.
        name: name of the config.
        path: path of the file to write.
        won: the fastest settings.
        profile: profile of ``machine``.
        machine: machine that was measured.

    Returns:
        The file's text.
    """
    won = list(won)
    known = config.defaults(recipe) | profile.settings
    whole: dict[str, Any] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    changes = _changes(cfg, won, profile)
    reasons = {winner.key: winner.reason for winner in won}
    downloads = [line for line in config.find(name).read_text().splitlines() if _DOWNLOAD.match(line)]
    exports = [f"# before it: export {each.key}={each.value}  # {each.reason}" for each in won if each.key.isupper()]
    measured = [line for key, value in changes.items() for line in (*_comment(reasons.get(key)), _yaml(key, value))]
    kept = [
        _yaml(key, value if key == "output_dir" else _inside(value, cfg.output_dir))
        for key, value in whole.items()
        if key not in changes and (key in ("recipe", "hardware") or known.get(key) != value)
    ]
    return "\n".join(
        [
            f"# {name} with the settings that `rocm-ext bench` found to be the fastest, {date.today().isoformat()}:",
            f"# {machine}",
            f"#   tune run {config.startable(recipe)} --config {path}",
            *downloads,
            *exports,
            "",
            *(measured or ["# No setting is faster than as configured."]),
            "",
            *kept,
            "",
        ]
    )


def _inside(value: Any, output_dir: str) -> Any:
    """``value`` with paths in the run's folder as ``${output_dir}/…``, so that they follow it."""
    if isinstance(value, dict):
        return {key: _inside(each, output_dir) for key, each in value.items()}
    if isinstance(value, str) and (value == output_dir or value.startswith(f"{output_dir}/")):
        return "${output_dir}" + value[len(output_dir) :]
    return value


def _comment(reason: str | None) -> list[str]:
    return [f"# {reason}"] if reason else []


def _changes(cfg: DictConfig, won: Iterable[Winner], profile: Profile) -> dict[str, Any]:
    """Keys and values that take over the fastest settings."""
    found: dict[str, Any] = {}
    for winner in won:
        if winner.key == "batch_size":
            found |= _rows(cfg, winner.value)
        elif winner.key == "engine.slots":
            if "engine" in cfg and str(cfg.engine[config.COMPONENT]).endswith(".LocalEngine"):
                found["engine"] = {**cfg.engine, "slots": winner.value}
        elif winner.key in cfg:
            found[winner.key] = winner.value
    locked = profile.locked
    insist = [key for key in found if key in locked and found[key] not in (locked[key].value, *locked[key].also)]
    if insist:  # measured with --risky
        found["hardware_overrides"] = sorted({*cfg.hardware_overrides, *insist})
    return found


def _rows(cfg: DictConfig, rows: int) -> dict[str, Any]:
    """Compute as many tokens at once as ``rows`` rows of the measured length, in steps of as many rows as before."""
    measured = longest_row(cfg)
    found: dict[str, Any] = {"batch_size": max(1, rows * measured // (cfg.tokenizer.get("max_seq_len") or measured))}
    if cfg.tokens_per_micro_batch is not None:
        found["tokens_per_micro_batch"] = None
    if "sequences_per_step" in cfg and cfg.sequences_per_step is None:
        found["sequences_per_step"] = cfg.batch_size * (cfg.gradient_accumulation_steps or 1)
        found |= {"gradient_accumulation_steps": None} if cfg.gradient_accumulation_steps else {}
    return found


def _yaml(key: str, value: Any) -> str:
    return OmegaConf.to_yaml(OmegaConf.create({key: value})).rstrip("\n")
