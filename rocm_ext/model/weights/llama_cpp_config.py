"""The ``config.json`` of a GGUF file, from its metadata: the reverse of :mod:`rocm_ext.model.weights.llama_cpp`."""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rocm_ext.base.errors import UserError, refuse
from rocm_ext.base.types import Json
from rocm_ext.model.families import MODEL_TYPES, read_rope
from rocm_ext.model.weights.gguf_files import GgufFile, Metadata, Place
from rocm_ext.model.weights.llama_cpp import (
    FACTORS,
    MOST_LAYERS,
    NATIVE,
    STILL,
    add_keys,
    check_betas,
    first_dimensions,
    layers_ahead,
    library,
    read_layout,
    rope_factors,
)
from rocm_ext.model.weights.llama_cpp_models import COMMON, ROWS, ModelRow

# keys that do not change the function, or repeat other keys
_OPTIONAL = {"vocab_size", "head_count_kv", "key_length", "value_length", "final_logit_softcapping",
             "sliding_window_pattern", "rope_freq_base_swa", "rope_dimension_sections"}  # fmt: skip
_LARGEST = 2**28  # the largest of the other sizes, a number of positions
# sizes that may be 0
_OR_NONE = {"shared_kv_layers", "embedding_length_per_layer_input", "feed_forward_length", "final_logit_softcapping",
            "rope_dimension_sections"}  # fmt: skip
_IDLE = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.value_length"}
_YARN = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow",
         "attention_factor": "rope.scaling.attn_factor"}  # fmt: skip


def config_of(files: Sequence[GgufFile]) -> Json:
    """Return the content of ``config.json`` for the GGUF files of a model, the reverse of :func:`read_layout`.

    Raises:
        UserError: the metadata has an unknown architecture or an unknown key.
        Exception: a key is missing or a value has another type; the caller explains it.
    """
    file = files[0]
    arch = file.architecture

    def check(fits: bool, problem: str) -> None:
        if not fits:
            raise UserError(f"{file.path}: {arch}.{problem}")

    places: dict[str, Place] = {}
    for part in files:
        places |= part.places
    kind, row = _family_of(file)
    embeddings = places.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise UserError(f"{file.path} lacks token_embd.weight, the embeddings")
    name = MODEL_TYPES.get(kind) or _class_of(kind, file)
    config: Json = {"architectures": [name], "model_type": kind}
    asked = dict(COMMON)
    optional = set(_OPTIONAL)  # see check_config
    if row is not None:
        for key, value in row.only.items():
            if not callable(value):
                config[key] = value
        asked |= row.keys
        optional.update(asked if "expert_count" in row.keys else row.keys)
    keys = _keys(file)
    values = Metadata()
    for key, theirs in asked.items():
        stored = _stored_key(arch, key)
        value = keys.pop(stored, None)
        if value is None and key in optional:
            continue
        problem = _problem_of(key, value)
        check(not problem, f"{stored} is {value!r}; {problem}")
        values[key] = value
        if isinstance(theirs, str):
            same = config.setdefault(theirs, value) == value
            check(same, f"{stored} is {value}, but {theirs} {config[theirs]}")
    width = values.get("key_length", config["hidden_size"] // config["num_attention_heads"])
    config["head_dim"] = width
    config["vocab_size"] = embeddings.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in places
    if row is None:
        biased_qkv = arch == "llama" and "blk.0.attn_q.bias" in places
        config["attention_bias"] = biased_qkv or "blk.0.attn_output.bias" in places
    proportional = row is not None and row.arch == "GEMMA4"
    config["rope_parameters"] = _rope_of(files, keys, config, proportional)
    turned = keys.pop("rope.dimension_count", width)
    if turned != width:
        partial = arch.startswith("qwen35") and turned in range(2, width, 2)
        check(partial, f"rope.dimension_count is {turned}; expected head_dim, {width}")
        config["rope_parameters"]["partial_rotary_factor"] = turned / width
    most = values.get("expert_count", _LARGEST)
    check(
        values.get("expert_used_count", 0) <= most,
        f"expert_used_count is more than expert_count, {most}",
    )
    if row is not None:
        config |= row.back(values, config)
    others = sorted(keys.keys() - _IDLE)
    refuse(
        f"{file.path}: {arch}.{key} is {keys[key]!r}, which is not computed here" for key in others
    )
    return config


def _family_of(file: GgufFile) -> tuple[str, "ModelRow | None"]:
    """Return the model_type of a file's architecture, and its row of the table unless it is a native family."""
    for kind, row in ROWS.items():
        if _named(row.arch) == file.architecture:
            return kind, row
    for kind, name in MODEL_TYPES.items():
        if _named(NATIVE[name]) == file.architecture:
            return kind, None
    known = {_named(arch) for arch in NATIVE.values()}
    known |= {_named(row.arch) for row in ROWS.values()}
    raise UserError(
        f"{file.path} is llama.cpp's {file.architecture}; {', '.join(sorted(known))} are read from GGUF files"
    )


def _class_of(kind: str, file: GgufFile) -> str:
    """Return transformers' name of the class of a model_type."""
    with suppress(ImportError, KeyError):
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    raise UserError(
        f"{file.path} needs a transformers that knows {kind}: pip install 'torchtune-rocm[transformers]'"
    )


def _problem_of(key: str, value) -> str:
    """Say what is wrong with a value of the metadata. An empty text means nothing."""
    values = value if isinstance(value, list) else [value]
    kinds = {type(value) for value in values}
    if key == "sliding_window_pattern":
        return "" if kinds <= {bool} else "expected booleans"
    if not kinds <= {int, float}:
        return "expected a number"
    most = MOST_LAYERS if key == "block_count" else _LARGEST
    least = 1e-12 if float in kinds else 1
    if key in _OR_NONE:
        least = 0
    fits = all(least <= value <= most for value in values)
    return "" if fits else f"expected {least} to {most}"


def check_config(folder: Path, file: GgufFile) -> None:
    """Check that a folder's ``config.json`` gives the metadata of ``file``, from which it was made."""
    arch = file.architecture
    stored = _keys(file)
    layout = read_layout(folder)
    asked = {*COMMON}
    for row in ROWS.values():
        if row.arch == layout.arch:
            asked |= row.keys.keys()
    asked -= _OPTIONAL
    needed = {_stored_key(arch, key) for key in layout.keys.keys() & asked}
    for key, value in _stored(arch, layout.keys).items():
        if key not in stored:
            if key in needed:
                raise UserError(f"{file.path} lacks {arch}.{key}")
        elif not _equal(stored[key], value):
            raise UserError(
                f"{file.path}: {arch}.{key} is {stored[key]}, but {value} is computed here"
            )


def _equal(stored, value) -> bool:
    """Return whether two values of the metadata agree; a single number stands for a list of its copies."""
    if isinstance(stored, list) or isinstance(value, list):
        ours = value if isinstance(value, list) else [value]
        theirs = stored if isinstance(stored, list) else [stored]
        if len(ours) == 1:
            ours = ours * len(theirs)
        if len(theirs) == 1:
            theirs = theirs * len(ours)
        return len(ours) == len(theirs) and all(map(_equal, theirs, ours))
    if isinstance(value, float):
        return math.isclose(stored, value, rel_tol=1e-5)
    return stored == value


def _named(arch: str) -> str:
    return arch.lower().replace("_", "-")


def _keys(file: GgufFile) -> Metadata:
    """Return the architecture's metadata, without layers that predict further tokens."""
    prefix = f"{file.architecture}."
    keys = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    ahead = layers_ahead(file)
    if ahead:
        del keys["nextn_predict_layers"]
        keys["block_count"] -= ahead
    pattern = "attention.sliding_window_pattern"
    period = keys.get(pattern)
    layers = keys.get("block_count", 0)
    if type(period) is int and layers in range(MOST_LAYERS):
        every = max(period, 1)
        keys[pattern] = [layer % every > 0 for layer in range(1, layers + 1)]
    return keys


def _stored(arch: str, keys: Metadata) -> Metadata:
    """Return keys and values as stored in the metadata."""
    writer = library().GGUFWriter(None, arch)
    add_keys(writer, keys)
    entries = writer.kv_data[0].items()
    return {key.removeprefix(f"{arch}."): entry.value for key, entry in entries}


def _stored_key(arch: str, key: str) -> str:
    return list(_stored(arch, {key: [1]}))[-1]


def _rope_of(files: Sequence[GgufFile], keys: Metadata, config: Json, proportional: bool) -> Json:
    """Return RoPE's parameters, and remove its keys from ``keys``; ``proportional``: only first dimensions rotate."""

    path = files[0].path

    def taken(key: str, usual=None) -> Any:
        value = keys.pop(key, usual)
        problem = _problem_of(key, value)
        if problem:
            raise UserError(f"{path}: {key} is {value!r}; {problem}")
        return value

    rope = {"rope_type": "default", "rope_theta": taken("rope.freq_base", 10_000.0)}
    kind = keys.pop("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{path}: rope.scaling.type is {kind!r}; expected none, linear or yarn")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": taken("rope.scaling.factor")}
    if kind == "yarn":
        trained = keys.pop(
            "rope.scaling.original_context_length", config["max_position_embeddings"]
        )
        rope["original_max_position_embeddings"] = trained
        for key, stored in _YARN.items():
            if stored in keys:
                rope[key] = keys.pop(stored)
        if "attention_factor" in rope:
            usual = 0.1 * math.log(rope["factor"]) + 1.0  # llama.cpp multiplies by it
            rope["attention_factor"] *= usual
        check_betas(path, read_rope({"rope_parameters": rope}, 1).yarn)
    holders = [file for file in files if FACTORS in file.places]
    if not holders:
        return rope
    holder = holders[0]
    place = holder.places[FACTORS]
    width = config["head_dim"]
    fits = kind == "none" and not place.kind and place.shape == (width // 2,)
    factors = holder.numbers(FACTORS) if fits else torch.ones(1)
    if proportional:
        family = "Gemma 4"
        turned = int((factors < STILL).sum())
        factor = float(factors[0])
        rope |= {
            "rope_type": "proportional",
            "factor": factor,
            "partial_rotary_factor": 2 * turned / width,
        }
        same = torch.equal(factors, first_dimensions(width, turned, factor))
    else:
        family = "Llama 3"
        rope |= {
            "rope_type": "llama3",
            "factor": round(float(factors.max()), 3),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        computed = rope_factors(width, read_rope({"rope_parameters": rope}, 1))
        same = torch.allclose(computed, factors, 1e-4)
    if not fits or not same:
        raise UserError(
            f"{path}: {FACTORS} are not {family}'s; put the model's config.json beside the file"
        )
    return rope
