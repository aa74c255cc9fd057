"""Scores of texts: BLEU and chrF by sacrebleu, word error rate by torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmattn.errors import ConfigError, ShapeError, check_choice, import_extra
from mmattn.tokenization import check_text

METRICS = ("bleu", "chrf")


def text_scores(
    texts: Sequence[str], references: Sequence[str | Sequence[str]], metrics: Sequence[str] = METRICS
) -> dict[str, float]:
    """Return scores of captions, translations or transcripts, each over all texts together.

    "bleu" and "chrf" are those of sacrebleu, from 0 to 100. "wer" is the word error rate against the first reference, 0
    at best.

    Args:
        texts: generated texts.
        references: for each text one reference, or several.
        metrics: of "bleu", "chrf" and "wer".

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


def _wer(texts: list[str], references: list[list[str]]) -> float:
    rate = import_extra("torchmetrics.functional.text", "metrics").word_error_rate
    return float(rate(texts, [one[0] for one in references]))


_SCORES: dict[str, Callable[[list[str], list[list[str]]], float]] = {
    "bleu": _bleu,
    "chrf": _chrf,
    "wer": _wer,
}
