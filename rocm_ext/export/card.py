"""The model card of what a run trained, ``README.md`` on the Hugging Face hub."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rocm_ext.base.hub import is_hub_name
from rocm_ext.base.registry import GRPO, RAFT
from rocm_ext.data.loading import LOADERS
from rocm_ext.export.source import Source
from rocm_ext.model.adapters.peft_files import PeftConfig
from rocm_ext.runs.folder import RunFolder
from rocm_ext.runs.scores import Score

_TAGS = ["lora", "peft", "torchtune-rocm"]
_LICENCE = ("license", "license_name", "license_link")
_SETTINGS = (
    "recipe",
    "epochs",
    "cycles",
    "steps",
    "max_steps_per_epoch",
    "sequences_per_step",
    "prompts_per_step",
    "samples_per_prompt",
    "optimizer.lr",
    "lr_schedule",
    "objective._component_",
    "verifier._component_",
    "model.target_modules",
    "dtype",
    "seed",
)
_DATA = ("dataset", "prompts", "dataset_val", "eval_prompts")


def card(source: Source, merged: bool) -> str:
    """Return the model card of an export.

    Args:
        source: an adapter with its base model.
        merged: whether the card is the merged model's, else the adapter's.
    """
    head: dict[str, Any] = {"tags": _TAGS, "pipeline_tag": "text-generation"}
    head["library_name"] = "transformers" if merged else "peft"
    name = source.name if is_hub_name(source.name) else Path(source.name).name
    if is_hub_name(source.name):
        head |= {"base_model": name, "base_model_relation": "finetune" if merged else "adapter"}
    licence = _licence(source.base)
    head |= licence
    run = source.run
    if run is not None and (named := [each for each in _sources(run) if _is_data_set(each)]):
        head["datasets"] = list(dict.fromkeys(named))
    terms, shown = _plain(str(licence.get("license_name", licence.get("license", "")))), _plain(name)
    lines = [
        f"# {shown}, {'fine-tuned' if merged else 'LoRA adapter'}",
        "",
        f"Base model: {shown}. Its licence{f', {terms},' if terms else ''} applies.",
        "Trained with torchtune-rocm.",
        "",
        *_table("Settings", _settings(source)),
    ]
    if run is not None:
        lines += [*_table("Data", _data(run)), *_table("Results", _results(run))]
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---\n\n" + "\n".join(lines)


def _licence(base: Path) -> dict[str, Any]:
    """Return what the base model's own card says about its licence."""
    path = base / "README.md"
    _, mark, rest = (
        path.read_text(encoding="utf-8", errors="replace").partition("---\n") if path.is_file() else ("",) * 3
    )
    try:
        head = yaml.safe_load(rest.partition("\n---")[0]) if mark else None
    except yaml.YAMLError:
        head = None
    return {key: head[key] for key in _LICENCE if key in head} if isinstance(head, Mapping) else {}


def _settings(source: Source) -> dict[str, str]:
    rows: dict[str, str] = {}
    if source.adapter is not None:
        peft = PeftConfig.read(source.adapter)
        rows = {"rank": str(peft.rank), "alpha": f"{peft.alpha:g}"}
        rows |= {"DoRA": "yes"} if peft.dora else {}
    if source.run is not None:
        values = {key: source.run.setting(key) for key in _SETTINGS}
        rows |= {key: str(value) for key, value in values.items() if value is not None}
    return rows


def _sources(run: RunFolder) -> list[str]:
    nodes = [run.setting(key) for key in _DATA]
    parts = [part for node in nodes for part in (node if isinstance(node, list) else [node])]
    sources = [part.get("source") for part in parts if isinstance(part, Mapping)]
    return [each for each in sources if isinstance(each, str)]


def _is_data_set(source: str) -> bool:
    """Whether a source is a data set on the hub, and not a file in a folder that is not below this one."""
    return is_hub_name(source) and Path(source).suffix not in LOADERS


def _data(run: RunFolder) -> dict[str, str]:
    # a path may tell more about a machine than its file's name
    return {
        str(number): each if _is_data_set(each) else Path(each).name for number, each in enumerate(_sources(run), 1)
    }


def _results(run: RunFolder) -> dict[str, str]:
    """Return what the run measured, with held-out values where it has them."""
    rows: dict[str, str] = {}
    scores: dict[str, Mapping[str, Any] | None] = {}
    if run.family == RAFT:
        scores |= {f"pass@1, cycle {cycle.number}": cycle.scores for cycle in run.cycles}
    elif run.family == GRPO:
        scores |= {f"pass@1, step {each.step}": each.scores for each in run.evaluations}
    else:
        for name, column in (("validation", run.validations["val_loss"]), ("training", run.steps["loss"])):
            values = column[~np.isnan(column)]
            if len(values):
                rows[f"{name} loss, first and last"] = f"{values[0]:.4f}, {values[-1]:.4f}"
    return rows | {key: str(Score(each["correct"], each["prompts"])) for key, each in scores.items() if each}


def _plain(text: str) -> str:
    """Text of others in one line of Markdown, without links, tags and other markup."""
    return re.sub(r"[\\`*\[\]<>|~!&]", r"\\\g<0>", " ".join(text.split()))


def _table(title: str, rows: Mapping[str, str]) -> list[str]:
    cells = [f"| {_plain(key)} | {_plain(value)} |" for key, value in rows.items()]
    return [f"## {title}", "", "| | |", "|---|---|", *cells, ""] if rows else []
