"""Topics of Python's own documentation, their chunks, the neighbours of each chunk, and windows of text with both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn

KINDS = ("neighbours", "continuations", "both")
Choice = Callable[[list[int]], list[int]]  # from the neighbours of a chunk to those that are read


def load_topics(held_out: float = 0.15, seed: int = 0, copies: bool = False) -> tuple[dict[str, str], dict[str, str]]:
    """Return topics {name: text} to train on and to retrieve from, and held-out topics, from `pydoc_data`.

    Topics repeat each other's sections. Every paragraph is kept once, in a held-out topic where one has it: else those
    to train on would leak into the held-out ones, and what is retrieved in training would be copies of the text, which
    teaches nothing but to copy. With `copies` every topic to train on stays as it is, to see what that would be worth.
    """
    from pydoc_data.topics import topics

    unique = {text: name for name, text in sorted(topics.items(), reverse=True)}
    names = sorted(unique.values())
    Random(seed).shuffle(names)
    held_out_names = sorted(names[: round(held_out * len(names))])
    done: set[str] = set()
    texts: dict[str, str] = {}
    for name in [*held_out_names, *sorted(set(names) - set(held_out_names))]:
        new: dict[str, str] = {}
        for part in paragraphs(topics[name]):
            if plain(part) not in done:
                new.setdefault(plain(part), part)
        done.update(new)
        texts[name] = topics[name] if copies and name not in held_out_names else "\n\n".join(new.values())
    held = {name: texts.pop(name) for name in held_out_names}
    return {name: text for name, text in texts.items() if text}, held


def paragraphs(text: str) -> list[str]:
    """Return the paragraphs of a topic."""
    return [part for part in re.split(r"\n\s*\n", text) if part.strip()]


def plain(paragraph: str) -> str:
    """Return a paragraph without line breaks and capitals, to be compared by."""
    return " ".join(paragraph.split()).lower()


@dataclass
class Passages:
    """Every chunk of s tokens of some documents, in order.

    `chunks` are ids (s,) of each, the last of a document may be shorter; `document` is the number of its document.
    `vectors` (n, e) are searched; `states` are slots (r, e') of the chunk and then of the next one, by `read_passages`.
    """

    chunks: list[list[int]]
    document: list[int]
    texts: list[str]
    vectors: Tensor = field(default_factory=lambda: torch.empty(0))
    states: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.chunks)

    @classmethod
    def of(cls, documents: Sequence[str], tokenizer: Any, size: int) -> Passages:
        """Cut documents into chunks of `size` tokens."""
        passages = cls([], [], [])
        for number, text in enumerate(documents):
            ids = tokenizer(text)["input_ids"]
            for start in range(0, len(ids), size):
                passages.chunks.append(ids[start : start + size])
                passages.document.append(number)
                passages.texts.append(tokenizer.decode(ids[start : start + size]))
        return passages

    def encode(self, encoder: mmattn.TextEncoder, progress: bool) -> None:
        """Compute vectors."""
        texts = list(map(searchable, self.texts))
        self.vectors = encoder.encode(texts, batch_size=128, progress=progress).tokens[:, 0]

    def read(self, lm: Any, layer: int) -> None:
        """Compute slots."""
        self.states = read_passages(lm, [self.ids(row) for row in range(len(self))], layer)

    def ids(self, row: int) -> list[int]:
        """Return the ids of a chunk and of the next one of the same document."""
        after = row + 1
        last = after == len(self) or self.document[after] != self.document[row]
        return self.chunks[row] + ([] if last else self.chunks[after])

    def slots(self, row: int, kind: str) -> Tensor:
        """Return the slots (r, e') that are read of a retrieved chunk: itself, what follows it, or both."""
        size = len(self.chunks[row])
        return self.states[row][slice(size if kind == "continuations" else 0, size if kind == "neighbours" else None)]


@torch.no_grad()
def read_passages(lm: Any, texts: Sequence[Sequence[int]], layer: int, batch_size: int = 64) -> list[Tensor]:
    """Encode each text as slots (r, 2 d): the hidden state before each token, and the token's embedding.

    The state stands for the context, so that it resembles the state of a token in another text after the same words,
    and the embedding for the next token: keys and values of a kNN-LM (arXiv 1911.00172), to be attended to. Both are
    scaled to a mean square of 1.

    Args:
        lm: a language model without adapters.
        texts: ids of each passage.
        layer: whose hidden states are used.
        batch_size: passages at once.
    """
    embeddings, decoder = lm.get_input_embeddings(), lm.get_decoder() or lm.base_model
    slots: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        longest = max(map(len, part))
        # Any padding will do: attention is causal.
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part])
        ids = ids.to(embeddings.weight.device)
        states = decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        both = torch.cat([_scaled(before), _scaled(embeddings(ids))], -1)
        slots += [row[: len(text)].clone() for row, text in zip(both, part, strict=True)]
    return slots


def searchable(text: str) -> str:
    """Return the text, or a full stop if a text encoder would read nothing in it: blanks, half a character."""
    return text if any(letter.isprintable() and letter not in " \ufffd" for letter in text) else "."


def _scaled(states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(states.float(), states.shape[-1:])


def neighbours(queries: Passages, library: Passages, count: int, same: bool) -> list[list[int]]:
    """Return for each chunk the nearest ones of the library; if both are the same, of other documents only."""
    index = mmattn.Index.build(library.vectors, metadata=[{"document": number} for number in library.document])
    nearest: list[list[int]] = []
    for number in sorted(set(queries.document)):
        rows = [row for row, document in enumerate(queries.document) if document == number]
        other = (lambda about, number=number: about["document"] != number) if same else None
        hits = index.search(queries.vectors[rows], count, filter=other)
        nearest += [[row for row in line if row is not None] for line in hits.ids]
    return nearest


@dataclass
class Window:
    """Some chunks of one document: ids, and the neighbours of each chunk."""

    ids: list[int]
    neighbours: list[list[int]]


def windows(passages: Passages, nearest: Sequence[Sequence[int]], chunks: int) -> list[Window]:
    """Return consecutive windows of at most `chunks` chunks, within documents."""
    result: list[Window] = []
    for _, group in groupby(range(len(passages)), key=passages.document.__getitem__):
        rows = list(group)
        for part in (rows[start : start + chunks] for start in range(0, len(rows), chunks)):
            ids = [token for row in part for token in passages.chunks[row]]
            if len(ids) > 1:
                result.append(Window(ids, [list(nearest[row]) for row in part]))
    return result


def memory_of(part: Sequence[Window], library: Passages, kind: str, choose: Choice) -> mmattn.Memory:
    """Return the slots of the neighbours of some windows, as (b, m, e) with the chunk of each slot as its segment."""
    rows = []
    for window in part:
        slots, segments = [library.states[0][:0]], [torch.zeros(1, 0, dtype=torch.long)]
        for chunk, nearest in enumerate(window.neighbours):
            for row in choose(nearest):
                slots.append(library.slots(row, kind))
                segments.append(torch.full((1, len(slots[-1])), chunk))
        rows.append(mmattn.Memory(torch.cat(slots)[None], segments=torch.cat(segments, 1)))
    return mmattn.Memory.stack(rows)


def sample_of(count: int, random: Random) -> Choice:
    """Return a choice of `count` neighbours at random, so that no chunk always reads the same."""
    return lambda nearest: nearest if len(nearest) <= count else random.sample(nearest, count)


def random_passages(count: int, library: Passages, random: Random) -> Choice:
    """Return a choice of any chunks of the library instead of the neighbours: the control."""
    return lambda nearest: [random.randrange(len(library)) for _ in nearest[:count]]
