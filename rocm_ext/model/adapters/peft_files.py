"""LoRA adapters in PEFT's format: config and weights; settings that this library does not compute are refused."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import REPO_ID, hub_name
from rocm_ext.base.kinds import JSON_SWITCH, NULL, Kind, integer, number
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import PATTERNS
from rocm_ext.model.adapters import peft_layers
from rocm_ext.model.adapters.peft_layers import (
    PeftLayer,
    from_peft,
    names_of,
    sizes_of,
    to_peft,
    trained_layers,
    updates_by_weight,
)
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import (
    Adapter,
    Dora,
    ExpertLora,
    Sizes,
    adapter_parameters,
    described,
    scale_of,
)
from rocm_ext.model.names import EMBEDDINGS, LORA_A, LORA_B, MAGNITUDE, ROWS, last_part
from rocm_ext.model.token_rows import TokenRows, by_layer, trained_tokens
from rocm_ext.model.weights.checkpointer import HF, State

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NO_PEFT = ("PHI3_MINI", "PHI4", "LLAMA3_VISION", "REWARD", "CLIP_TEXT", "T5_ENCODER")
# Keys that do not change an adapter's function once its weights are known, or that `read` checks
_FREE = frozenset(
    """
    r lora_alpha use_rslora use_dora bias init_lora_weights base_model_name_or_path peft_type task_type auto_mapping
    revision peft_version inference_mode lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
    target_parameters rank_pattern alpha_pattern trainable_token_indices ensure_weight_tying
    megatron_config megatron_core loftq_config eva_config corda_config qalora_group_size runtime_config
    """.split()  # noqa: SIM905
)


def _is_text(value) -> bool:
    return isinstance(value, str)


_NAMES = Kind(
    lambda value: isinstance(value, list) and all(map(_is_text, value)), ("a list of names",)
)
_OPTIONAL = {
    "use_rslora": JSON_SWITCH,
    "use_dora": JSON_SWITCH,
    "target_modules": _NAMES | Kind(_is_text, ("a pattern",)),
    "target_parameters": _NAMES,
    "trainable_token_indices": Kind(
        lambda value: all(map(_are_ids, value.values() if isinstance(value, dict) else [value])),
        ("different ids of tokens, or a list of such for each layer",),
    ),
    "peft_version": Kind(lambda value: _is_text(value) and len(value) <= 100, ("a version",)),
    "base_model_name_or_path": Kind(
        lambda value: (
            _is_text(value) and value.isprintable() and max(map(len, value.split("/"))) <= 255
        ),
        ("a name on the hub or a folder",),
    ),
}
_EXPECTED = {
    "r": integer(1, 2**16),
    "lora_alpha": number(lambda value: abs(value) <= 1e6, "a number, at most a million"),
    **{key: kind | NULL for key, kind in _OPTIONAL.items()},
    **PATTERNS,
}


def _are_ids(value) -> bool:
    if not isinstance(value, list) or not value:
        return False
    in_range = all(type(number) is int and 0 <= number < 2**31 for number in value)
    return in_range and len(set(value)) == len(value)


# Other initialisations of an adapter (PiSSA, OLoRA, CorDA, LoftQ) also change the base model.
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, kw_only=True)
class PeftConfig(Sizes):
    """The part of an ``adapter_config.json`` that decides the adapter's function.

    Attributes:
        rslora: whether the factor is alpha / sqrt(r) (arXiv:2312.03732) instead of alpha / r.
        dora: whether the adapter has DoRA's magnitudes.
        base_model: name or folder of the base model; empty if the file has none.
        version: PEFT's version; empty if the file has none.
        tokens: PEFT's ``trainable_token_indices``, ids by the ends of layers' names.
    """

    rslora: bool
    dora: bool
    base_model: str
    version: str = ""
    tokens: Mapping[str, list[int]] = field(default_factory=dict)

    def scale(self, name: str) -> float:
        """Return the factor of B A of the layer ``name``, see :meth:`Sizes.of`."""
        rank, alpha = self.of(name)
        return scale_of(alpha, rank, self.rslora)

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read a folder's ``adapter_config.json``.

        Raises:
            UserError: the file is missing or damaged, a value has another type or is out of range, or this library does
                not compute a setting; the message names it.
        """
        path = folder / ADAPTER_CONFIG
        with explain_errors(f"cannot read the adapter in {folder}"):
            if not path.exists():
                raise UserError(f"no adapter in {folder}: {ADAPTER_CONFIG} is missing")
            config = json_object(path.read_bytes())
        if config is None:
            raise UserError(
                f"cannot read the adapter in {folder}: {ADAPTER_CONFIG} must hold a JSON object"
            )
        _refuse(folder, _not_computed(config))
        for key, kind in _EXPECTED.items():
            value = config.get(key)
            if not kind.fits(value):
                raise UserError(f"{path} has {_short(key, value)}; expected {kind}")
        tokens = config.get("trainable_token_indices") or {}
        return cls(
            rank=config["r"],
            alpha=config["lora_alpha"],
            rank_pattern=config.get("rank_pattern") or {},
            alpha_pattern=config.get("alpha_pattern") or {},
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            base_model=config.get("base_model_name_or_path") or "",
            parameters=tuple(config.get("target_parameters") or ()),
            version=config.get("peft_version") or "",
            tokens=tokens if isinstance(tokens, dict) else {EMBEDDINGS: tokens},
        )

    def ids(self, layer: str) -> list[int]:
        """Return the trained tokens of ``layer``, named as in PEFT's tensors, or [] if it has none."""
        if len(self.tokens) == 1:  # embeddings may have any name
            return next(iter(self.tokens.values()))
        for end, ids in self.tokens.items():
            if layer.endswith(end):
                return ids
        return []

    def check(self, folder: Path, decoder: Decoder, layers: list[PeftLayer]) -> None:
        """Check that ``decoder`` computes the same function with the weights of the adapter in ``folder``.

        Args:
            folder: the adapter's folder, for the message.
            decoder: the model that takes the adapter.
            layers: its trained layers.

        Raises:
            UserError: r or alpha of a layer, rsLoRA, DoRA, trained tokens or adapted experts differ; the message gives
                the settings for the run's config.
        """
        sizes = sizes_of(layers)
        own_sizes = {name: self.of(name.removesuffix(".weight")) for name in sizes}
        theirs = described(own_sizes)
        self._check_patterns(folder, decoder, theirs)
        theirs |= {
            "use_rslora": self.rslora,
            "use_dora": self.dora,
            "trainable_token_indices": by_layer(decoder, self.tokens) or None,
        }
        layer = _any_adapted(layers)
        ours = described(sizes) | {
            "use_rslora": layer.rslora,
            "use_dora": isinstance(layer, Dora),
            "trainable_token_indices": trained_tokens(decoder) or None,
        }
        there = []
        here = []
        options = []
        for name, value in theirs.items():
            if value != ours[name]:
                key = _RUN_KEYS[name]
                there.append(_short(name, value))
                here.append(_short(key, ours[name]))
                options.append(_option(key, value))
        if options:
            raise UserError(
                f"adapter {folder} has {', '.join(there)}; the config has {', '.join(here)}. "
                f"Set {' '.join(options)}"
            )
        self._check_parameters(folder, decoder, layers)

    def _check_patterns(self, folder: Path, decoder: Decoder, theirs: Mapping[str, Any]) -> None:
        """Refuse settings for which torchtune's builders and native decoders have no key."""
        foreign = []
        if decoder.names is None:
            foreign += [_short(key, theirs[key]) for key in PATTERNS if theirs[key]]
            if self.tokens:
                foreign.append(_short("trainable_token_indices", dict(self.tokens)))
        if self.parameters and not decoder.published_modules:  # native models have no experts
            foreign.append(f"target_parameters={list(self.parameters)}")
        _refuse(folder, foreign)

    def _check_parameters(self, folder: Path, decoder: Decoder, layers: list[PeftLayer]) -> None:
        """Check that ``target_parameters`` names all adapted experts, and besides them only adapted layers."""
        named = peft_layers.matching(decoder, self.parameters)
        adapted = {layer.weight for layer in layers if not isinstance(layer.layer, TokenRows)}
        experts = {layer.weight for layer in layers if isinstance(layer.layer, ExpertLora)}
        names_nothing = bool(self.parameters) and not named
        if not experts <= named <= adapted or names_nothing:
            expected = peft_layers.target_parameters(layers, decoder) or None
            raise UserError(
                f"adapter {folder} has target_parameters={list(self.parameters)}; the config has {expected}. "
                f"Set model.target_parameters={list(self.parameters) or None}"
            )

    def other_base(self, folder: Path, base: str) -> str | None:
        """Return a warning if the adapter names another base model than the run's, ``base``. None if the names agree.

        Hub names and folders are equal if their last parts are: ``Qwen/Qwen2.5-7B`` and ``models/Qwen2.5-7B``.
        """
        if not self.base_model or _last(self.base_model) == _last(base):
            return None
        return (
            f"adapter {folder} was trained on {self.base_model}, this run's base model is {base}; "
            "if these are different models, its answers are wrong"
        )


# keys of a run's config, by PEFT's
_RUN_KEYS = {
    "r": "model.lora_rank",
    "lora_alpha": "model.lora_alpha",
    "rank_pattern": "model.rank_pattern",
    "alpha_pattern": "model.alpha_pattern",
    "use_rslora": "use_rslora",
    "use_dora": "model.use_dora",
    "trainable_token_indices": "model.trainable_tokens",
}


def _refuse(folder: Path, settings: list[str]) -> None:
    if settings:
        raise UserError(
            f"adapter {folder} has {', '.join(settings)}, which this library does not compute; merge it into the "
            "base model with PEFT (merge_and_unload) and start from the merged model"
        )


def _not_computed(config: Json) -> list[str]:
    others = (key for key in config if key not in _FREE and config[key])
    foreign = [_short(key, config[key]) for key in others]
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        foreign.insert(0, _short("peft_type", kind))
    bias = config.get("bias", "none")
    if bias != "none":
        foreign.append(_short("bias", bias))
    init = config.get("init_lora_weights", True)
    if init not in _KEEP_BASE:
        foreign.append(_short("init_lora_weights", init))
    return foreign


def _short(key: str, value) -> str:
    text = " ".join(f"{key}={value!r}".split())
    return text if len(text) <= 80 else text[:77] + "..."


def _option(key: str, value) -> str:
    """Return ``key=value``, quoted for a shell."""
    if isinstance(value, dict):
        return f"'{key}={json.dumps(value or None)}'"
    return f"{key}={value}"


def _last(name: str) -> str:
    """The model's own name, without its owner; a folder of the hub's cache is models--OWNER--NAME/snapshots/..."""
    parts = [part for part in re.split(r"[/\\]", name) if part.strip(".")]
    cached = [part for part in parts if part.startswith("models--")]
    if cached:
        return cached[-1].rsplit("--", 1)[-1].lower()
    return parts[-1].lower() if parts else ""


def check_checkpointer(cfg: DictConfig, decoder: Decoder) -> None:
    """Refuse a model family without PEFT export, and weights with another row order or folder than the model's."""
    model_type = cfg.checkpointer.model_type
    read = cfg.checkpointer.get("checkpoint_dir")
    built = cfg.model.get("checkpoint_dir")
    problem = ""
    if (model_type == HF) != (decoder.names is not None):
        problem = (
            f"model_type is {model_type}: rocm_ext.model.HFCheckpointer reads the weights of "
            "rocm_ext.model.from_checkpoint, torchtune's checkpointers those of torchtune's builders. "
            "With from_checkpoint, leave checkpointer and tokenizer out"
        )
    # RoPE and norms may differ
    elif model_type == HF and Path(read).resolve() != Path(built).resolve():
        problem = (
            f"checkpoint_dir is {read}, but model.checkpoint_dir is {built}; set model.checkpoint_dir alone, or both "
            "to one folder"
        )
    elif model_type in _NO_PEFT:
        problem = f"model_type {model_type} has no PEFT adapter format in torchtune"
    if problem:
        raise UserError(f"checkpointer.{problem}")


def adapter_state(decoder: Decoder) -> dict[str, Tensor]:
    """Copies of the adapter's weights on the CPU, under torchtune's names."""
    parameters = adapter_parameters(decoder).items()
    return {name: peft_layers.on_cpu(parameter) for name, parameter in parameters}


def fingerprint(state: State) -> str:
    """Return the SHA-256 of tensors by name, in hex."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode())
        digest.update(tensor.float().numpy().tobytes())
    return digest.hexdigest()


def write_adapter(folder: Path, decoder: Decoder, model_type: str, base_model: str) -> None:
    """Write ``decoder``'s adapter as a PEFT folder, which ``PeftModel.from_pretrained(base, folder)`` loads.

    Args:
        folder: existing folder that receives the two files.
        decoder: model with adapters.
        model_type: torchtune's ModelType name; it decides the row order of q and k.
        base_model: hub name or folder of the base model, for PEFT.
    """
    names = names_of(decoder, model_type)
    layers = trained_layers(decoder, names)
    tensors = to_peft(layers, names)
    for name, tensor in tensors.items():
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    layer = _any_adapted(layers)
    parameters = peft_layers.target_parameters(layers, decoder)
    dropout = getattr(layer.dropout, "p", 0.0)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **described(sizes_of(layers)),
        "lora_dropout": 0.0 if parameters else dropout,  # PEFT refuses it with parameters
        "target_modules": peft_layers.target_modules(layers, decoder),
        "use_dora": isinstance(layer, Dora),
        "use_rslora": layer.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if parameters:
        config |= {"target_parameters": parameters, "peft_version": peft_layers.layout_version()}
    tokens = peft_layers.token_indices(layers)
    if tokens:
        config["trainable_token_indices"] = tokens
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _any_adapted(layers: list[PeftLayer]) -> Adapter:
    """Return one of the layers with LoRA or DoRA; all have the same settings but for r and alpha."""
    return next(layer.layer for layer in layers if not isinstance(layer.layer, TokenRows))


def config_folder(source: Path) -> Path | None:
    """Return the folder with an adapter's ``adapter_config.json``: a PEFT folder, or the folder of torchtune's file.

    The result is None if torchtune's file has no such config, so that its alpha is unknown.
    """
    if not source.is_file():
        return source
    return source.parent if (source.parent / ADAPTER_CONFIG).is_file() else None


def is_rslora(source: Path) -> bool:
    """Return whether an adapter says ``use_rslora``."""
    folder = config_folder(source)
    return folder is not None and PeftConfig.read(folder).rslora


def read_adapter(source: Path, decoder: Decoder, model_type: str) -> dict[str, Tensor]:
    """Read adapter weights, by torchtune's names, from a PEFT folder or from torchtune's ``adapter_model.pt``.

    Args:
        source: the folder or the file.
        decoder: model for the adapter; it gives rank, alpha and head shapes.
        model_type: torchtune's ModelType name; it decides the row order of q and k.

    Raises:
        UserError: the adapter is missing or damaged, has weights that are not finite or belong to no layer, or
            ``decoder`` would compute another function.
    """
    if source.is_file() and model_type == HF:
        raise UserError(
            f"adapter {source} is a file of torchtune's, whose row order this model does not have; start from a folder "
            f"in PEFT's format ({ADAPTER_CONFIG}, {ADAPTER_WEIGHTS})"
        )
    names = names_of(decoder, model_type)
    layers = trained_layers(decoder, names)
    folder = config_folder(source)
    if folder is not None:
        PeftConfig.read(folder).check(folder, decoder, layers)
    if source.is_file():
        return _finite_tensors(source)
    config, state = read_peft(source)
    if not config.parameters:
        _check_targets(source, state, decoder, layers)
    try:
        return from_peft(state, decoder, names, config)
    except UserError as error:
        raise UserError(f"adapter {source} does not fit model: {error}") from error


def _check_targets(folder: Path, state: State, decoder: Decoder, layers: list[PeftLayer]) -> None:
    """Check that adapter and model adapt the same kinds of layers."""
    layers_of_file = [name.removesuffix(LORA_A) for name in state if name.endswith(LORA_A)]
    layers_of_model = [name.removesuffix(".weight") for name in sizes_of(layers)]
    theirs = sorted(set(map(last_part, layers_of_file)))
    ours = sorted(set(map(last_part, layers_of_model)))
    if not theirs or theirs == ours:
        return
    if decoder.names is None:  # torchtune's builders
        keys = "model.lora_attn_modules, model.apply_lora_to_mlp and model.apply_lora_to_output for these"
    else:
        keys = f"model.target_modules=[{','.join(theirs)}]"
    raise UserError(
        f"adapter {folder} adapts {', '.join(theirs)}; the config adapts {', '.join(ours)}. Set {keys}"
    )


def read_peft(folder: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Read the two files of a PEFT folder, and check that they fit.

    Returns:
        The config, and the weights by PEFT's names, with rows of tokens in the order of their ids.
    """
    config = PeftConfig.read(folder)
    state = _finite_tensors(folder)
    if not state:
        raise UserError(f"adapter {folder} has no weights in {ADAPTER_WEIGHTS}; write it again")
    refuse(f"adapter {folder} is damaged: {problem}" for problem in _damage(config, state))
    for name in state:
        if name.endswith(ROWS):
            ids = config.ids(name.removesuffix(ROWS))
            order = sorted(range(len(ids)), key=ids.__getitem__)
            state[name] = state[name][order]
    return config, state


def _damage(config: PeftConfig, state: State) -> Iterator[str]:
    """Yield the differences between an adapter's weights, by PEFT's names, and its config."""
    yield from _damaged_rows(config, state)
    parts = [LORA_A, LORA_B]
    if config.dora:
        parts.append(MAGNITUDE)
    for weight, tensors in updates_by_weight(state).items():
        if tensors.keys() == {ROWS}:
            continue
        layer = weight.removesuffix(".weight")
        unexpected = tensors.keys() - {*parts}
        missing = {*parts} - tensors.keys()
        if unexpected or missing:
            kind = "unexpected" if unexpected else "missing"
            yield f"{kind} {layer}{min(unexpected | missing)}"
            continue
        shapes = [list(tensors[part].shape) for part in parts]
        if not _shapes_fit(config, layer, *shapes):
            rank, _ = config.of(layer)
            expected = f"[{rank}, inputs], [outputs, {rank}]"
            if config.dora:
                expected += ", [outputs]"
            yield f"{layer} has weights {', '.join(map(str, shapes))}; with r={rank}, expected {expected}"


def _damaged_rows(config: PeftConfig, state: State) -> Iterator[str]:
    """Yield the tensors of tokens' rows that do not fit the ids in the config."""
    names = [name for name in state if name.endswith(ROWS)]
    if config.tokens and not names:
        yield f"{ROWS} is missing; expected a row for each of {config.ids('')}"
    for name in names:
        ids = config.ids(name.removesuffix(ROWS))
        shape = list(state[name].shape)
        if len(shape) != 2 or shape[0] != len(ids):
            yield f"{name} is {shape}; expected a row for each of {ids}"


def _shapes_fit(
    config: PeftConfig, layer: str, a: list[int], b: list[int], *norms: list[int]
) -> bool:
    """Return whether A, B and DoRA's norms of a layer have shapes [r, in], [out, r] and [out]."""
    are_matrices = len(a) == len(b) == 2
    if not are_matrices or any(norm != b[:1] for norm in norms):
        return False
    inner, _ = config.of(layer)
    if config.parameters and a[0]:  # maybe r rows for each expert
        ranks = {config.rank, *config.rank_pattern.values()}
        if any(a[0] % rank == 0 for rank in ranks):
            inner = a[0]
    return a[0] == inner and b[1] == inner


def _load(file: Path) -> Any:
    """Read a file of torch; its own message would advise to run the code that the file holds."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ValueError("it is no file of tensors") from None


def _finite_tensors(source: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT folder or of torchtune's file."""
    with explain_errors(f"cannot read the adapter in {source}", "; expected a PEFT folder"):
        weights = source if source.is_file() else source / ADAPTER_WEIGHTS
        if not weights.exists():
            raise UserError(
                f"no adapter in {source}: expected {ADAPTER_WEIGHTS} and {ADAPTER_CONFIG}"
            )
        if weights == source:
            state = _load(source)
        else:
            state = load_file(weights)
    is_state = isinstance(state, dict) and all(isinstance(part, Tensor) for part in state.values())
    if not is_state:
        raise UserError(f"cannot read the adapter in {source}: expected tensors by name")
    for name, tensor in state.items():
        problem = ""
        if not tensor.is_floating_point():
            problem = f"is {tensor.dtype}"
        elif not tensor.float().isfinite().all():
            problem = "has values that are not finite"
        if problem:
            raise UserError(
                f"adapter {source} is damaged: {name} {problem}; expected floating-point numbers"
            )
    return state


def base_model_name(folder: Path) -> str:
    """Name of the base model for PEFT: its hub name (from the hub's cache or `tune download`), else its path."""
    name = hub_name(folder)
    if name:
        return name
    try:
        return json.loads((folder / REPO_ID).read_text())["repo_id"]
    except (OSError, ValueError, KeyError):
        return str(folder.resolve())
