"""Tokenise text with a model's ``tokenizer.json``, as transformers does, without torch."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from rocm_ext.base.errors import UserError, explain_errors
from rocm_ext.base.files import json_object
from rocm_ext.base.hub import how_to_download
from rocm_ext.base.types import Json

TOKENIZER = "tokenizer.json"
EOS = "eos_token_id"
_UNKNOWN_ID = (TypeError, KeyError, IndexError, OverflowError)  # errors of tokenizers


class TextEncoder:
    """Tokenises text: parses special tokens in it, and adds none.

    Args:
        path: a ``tokenizer.json``.

    Attributes:
        special: texts of the special tokens.
        ids: ids of the added tokens, by text.
        byte_tokens: ids of single-byte tokens (byte fallback), which not every vocabulary has.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with explain_errors(f"cannot read {path}", "; download the file again"):
            self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.ids: dict[str, int] = {}
        self._splits: dict[int, str] = {}
        special = set()
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            self.ids[token.content] = number
            if token.special:
                special.add(token.content)
            # Added tokens split a text first, so the text behind one is tokenised independently. Exceptions, left out
            # here: added tokens that absorb white space or depend on their neighbours.
            absorbs_space = token.lstrip or token.rstrip
            if not (absorbs_space or token.single_word or token.normalized):
                self._splits[number] = token.content
        self.special = frozenset(special)
        bytes_ = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_tokens = frozenset(number for number in bytes_ if number is not None)
        self._longest = max(map(len, self.ids), default=0)
        self._split = any_of(self._splits.values())
        self._headers: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Tokenise ``text``; a UserError if it is not valid Unicode."""
        return self._encode([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise several texts, which takes less time than one by one.

        A common beginning, up to its last added token, is tokenised once.
        """
        if len(texts) == 1:
            return [self.encode(texts[0])]
        shared = commonprefix(texts)  # noqa: RUF071 - of characters
        first = self.encode(shared)
        cut = _Anchor(0, 0, 0)
        for anchor in self._anchors(shared, first):
            # a longer token may begin where the texts still agree
            if anchor.start + self._longest <= len(shared):
                cut = anchor
        rests = self._encode([text[cut.start :] for text in texts])
        return [first[: cut.at] + rest for rest in rests]

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        try:
            # "fast" skips offsets, which cost a fifth of the time
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError as error:  # JSON can contain half a surrogate pair
            raise UserError("the text is not valid Unicode") from error
        return [encoding.ids for encoding in encodings]

    def prefix(self) -> list[int]:
        """Return the tokens that the model's tokenizer adds before a text, such as a BOS."""
        plain = self.encode("a")
        tokens = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(tokens)):
            if tokens[start : start + len(plain)] == plain:
                return tokens[:start]
        return []

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of ``tokens``, with special tokens if ``special``."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=not special)

    def _header(self, text: str) -> list[int]:
        """Tokenise the text between an added token and a cut, and remember it: it is often one of few headers."""
        tokens = self._headers.get(text)
        if tokens is None:
            tokens = self.encode(text)
            if len(text) < 256 and len(self._headers) < 1024:
                self._headers[text] = tokens
        return tokens

    def encode_apart(
        self, text: str, cuts: Sequence[int], encoded: list[int] | None = None
    ) -> tuple[list[int], list[int]]:
        """Tokenise ``text`` so that the tokens before a cut encode the text before it.

        Args:
            text: the text.
            cuts: positions in ``text``, in characters, ascending.
            encoded: the tokens of ``text``, if they are known.

        Returns:
            The tokens, and the number of tokens before each cut. They equal :meth:`encode`'s unless a token spans a
            cut; the text behind that cut is then tokenised separately.
        """
        # tokens before the last cut that a token spanned, where `text` now begins
        done: list[int] = []
        begun = 0
        positions = []
        tokens = self.encode(text) if encoded is None else encoded
        anchors = self._anchors(text, tokens)
        for cut in cuts:
            ended = bisect_right(anchors, cut - begun, key=lambda anchor: anchor.end)
            anchor = anchors[ended - 1] if ended else _Anchor(0, 0, 0)
            before = self._header(text[anchor.start : cut - begun])
            index = anchor.at + len(before)  # number of tokens before the cut
            if tokens[anchor.at : index] != before:
                done += tokens[: anchor.at] + before
                text = text[cut - begun :]
                begun = cut
                index = 0
                tokens = self.encode(text)
                anchors = self._anchors(text, tokens)
            positions.append(len(done) + index)
        return done + tokens, positions

    def _anchors(self, text: str, tokens: Sequence[int]) -> list["_Anchor"]:
        """Return the splitting tokens in ``text``, whose ``tokens`` are given; [] in doubt."""
        indices = [index for index, token in enumerate(tokens) if token in self._splits]
        known = [self._splits[tokens[index]] for index in indices]
        matches = list(self._split.finditer(text))
        if [match[0] for match in matches] != known:
            return []
        anchors = []
        for match, index in zip(matches, indices, strict=True):
            anchors.append(_Anchor(*match.span(), index))
        return anchors


class _Anchor(NamedTuple):
    """A splitting token in a text: its start and end in characters, and its index among the tokens."""

    start: int
    end: int
    at: int


class HFTokenizer:
    """A model's ``tokenizer.json`` with the interface of torchtune's tokenizers, for a config's ``tokenizer:``.

    The model's chat template renders conversations; see :func:`rocm_ext.data.tokenizer.open_tokenizer`.

    Args:
        path: a ``tokenizer.json`` in the model's folder, whose other files name the EOS tokens.
        max_seq_len: maximum length of a row in tokens, see ``too_long``; by default the model's limit.

    Attributes:
        encoder: tokenises text.
        special_tokens: ids of the added tokens, by text.
        reserved: texts of the special tokens.
        stop_tokens: ids of the EOS tokens.
        eos_id: the first of ``stop_tokens``.
        pad_id: id of padding.

    Raises:
        UserError: a file is missing or damaged, or no file names an EOS token.
    """

    def __init__(self, path: str, max_seq_len: int | None = None) -> None:
        folder = Path(path).parent
        if not Path(path).is_file():
            raise UserError(f"{path} does not exist; {how_to_download(folder)}")
        self.encoder = TextEncoder(Path(path))
        self.max_seq_len = max_seq_len
        self.special_tokens = self.encoder.ids
        self.reserved = self.encoder.special
        self.stop_tokens = ids_in(folder, EOS) or self._named_eos(folder)
        if not self.stop_tokens:
            raise UserError(
                f"no file in {folder} names an EOS token (eos_token_id in generation_config.json)"
            )
        self.eos_id = self.stop_tokens[0]
        padding = ids_in(folder, "pad_token_id")
        self.pad_id = padding[0] if padding else self.eos_id
        self._before = self.encoder.prefix()

    def _named_eos(self, folder: Path) -> list[int]:
        """Return the id of the EOS token that ``tokenizer_config.json`` names, or []."""
        token = _content(folder / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        return [self.special_tokens[text]] if text in self.special_tokens else []

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Tokenise ``text``, perhaps with special tokens.

        ``add_bos`` adds the model's tokens before a text, unless the text begins with them; ``add_eos`` adds
        :attr:`eos_id`.
        """
        tokens = self.encoder.encode(text)
        if add_bos and tokens[: len(self._before)] != self._before:
            tokens = self._before + tokens
        if add_eos:
            tokens = [*tokens, self.eos_id]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        return self.encoder.decode(tokens)


def to_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Decode ``tokens`` [s] and skip ids that the tokenizer does not know.

    A model's embeddings are padded beyond its vocabulary, so a sample may contain such ids. torchtune's
    tokenizers raise on them.
    """
    try:
        return tokenizer.decode(list(tokens))
    except _UNKNOWN_ID:
        return tokenizer.decode([token for token in tokens if _known(tokenizer, token)])


def _known(tokenizer: Any, token: int) -> bool:
    try:
        tokenizer.decode([token])
    except _UNKNOWN_ID:
        return False
    return True


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of the texts, the longest first."""
    longest = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")


def ids_in(folder: Path, key: str) -> list[int]:
    """Return the token ids under ``key`` in a model's ``generation_config.json``, else in its ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        value = _content(folder / name).get(key)
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if type(number) is int]
        if numbers:
            return numbers
    return []


def _content(path: Path) -> Json:
    if not path.is_file():
        return {}
    return json_object(path.read_bytes()) or {}
