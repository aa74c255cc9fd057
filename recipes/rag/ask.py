"""Ask a trained adapter: what `mmattn ask` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from answering import load_lm, looked_at, looks, write_answers
from settings import ScoreSettings

import mmattn
from mmattn.errors import TextError


@dataclass(frozen=True)
class Source:
    """An entry that was looked at, and how much: a share of the weights at the first token of the answer."""

    text: str
    weight: float


class Asked:
    """An index, a language model with an adapter, and an encoder, loaded once for many questions."""

    def __init__(self, index: Path, adapter: Path, lm: str = "assets/rag", view: int = 100) -> None:
        self.encoder = mmattn.TextEncoder()
        self.index = mmattn.Index.load(index, encoder=self.encoder)
        host, self.tokenizer = load_lm(lm)
        self.model = mmattn.load(host, adapter)
        self.view = view

    def __call__(self, question: str) -> tuple[str, list[Source]]:
        """An answer, and the entries that were looked at, the most first; what is left of 1 went to "nothing here".

        Raises:
            TextError: an empty question.
        """
        if not question.strip():
            raise TextError("the question is empty: ask something")
        memory = looked_at(self.index.search([question], self.view), ScoreSettings())
        prompt = f"Question: {question.strip()}\nAnswer:"
        answer = write_answers(self.model, self.tokenizer, [prompt], memory)[0]
        weights = looks(self.model, self.tokenizer, [prompt], memory)[0]
        return answer, sources(memory.sources[0] if memory.sources else [], weights.tolist())


def sources(named: list[Any], weights: list[float]) -> list[Source]:
    """Entries with a weight, the most first."""
    found = [Source(one["text"], weight) for one, weight in zip(named, weights, strict=False) if one is not None]
    return sorted(found, key=lambda source: -source.weight)
