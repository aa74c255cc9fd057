"""Cut documents into overlapping chunks."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mmattn.errors import ConfigError, ShapeError, check_int
from mmattn.tokenization import call_tokenizer, check_text

# Scripts that put no spaces between words: Thai, Lao, Tibetan, Myanmar, Khmer; Chinese and Japanese with their marks.
_SPACELESS = (
    "\u0e01-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
    "\u2e80-\u2fdf\u3001-\u312f\u31a0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff9f\U00020000-\U0003ffff"
)
_MARKS = "".join(mark for mark in map(chr, range(0x300, 0x3100)) if unicodedata.category(mark)[0] == "M")
_MARKS += "\ufe00-\ufe0f\uff9e\uff9f\U000e0100-\U000e01ef"
# A word, or in such a script a character with what is written on it.
_WORD = re.compile(rf"[{_SPACELESS}][{_MARKS}]*|[^\s{_SPACELESS}]+")
Span = tuple[int, int]


@dataclass(frozen=True)
class Chunk:
    """A piece of a document.

    Attributes:
        text: the piece, stripped of blanks.
        source: the name of its document.
        start: first character in the document.
        end: end in the document: `text == document[start:end]`.
    """

    text: str
    source: Any
    start: int
    end: int


def chunk(
    texts: str | Iterable[str],
    size: int,
    overlap: int = 0,
    *,
    tokenizer: Any = None,
    sources: Sequence[Any] | None = None,
    unique: bool = True,
) -> list[Chunk]:
    """Cut documents into chunks of at most `size` tokens; neighbours share `overlap` tokens.

    A chunk lies in one document, and the end of a document is not repeated in a chunk of its own.

    Args:
        texts: one document or several. Those without a word give no chunk.
        size: tokens of a chunk.
        overlap: how many of these a chunk shares with the one before it.
        tokenizer: a fast Hugging Face tokenizer; None counts words, and characters in scripts without spaces between
            words, such as Chinese, Japanese and Thai. A character of several tokens is not cut, so its chunk may exceed
            `size`.
        sources: the name of each document; its number by default.
        unique: return only the first of chunks with equal text.

    Raises:
        ConfigError: a size below 1, an overlap not below it, or a tokenizer without offsets.
        ShapeError: not as many sources as texts.
        TextError: an item that is no text.

    >>> [piece.text for piece in chunk("one two three four five", size=3, overlap=1)]
    ['one two three', 'three four five']
    >>> chunk(["Rain fell.", "It was cold."], size=2, sources=["a.txt", "b.txt"])[1]
    Chunk(text='It was', source='b.txt', start=0, end=6)
    """
    documents = check_text(texts)
    check_int("size", size)
    check_int("overlap", overlap, at_least=0)
    if overlap >= size:
        raise ConfigError(f"overlap must be below size; got {overlap} of {size}")
    names: Sequence[Any] = range(len(documents)) if sources is None else sources
    if len(names) != len(documents):
        raise ShapeError(f"sources need one entry per text, {len(documents)}; got {len(names)}")
    chunks: list[Chunk] = []
    texts_so_far: set[str] = set()
    for document, source in zip(documents, names, strict=True):
        units = _tokens(document, tokenizer)
        for first, last in _windows([count for _, count in units], size, overlap):
            start, end = units[first][0][0], units[last][0][1]
            text = document[start:end]
            if unique and text in texts_so_far:
                continue
            texts_so_far.add(text)
            chunks.append(Chunk(text, source, start, end))
    return chunks


def _windows(counts: list[int], size: int, overlap: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last unit of each chunk, where unit i counts as `counts[i]`."""
    first = 0
    while first < len(counts):
        end, total = first + 1, counts[first]
        while end < len(counts) and total + counts[end] <= size:
            total += counts[end]
            end += 1
        yield first, end - 1
        if end == len(counts):
            return
        begin, shared = end, 0
        room = min(overlap, size - counts[end])  # or the next chunk would end where this one does
        while begin - 1 > first and shared + counts[begin - 1] <= room:
            begin -= 1
            shared += counts[begin]
        first = begin


def _tokens(document: str, tokenizer: Any) -> list[tuple[Span, int]]:
    """Return spans and how many tokens each is: those of one character together, blanks with the last."""
    if tokenizer is None:
        return [(word.span(), 1) for word in _WORD.finditer(document)]
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            f"the tokenizer must be a fast one, which returns offsets; got {type(tokenizer).__name__}. Load it with "
            "AutoTokenizer, or count words with tokenizer=None"
        )
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    units: list[tuple[Span, int]] = []
    for offsets in call_tokenizer(tokenizer, document, return_offsets_mapping=True, **options)["offset_mapping"]:
        start, end = _trimmed(document, *offsets)
        blank = start == end
        if units and (blank or start < units[-1][0][1]):
            (begin, previous_end), count = units[-1]
            units[-1] = ((begin, previous_end if blank else max(previous_end, end)), count + 1)
        elif not blank:
            units.append(((start, end), 1))
    return units


def _trimmed(document: str, start: int, end: int) -> Span:
    """Return the span without surrounding blanks."""
    text = document[start:end]
    left = len(text) - len(text.lstrip())
    return start + left, max(start + left, start + len(text.rstrip()))
