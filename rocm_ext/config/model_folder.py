"""The folder with a config's model: check that it exists, and fill in the config's blocks that follow from it."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import how_to_download, is_hub_name
from rocm_ext.base.importing import COMPONENT
from rocm_ext.base.patterns import matches
from rocm_ext.base.types import Config

FROM_CHECKPOINT = "rocm_ext.model.from_checkpoint"
_PATHS = {
    "adapter_checkpoint",
    "checkpoint_dir",
    "data_files",
    "merges_file",
    "path",
    "source",
    "special_tokens_path",
}
_BLOCKS: dict[str, dict[str, str]] = {
    "checkpointer": {
        COMPONENT: "rocm_ext.model.HFCheckpointer",
        "checkpoint_dir": "${model.checkpoint_dir}",
        "output_dir": "${output_dir}",
        "model_type": "HF",
    },
    "tokenizer": {
        COMPONENT: "rocm_ext.data.HFTokenizer",
        "path": "${checkpointer.checkpoint_dir}/tokenizer.json",
    },
}


def names_layer(key: str, name: str) -> bool:
    """Return whether a key of ``rank_pattern`` or ``alpha_pattern`` matches the layer ``name``, as in PEFT."""
    return matches(rf"(.*\.)?({key})$", name)


def complete(merged: Config, on_command_line: Mapping[str, str]) -> None:
    """Fill in ``checkpointer`` and ``tokenizer`` of a config whose model is :data:`FROM_CHECKPOINT`.

    ``merged`` changes in place. Given keys stay, and so does a block that names another component.
    """
    model = merged.get("model")
    named = model.get(COMPONENT) if isinstance(model, Mapping) else None
    named = on_command_line.get("model", on_command_line.get(f"model.{COMPONENT}", named))
    if named != FROM_CHECKPOINT:
        return
    for key, block in _BLOCKS.items():
        given = merged.get(key)
        if given in (None, "???"):
            given = {}
        if isinstance(given, Mapping):
            whole = {**block, **given}
            if whole[COMPONENT] == block[COMPONENT]:
                merged[key] = whole


def seen_from_here(config: Any, run: Path) -> Any:
    """Return a run's config, or a block of one, whose relative paths lead from the current folder.

    They start where the run did: above ``run``, its output folder, by as many folders as its ``output_dir`` names.
    """
    given = Path(str(config.get("output_dir") or ""))
    start = run.resolve()
    for name in reversed(given.parts):
        if start.name != name:  # it has moved
            return config
        start = start.parent

    def seen(value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            return {name: seen(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [seen(part, key) for part in value]
        if isinstance(value, str) and key in _PATHS and not os.path.exists(value):
            moved = start / value
            if moved.exists():
                return str(moved)
        return value

    return seen(config)


def check_model_folder(cfg: DictConfig, config: Path | None) -> None:
    """Raise a UserError if the model's folder does not exist; a model with a name on the hub is downloaded later.

    Args:
        cfg: the run's config.
        config: file of the config; a comment in it may give the download command. None: the config of a run, whose
            relative paths start in the folder where it started.
    """
    block = cfg.get("checkpointer")
    checkpointer = block if isinstance(block, DictConfig) else {}
    known = str(checkpointer.get(COMPONENT)).startswith(("rocm_ext.", "torchtune."))
    if config is not None and not known:
        return
    folder = checkpointer.get("checkpoint_dir")
    if not (isinstance(folder, str) and folder) or os.path.exists(folder):
        return
    if is_hub_name(folder) and cfg.model.get("checkpoint_dir") == folder:
        return
    kind, how = "folder", ""
    if config is None:
        if not Path(folder).is_absolute():
            how = "; start this command in the folder where the model is"
    elif folder.endswith(".gguf"):
        kind = "file"
    else:
        command = _command_in(config.read_text(), Path(folder))
        how = f"; first run {command}" if command else f"; {how_to_download(Path(folder))}"
    raise UserError(f"the model's {kind} {folder} does not exist{how}")


def _command_in(text: str, folder: Path) -> str | None:
    """Return the command in a config's comments that downloads or makes the model in ``folder``."""
    for command in re.findall(r"^# *((?:tune download|rocm-ext pocket) .*\S)", text, re.MULTILINE):
        _, subcommand, name, *options = shlex.split(command)
        made = Path(name)  # by `rocm-ext pocket`
        if subcommand == "download":
            made = Path()
            if "--output-dir" in options:
                made = Path(options[options.index("--output-dir") + 1])
        if made == folder:
            return command
        if subcommand == "download" and name.rpartition("/")[2] == folder.name:
            return f"tune download {name} --output-dir {folder}"
    return None
