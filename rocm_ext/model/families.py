"""Architectures of checkpoints in Hugging Face's format, by their ``config.json``.

Only keys that transformers' code for a family reads change the function of a model. This module knows all of them: it
reads a key, or refuses values that the native decoders do not compute.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import how_to_download
from rocm_ext.base.kinds import JSON_SWITCH, NOT_NEGATIVE, Kind, check
from rocm_ext.base.patterns import matches

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
ModelConfig = Mapping[str, Any]  # a model's config.json, or a block of one
# The largest sizes that are read, some ten times any model's: a damaged file must not fill the memory
_LARGEST = {
    1_000: "num_hidden_layers num_layers n_layers n_layer",
    100_000: "num_experts num_local_experts n_routed_experts moe_num_experts num_attention_heads num_key_value_heads",
    1_000_000: "hidden_size intermediate_size moe_intermediate_size shared_expert_intermediate_size head_dim n_embd",
    100_000_000: "vocab_size max_position_embeddings",
}
_MOST = {key: most for most, keys in _LARGEST.items() for key in keys.split()}


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of RoPE (arXiv:2309.00071).

    Attributes:
        fast, slow: rotations over the original positions. Dimensions with more than ``fast`` keep their frequency;
            frequencies of dimensions with fewer than ``slow`` are divided.
        rounded: whether the bounds between these dimensions are integers.
        attention: factor of cosines and sines.
    """

    fast: float
    slow: float
    rounded: bool
    attention: float


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings.

    Attributes:
        base: theta.
        kind: ``default``, ``linear``, ``llama3`` or ``yarn``.
        factor: divisor of the frequencies; ``llama3`` and ``yarn`` divide only the low ones.
        low, high: ``llama3``'s low_freq_factor and high_freq_factor.
        original: original_max_position_embeddings of ``llama3`` and ``yarn``.
        yarn: further settings of ``yarn``.
    """

    base: float
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    yarn: Yarn | None = None

    def frequencies(self, dim: int) -> Tensor:
        """Return the angles by which a position rotates the pairs of a head's ``dim`` dimensions: [dim / 2] fp32."""
        import torch  # here, because `rocm-ext rows` reads architectures alone

        exponents = torch.arange(0, dim, 2).float() / dim
        theta = 1.0 / self.base**exponents
        if self.kind == "default":
            return theta
        if self.kind == "linear":
            return theta / self.factor
        if self.yarn is not None:
            return self._interpolated(dim, theta, self.yarn)
        # Llama 3.1: low frequencies are divided, high ones stay, those between are interpolated
        wavelength = 2 * math.pi / theta
        share = (self.original / wavelength - self.low) / (self.high - self.low)
        between = (1 - share) * theta / self.factor + share * theta
        is_low = wavelength > self.original / self.low
        is_high = wavelength < self.original / self.high
        scaled = torch.where(is_low, theta / self.factor, between)
        return torch.where(is_high, theta, scaled)

    def _interpolated(self, dim: int, theta: Tensor, yarn: Yarn) -> Tensor:
        """Return YaRN's frequencies: unchanged in the first dimensions, divided in the last, interpolated between."""
        import torch

        def dimension(rotations: float) -> float:
            """Return the dimension that makes so many rotations over the original positions."""
            positions = self.original / (rotations * 2 * math.pi)
            return dim * math.log(positions) / (2 * math.log(self.base))

        first = dimension(yarn.fast)
        end = dimension(yarn.slow)
        if yarn.rounded:
            first = math.floor(first)
            end = math.ceil(end)
        first = max(first, 0)
        # dim - 1 counts the head's dimensions, although there are half as many frequencies; transformers does the same
        end = min(end, dim - 1)
        if first == end:
            end += 0.001
        index = torch.arange(len(theta), dtype=torch.float32)
        share = ((index - first) / (end - first)).clamp(0, 1)
        return theta / self.factor * share + theta * (1 - share)


@dataclass(frozen=True)
class Architecture:
    """The function of a decoder, without weights.

    Attributes:
        name: transformers' class, such as ``Qwen3ForCausalLM``.
        vocabulary: rows of the embeddings.
        layers, width, intermediate: number of layers, size of hidden states and of the MLP.
        heads, kv_heads, head_dim: shape of attention.
        positions: the longest sequence for which the decoder computes the same as transformers. A sliding window limits
            it, because up to its length windowed attention is causal attention.
        window: the sliding window, or None if the model has none.
        norm_eps: eps of every RMSNorm.
        tied: whether the output layer is the embeddings.
        qkv_bias, out_bias: which projections of attention have a bias.
        head_norms: whether q and k are normalised per head, before RoPE.
        attention_dropout: probability, in training.
        rope: position embeddings.
    """

    name: str
    vocabulary: int
    layers: int
    width: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    window: int | None
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    head_norms: bool
    attention_dropout: float
    rope: Rope


@dataclass(frozen=True)
class _Family:
    """Differences between families, with transformers' defaults for keys that a ``config.json`` may lack."""

    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    head_norms: bool = False
    window: str = ""  # "always": sliding_window decides; "switched": if use_sliding_window is set


_FAMILIES = {
    "LlamaForCausalLM": _Family(reads_attention_bias=True),
    "Qwen2ForCausalLM": _Family(kv_heads=32, always_qkv_bias=True, window="switched"),
    "Qwen3ForCausalLM": _Family(
        kv_heads=32, head_dim=128, reads_attention_bias=True, head_norms=True, window="switched"
    ),
    "MistralForCausalLM": _Family(kv_heads=8, window="always"),
}
MODEL_TYPES = {name.removesuffix("ForCausalLM").lower(): name for name in _FAMILIES}
QUANTISED = ("quantization_config", "compression_config")  # keys of a config.json
_COMPRESSED = ("float-quantized", "naive-quantized")  # compressed-tensors' formats of FP8
_PARTS = ("text_config", "vision_config", "audio_config")  # keys of a multimodal model's config


def read_architecture(folder: Path) -> Architecture:
    """Read a folder's ``config.json``; raise a UserError where the native decoders do not support it."""
    with _opened(folder) as config:
        return _architecture(config)


def foreign_config(folder: Path, trust_remote_code: bool = False) -> ModelConfig | None:
    """Read the ``config.json`` of a folder whose architecture has no native decoder.

    ``trust_remote_code`` accepts a model with code in its folder.

    Returns:
        The file's content; None if a native decoder computes the model. For Llama with biases in the MLP, none does.

    Raises:
        UserError: the file is missing or damaged, the quantised format is not supported, or code is not trusted.
    """
    with _opened(folder) as config:
        multimodal = any(isinstance(config.get(part), Mapping) for part in _PARTS)
        name = _class_name(config, trust_remote_code)
        biased = name == "LlamaForCausalLM" and _switch(config, "mlp_bias")
        known = name in _FAMILIES and own_code(config) in (None, name)
        if known and not multimodal and not biased:
            return None
        _stored_format(config)
    return config


@contextmanager
def _opened(folder: Path) -> Iterator[ModelConfig]:
    """Context with the content of a folder's ``config.json``; errors inside get the file's name."""
    path = folder / CONFIG
    with explain_errors(f"cannot read {path}"):
        if not path.exists():
            raise UserError(
                f"no model in {folder}: {CONFIG} is missing; {how_to_download(folder)} "
                f"(`rocm-ext plan` needs only {CONFIG})"
            )
        config = json_object(path.read_bytes())
    if config is None:
        raise UserError(f"{path} is damaged: expected a JSON object; download the file again")
    for part in (config, *(config.get(key) for key in _PARTS)):
        if not isinstance(part, Mapping):
            continue
        for key, most in _MOST.items():
            value = part.get(key)
            if isinstance(value, int) and value > most:
                raise UserError(f"{path}: {key} is more than {most:,}; download the file again")
    try:
        yield config
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _architecture(config: ModelConfig) -> Architecture:
    name = _class_name(config)
    if name not in _FAMILIES:
        raise UserError(f"{name} is not supported; supported are {', '.join(_FAMILIES)}")
    family = _FAMILIES[name]
    _stored_format(config)
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"hidden_act is {activation!r}; supported is silu")
    if config.get("is_causal") is False:
        raise UserError("is_causal is False; only causal language models are supported")
    if config.get("mlp_bias"):
        raise UserError("mlp_bias is True; an MLP with biases is not supported")
    width = _whole(config, "hidden_size")
    heads = _whole(config, "num_attention_heads")
    layers = _whole(config, "num_hidden_layers")
    positions = _whole(config, "max_position_embeddings")
    kv_heads = _whole(config, "num_key_value_heads", family.kv_heads or heads)
    head_dim = _whole(config, "head_dim", family.head_dim or width // heads)
    if heads % kv_heads or head_dim % 2:
        raise UserError(
            f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}; expected heads that "
            "divide by the key-value heads, and an even head_dim"
        )
    biased = _switch(config, "attention_bias") and family.reads_attention_bias
    window = _window(config, family, layers)
    rope = read_rope(config, positions)
    if rope.yarn:  # some files keep the original length here
        positions = max(positions, int(rope.factor * rope.original))
    return Architecture(
        name=name,
        vocabulary=_whole(config, "vocab_size"),
        layers=layers,
        width=width,
        intermediate=_whole(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        positions=min(positions, window or positions),
        window=window,
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        tied=_switch(config, "tie_word_embeddings"),
        qkv_bias=family.always_qkv_bias or biased,
        out_bias=biased,
        head_norms=family.head_norms,
        attention_dropout=_number(config, "attention_dropout", 0.0),
        rope=rope,
    )


def _class_name(config: ModelConfig, trust_remote_code: bool = False) -> str:
    """Return transformers' class of the model; refuse code in its folder that is not trusted."""
    kind = config.get("model_type")
    named = config.get("architectures") or [MODEL_TYPES.get(str(kind))]
    name = f"model_type {kind!r}"
    if isinstance(named, list) and named[0]:
        name = str(named[0])
    # transformers may have the same class
    if not trust_remote_code and own_code(config) not in (None, name):
        refuse_code(name)
    return name


def own_code(config: ModelConfig) -> str | None:
    """Return the name of the model's class in the folder's code (``auto_map``), or None without such code."""
    brings = config.get("auto_map")
    code = brings.get("AutoModelForCausalLM") if isinstance(brings, Mapping) else None
    return None if code is None else str(code).rpartition(".")[2]


def refuse_code(name: str) -> NoReturn:
    """Refuse a model that only code in its folder computes."""
    raise UserError(
        f"{name} brings its own code (auto_map), which runs only with model.trust_remote_code=True: it may do "
        "on this machine what you may do, so read it first"
    )


@dataclass(frozen=True)
class StoredFormat:
    """How a model's files store quantised weights.

    Attributes:
        kind: ``fp8`` or ``mxfp4``.
        block: rows and columns that share a scale, or 0 if all do.
        skipped: modules that are stored in 16 bits: names, parts of names, or patterns after ``re:``.
    """

    kind: str
    block: tuple[int, int]
    skipped: tuple[str, ...] = ()

    def skips(self, name: str) -> bool:
        """Whether the module ``name`` is stored in 16 bits."""
        for skipped in self.skipped:
            if skipped.startswith("re:"):
                if matches(skipped[3:], name):
                    return True
            elif f".{skipped}." in f".{name}.":
                return True
        return False


def stored_format(folder: Path) -> StoredFormat | None:
    """Return how a folder's files store quantised weights, or None if they are not quantised."""
    with _opened(folder) as config:
        return _stored_format(config)


def _stored_format(config: ModelConfig) -> StoredFormat | None:
    found = [config.get(key) for key in QUANTISED]
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        found += [text_config.get(key) for key in QUANTISED]
    settings = next(filter(None, found), None)
    if settings is None:
        return None
    method = known = None
    if isinstance(settings, Mapping):
        method = settings.get("quant_method")
        with explain_errors("quantization_config cannot be read"):
            known = _known_format(settings)
    if known is None:
        raise UserError(
            f"the weights are quantised ({method or 'quantization_config'}) in a way that is not supported; use the "
            "model's bf16 or fp16 weights, its FP8 or its MXFP4"
        )
    return known


def _known_format(settings: ModelConfig) -> StoredFormat | None:
    """Return the format that a ``quantization_config`` describes, or None if it is not supported."""
    skipped = settings.get("modules_to_not_convert") or settings.get("ignore") or []
    are_names = isinstance(skipped, list) and all(isinstance(name, str) for name in skipped)
    if not are_names:
        raise ValueError(
            f"the modules that are not quantised must be a list of names, found {skipped!r}"
        )
    for name in skipped:
        if name.startswith("re:"):
            re.compile(name[3:])
    method = settings.get("quant_method")
    if method == "mxfp4":
        return StoredFormat("mxfp4", (1, 32), tuple(skipped))
    block = None
    if method == "fp8":
        sizes = settings.get("weight_block_size", (128, 128))  # transformers' default
        rows, columns = sizes or (0, 0)
        if sizes and any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"weight_block_size is {sizes!r}; expected two whole numbers above 0")
        block = rows, columns
    elif method == "fbgemm_fp8":
        block = (1, 0)
    elif method == "compressed-tensors" and settings.get("format") in _COMPRESSED:
        block = _compressed_block(dict(settings.get("config_groups") or {}))
    return None if block is None else StoredFormat("fp8", block, tuple(skipped))


def _compressed_block(groups: Mapping[str, ModelConfig]) -> tuple[int, int] | None:
    """Return the block of compressed-tensors' weights if all are in FP8."""
    if len(groups) != 1:
        return None
    (group,) = groups.values()
    weight = group.get("weights") or {}
    if weight.get("type") != "float" or weight.get("num_bits") != 8:
        return None
    rows, columns = weight.get("block_structure") or (0, 0)
    sizes = int(rows), int(columns)
    blocks = {"tensor": (0, 0), "channel": (1, 0), "block": sizes}
    return blocks.get(str(weight.get("strategy")))


def _window(config: ModelConfig, family: _Family, layers: int) -> int | None:
    window = config.get("sliding_window", 4096)  # transformers' default in all these families
    if not family.window or window is None:
        return None
    if family.window == "switched":
        if not config.get("use_sliding_window"):
            return None
        kinds = config.get("layer_types")
        first = config.get("max_window_layers", 28)
        windowed = not isinstance(first, int) or first < layers
        if isinstance(kinds, list):
            windowed = "sliding_attention" in kinds
        if not windowed:
            return None
    return _whole({"sliding_window": window}, "sliding_window")


def read_rope(config: ModelConfig, positions: int) -> Rope:
    """Read RoPE from the older ``rope_theta`` and ``rope_scaling``, or from ``rope_parameters``.

    If a file has both, for example with YaRN added by hand, transformers reads only ``rope_scaling``.
    """
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(key) or {}
    if not isinstance(parameters, Mapping) or any(
        isinstance(value, Mapping) for value in parameters.values()
    ):
        raise UserError(f"{key} is {parameters!r}; expected one set of parameters for all layers")
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    base = _number(parameters, "rope_theta", _number(config, "rope_theta", 10_000.0))
    part = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part not in (None, 1):
        raise UserError(f"partial_rotary_factor is {part!r}; supported is RoPE over the whole head")
    if kind == "default":
        return Rope(base)
    if kind == "linear":
        return Rope(base, kind, _number(parameters, "factor"))
    if kind not in ("llama3", "yarn"):
        raise UserError(
            f"{key}: rope_type {kind!r} is not supported; supported are default, linear, llama3, yarn"
        )
    factor = _number(parameters, "factor")
    original = _whole(
        config,
        "original_max_position_embeddings",
        parameters.get("original_max_position_embeddings") or positions,
    )
    if kind == "yarn":
        yarn = _yarn(parameters, key, factor)
        return Rope(base, kind, factor, original=original, yarn=yarn)
    low = _number(parameters, "low_freq_factor")
    high = _number(parameters, "high_freq_factor")
    if low == high:
        raise UserError(
            f"{key}: low_freq_factor and high_freq_factor are both {low}; expected two numbers"
        )
    return Rope(base, kind, factor, low, high, original)


def _yarn(parameters: ModelConfig, key: str, factor: float) -> Yarn:
    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    numerator = _number(parameters, "mscale", 0.0)
    denominator = _number(parameters, "mscale_all_dim", 0.0)
    if numerator and denominator:
        inferred = scale(numerator) / scale(denominator)
    else:
        inferred = scale(1.0)
    fast = _number(parameters, "beta_fast", 0.0) or 32.0
    slow = _number(parameters, "beta_slow", 0.0) or 1.0
    if not (factor and fast > slow):
        raise UserError(
            f"{key}: factor {factor}, beta_fast {fast}, beta_slow {slow}; expected beta_fast over beta_slow"
        )
    rounded = parameters.get("truncate") is None or _switch(parameters, "truncate")
    return Yarn(fast, slow, rounded, _number(parameters, "attention_factor", inferred))


def _value(config: ModelConfig, key: str, kind: Kind, default=None) -> Any:
    value = default if config.get(key) is None else config[key]
    check({key: value}, {key: kind})
    return value


_WHOLE = Kind(lambda value: type(value) is int and value >= 1, ("a whole number of at least 1",))


def _whole(config: ModelConfig, key: str, default: int | None = None) -> int:
    return _value(config, key, _WHOLE, default)


def _number(config: ModelConfig, key: str, default: float | None = None) -> float:
    return float(_value(config, key, NOT_NEGATIVE, default))


def _switch(config: ModelConfig, key: str) -> bool:
    return _value(config, key, JSON_SWITCH, False)
