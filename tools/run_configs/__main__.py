"""Writes recipe_configs: the run configs from table.yaml, one template for each recipe, and the defaults from the table
of keys; ``make configs``."""

import re
from pathlib import Path
from typing import Any

import jinja2
import torchtune
import yaml
from omegaconf import OmegaConf

from rocm_ext.base import registry
from rocm_ext.config import keys, layers
from tools.run_configs.defaults import defaults_file

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "recipe_configs"
STOCK = Path(torchtune.__file__).parents[1] / "recipes/configs"
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.ChainableUndefined,
)
_QLORA = "(QLoRA, arXiv:2305.14314)"


def written() -> dict[str, str]:
    """Return the run configs by name, as the table has them, and the defaults files, such as ``defaults/common``."""
    table = yaml.safe_load((HERE / "table.yaml").read_text())
    files = {f"defaults/{name}": defaults_file(name) for name in keys.table()}
    for recipe in registry.TITLES:
        for name, row in table[recipe].items():
            files[name] = _render(recipe, name, row, table)
    return files


def _render(recipe: str, name: str, row: dict[str, Any], table: dict[str, Any]) -> str:
    """Return the run config of a row."""
    machine, model = _machine_and_model(name, table)
    short = model["hub"].rpartition("/")[2]
    stock = None
    if recipe == "lora_finetune_rocm" and "torchtune" in model:
        stock = OmegaConf.load(STOCK / f"{model['torchtune']}.yaml")
    backend, licence = model.get("backend"), model.get("licence")
    notes = [
        *row.get("notes", []),
        *filter(None, [model.get("note")]),
        *([f'transformers computes {backend}: pip install ".[transformers]"'] if backend else []),
        *(
            [f"Accept the licence at huggingface.co/{licence} and run `hf auth login` first."]
            if licence
            else []
        ),
    ]
    return _TEMPLATES.get_template(f"{row.get('template', recipe)}.yaml.jinja").render(
        recipe=recipe,
        defaults=defaults_files(recipe),
        name=name,
        row=row,
        machine=machine,
        large=machine["hardware"] == "mi300x",
        model=model,
        teacher=table["models"].get(row.get("teacher")),
        short=short,
        title=model.get("title", short),
        where=row.get("where", machine["is"]),
        launch=row.get("launch", "tune run"),
        command=f"{recipe} --config {name}",
        notes=notes,
        planned=lambda what="": _planned(recipe, row, machine, what),
        why=_why(recipe, row, machine),
        rate=_rate(model, stock),
        stock=stock,
        stock_lr=f"{stock.optimizer.lr:.0e}".replace("e-0", "e-") if stock else "",
    )


def defaults_files(recipe: str) -> str:
    """Return the names of the files with a recipe's defaults: its own, those it extends, and what they include."""
    names = {}

    def add(path: Path) -> None:
        names[path.name] = True
        for included in layers.read(path).get("include", []):
            add(path.with_name(f"{included}.yaml"))

    for part in registry.chain(registry.find(recipe)):
        add(part.defaults)
    return ", ".join(names)


def _machine_and_model(name: str, table: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    machine = next(machine for machine in table["machines"] if name.startswith(f"{machine}_"))
    model = re.sub(
        "_(raft|grpo|dpo|tools|from_[0-9a-z_]+)(_8gpu)?$", "", name.removeprefix(f"{machine}_")
    )
    return table["machines"][machine], table["models"][model]


def _planned(recipe: str, row: dict[str, Any], machine: dict[str, Any], what: str) -> str:
    """Say how much memory a run takes; ``what``: the rows that it was planned for."""
    memory, sampler = row["memory"], recipe in ("grpo_rocm", "distil_rocm")
    if isinstance(memory, int):
        memory = f"about {memory} GiB{' of 192' if machine['hardware'] == 'mi300x' and not sampler else ''}"
    said = f"{memory}, planned{f' for {what}' if what else ''}"
    if machine["hardware"] == "mi300x" and "least" not in row:
        return f"{said}, with no layer recomputed"
    beside = ", with the sampler's" if sampler else ""
    least = f", down to {row['least']} GiB" if "least" in row else ""
    return f"{said}{beside}; with less free memory the run recomputes layers{least}"


def _why(recipe: str, row: dict[str, Any], machine: dict[str, Any]) -> str:
    """Give the reason for a batch size."""
    tokens = row["batch_size"] * (4096 if recipe == "dpo_rocm" else 2048)
    why = row.get("why", machine.get("why", "")).format(tokens=f"{tokens:,}")
    if "twice" in row:
        why += f"; {2 * row['batch_size']} rows would need {row['twice']} GiB"
    return why


def _rate(model: dict[str, Any], stock: Any) -> str:
    """Give the reason for SFT's learning rate."""
    if "rate" in model:
        return f"{model['rate']} {_QLORA}"
    if model["lr"] == "1e-4":
        return f"models over 30B need half the rate of smaller ones {_QLORA}"
    if stock:
        return (
            "its adapters are bf16, which loses small updates; ours are fp32 and need a lower rate"
        )
    if model["lr"] == "5e-4":
        return "small models tolerate a higher rate than 7B and more"
    return f"LoRA's usual rate for models of this size {_QLORA}"


if __name__ == "__main__":
    for name, text in written().items():
        (CONFIGS / f"{name}.yaml").write_text(text)
