"""Tokenise text with a model's ``tokenizer.json``, as transformers does, without torch."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from rocm_ext.errors import UserError, one_line

TOKENIZER = "tokenizer.json"


class TextEncoder:
    """Tokenises text; special tokens in it are parsed, and none are added.

    Args:
        path: a ``tokenizer.json``.

    Attributes:
        special: the texts that become special tokens.

    Raises:
        UserError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the tokenizers package raises Exception itself
            raise UserError(f"cannot read {path}: {one_line(error)}; download the file again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token.content for token in added.values() if token.special)
        # Added tokens split a text before anything else happens to it, so the text behind one is tokenised as if it
        # stood alone. Those that take white space with them, or change with the text around them, are left out.
        plain = {number: t.content for number, t in added.items() if not (t.lstrip or t.rstrip or t.single_word)}
        self._splits = {number: content for number, content in plain.items() if not added[number].normalized}
        longest = sorted(self._splits.values(), key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest)) if longest else r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Tokenise ``text``.

        Raises:
            UserError: the text is not valid Unicode.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # JSON can contain half a surrogate pair
            raise UserError("the text is not valid Unicode") from error

    def encode_apart(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokenise ``text`` so that the tokens before a cut are those of the text before it.

        Args:
            text: the text.
            cuts: positions in ``text``, in characters, in order.

        Returns:
            The tokens, and how many of them are before each cut. They are those of :meth:`encode` unless one of its
            tokens spans a cut; the text behind that cut is then tokenised by itself.
        """
        done: list[int] = []  # tokens in front of the last cut that a token spanned; `text` begins there
        begun, positions = 0, []
        tokens = self.encode(text)
        anchors = self._anchors(text, tokens)
        for cut in cuts:
            at = bisect_right(anchors, cut - begun, key=lambda anchor: anchor[1]) - 1
            start, _, index = anchors[at] if at >= 0 else (0, 0, 0)
            own = self.encode(text[start : cut - begun])
            if tokens[index : index + len(own)] != own:
                done += tokens[:index] + own
                text, begun = text[cut - begun :], cut
                tokens, index, own = self.encode(text), 0, []
                anchors = self._anchors(text, tokens)
            positions.append(len(done) + index + len(own))
        return done + tokens, positions

    def _anchors(self, text: str, tokens: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return start and end of each splitting token in ``text``, and its index in ``tokens``; [] in doubt."""
        indices = [index for index, token in enumerate(tokens) if token in self._splits]
        found = list(self._split.finditer(text))
        if [match[0] for match in found] != [self._splits[tokens[index]] for index in indices]:
            return []
        return [(match.start(), match.end(), index) for match, index in zip(found, indices, strict=True)]
