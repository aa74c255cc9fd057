"""How good translations are, and what their keys and values take in pages and in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mmattn
from mmattn.errors import import_extra
from mmattn.evaluation import text_scores

from .pairs import Question
from .sentences import read_sources
from .writing import Translator

# Missed here, before anything is trained.
import_extra("sacrebleu", "translate")


def score(questions: Sequence[Question], written: Sequence[str]) -> dict[str, float]:
    """Share of translations that are one of the references letter for letter, chrF and BLEU over all references."""
    exact = sum(text in question.references for question, text in zip(questions, written, strict=True))
    references = [question.references for question in questions]
    return {"exact": exact / len(questions), **text_scores(written, references, ["chrf", "bleu"])}


def measure(
    name: str, translator: Translator, questions: Sequence[Question], shuffled: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """A row of the table, and the translations; `shuffled` gives each question the source of another."""
    sources = [question.source for question in questions]
    if shuffled:
        sources = sources[1:] + sources[:1]
    written = translator(sources)
    return {"name": name, **score(questions, written)}, written


def measure_pages(translator: Translator, questions: Sequence[Question], beams: int) -> dict[str, Any]:
    """Bytes of the targets' keys and values at their most, in one piece and in pages; whether the texts are the same.

    Sums over the batches that `translator` makes of the questions.
    """
    sources = read_sources(translator.tokenizer, [question.source for question in questions], translator.max_tokens)
    found = {"beams": beams, "page_size": translator.settings.page_size, "plain": 0, "paged": 0, "same": True}
    for rows in translator.parts(sources):
        own = [sources[row] for row in rows]
        plain, pool = mmattn.seq2seq.GrowingCache(), translator.model.make_pool(translator.settings.page_size)
        texts = translator.write(own, beams=beams, cache=plain)
        found["same"] &= texts == translator.write(own, beams=beams, cache=pool.cache(rows=len(own)))
        found["plain"] += plain.nbytes()
        found["paged"] += pool.peak * pool.page_bytes
    return found
