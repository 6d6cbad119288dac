"""Search in a folder of texts, for a model."""

import functools
import heapq
import json
import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rocm_ext.base.errors import UserError

_WORDS = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # as in Lucene


class Search:
    """Search in the texts of a folder, as a tool; BM25 ranks the passages (Robertson and Zaragoza, 2009).

    Files ``.txt`` and ``.md`` are texts; a line of a ``.jsonl`` is an object with ``text``. The index is made once, for
    all conversations.

    Args:
        folder: the folder; its subfolders are searched, too.
        passages: the most passages in a result.
        words: approximate length of a passage.

    Raises:
        UserError: the folder holds no text, or a line is unreadable.
    """

    def __init__(self, folder: str, passages: int = 3, words: int = 150) -> None:
        if not (passages >= 1 and words >= 1):
            raise UserError(
                f"Search needs passages and words of at least 1, found {passages} and {words}"
            )
        self._index = _index(str(Path(folder).resolve()), words)
        self._passages = passages

    def search(self, query: str) -> str:
        """Search in a collection of texts. You get the passages that fit best, each with the name of its file.

        Args:
            query: words to look for.
        """
        best = self._index.best(query, self._passages)
        return (
            "\n\n".join(f"{name}: {text}" for name, text in best)
            or "nothing found; try other words"
        )


class Index:
    """An inverted index of passages, which are (name, text)."""

    def __init__(self, passages: list[tuple[str, str]]) -> None:
        self._passages = passages
        # word -> the numbers of the passages with it, and its counts there
        self._postings: Mapping[str, tuple[array, array]] = defaultdict(
            lambda: (array("L"), array("L"))
        )
        lengths = array("L")
        for number, (name, text) in enumerate(passages):
            counts = Counter(_words(f"{name} {text}"))
            lengths.append(counts.total())
            for word, count in counts.items():
                numbers, appearances = self._postings[word]
                numbers.append(number)
                appearances.append(count)
        mean = sum(lengths) / len(lengths)
        self._norms = array("d", (_K1 * (1 - _B + _B * length / mean) for length in lengths))

    def best(self, query: str, most: int) -> list[tuple[str, str]]:
        """The (name, text) of the best passages, the best one first; of equals, the earlier."""
        scores: dict[int, float] = defaultdict(float)
        for word in dict.fromkeys(_words(query)):
            if word not in self._postings:
                continue
            numbers, counts = self._postings[word]
            matching, others = len(numbers), len(self._passages) - len(numbers)
            rarity = math.log(1 + (others + 0.5) / (matching + 0.5))
            for number, count in zip(numbers, counts, strict=True):
                scores[number] += rarity * count / (count + self._norms[number])
        best = heapq.nsmallest(most, scores, key=lambda number: (-scores[number], number))
        return [self._passages[number] for number in best]


def _words(text: str) -> list[str]:
    return _WORDS.findall(text.casefold())


@functools.cache  # forks of a process that has called it begin with the index
def _index(folder: str, words: int) -> Index:
    passages = []
    for name, text in _texts(Path(folder)):
        passages += [(name, passage) for passage in passages_of(text, words)]
    if not passages:
        raise UserError(f"Search found no text in {folder}; expected files .txt, .md or .jsonl")
    return Index(passages)


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = str(path.relative_to(folder))
        if path.suffix in (".txt", ".md"):
            yield name, path.read_text(encoding="utf-8", errors="replace")
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8", errors="replace") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{path}, line {number}"
                    try:
                        text = json.loads(line)["text"]
                    except (ValueError, TypeError, KeyError, RecursionError) as error:
                        raise UserError(f"{where}: expected an object with 'text'") from error
                    if not isinstance(text, str):
                        raise UserError(
                            f"{where}: 'text' is {type(text).__name__}; expected a text"
                        )
                    yield name, text


def passages_of(text: str, words: int) -> Iterator[str]:
    """Cut a text at the end of a paragraph, after at least ``words`` words; inside a paragraph after twice as many."""
    passage: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        for word in paragraph.split():
            passage.append(word)
            if len(passage) >= 2 * words:
                yield " ".join(passage)
                passage = []
        if len(passage) >= words:
            yield " ".join(passage)
            passage = []
    if passage:
        yield " ".join(passage)
