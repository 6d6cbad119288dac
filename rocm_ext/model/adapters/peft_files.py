"""LoRA adapters in PEFT's format: config and weights; settings that this library does not compute are refused."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path, PurePath
from pickle import UnpicklingError
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.hub import REPO_ID, hub_name
from rocm_ext.base.kinds import JSON_SWITCH, NULL, Kind, integer, number
from rocm_ext.base.types import Json
from rocm_ext.config.checks.training import PATTERNS
from rocm_ext.model.adapters import peft_experts
from rocm_ext.model.decoder import Decoder
from rocm_ext.model.lora import (
    Dora,
    ExpertLora,
    Sizes,
    adapter_parameters,
    adapters,
    described,
    rank_and_alpha,
    scale_of,
)
from rocm_ext.model.token_rows import EMBEDDINGS, TokenRows, by_layer, layer_names, trained_tokens
from rocm_ext.model.weights.checkpointer import HF

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ROWS = ".token_adapter.trainable_tokens_delta"  # rows, and not differences, in spite of the name
_PARTS = {
    ".lora_a.weight": ".lora_A.weight",
    ".lora_b.weight": ".lora_B.weight",
    ".magnitude": ".lora_magnitude_vector",
    f".{TokenRows.NAME}.weight": ROWS,
}
_PARTS_BACK = {theirs: ours for ours, theirs in _PARTS.items()}
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
_NAMES = Kind(lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value), ("a list of names",))
_OPTIONAL = {
    "use_rslora": JSON_SWITCH,
    "use_dora": JSON_SWITCH,
    "target_modules": _NAMES | Kind(lambda value: isinstance(value, str), ("a pattern",)),
    "target_parameters": _NAMES,
    "trainable_token_indices": Kind(
        lambda value: all(map(_are_ids, value.values() if isinstance(value, dict) else [value])),
        ("different ids of tokens, or a list of such for each layer",),
    ),
    "peft_version": Kind(lambda value: isinstance(value, str) and len(value) <= 100, ("a version",)),
    "base_model_name_or_path": Kind(
        lambda value: isinstance(value, str) and value.isprintable() and all(len(n) <= 255 for n in value.split("/")),
        ("a name on the hub or a folder",),
    ),
}
_EXPECTED = {
    "r": integer(1, 2**16),
    "lora_alpha": number(lambda value: abs(value) <= 1e6, "a number, at most a million"),
    **{key: kind | NULL for key, kind in _OPTIONAL.items()},
    **PATTERNS,
}


def _are_ids(value: Any) -> bool:
    ids = isinstance(value, list) and all(type(number) is int and 0 <= number < 2**31 for number in value)
    return ids and bool(value) and len(set(value)) == len(value)


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
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise UserError(f"no adapter in {folder}: {ADAPTER_CONFIG} is missing") from error
        except (ValueError, OSError, RecursionError) as error:
            raise UserError(f"cannot read the adapter in {folder}: {ADAPTER_CONFIG}: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"cannot read the adapter in {folder}: {ADAPTER_CONFIG} must hold a JSON object")
        _refuse(folder, _not_computed(config))
        odd = ((key, kind) for key, kind in _EXPECTED.items() if not kind.fits(config.get(key)))
        refuse(f"{path} has {_short(key, config.get(key))}; expected {kind}" for key, kind in odd)
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
        """Return the trained tokens of ``layer``, named as in PEFT's tensors; []: it has none."""
        if len(self.tokens) == 1:  # embeddings may have any name
            return next(iter(self.tokens.values()))
        return next((ids for end, ids in self.tokens.items() if layer.endswith(end)), [])

    def check(self, folder: Path, decoder: Any, model_type: str) -> None:
        """Check that ``decoder`` computes the same function with the weights of the adapter in ``folder``.

        ``model_type`` is torchtune's ModelType name.

        Raises:
            UserError: r or alpha of a layer, rsLoRA, DoRA, trained tokens or adapted experts differ; the message gives
                the settings for the run's config.
        """
        _, layer = next(adapters(decoder))
        sizes = _sizes(decoder, model_type)
        ours, theirs = described(sizes), described({name: self.of(name.removesuffix(".weight")) for name in sizes})
        foreign = [] if decoder.renames else [_short(key, theirs[key]) for key in PATTERNS if theirs[key]]
        if self.tokens and decoder.renames is None:
            foreign.append(_short("trainable_token_indices", dict(self.tokens)))
        if self.parameters and not decoder.published_modules:  # native models have no experts
            foreign.append(f"target_parameters={list(self.parameters)}")
        _refuse(folder, foreign)  # torchtune's builders have no such keys
        tokens, trained = by_layer(decoder, self.tokens), trained_tokens(decoder)
        rows: list[tuple[str, Any, str, Any]] = [
            *((key, theirs[key], f"model.{'lora_rank' if key == 'r' else key}", ours[key]) for key in ours),
            ("use_rslora", self.rslora, "use_rslora", layer.rslora),
            ("use_dora", self.dora, "model.use_dora", isinstance(layer, Dora)),
            ("trainable_token_indices", tokens or None, "model.trainable_tokens", trained or None),
        ]
        if wrong := [row for row in rows if row[1] != row[3]]:
            raise UserError(
                f"adapter {folder} has {', '.join(_short(name, theirs) for name, theirs, *_ in wrong)}; "
                f"the config has {', '.join(_short(key, ours) for *_, key, ours in wrong)}. "
                f"Set {' '.join(_option(key, theirs) for _, theirs, key, _ in wrong)}"
            )
        adapted, experts = peft_experts.matching(decoder, self.parameters), peft_experts.expert_loras(decoder).keys()
        every = experts | {f"{name}.weight" for name in peft_experts.linears(decoder)}
        if not experts <= adapted <= every or (self.parameters and not adapted):
            named = peft_experts.target_parameters(decoder) or None
            raise UserError(
                f"adapter {folder} has target_parameters={list(self.parameters)}; the config has {named}. "
                f"Set model.target_parameters={list(self.parameters) or None}"
            )

    def other_base(self, folder: Path, base: str) -> str | None:
        """Return a warning if the adapter names another base model than the run's, ``base``; None: the names agree.

        Hub names and folders are equal if their last parts are: ``Qwen/Qwen2.5-7B`` and ``models/Qwen2.5-7B``.
        """
        if not self.base_model or _last(self.base_model) == _last(base):
            return None
        return (
            f"adapter {folder} was trained on {self.base_model}, this run's base model is {base}; "
            "if these are different models, its answers are wrong"
        )


def _refuse(folder: Path, settings: list[str]) -> None:
    if settings:
        raise UserError(
            f"adapter {folder} has {', '.join(settings)}, which this library does not compute; merge it into the "
            "base model with PEFT (merge_and_unload) and start from the merged model"
        )


def _not_computed(config: Json) -> list[str]:
    foreign = [_short(key, value) for key, value in config.items() if key not in _FREE and value]
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        foreign.insert(0, _short("peft_type", kind))
    if (bias := config.get("bias", "none")) != "none":
        foreign.append(_short("bias", bias))
    if (init := config.get("init_lora_weights", True)) not in _KEEP_BASE:
        foreign.append(_short("init_lora_weights", init))
    return foreign


def _short(key: str, value: Any) -> str:
    text = " ".join(f"{key}={value!r}".split())
    return text if len(text) <= 80 else text[:77] + "..."


def _option(key: str, value: Any) -> str:
    """Return ``key=value``, quoted for a shell."""
    return f"'{key}={json.dumps(value or None)}'" if isinstance(value, dict) else f"{key}={value}"


def _last(name: str) -> str:
    parts = [part for part in PurePath(name.replace("\\", "/")).parts if part not in ("/", ".", "..")]
    cached = [part for part in parts if part.startswith("models--")]  # the hub's cache: models--OWNER--NAME/snapshots/…
    return (cached[-1].rsplit("--", 1)[-1] if cached else parts[-1] if parts else "").lower()


def check_checkpointer(cfg: DictConfig, decoder: Decoder) -> None:
    """Refuse a model family without PEFT export, and weights with another row order or folder than the model's."""
    model_type, problem = cfg.checkpointer.model_type, ""
    read, built = cfg.checkpointer.get("checkpoint_dir"), cfg.model.get("checkpoint_dir")
    if (model_type == HF) != (decoder.renames is not None):
        problem = (
            f"model_type is {model_type}: rocm_ext.model.HFCheckpointer reads the weights of "
            "rocm_ext.model.from_checkpoint, torchtune's checkpointers those of torchtune's builders. "
            "With from_checkpoint, leave checkpointer and tokenizer out"
        )
    elif model_type == HF and Path(read).resolve() != Path(built).resolve():  # RoPE and norms may differ
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
    return {name: p.detach().cpu().clone() for name, p in adapter_parameters(decoder).items()}


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors by name, in hex."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


def write_adapter(folder: Path, decoder: Decoder, model_type: str, base_model: str) -> None:
    """Write ``decoder``'s adapter as a PEFT folder, which ``PeftModel.from_pretrained(base, folder)`` loads.

    Args:
        folder: existing folder that receives the two files.
        decoder: model with adapters.
        model_type: torchtune's ModelType name; it decides the row order of q and k.
        base_model: hub name or folder of the base model, for PEFT.
    """
    peft = to_peft(adapter_state(decoder), decoder, model_type)
    save_file({name: t.contiguous() for name, t in peft.items()}, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    layer = next(layer for _, layer in adapters(decoder))
    parameters = peft_experts.target_parameters(decoder)
    adapted = {name[len(PREFIX) :].rsplit(".lora_", 1)[0] for name in peft if not name.endswith(ROWS)}
    adapted -= peft_experts.modules(decoder)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        **described(_sizes(decoder, model_type)),
        "lora_dropout": 0.0 if parameters else getattr(layer.dropout, "p", 0.0),  # PEFT refuses it with parameters
        "target_modules": _targets(adapted, decoder),
        "use_dora": isinstance(layer, Dora),
        "use_rslora": layer.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if parameters:
        config |= {"target_parameters": parameters, "peft_version": peft_experts.layout_version()}
    if tokens := trained_tokens(decoder):
        by_end = {layer_names(decoder)[name].rpartition(".")[2]: ids for name, ids in tokens.items()}
        config["trainable_token_indices"] = tokens[EMBEDDINGS] if tokens.keys() == {EMBEDDINGS} else by_end
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def _sizes(decoder: Decoder, model_type: str) -> dict[str, tuple[int, float]]:
    """Return r and alpha of the adapted layers, by the names that patterns match in PEFT."""
    convert, by_weight = _converter(decoder, model_type, to_files=True), peft_experts.by_parameter(decoder)
    sizes = {}
    for name, layer in adapters(decoder):
        if isinstance(layer, ExpertLora):
            theirs = name.removesuffix(ExpertLora.SUFFIX)
        else:
            theirs, _ = convert(f"{name}.weight", layer.lora_a.weight, False)
            theirs = theirs if name in by_weight else theirs.removesuffix(".weight")
        sizes[theirs] = rank_and_alpha(layer)
    return sizes


def _targets(adapted: set[str], decoder: Decoder) -> list[str]:
    """Return ``target_modules``: the ends of the adapted layers' names, or full names if other modules end alike."""
    ends = {name.rpartition(".")[2] for name in adapted}
    others = decoder.published_modules - adapted
    return sorted(adapted if any(name.rpartition(".")[2] in ends for name in others) else ends)


def config_folder(source: Path) -> Path | None:
    """Return the folder with an adapter's ``adapter_config.json``: a PEFT folder, or the folder of torchtune's file.

    None: there is no such config for torchtune's file, so its alpha is unknown.
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
    if (folder := config_folder(source)) is not None:
        PeftConfig.read(folder).check(folder, decoder, model_type)
    if source.is_file():
        return _finite_tensors(source)
    config, state = read_peft(source)
    if not config.parameters:
        _check_targets(source, state, decoder, model_type)
    try:
        return from_peft(state, decoder, model_type, config)
    except UserError as error:
        raise UserError(f"adapter {source} does not fit model: {error}") from error


def _check_targets(folder: Path, state: Mapping[str, Tensor], decoder: Decoder, model_type: str) -> None:
    """Check that adapter and model adapt the same kinds of layers."""
    layers = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    theirs = sorted({layer.rpartition(".")[2] for layer in layers})
    ours = sorted({layer.removesuffix(".weight").rpartition(".")[2] for layer in _sizes(decoder, model_type)})
    if not theirs or theirs == ours:
        return
    if decoder.renames is None:  # torchtune's builders
        keys = "model.lora_attn_modules, model.apply_lora_to_mlp and model.apply_lora_to_output for these"
    else:
        keys = f"model.target_modules=[{','.join(theirs)}]"
    raise UserError(f"adapter {folder} adapts {', '.join(theirs)}; the config adapts {', '.join(ours)}. Set {keys}")


def read_peft(folder: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """Read the two files of a PEFT folder, and check that they fit.

    Returns:
        The config, and the weights by PEFT's names, with rows of tokens in the order of their ids.
    """
    config, state = PeftConfig.read(folder), _finite_tensors(folder)
    if not state:
        raise UserError(f"adapter {folder} has no weights in {ADAPTER_WEIGHTS}; write it again")
    refuse(f"adapter {folder} is damaged: {problem}" for problem in _damage(config, state))
    for name in [name for name in state if name.endswith(ROWS)]:
        ids = config.ids(name.removesuffix(ROWS))
        state[name] = state[name][sorted(range(len(ids)), key=ids.__getitem__)]
    return config, state


def _damage(config: PeftConfig, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the differences between an adapter's weights, by PEFT's names, and its config."""
    rows = [name for name in state if name.endswith(ROWS)]
    for name in rows or [ROWS] * bool(config.tokens):
        ids, shape = config.ids(name.removesuffix(ROWS)), list(state[name].shape) if name in state else "missing"
        if shape == "missing" or len(shape) != 2 or shape[0] != len(ids):
            yield f"{name} is {shape}; expected a row for each of {ids}"
    needed = [".lora_A.weight", ".lora_B.weight", *([".lora_magnitude_vector"] if config.dora else [])]
    of_experts = {config.rank, *config.rank_pattern.values()} if config.parameters else set[int]()
    for weight, parts in updates_by_weight(state).items():
        if parts.keys() == {ROWS}:
            continue
        layer = weight.removesuffix(".weight")
        rank, _ = config.of(layer)
        if odd := {*needed} ^ parts.keys():
            kind = "unexpected" if odd & parts.keys() else "missing"
            yield f"{kind} {layer}{min(odd)}"
            continue
        a, b, *norms = (list(parts[part].shape) for part in needed)
        many = a and a[0] and any(a[0] % r == 0 for r in of_experts)  # r rows per expert
        inner = a[0] if many else rank
        if len(a) != 2 or len(b) != 2 or a[0] != inner or b[1] != inner or any(norm != b[:1] for norm in norms):
            yield (
                f"{layer} has weights {', '.join(map(str, [a, b, *norms]))}; with r={rank}, expected [{rank}, inputs], "
                f"[outputs, {rank}]{', [outputs]' if norms else ''}"
            )


def _finite_tensors(source: Path) -> dict[str, Tensor]:
    """Read the tensors of a PEFT folder or of torchtune's file."""
    try:
        if source.is_file():
            state = torch.load(source, map_location="cpu", weights_only=True)
        else:
            state = load_file(source / ADAPTER_WEIGHTS)
    except FileNotFoundError as error:
        raise UserError(f"no adapter in {source}: expected {ADAPTER_WEIGHTS} and {ADAPTER_CONFIG}") from error
    except (SafetensorError, UnpicklingError, ValueError, RuntimeError, OSError) as error:
        cause = "it is no file of tensors" if isinstance(error, UnpicklingError) else str(error).split("\n")[0]
        raise UserError(f"cannot read the adapter in {source}: {cause}; expected a PEFT folder") from error
    if not isinstance(state, dict) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise UserError(f"cannot read the adapter in {source}: expected tensors by name")
    for name, tensor in state.items():
        if not tensor.is_floating_point() or not tensor.float().isfinite().all():
            problem = "has values that are not finite" if tensor.is_floating_point() else f"is {tensor.dtype}"
            raise UserError(f"adapter {source} is damaged: {name} {problem}; expected floating-point numbers")
    return state


def to_peft(state: Mapping[str, Tensor], decoder: Decoder, model_type: str) -> dict[str, Tensor]:
    """Convert adapter weights from torchtune's names and row order to PEFT's."""
    result = peft_experts.to_peft(state, decoder)
    others = {name: tensor for name, tensor in state.items() if f"{ExpertLora.SUFFIX}." not in name}
    result |= _converted(others, _PARTS, _converter(decoder, model_type, to_files=True))
    return {PREFIX + name: tensor for name, tensor in result.items()}


def from_peft(state: Mapping[str, Tensor], decoder: Decoder, model_type: str, config: PeftConfig) -> dict[str, Tensor]:
    """Convert adapter weights from PEFT's names and row order to torchtune's."""
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}
    result, used = peft_experts.from_peft(bare, decoder, config)
    others = {name: tensor for name, tensor in bare.items() if name not in used}
    return result | _converted(others, _PARTS_BACK, _converter(decoder, model_type, to_files=False))


Convert = Callable[[str, Tensor, bool], tuple[str, Tensor]]


def _converted(state: Mapping[str, Tensor], parts: Mapping[str, str], convert: Convert) -> dict[str, Tensor]:
    result = {}
    for name, tensor in state.items():
        weight, part = _split_part(name, parts)
        # the converters reorder output rows; lora_b and m have output rows, lora_a does not
        new, value = convert(weight, tensor, "lora_a" not in part.lower())
        result[new.removesuffix(".weight") + parts[part]] = value
    return result


def _split_part(name: str, parts: Iterable[str]) -> tuple[str, str]:
    """Return the name of the base weight, and the suffix of the adapter's part."""
    if (part := next(filter(name.endswith, parts), None)) is None:
        raise UserError(f"adapter weight {name} is neither LoRA nor DoRA")
    return name.removesuffix(part) + ".weight", part


def _converter(decoder: Decoder, model_type: str, to_files: bool) -> Convert:
    """Return a function that converts one tensor to Hugging Face's names and order of rows, or back.

    Most families store the rows of q and k as rotary pairs in torchtune and as halves in Hugging Face's format, so
    torchtune's converters reorder these rows. Qwen2 and native decoders use halves. torchtune's PEFT export wrongly
    reorders Qwen2's adapters; these converters do not.
    """
    renames = decoder.renames

    def convert(name: str, tensor: Tensor, has_rows: bool) -> tuple[str, Tensor]:
        try:
            return by_torchtune(name, tensor, has_rows) if renames is None else (renames[not to_files](name), tensor)
        except Exception as error:  # torchtune raises a bare Exception for unknown names, renames a KeyError
            raise UserError(f"{name} {list(tensor.shape)} belongs to no layer of such a model") from error

    if renames is not None:
        return convert
    from torchtune.models import convert_weights
    from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune, gemma2_tune_to_hf
    from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune, qwen2_tune_to_hf

    both = {"QWEN2": (qwen2_tune_to_hf, qwen2_hf_to_tune), "GEMMA2": (gemma2_tune_to_hf, gemma2_hf_to_tune)}
    function: Any = both.get(model_type, (convert_weights.tune_to_hf, convert_weights.hf_to_tune))[not to_files]
    attention: Any = decoder.layers[0].attn
    heads = {"num_heads": attention.num_heads, "num_kv_heads": attention.num_kv_heads, "head_dim": attention.head_dim}

    def by_torchtune(name: str, tensor: Tensor, has_rows: bool) -> tuple[str, Tensor]:
        if not has_rows:  # only the name changes; the converter needs a tensor with the rows of the layer
            rows = heads["num_kv_heads"] if "k_proj" in name else heads["num_heads"]
            ((new, _),) = function({name: torch.empty(rows * heads["head_dim"], 1)}, dim=1, **heads).items()
            return new, tensor
        columns = tensor.reshape(tensor.shape[0], -1)
        ((new, value),) = function({name: columns}, dim=columns.shape[1], **heads).items()
        return new, value.reshape(tensor.shape)

    return convert


def base_model_name(folder: Path) -> str:
    """Name of the base model for PEFT: its hub name (from the hub's cache or `tune download`), else its path."""
    if name := hub_name(folder):
        return name
    try:
        return json.loads((folder / REPO_ID).read_text())["repo_id"]
    except (OSError, ValueError, KeyError):
        return str(folder.resolve())


def updates_by_weight(adapter: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group a PEFT adapter's weights by the base weight they change, then by part."""
    updates: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        weight, part = _split_part(name, _PARTS_BACK)
        updates.setdefault(weight.removeprefix(PREFIX), {})[part] = tensor
    return updates
