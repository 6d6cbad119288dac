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

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.files import disk_errors
from rocm_ext.base.hub import REPO_ID
from rocm_ext.base.log import log
from rocm_ext.base.types import Json
from rocm_ext.data import pre_tokenizers
from rocm_ext.data.encoder import TOKENIZER
from rocm_ext.machine.bench_file import cache_folder
from rocm_ext.model.families import CONFIG, foreign_config
from rocm_ext.model.weights.gguf_files import LINKS, SHAPES, SUFFIX, GgufFile, Metadata, parts_of
from rocm_ext.model.weights.llama_cpp_config import check_config, config_of

_SETTINGS = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_BESIDE = (CONFIG, TOKENIZER, _SETTINGS, "generation_config.json", _TEMPLATE)
_VERSION = 3  # the version of the written files
# llama.cpp's types of tokens
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER = 4
_UNUSED = 5
# tokenizers from SentencePiece, and its space
_PIECES = ("llama", "gemma4")
_SPACE = "\u2581"


def folder_of(name: str) -> Path | None:
    """Return the folder of a GGUF file, and make it if it is missing. None if ``name`` is no such file.

    ``name`` is a GGUF file, the first part of a split model, or a folder with one GGUF model and no other weights.

    Raises:
        UserError: the file is damaged, or its model or tokenizer cannot be read from GGUF files.
    """
    path = _file_of(Path(name))
    if path is None:
        return None
    # links are not followed: their targets may have other names
    files = parts_of(Path(os.path.abspath(path)))
    neighbours = [path.parent / name for name in _BESIDE]
    beside = [file for file in neighbours if file.is_file()]
    cache = cache_folder()
    if cache is None:
        raise UserError(
            f"{path} needs a folder for its config.json and tokenizer; set XDG_CACHE_HOME"
        )
    folder = cache / "gguf" / f"{path.stem[:100]}-{_key([*files, *beside])}"
    if (folder / CONFIG).is_file():
        return folder
    opened = [GgufFile(file) for file in files]
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as aside:
            made = Path(aside) / folder.name
            made.mkdir()
            try:
                _write(made, opened, beside)
            except UserError as error:  # the message names a file that the user never sees
                problem = str(error).replace(str(made / CONFIG), f"the model in {path}")
                raise UserError(problem) from error
            try:
                made.rename(folder)
            except OSError:
                if not (folder / CONFIG).is_file():  # no other program was faster
                    raise
    return folder


def _key(files: Sequence[Path]) -> str:
    """Return a hash that changes with the files."""
    facts: list[Any] = [_VERSION]
    for file in files:
        stat = file.stat()
        facts.append((str(file), stat.st_size, stat.st_mtime_ns))
    content = json.dumps(facts).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _file_of(path: Path) -> Path | None:
    if path.suffix.lower() == SUFFIX:
        if path.is_file():
            return path
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a pipe, socket or device; expected a GGUF file")
    if not path.is_dir() or (path / LINKS).is_file():
        return None
    if any(path.glob("*.safetensors")) or any(path.glob("*.bin")):
        return None
    files = sorted(path.glob(f"*{SUFFIX}"))
    models = set()
    for file in files:
        if not file.name.startswith("mmproj"):
            first, *_ = parts_of(file)
            models.add(first)
    if len(models) > 1:
        some = ", ".join(file.name for file in files[:3])
        raise UserError(f"{path} has {len(models)} models, {some}; name one")
    return models.pop() if models else None


def _write(folder: Path, files: list[GgufFile], beside: list[Path]) -> None:
    first = files[0]
    copies = {file.name: file for file in beside}
    for number, file in enumerate(files):
        part = file.metadata.get("split.no", number)
        count = file.metadata.get("split.count", 0)
        if (count or 1) != len(files) or part != number:
            raise UserError(
                f"{file.path} is part {part} of {count} of a split model, and the names of the parts have changed"
            )
    made = True
    try:
        # values may have any type
        with explain_errors(f"{first.path} has metadata that cannot be read"):
            content = config_of(files)
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        check_config(folder, first)
    except UserError as error:
        if CONFIG not in copies:
            raise
        log.warning("%s; %s is used instead", error, copies[CONFIG])
        shutil.copy(copies[CONFIG], folder)
        made = False
    if foreign_config(folder) is not None:
        from rocm_ext.model.hf.decoder import shapes_of

        _save(folder / SHAPES, shapes_of(folder))
    makers = {"generation_config.json": _generation, TOKENIZER: _tokenizer, _SETTINGS: _settings}
    for name, make in makers.items():
        if name in copies:
            shutil.copy(copies[name], folder)
        else:
            text = json.dumps(make(first), ensure_ascii=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
    if _TEMPLATE in copies:
        shutil.copy(copies[_TEMPLATE], folder)
    paths = [str(file.path) for file in files]
    _save(folder / LINKS, {"files": paths, "made": made})
    _save(folder / REPO_ID, {"repo_id": str(first.path)})


def _save(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content) + "\n")


def _tokenizer(file: GgufFile) -> Json:
    """Return the ``tokenizer.json`` that the metadata describes; refuse tokenizers other than BPE with known rules."""

    def check(fits: bool, problem: str) -> None:
        if not fits:
            raise UserError(
                f"{file.path} {problem}; put the model's {TOKENIZER} and {_SETTINGS} into its folder"
            )

    of = file.metadata
    kind = of.get("tokenizer.ggml.model")
    pre = pre_tokenizers.known_as(str(of.get("tokenizer.ggml.pre")))
    rules = pre_tokenizers.of_name(pre)
    pieces = kind in _PIECES
    known = pieces or (kind == "gpt2" and rules is not None)
    check(known, f"has the tokenizer {kind} with the rules {pre}, which are not known")
    tokens = of.get("tokenizer.ggml.tokens") or []
    types = of.get("tokenizer.ggml.token_type") or []
    merges = of.get("tokenizer.ggml.merges") or []
    lists = all(isinstance(part, list) for part in (tokens, types, merges))
    is_complete = lists and len(tokens) == len(types) == len(set(tokens)) > 0
    check(is_complete, "describes its tokenizer in part only")
    vocabulary = {}
    for number, text in enumerate(tokens):
        if types[number] != _UNUSED:
            vocabulary[text] = number
    if kind == "llama":
        pairs = _merges_of(vocabulary, types, of.get("tokenizer.ggml.scores"))
    else:
        pairs = [str(merge).split(" ") for merge in merges]
    usable = []
    for pair in pairs:
        made = "".join(pair)
        if len(pair) == 2 and {*pair, made} <= vocabulary.keys():
            usable.append(pair)
    check(bool(usable), "describes no merges of its tokenizer")
    unknown = None
    takes_words = False
    if pieces:
        if _UNKNOWN in types:
            unknown = tokens[types.index(_UNKNOWN)]
        has_prefix = of.get("tokenizer.ggml.add_space_prefix", True) is True
        steps = _of_pieces(kind == "llama" and has_prefix)
    else:
        level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        }
        steps = {
            "normalizer": None,
            "pre_tokenizer": rules,
            "post_processor": level,
            "decoder": level,
        }
        takes_words = pre in pre_tokenizers.TAKES_WORDS
    begins = pieces or pre in pre_tokenizers.BEGINS
    bos = _ids(of, "bos").get("bos")
    if bos is not None and of.get("tokenizer.ggml.add_bos_token", begins) is True:
        steps["post_processor"] = _with_bos(bos, tokens[bos])
    model = {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": pieces,
        "byte_fallback": pieces,
        "ignore_merges": takes_words,
        "vocab": vocabulary,
        "merges": usable,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        **steps,
        "model": model,
    }


def _added(tokens: Sequence[str], types: Sequence[int]) -> list[Json]:
    """Return the tokens that no merges make."""
    switches = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = []
    for number, text in enumerate(tokens):
        kind = types[number]
        if kind in (_UNKNOWN, _CONTROL, _USER):
            added.append({"id": number, "content": text, "special": kind != _USER, **switches})
    return added


def _with_bos(number: int, text: str) -> Json:
    """Return the step that puts a token before a text."""
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    rest = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, rest],
        "pair": [first, rest, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }


def _merges_of(vocabulary: Mapping[str, int], types: Sequence[int], scores) -> list[list[str]]:
    """Return the merges of SentencePiece's pieces, the highest score first, in llama.cpp's order."""
    if not isinstance(scores, list) or len(scores) != len(types):
        return []
    mergeable = (_NORMAL, _USER)
    pieces = {}
    for text, number in vocabulary.items():
        if types[number] in mergeable:
            pieces[text] = number
    # pieces are in the order of their numbers, which sorting keeps where scores are equal
    ranked = sorted(pieces, key=lambda text: -scores[pieces[text]])
    merges = []
    for text in ranked:
        for at in range(1, len(text)):
            first = text[:at]
            second = text[at:]
            if first in pieces and second in pieces:
                merges.append([first, second])
    return merges


def _of_pieces(prefix: bool) -> Json:
    """Return the steps before and after SentencePiece's merges; ``prefix``: a space comes before the text."""
    into = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    normalizers = [into]
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _settings(file: GgufFile) -> dict[str, str]:
    """Return the ``tokenizer_config.json``: special tokens and chat template."""
    tokens: Any = file.metadata.get("tokenizer.ggml.tokens")
    content = {}
    for name, number in _ids(file.metadata, "bos", "eos", "pad").items():
        content[f"{name}_token"] = tokens[number]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        content["chat_template"] = template
    return content


def _generation(file: GgufFile) -> dict[str, int | list[int]]:
    """Return the ``generation_config.json`` with the tokens that end an answer."""
    ends = _ids(file.metadata, "eos", "eot").values()
    if not ends:
        raise UserError(
            f"{file.path} names no EOS token; put the model's generation_config.json into its folder"
        )
    content: dict[str, int | list[int]] = {"eos_token_id": list(dict.fromkeys(ends))}
    for name, number in _ids(file.metadata, "bos", "pad").items():
        content[f"{name}_token_id"] = number
    return content


def _ids(metadata: Metadata, *names: str) -> dict[str, int]:
    """Return the ids of the special tokens ``names`` that the metadata has."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else 0
    ids = {}
    for name in names:
        key = {"pad": "padding"}.get(name, name)
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(number) is int and 0 <= number < count:
            ids[name] = number
    return ids
