"""Find what to export: the base model, the adapter and the records of a run."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import files_of
from rocm_ext.base.registry import SFT
from rocm_ext.config.model_folder import FROM_CHECKPOINT, seen_from_here
from rocm_ext.data.encoder import EOS, TOKENIZER, ids_in
from rocm_ext.data.template import TEMPLATE, ChatTemplate, read_template
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.distributed.ranks import Ranks
from rocm_ext.model.adapters.merge import BESIDE_WEIGHTS, merge
from rocm_ext.model.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PeftConfig,
    base_model_name,
    read_peft,
)
from rocm_ext.model.build import build_model
from rocm_ext.model.download import use_downloaded, use_weights
from rocm_ext.model.families import CONFIG
from rocm_ext.model.weights.gguf_files import SUFFIX, refuse_merging
from rocm_ext.runs.folder import RunFolder

UNMERGED = "write --gguf-adapter, which llama.cpp adds as it computes, or name the model in 16 bits by --base-model"
_RUN_CONFIG, _TOKENIZER = "config.yaml", "${checkpointer.checkpoint_dir}/" + TOKENIZER
_HERE = Ranks(torch.device("cpu"))
OF_ADAPTER = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, TEMPLATE)  # the published files of an adapter


@dataclass(frozen=True)
class Source:
    """A model to export.

    Attributes:
        base: folder of the base model in Hugging Face's format.
        adapter: PEFT folder, or None for the base model alone.
        run: records of the run that trained the adapter. None if it is unknown.
        cfg: ``model``, ``checkpointer``, ``tokenizer`` and chat template, as in a run's config.
        base_name: the base model's name on the hub. If it is None, the folder may have it.
    """

    base: Path
    adapter: Path | None
    run: RunFolder | None
    cfg: DictConfig
    base_name: str | None = None

    @property
    def name(self) -> str:
        """The base model's name on the hub, or its folder."""
        return self.base_name or base_model_name(self.base)

    def decoder(self) -> Any:
        """Build the adapter's model, without weights."""
        return build_model(self.cfg.model, torch.bfloat16, 0, torch.device("meta"))

    @property
    def _setting(self) -> str:
        template = self.adapter / TEMPLATE if self.adapter is not None else None
        return str(template) if template is not None and template.is_file() else "auto"

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The run's chat template, else the base model's, else None."""
        day = date.fromisoformat(str(self.cfg.chat_template_date))
        return read_template(self._setting, self.base, self.cfg.chat_template_args, day)

    @cached_property
    def tokenizer(self) -> Any:
        """The base model's tokenizer with :attr:`template`; its ``stop_tokens`` end an answer."""
        cfg = self.cfg.copy()
        cfg.chat_template = "none" if self.template is None else self._setting
        return open_tokenizer(cfg)


def open_source(path: Path, base: Path | None = None, trusted: bool = False) -> Source:
    """Open the model in ``path``.

    Args:
        path: ``output_dir`` of a run, a PEFT folder, or a model's folder.
        base: the base model's folder. By default the run's config or the adapter names it.
        trusted: whether a run's config may name any model, see :func:`rocm_ext.config.check_from_folder`.

    Raises:
        UserError: the model or its base model is missing, the run's config could run code, or a file is a link out of
            its folder.
    """
    if not path.is_dir():
        raise UserError(
            f"{path} is not a folder; expected the output_dir of a run, an adapter or a model"
        )
    if (path / ADAPTER_CONFIG).is_file():
        return _adapted(path, _run_of(path.resolve()), base, trusted)
    if (path / _RUN_CONFIG).is_file():
        run = RunFolder(path)
        if not (path / "adapter" / ADAPTER_WEIGHTS).is_file():
            raise UserError(
                f"{path} has no adapter yet: its run has not ended; give one of its checkpoints' adapters"
            )
        return _adapted(path / "adapter", run, base, trusted)
    if (path / CONFIG).is_file():
        files_of(path, BESIDE_WEIGHTS)
        return Source(path, None, None, OmegaConf.create(_of_folder(str(path))))
    raise UserError(
        f"{path} holds no run ({_RUN_CONFIG}), no adapter ({ADAPTER_CONFIG}) and no model ({CONFIG})"
    )


def _run_of(adapter: Path) -> RunFolder | None:
    """Return the run of an adapter or checkpoint, by the names of folders. None if it is from elsewhere."""
    run = adapter.parent if adapter.name == "adapter" else adapter.parent.parent
    ours = adapter.name == "adapter" or adapter.parent.name == "checkpoints"
    return RunFolder(run) if ours and (run / _RUN_CONFIG).is_file() else None


def _adapted(adapter: Path, run: RunFolder | None, base: Path | None, trusted: bool) -> Source:
    files_of(adapter, OF_ADAPTER)
    peft, _ = read_peft(adapter)  # its checks come before a model of its rank is built
    content = _of_folder(str(base or peft.base_model), peft)
    if run is not None and {"model", "checkpointer"} <= run.config.keys():
        theirs = seen_from_here(run.config, run.path)
        if not trusted:
            read = ("model", "checkpointer", "chat_template_args", "chat_template_date")
            config.check_from_folder(
                {key: run.config.get(key) for key in read}, run.path / _RUN_CONFIG
            )
        for key in ("chat_template_args", "chat_template_date"):
            if key in run.config:
                content[key] = run.config[key]
        model = dict(theirs["model"])
        for key in ("lora_rank", "lora_alpha", "use_dora"):
            if key in model:
                model[key] = content["model"][key]
        content["model"] = model
        if base is None:
            content["checkpointer"] = theirs["checkpointer"]
        elif "checkpoint_dir" in model:
            model["checkpoint_dir"] = str(base)
    cfg = OmegaConf.create(content)
    if not cfg.checkpointer.checkpoint_dir:
        raise UserError(f"{adapter} does not name its base model; set --base-model")
    is_gguf = peft.base_model.endswith(SUFFIX)
    if is_gguf and not Path(cfg.checkpointer.checkpoint_dir).exists():
        # its folder has left the cache
        cfg.checkpointer.checkpoint_dir = cfg.model.checkpoint_dir = peft.base_model
    use_downloaded(cfg, _HERE)
    folder = Path(cfg.checkpointer.checkpoint_dir)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"no base model in {folder} ({CONFIG} is missing); start this command in the folder where the run started, "
            "or set --base-model"
        )
    files_of(folder, BESIDE_WEIGHTS)
    use_weights(folder, _HERE)
    return Source(folder, adapter, run, cfg)


def write_merged(source: Source, out: Path, card: Callable[[], str]) -> None:
    """Write the base model with the adapter merged into its weights, and with tokenizer and chat template.

    If the chat template ends a turn with a token that does not stop the base model, ``generation_config.json`` also
    gets that token. ``card`` returns the text of the model card.

    Raises:
        UserError: ``source`` has no adapter, ``out`` holds something, or the disk is full.
    """
    if source.adapter is None:
        raise UserError(f"{source.base} has no adapter to merge")
    refuse_merging(source.base, UNMERGED)
    # the merged folder takes its place and its name, and "." has no name
    replaceable = out.name and out.is_dir() and not any(out.iterdir())
    if out.exists() and not replaceable:
        raise UserError(f"{out} exists; choose a new folder")
    text = card()  # its errors come before anything is written
    stops = ids_in(source.base, EOS)
    more = []
    if stops:
        more = [number for number in source.tokenizer.stop_tokens if number not in stops]

    def complete(folder: Path) -> None:
        (folder / "README.md").write_text(text, encoding="utf-8")
        if more:
            path = folder / "generation_config.json"
            content = json_object(path.read_bytes()) if path.is_file() else {}
            settings = {**(content or {}), "eos_token_id": [*stops, *more]}
            path.write_text(json.dumps(settings, indent=2) + "\n")

    merge(source.cfg.checkpointer, source.adapter, out, source.decoder(), complete)


def _of_folder(folder: str, peft: PeftConfig | None = None) -> dict[str, Any]:
    """Return :class:`Source`'s ``cfg`` for a model's folder."""
    model: dict[str, object] = {config.COMPONENT: FROM_CHECKPOINT, "checkpoint_dir": folder}
    if peft is not None:
        # merging needs no layers
        model |= {"lora_rank": peft.rank, "lora_alpha": peft.alpha, "use_dora": False}
        if peft.parameters:
            model["target_parameters"] = list(peft.parameters)
    defaults = config.defaults(SFT)
    return {
        "model": model,
        "checkpointer": {"checkpoint_dir": folder},
        "tokenizer": {config.COMPONENT: "rocm_ext.data.HFTokenizer", "path": _TOKENIZER},
        **{key: defaults[key] for key in ("chat_template_args", "chat_template_date")},
    }
