"""Which word of a source each word of its translation attended to: as numbers, as text, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alignment:
    """Words of a source and of a translation, and the share (translation, source) of each look."""

    source: list[str]
    target: list[str]
    weights: Tensor

    def __str__(self) -> str:
        """Each word of the translation with the word it attended to most: "Je→I suis→am"."""
        best = self.weights.argmax(1).tolist()
        return " ".join(f"{word}→{self.source[place]}" for word, place in zip(self.target, best, strict=True))


Words = list[tuple[str, list[int]]]


def aligned(sources: Words, targets: Words, weights: Tensor, read: bool) -> Tensor:
    """Weights (…, words of the target, of the source) from those of tokens.

    Args:
        sources, targets: of `words`. weights: (…, 1 + l, m) of the start and of each token of the target.
        read: a token's look is the one it has when it is read; otherwise that of the token before it, from which it is
            written.
    """
    looks = weights[..., 1:, :] if read else weights[..., :-1, :]
    columns = torch.stack([looks[..., tokens].sum(-1) for _, tokens in sources], -1)
    if not targets:
        return columns
    return torch.stack([columns[..., tokens, :].mean(-2) for _, tokens in targets], -2)


def words(tokenizer: Any, ids: list[int]) -> Words:
    """The words of a text of tokens, each with the places of its tokens.

    A word begins at a space, or where letters meet punctuation: "l'homme." is "l'", "homme" and ".".
    """
    found: list[list[int]] = []
    for place in range(len(ids)):
        text = tokenizer.decode([ids[place]])
        before = tokenizer.decode([ids[place - 1]]) if place else ""
        alike = before.isspace() or text in ("'", "’", "-") or before[-1:].isalnum() == text[:1].isalnum()
        joined = alike and not text.startswith(" ")
        # Half a letter decodes to a replacement mark and belongs to what it goes on from.
        if found and (joined or "\ufffd" in (text[:1], before[-1:])):
            found[-1].append(place)
        else:
            found.append([place])
    return [(tokenizer.decode([ids[place] for place in places]).strip(), places) for places in found]


def draw(alignments: Sequence[Alignment], path: Path) -> None:
    """A heat map for each sentence: a row for each word of the translation, a column for each word of the source."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(5, len(alignments))
    lines = math.ceil(len(alignments) / columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * lines))
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis in axes:
        axis.axis("off")
    for axis, one in zip(figure.axes, alignments, strict=False):
        axis.axis("on")
        axis.imshow(one.weights.tolist(), cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(one.source)), [_label(word) for word in one.source], rotation=60)
        axis.set_yticks(range(len(one.target)), [_label(word) for word in one.target])
        axis.xaxis.tick_top()
        axis.tick_params(length=0, labelsize=8)
        for row, shares in enumerate(one.weights.tolist()):
            for column, share in enumerate(shares):
                if share >= 0.1:
                    colour = "white" if share > 0.6 else "black"
                    axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=6, color=colour)
    figure.subplots_adjust(wspace=0.6, hspace=0.6)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _label(word: str) -> str:
    # A dollar sign would begin a formula, and what a model writes may be one long word.
    return "".join(letter if letter.isprintable() else "·" for letter in word[:16]).replace("$", r"\$")
