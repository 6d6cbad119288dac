"""Make a folder in Hugging Face's format for a GGUF file.

The folder is in this library's cache and names the GGUF files. The tokenizer is copied from the file's folder, or made
from the metadata. ``config.json`` is made from the metadata, or copied where the metadata cannot be read.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rocm_ext.base.errors import UserError, explain_errors, refuse
from rocm_ext.base.files import disk_errors
from rocm_ext.base.hub import REPO_ID
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data import pre_tokenizers
from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.machine.bench_file import cache_folder
from rocm_ext.model.families import CONFIG, foreign_config
from rocm_ext.model.weights import llama_cpp
from rocm_ext.model.weights.gguf_files import LINKS, SHAPES, SUFFIX, GgufFile, Metadata, parts_of

_SETTINGS, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_BESIDE = (CONFIG, TOKENIZER, _SETTINGS, "generation_config.json", _TEMPLATE)
_VERSION = 3  # of what is written
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED = 1, 2, 3, 4, 5  # llama.cpp's types of tokens
_PIECES, _SPACE = ("llama", "gemma4"), "\u2581"  # tokenizers from SentencePiece, and its space


def folder_of(name: str) -> Path | None:
    """Return the folder of a GGUF file, and make it if it is missing; None: ``name`` is no such file.

    ``name`` is a GGUF file, the first part of a split model, or a folder with one GGUF model and no other weights.

    Raises:
        UserError: the file is damaged, or its model or tokenizer cannot be read from GGUF files.
    """
    if (path := _file_of(Path(name))) is None:
        return None
    files = parts_of(Path(os.path.abspath(path)))  # links are not followed: their targets may have other names
    beside = [file for name in _BESIDE if (file := path.parent / name).is_file()]
    facts = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in [*files, *beside]]
    key = hashlib.sha256(json.dumps([_VERSION, *facts]).encode()).hexdigest()[:16]
    if (cache := cache_folder()) is None:
        raise UserError(f"{path} needs a folder for its config.json and tokenizer; set XDG_CACHE_HOME")
    folder = cache / "gguf" / f"{path.stem[:100]}-{key}"
    if not (folder / CONFIG).is_file():
        opened = [GgufFile(file) for file in files]
        with disk_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as aside:
                made = Path(aside) / folder.name
                made.mkdir()
                try:
                    _write(made, opened, beside)
                except UserError as error:  # the message names a file that the user never sees
                    raise UserError(str(error).replace(str(made / CONFIG), f"the model in {path}")) from error
                try:
                    made.rename(folder)
                except OSError:
                    if not (folder / CONFIG).is_file():  # no other program was faster
                        raise
    return folder


def _file_of(path: Path) -> Path | None:
    if path.suffix.lower() == SUFFIX and path.is_file():
        return path
    if path.suffix.lower() == SUFFIX and path.exists() and not path.is_dir():
        raise UserError(f"{path} is a pipe, socket or device; expected a GGUF file")
    if not path.is_dir() or (path / LINKS).is_file():
        return None
    weights = [file for pattern in ("*.safetensors", "*.bin") for file in path.glob(pattern)]
    files = [] if weights else sorted(path.glob(f"*{SUFFIX}"))
    models = {parts_of(file)[0] for file in files if not file.name.startswith("mmproj")}  # vision encoders
    if len(models) > 1:
        raise UserError(f"{path} has {len(models)} models, {', '.join(file.name for file in files[:3])}; name one")
    return models.pop() if models else None


def _write(folder: Path, files: list[GgufFile], beside: list[Path]) -> None:
    first, copies = files[0], {file.name: file for file in beside}
    split = [(file.metadata.get("split.no", n), file.metadata.get("split.count", 0)) for n, file in enumerate(files)]
    refuse(
        f"{file.path} is part {at} of {count} of a split model, and the names of the parts have changed"
        for number, (file, (at, count)) in enumerate(zip(files, split, strict=True))
        if (count or 1) != len(files) or at != number
    )
    made = True
    try:
        with explain_errors(f"{first.path} has metadata that cannot be read"):  # values may have any type
            content = llama_cpp.config_of(files)
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        llama_cpp.check_config(folder, first)
    except UserError as error:
        if CONFIG not in copies:
            raise
        log.warning("%s; %s is used instead", error, copies[CONFIG])
        shutil.copy(copies[CONFIG], folder)
        made = False
    if foreign_config(folder) is not None:
        from rocm_ext.model.hf.decoder import shapes_of

        (folder / SHAPES).write_text(json.dumps(shapes_of(folder)) + "\n")
    for name, make in (("generation_config.json", _generation), (TOKENIZER, _tokenizer), (_SETTINGS, _settings)):
        if name in copies:
            shutil.copy(copies[name], folder)
        else:
            (folder / name).write_text(json.dumps(make(first), ensure_ascii=False) + "\n", encoding="utf-8")
    if _TEMPLATE in copies:
        shutil.copy(copies[_TEMPLATE], folder)
    (folder / LINKS).write_text(json.dumps({"files": [str(file.path) for file in files], "made": made}) + "\n")
    (folder / REPO_ID).write_text(json.dumps({"repo_id": str(first.path)}) + "\n")


def _tokenizer(file: GgufFile) -> Json:
    """Return the ``tokenizer.json`` that the metadata describes; refuse tokenizers other than BPE with known rules."""

    def check(fits: bool, problem: str) -> None:
        if not fits:
            raise UserError(f"{file.path} {problem}; put the model's {TOKENIZER} and {_SETTINGS} into its folder")

    of = file.metadata
    kind, pre = of.get("tokenizer.ggml.model"), pre_tokenizers.known_as(str(of.get("tokenizer.ggml.pre")))
    rules, pieces = pre_tokenizers.of_name(pre), kind in _PIECES
    known = pieces or (kind == "gpt2" and rules is not None)
    check(known, f"has the tokenizer {kind} with the rules {pre}, which are not known")
    tokens, types, merges = (of.get(f"tokenizer.ggml.{key}") or [] for key in ("tokens", "token_type", "merges"))
    lists = all(isinstance(part, list) for part in (tokens, types, merges))
    check(
        lists and bool(tokens) and len(tokens) == len(types) == len(set(tokens)), "describes its tokenizer in part only"
    )
    added = [
        {"id": number, "content": text, "special": type_ != _USER}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, (text, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (_UNKNOWN, _CONTROL, _USER)
    ]
    vocabulary = {text: number for number, text in enumerate(tokens) if types[number] != _UNUSED}
    if kind == "llama":
        pairs = _merges_of(vocabulary, types, of.get("tokenizer.ggml.scores"))
    else:
        pairs = [merge.split(" ") for merge in map(str, merges)]
    usable = [pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= vocabulary.keys()]
    check(bool(usable), "describes no merges of its tokenizer")
    begins = pieces or pre in pre_tokenizers.BEGINS
    bos = _id(of, "bos") if of.get("tokenizer.ggml.add_bos_token", begins) is True else None
    if pieces:
        unknown = next((text for text, type_ in zip(tokens, types, strict=True) if type_ == _UNKNOWN), None)
        steps = _of_pieces(kind == "llama" and of.get("tokenizer.ggml.add_space_prefix", True) is True)
        model = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True, "ignore_merges": False}
    else:
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        steps = {"normalizer": None, "pre_tokenizer": rules, "post_processor": level, "decoder": level}
        takes_words = pre in pre_tokenizers.TAKES_WORDS
        model = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": takes_words}
    if bos is not None:
        text = tokens[bos]
        first, rest = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        steps["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, rest],
            "pair": [first, rest, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
        }
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**head, **steps, "model": {"type": "BPE", **model, "vocab": vocabulary, "merges": usable}}


def _merges_of(vocabulary: Mapping[str, int], types: Sequence[int], scores: Any) -> list[list[str]]:
    """Return the merges of SentencePiece's pieces, the highest score first, in llama.cpp's order."""
    if not isinstance(scores, list) or len(scores) != len(types):
        return []
    pieces = {text: number for text, number in vocabulary.items() if types[number] in (_NORMAL, _USER)}
    ranked = sorted(pieces, key=lambda text: (-scores[pieces[text]], pieces[text]))
    splits = ([text[:at], text[at:]] for text in ranked for at in range(1, len(text)))
    return [pair for pair in splits if pieces.keys() >= {*pair}]


def _of_pieces(prefix: bool) -> Json:
    """Return the steps before and after SentencePiece's merges; ``prefix``: a space comes before the text."""
    into = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *after]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, into]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _settings(file: GgufFile) -> dict[str, str]:
    """Return the ``tokenizer_config.json``: special tokens and chat template."""
    tokens, template = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.chat_template")
    special = {name: _id(file.metadata, name) for name in ("bos", "eos", "pad")}
    content = {f"{name}_token": tokens[at] for name, at in special.items() if at is not None}  # type: ignore[index]
    return content | ({"chat_template": template} if isinstance(template, str) else {})


def _generation(file: GgufFile) -> dict[str, int | list[int]]:
    """Return the ``generation_config.json`` with the tokens that end an answer."""
    ends = [number for name in ("eos", "eot") if (number := _id(file.metadata, name)) is not None]
    if not ends:
        raise UserError(f"{file.path} names no EOS token; put the model's generation_config.json into its folder")
    others = {f"{name}_token_id": at for name in ("bos", "pad") if (at := _id(file.metadata, name)) is not None}
    return {"eos_token_id": list(dict.fromkeys(ends)), **others}


def _id(metadata: Metadata, name: str) -> int | None:
    key = {"pad": "padding"}.get(name, name)
    at = metadata.get(f"tokenizer.ggml.{key}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens")
    return at if type(at) is int and isinstance(tokens, list) and 0 <= at < len(tokens) else None
