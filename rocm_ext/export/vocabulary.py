"""Write a model's tokenizer and chat template for llama.cpp.

llama.cpp knows rules by which a BPE splits text into words by their names (``tokenizer.ggml.pre``). This module
finds the name for the rules in ``tokenizer.json``, and refuses unknown rules.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from rocm_ext.base.errors import UserError
from rocm_ext.base.files import json_object
from rocm_ext.base.types import Json
from rocm_ext.data import pre_tokenizers
from rocm_ext.data.encoder import TOKENIZER, TextEncoder, ids_in
from rocm_ext.data.render import render_conversation
from rocm_ext.export.source import Source
from rocm_ext.model.weights.llama_cpp import CONVERTER, Layout, library

# llama.cpp keeps these tokens of Gemma 4 in the text, for its parsers of tools and reasoning
_SHOWN = (
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    '<|"|>',
)
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"  # SentencePiece's
_TURN = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def add_vocabulary(writer: Any, source: Source, layout: Layout) -> None:
    """Add tokens, merges, special ids and the chat template to the metadata of a ``gguf.GGUFWriter``.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    path = source.base / TOKENIZER
    content = json_object(path.read_bytes()) if path.is_file() else None
    if content is None:
        raise UserError(f"{path} is missing or damaged; GGUF files need it")
    model = content.get("model") or {}
    if model.get("type") != "BPE":
        _refuse(path, f"model.type is {model.get('type')!r}")
    has_pieces = bool(model.get("byte_fallback"))  # SentencePiece's
    if has_pieces:
        begins_with_space = _begins_with_space(path, content)
        merges_by_scores = layout.arch != "GEMMA4"  # llama.cpp's "llama" does
        writer.add_tokenizer_model("llama" if merges_by_scores else "gemma4")
        if merges_by_scores:
            writer.add_tokenizer_pre("default")
    else:
        merges_by_scores = False
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_splitting(path, content))
    tokens, types = _tokens(content, layout.vocabulary)
    merges = []
    for merge in model["merges"]:
        merges.append(merge if isinstance(merge, str) else " ".join(merge))
    writer.add_token_list(tokens)
    if not merges_by_scores:
        writer.add_token_merges(merges)
    if has_pieces:
        writer.add_add_space_prefix(begins_with_space)
        writer.add_token_scores(_scores(merges, tokens))
    writer.add_token_types(types)
    _add_special(writer, source, model)
    if source.template is not None:
        writer.add_chat_template(source.template.text)


def _refuse(path: Path, what: str) -> NoReturn:
    raise UserError(f"{path}: {what}, which this command does not write to GGUF files; {CONVERTER}")


def _splitting(path: Path, content: Json) -> str:
    """Return llama.cpp's name of the rules that split text into words; refuse unknown rules."""
    normalizer = content.get("normalizer")
    nothing = {"type": "Sequence", "normalizers": []}
    if normalizer not in (None, {"type": "NFC"}, nothing):
        kind = normalizer.get("type") if isinstance(normalizer, Mapping) else "?"
        _refuse(path, f"normalizer is {kind}")
    pre = content.get("pre_tokenizer") or {}
    name = pre_tokenizers.name_of(pre)
    whole_words = content["model"].get("ignore_merges")
    if name is None or (whole_words and name not in pre_tokenizers.WHOLE_WORDS):
        kinds = [step.get("type") for step in pre.get("pretokenizers", [pre])]
        _refuse(path, f"pre_tokenizer {' and '.join(map(str, kinds))} has unknown rules")
    return name


def _begins_with_space(path: Path, content: Json) -> bool:
    """Return whether SentencePiece's BPE in ``tokenizer.json`` puts a space before a text; refuse other rules."""
    steps = content.get("normalizer") or {}
    steps = steps.get("normalizers", [steps] if steps else [])
    before = content.get("pre_tokenizer")
    # it splits nothing once the normalizer has replaced all spaces
    idle = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepends = {"type": "Prepend", "prepend": _SPACE}
    if before in (None, idle) and steps in ([replaces], [prepends, replaces]):
        return len(steps) == 2
    if before and not steps:
        whole = not before.get("split", True)
        if whole and before.get("type") == "Metaspace":
            return before.get("prepend_scheme") != "never"
    _refuse(path, "its rules for spaces are unknown")


def _scores(merges: Sequence[str], tokens: Sequence[str]) -> list[float]:
    """Return scores with which llama.cpp merges in the order of ``merges``."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _tokens(content: Json, size: int) -> tuple[list[str], list[int]]:
    """Return texts and llama.cpp's types, by id."""
    kind = library().TokenType
    texts = [f"[PAD{number}]" for number in range(size)]
    types = [int(kind.UNUSED)] * size
    model = content["model"]
    vocabulary = model["vocab"]
    added = content.get("added_tokens") or []
    most = max(chain(vocabulary.values(), (token["id"] for token in added)))
    if most >= size:
        raise UserError(
            f"{TOKENIZER} has the token {most}, but the model has {size} tokens; download both again"
        )
    for text, number in vocabulary.items():
        is_byte = model.get("byte_fallback") and _BYTE.fullmatch(text)
        texts[number] = text
        types[number] = int(kind.BYTE if is_byte else kind.NORMAL)
    unknown = model.get("unk_token")
    if unknown in vocabulary:
        types[vocabulary[unknown]] = int(kind.UNKNOWN)
    for token in added:
        number = token["id"]
        text = token["content"]
        texts[number] = text
        if types[number] == kind.UNKNOWN:
            continue
        looks_special = text.startswith("<|") and text.endswith("|>")
        hidden = text not in _SHOWN and (token.get("special") or looks_special)
        types[number] = int(kind.CONTROL if hidden else kind.USER_DEFINED)
    return texts, types


def _add_special(writer: Any, source: Source, model: Json) -> None:
    """Add the ids of special tokens. ``eos`` ends a text; ``eot`` ends a turn, if it is another token."""
    encoder = TextEncoder(source.base / TOKENIZER)
    before = encoder.prefix()
    begins = before or ids_in(source.base, "bos_token_id")
    if begins:
        writer.add_bos_token_id(begins[0])
    writer.add_add_bos_token(bool(before))
    writer.add_eos_token_id(source.tokenizer.end_of_text)
    turn = end_of_turn(source)
    if turn not in (None, source.tokenizer.end_of_text):
        writer.add_eot_token_id(turn)
    pads = ids_in(source.base, "pad_token_id")
    if pads:
        writer.add_pad_token_id(pads[0])
    unknown = model.get("unk_token")
    if unknown in model["vocab"]:
        writer.add_unk_token_id(model["vocab"][unknown])


def end_of_turn(source: Source) -> int | None:
    """Return the token that ends the assistant's turn in training, or None."""
    if source.template is None:
        return None
    try:
        tokens, _ = render_conversation(source.tokenizer, _TURN)
    except UserError:  # the template takes only other conversations
        return None
    stops = source.tokenizer.stop_tokens
    return next((token for token in reversed(tokens) if token in stops), None)
