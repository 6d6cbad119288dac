"""A GGUF file as a folder in Hugging Face's format, which the rest of this library reads.

The folder lies in this library's cache. ``config.json`` and the tokenizer are made from the metadata, or copied from
beside the file; the weights stay where they are.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import replace_folder
from rocm_ext.base.hub import REPO_ID
from rocm_ext.data import words
from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.machine.bench_file import cache_folder
from rocm_ext.model import llama_cpp
from rocm_ext.model.families import CONFIG
from rocm_ext.model.gguf_files import LINKS, SUFFIX, GgufFile, parts_of

_BESIDE = (CONFIG, TOKENIZER, "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_VERSION = 1  # of what is written
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # llama.cpp's types of tokens


def folder_of(name: str) -> Path | None:
    """Return the folder of a GGUF file, which is made if it is not there yet; None: ``name`` is no such file.

    Args:
        name: path of a file, the first one of a split model, or of a folder with one model and no other weights.

    Raises:
        UserError: the file is damaged, or has a model or a tokenizer that is not read from GGUF files.
    """
    if (path := _file_of(Path(name))) is None:
        return None
    files = parts_of(path.resolve())
    beside = [file for each in _BESIDE if (file := path.parent / each).is_file()]
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in [*files, *beside]]
    key = hashlib.sha256(json.dumps([_VERSION, *facts]).encode()).hexdigest()[:16]
    if (cache := cache_folder()) is None:
        raise UserError(f"{path} needs a folder for its config.json and tokenizer; set XDG_CACHE_HOME")
    folder = cache / "gguf" / f"{path.stem}-{key}"
    if not (folder / CONFIG).is_file():
        opened = [GgufFile(file) for file in files]
        with replace_folder(folder) as aside:
            _write(aside, opened, beside)
    return folder


def _file_of(path: Path) -> Path | None:
    if path.suffix == SUFFIX and path.is_file():
        return path
    if not path.is_dir() or (path / LINKS).is_file():
        return None
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    found = [] if weights else sorted(path.glob(f"*{SUFFIX}"))
    models = {parts_of(file)[0] for file in found}
    if len(models) > 1:
        raise UserError(f"{path} has {len(models)} models, {', '.join(file.name for file in found[:3])}; name one")
    return models.pop() if models else None


def _write(folder: Path, files: list[GgufFile], beside: list[Path]) -> None:
    first, places = files[0], {name: place for file in files for name, place in file.places.items()}
    for file in beside:
        shutil.copy(file, folder)
    if not (folder / CONFIG).is_file():
        config = llama_cpp.config_of(first, places)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    if not (folder / TOKENIZER).is_file():
        for name, content in _tokenizer(first).items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / LINKS).write_text(json.dumps({"files": [str(file.path) for file in files]}) + "\n")
    (folder / REPO_ID).write_text(json.dumps({"repo_id": str(first.path)}) + "\n")


def _tokenizer(file: GgufFile) -> dict[str, dict[str, Any]]:
    """Return the files of the tokenizer that the metadata describes.

    Raises:
        UserError: it is not a BPE with rules that are known here.
    """
    of, where = file.metadata, f"put the model's own {TOKENIZER} and tokenizer_config.json beside {file.path}"
    kind, pre = of.get("tokenizer.ggml.model"), of.get("tokenizer.ggml.pre")
    rules = words.of_name(str(pre))
    tokens, types, merges = (of.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type", "merges"))
    if kind != "gpt2" or rules is None:
        raise UserError(f"{file.path} has the tokenizer {kind} with the rules {pre}, which are not known; {where}")
    if (
        not all(isinstance(part, list) for part in (tokens, types, merges))
        or not tokens
        or not len(tokens) == len(types) == len(set(tokens))
    ):
        raise UserError(f"{file.path} describes its tokenizer in part only; {where}")
    added = [
        {"id": number, "content": text, "special": type_ == _CONTROL}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, (text, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_CONTROL, _USER)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    bos = _id(of, "bos") if of.get("tokenizer.ggml.add_bos_token") else None
    model = {
        "type": "BPE",
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": pre in words.WHOLE_WORDS,
        "vocab": {text: number for number, text in enumerate(tokens) if types[number] != _UNUSED},
        "merges": merges,
    }
    ends = [number for name in ("eos", "eot") if (number := _id(of, name)) is not None]
    special = {name: _id(of, name) for name in ("bos", "eos", "pad")}
    return {
        TOKENIZER: {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": rules,
            "post_processor": level if bos is None else _begins(tokens[bos], bos),
            "decoder": level,
            "model": model,
        },
        "tokenizer_config.json": {f"{name}_token": tokens[at] for name, at in special.items() if at is not None}
        | ({"chat_template": of["tokenizer.chat_template"]} if "tokenizer.chat_template" in of else {}),
        "generation_config.json": {"eos_token_id": list(dict.fromkeys(ends))}
        | {f"{name}_token_id": at for name, at in special.items() if at is not None and name != "eos"},
    }


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    key = {"pad": "padding"}.get(name, name)
    at = metadata.get(f"tokenizer.ggml.{key}_token_id")
    return at if type(at) is int and 0 <= at < len(metadata["tokenizer.ggml.tokens"]) else None


def _begins(text: str, number: int) -> dict[str, Any]:
    first, rest = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, rest],
        "pair": [first, rest, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }
