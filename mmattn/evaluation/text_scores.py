"""Scores of texts: BLEU and chrF by sacrebleu, CIDEr by pycocoevalcap, word error rate by torchmetrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mmattn.errors import ConfigError, ShapeError, check_choice, import_extra
from mmattn.tokenization import check_text

METRICS = ("bleu", "chrf")
# What CIDEr's own tokenizer takes out of captions (pycocoevalcap/tokenizer/ptbtokenizer.py).
_PUNCTUATION = frozenset(["''", "'", "``", "`", "(", ")", "{", "}", ".", "?", "!", ",", ":", "-", "--", "...", ";"])
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def text_scores(
    texts: Sequence[str], references: Sequence[str | Sequence[str]], metrics: Sequence[str] = METRICS
) -> dict[str, float]:
    """Return scores of captions, translations or transcripts, each over all texts together.

    "bleu" and "chrf" are those of sacrebleu, from 0 to 100. "cider" is CIDEr-D (arXiv 1411.5726, section 4.1) of COCO,
    whose n-grams weigh by their rarity among these references, so that it says little of a few texts. NLTK tokenizes
    captions, which needs no Java and differs from COCO's tokenizer only in abbreviations within a text and brackets.
    "wer" is the word error rate against the first reference, 0 at best.

    Args:
        texts: generated texts.
        references: for each text one reference, or several.
        metrics: of "bleu", "chrf", "cider" and "wer".

    Raises:
        ShapeError: another number of references than of texts, or none.
        TextError: what is no text.
        ConfigError: an unknown metric, or a text without a reference.
        MissingExtraError: the library of a metric is not installed.

    >>> text_scores(["a red rose"], [["a red rose", "a rose in red"]], ["bleu", "chrf", "wer"])
    {'bleu': 0.0, 'chrf': 100.0, 'wer': 0.0}
    """
    written = check_text(texts)
    wanted = [check_text(one) for one in references]
    if len(wanted) != len(written) or not written:
        raise ShapeError(f"{len(written)} texts and {len(wanted)} references were given: give one of each, at least")
    for number, one in enumerate(wanted):
        if not one:
            raise ConfigError(f"text {number} has no reference: leave it out, or give one")
    return {metric: _SCORES[check_choice("metrics", metric, tuple(_SCORES))](written, wanted) for metric in metrics}


def _streams(references: Sequence[Sequence[str]]) -> list[list[str | None]]:
    """Return references as sacrebleu takes them: the first of each text, the second of each, …, or None."""
    longest = max(map(len, references))
    return [[one[place] if place < len(one) else None for one in references] for place in range(longest)]


def _bleu(texts: list[str], references: list[list[str]]) -> float:
    return float(import_extra("sacrebleu", "metrics").corpus_bleu(texts, _streams(references)).score)


def _chrf(texts: list[str], references: list[list[str]]) -> float:
    return float(import_extra("sacrebleu", "metrics").corpus_chrf(texts, _streams(references)).score)


def _cider(texts: list[str], references: list[list[str]]) -> float:
    cider: Any = import_extra("pycocoevalcap.cider.cider", "eval").Cider()
    cut = import_extra("nltk.tokenize", "eval").NLTKWordTokenizer().tokenize

    def words(text: str) -> str:
        # Only the last point of a text is cut off a word, and a caption may be several sentences.
        parts = (part for sentence in _SENTENCE_END.split(text.lower()) for part in cut(sentence))
        return " ".join(part for part in parts if part not in _PUNCTUATION)

    wanted = {number: [words(reference) for reference in one] for number, one in enumerate(references)}
    score, _ = cider.compute_score(wanted, {number: [words(text)] for number, text in enumerate(texts)})
    return float(score)


def _wer(texts: list[str], references: list[list[str]]) -> float:
    rate = import_extra("torchmetrics.functional.text", "metrics").word_error_rate
    return float(rate(texts, [one[0] for one in references]))


_SCORES: dict[str, Callable[[list[str], list[list[str]]], float]] = {
    "bleu": _bleu,
    "chrf": _chrf,
    "cider": _cider,
    "wer": _wer,
}
