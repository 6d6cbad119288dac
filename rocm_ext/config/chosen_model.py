"""The model that a command samples from or measures, named by a config, a run's output folder or a model's folder."""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open

from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.hub import is_hub_name
from rocm_ext.base.types import Config, Json
from rocm_ext.config.components import COMPONENT, check_from_folder
from rocm_ext.config.layers import (
    by_key,
    defaults,
    find,
    load,
    nothing_required,
    read,
    recipe_of,
    requested_hardware,
)
from rocm_ext.config.model_folder import (
    FROM_CHECKPOINT,
    check_model_folder,
    complete,
    names_layer,
    seen_from_here,
)

BASE = "base"  # the value of ``teacher`` that stands for the model in training without its adapter
_LOCAL = "rocm_ext.sampling.LocalEngine"
_OF_TRAINING = ("lr_scheduler", "metric_logger", "profiler")
_PATTERNS = ("rank_pattern", "alpha_pattern")
# Keys of adapter_config.json -> arguments of from_checkpoint
_SAME = ("lora_alpha", *_PATTERNS, "use_dora", "target_modules", "target_parameters")
_ADAPTER = {
    "r": "lora_rank",
    "trainable_token_indices": "trainable_tokens",
    **{key: key for key in _SAME},
}


@dataclass(frozen=True)
class ChosenModel:
    """A model with its settings.

    Attributes:
        name: name or file of the config, or the model's folder.
        adapter: PEFT folder. None for the model as the config starts from it.
        content: keys of a run's config, or of a config without a file. None if ``name`` is a config.
        run: whether the user named a run's output folder.
    """

    name: str
    adapter: Path | None
    content: Config | None = None
    run: bool = False

    @property
    def has_file(self) -> bool:
        """Whether ``name`` is a config."""
        return self.run or self.content is None

    def recipe(self, overrides: Iterable[str]) -> registry.Recipe:
        """Return the config's recipe; for a model, RAFT."""
        if self.has_file:
            return recipe_of(self.name, overrides)
        return registry.find(registry.RAFT)

    def hardware(self, overrides: Iterable[str]) -> str:
        """Return the value of ``hardware`` that :meth:`load` would resolve."""
        if self.has_file:
            return requested_hardware(self.name, overrides)
        return by_key(overrides).get("hardware", "auto")

    def load(self, overrides: Iterable[str] = ()) -> DictConfig:
        """Return the config, which starts from :attr:`adapter`, if set; errors as :func:`rocm_ext.config.load`."""
        recipe = self.recipe(overrides)
        content = self.content
        if content and self.run:
            # its config also has the user's variables, which nothing refers to any more
            known = defaults(recipe)
            content = {key: value for key, value in content.items() if key in known}
        cfg = load(recipe, self.name, overrides, content)
        if self.has_file:
            check_model_folder(cfg, None if self.run else find(self.name))
        if self.adapter is not None:
            cfg.checkpointer.adapter_checkpoint = str(self.adapter)
            cfg.use_rslora = None  # as the adapter was trained
        return cfg


def find_target(
    name: str, adapter: Path | None, trusted: bool = False, unused: Collection[str] = ()
) -> ChosenModel:
    """Find the model that the user named.

    Args:
        name: a config of this library or a file; the ``output_dir`` of a run, which stands for its adapter; a folder
            with a model in Hugging Face's format; a GGUF file; or a model's name on the hub.
        adapter: PEFT folder that replaces the run's adapter.
        trusted: whether a run's config may name any component, see :func:`rocm_ext.config.check_from_folder`.
        unused: further keys of a run's config that the command ignores, as it ignores keys that only training reads.

    Raises:
        UserError: nothing has this name, the folder is of another kind, or its config could run code.
    """
    folder = Path(name)
    if adapter is not None:
        _read_adapter(adapter)
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return _model(name, adapter)
        if (folder / "adapter_config.json").is_file():
            base = _read_adapter(folder).get("base_model_name_or_path") or "MODEL"
            raise UserError(
                f"{folder} is an adapter; name its model, too: {base} --adapter {folder}"
            )
        if (folder / "config.yaml").is_file():
            return _run(folder, adapter, trusted, unused)
        if any(folder.glob("*.gguf")):
            return _model(name, adapter)
        raise UserError(
            f"{folder} holds neither a model (config.json) nor a run (config.yaml); name one of these or a config"
        )
    if is_hub_name(name) or (folder.suffix.lower() == ".gguf" and folder.is_file()):
        return _model(name, adapter)
    try:
        find(name)
    except UserError as error:
        raise UserError(f"{error}, and there is no such folder") from error
    return ChosenModel(name, adapter)


def _run(folder: Path, adapter: Path | None, trusted: bool, unused: Collection[str]) -> ChosenModel:
    """Return the result of a run: its ``adapter``."""
    if adapter is None and not (folder / "adapter" / "adapter_config.json").is_file():
        hint = "it has no checkpoint either"
        saved = list(folder.glob("checkpoints/*/**/adapter_config.json"))
        if saved:
            newest = max(saved, key=lambda path: path.stat().st_mtime)
            hint = f"--adapter {newest.parent} is its newest checkpoint"
        raise UserError(f"the run in {folder} has no adapter yet; {hint}")
    file = folder / "config.yaml"
    content = read(file)
    for key in (*_OF_TRAINING, *unused):
        content.pop(key, None)
    content = seen_from_here(content, folder)
    if not trusted:
        check_from_folder(content, file)
    return ChosenModel(str(file), adapter or folder / "adapter", content, run=True)


def _matching(pattern: Any, adapter: Path) -> Any:
    """Return a pattern without the keys that match no layer of the adapter: PEFT ignores them."""
    try:
        with safe_open(adapter / "adapter_model.safetensors", "np") as file:
            names = list(file.keys())
        layers = [name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names]
        matching = {}
        for key, value in pattern.items():
            if any(names_layer(key, layer) for layer in layers):
                matching[key] = value
        return matching
    except Exception:  # reading the adapter reports what is wrong with it
        return pattern


def _model(name: str, adapter: Path | None) -> ChosenModel:
    model: Config = {COMPONENT: FROM_CHECKPOINT, "checkpoint_dir": name, "lora_rank": 1}
    if adapter is not None:
        settings = _read_adapter(adapter)
        for theirs, ours in _ADAPTER.items():
            value = settings.get(theirs)
            if value and ours in _PATTERNS and not settings.get("target_parameters"):
                value = _matching(value, adapter)
            no_module = ours == "target_modules" and value == []  # experts alone may have LoRA
            if value or no_module:
                model[ours] = value
        tokens = model.get("trainable_tokens")
        if isinstance(tokens, list):  # PEFT's lists are of the embeddings alone
            model["trainable_tokens"] = {"embed_tokens": tokens}
    optimizer = {COMPONENT: "torch.optim.AdamW"}  # the memory plan counts one
    return ChosenModel(
        name, adapter, {"recipe": registry.RAFT, "model": model, "optimizer": optimizer}
    )


def _read_adapter(folder: Path) -> Json:
    path = folder / "adapter_config.json"
    if folder.is_file():
        raise UserError(f"the adapter {folder} is a file; name its folder, which holds {path.name}")
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise UserError(f"no adapter in {folder}: {path.name} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content


def sampling_config(cfg: DictConfig) -> DictConfig:
    """Convert a config of any recipe to RAFT's: same model, data keys and machine, RAFT's defaults, no ``prompts``."""
    content: Any = OmegaConf.to_container(cfg)
    known = nothing_required(defaults(registry.RAFT))
    for key in known.keys() & content.keys():
        known[key] = content[key]
    return OmegaConf.create(known | {"recipe": registry.RAFT, "prompts": None})


def sample_here(cfg: DictConfig) -> None:
    """Make a RAFT config sample in this process instead of on servers."""
    if cfg.engine[COMPONENT] != _LOCAL:
        cfg.engine = {COMPONENT: _LOCAL}


def is_server(teacher: str) -> bool:
    """Return whether the key ``teacher`` names a server."""
    return teacher.startswith(("http://", "https://"))


def teacher_config(cfg: DictConfig, training: DictConfig) -> DictConfig:
    """Return the config of a teacher that is another model than the learner.

    ``cfg`` is a config of ``distil_rocm``; ``training``, the learner's, has the machine's settings.
    """
    folder = Path(cfg.teacher)
    is_model = (folder / "config.json").is_file()
    if (folder / "adapter_config.json").is_file() and not is_model:
        raise UserError(
            f"teacher {cfg.teacher} is an adapter; set teacher_adapter to it, and teacher to its base"
        )
    adapter = Path(cfg.teacher_adapter) if cfg.teacher_adapter else None
    model: Any = _model(cfg.teacher, adapter).content
    content: Any = OmegaConf.to_container(training)
    content |= {
        "model": {**model["model"], "quantize_base": cfg.teacher_quantize_base},
        "checkpointer": {},
        "tokenizer": {},
        "loss": {COMPONENT: "rocm_ext.losses.CrossEntropy"},
        "startup_checks": False,
        "use_rslora": None,
        "compile": False,
        "enable_activation_offloading": False,
        "save_adapter_weights_only": True,
    }
    complete(content, {})
    made = OmegaConf.create(content)
    made.checkpointer.adapter_checkpoint = None if adapter is None else str(adapter)
    OmegaConf.resolve(made)
    return made
