"""A trained model with its tokenizer: translations, and the attention of each of their words to the source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmattn import inspect
from mmattn.errors import ConfigError

from .data import encode_sources
from .model import TranslationModel
from .settings import WritingSettings

Words = list[tuple[str, list[int]]]
"""The words of a text, each with the places of its tokens."""


@dataclass(frozen=True)
class Translator:
    """Translates sources of at most `max_tokens` tokens, begin and end included."""

    model: TranslationModel
    tokenizer: Any
    settings: WritingSettings
    max_tokens: int

    def save(self, folder: Path) -> None:
        """Save the model and the tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    @classmethod
    def load(cls, run: Path, settings: WritingSettings | None = None) -> Translator:
        """Load the model and the tokenizer of a finished run."""
        if not (run / "model" / "model.safetensors").is_file():
            raise ConfigError(f"{run} is not the folder of a finished run: it needs model/")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "model")
        model = TranslationModel.from_pretrained(run / "model").eval()
        return cls(model, tokenizer, settings or WritingSettings(), model.config.max_positions)

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """Return the translations of sentences, in their order."""
        sources = encode_sources(self.tokenizer, texts, self.max_tokens)
        order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
        targets: list[list[int]] = [[] for _ in sources]
        for begin in range(0, len(order), self.settings.batch):
            rows = order[begin : begin + self.settings.batch]
            for row, ids in zip(rows, self.write([sources[row] for row in rows]), strict=True):
                targets[row] = ids
        return [self.tokenizer.decode(ids).strip() for ids in targets]

    def write(self, sources: Sequence[list[int]]) -> list[list[int]]:
        """Return the ids of translations, without begin, end and padding."""
        batch = self.tokenizer.pad({"input_ids": sources}, return_tensors="pt").to(self.model.device)
        settings = {"num_beams": self.settings.beams, "length_penalty": self.settings.length_penalty}
        written = self.model.generate(**batch, **settings, do_sample=False, max_new_tokens=self.max_tokens - 1)
        special = self.tokenizer.all_special_ids
        return [[token for token in row if token not in special] for row in written.tolist()]

    @torch.no_grad()
    def trace(self, source: str) -> inspect.Trace:
        """Translate a source; trace the attention of each word by layer and head, and its probability."""
        (ids,) = encode_sources(self.tokenizer, [source], self.max_tokens)
        (written,) = self.write([ids])
        sources, targets = split_words(self.tokenizer, ids), split_words(self.tokenizer, written)
        # A row with the whole source, one with none of it, and one without each word.
        visible = torch.ones(2 + len(sources), len(ids), dtype=torch.bool)
        visible[1] = False
        for row, (_, tokens) in enumerate(sources, start=2):
            visible[row, tokens] = False
        whole = torch.tensor([ids], device=self.model.device).expand(len(visible), -1)
        begun = torch.tensor([[self.tokenizer.bos_token_id, *written]], device=self.model.device)
        rows = begun.expand(len(visible), -1)
        encoded = self.model.encoder(whole)
        logits = self.model(None, visible.to(self.model.device), rows[:, :-1], encoder_outputs=encoded).logits
        logs = logits.log_softmax(-1).gather(2, rows[:, 1:, None])[..., 0]
        chances = torch.stack([logs[:, tokens].sum(1) for _, tokens in targets], 1).exp().cpu()
        with inspect.record(self.model) as weights:
            self.model(whole[:1], decoder_input_ids=begun)
        return inspect.Trace(
            [word for word, _ in targets],
            [word for word, _ in sources],
            align(sources, targets, torch.cat([calls[0] for calls in weights.values()]).cpu()),
            [f"layer {layer} of the decoder" for _, layer in self.model.attentions()],
            f"{source} → {self.tokenizer.decode(written).strip()}",
            probability=chances[0],
            without=chances[1],
            dropped=chances[2:].T,
        )


def align(sources: Words, targets: Words, weights: Tensor) -> Tensor:
    """Return weights (…, target words, source words) from those of tokens, taken where a token is predicted."""
    columns = torch.stack([weights[..., :-1, tokens].sum(-1) for _, tokens in sources], -1)
    if not targets:
        return columns
    return torch.stack([columns[..., tokens, :].mean(-2) for _, tokens in targets], -2)


def split_words(tokenizer: Any, ids: list[int]) -> Words:
    """Split tokens into words."""
    words: list[list[int]] = []
    for place in range(len(ids)):
        text = tokenizer.decode([ids[place]])
        before = tokenizer.decode([ids[place - 1]]) if place else ""
        alike = before.isspace() or text in ("'", "’", "-") or before[-1:].isalnum() == text[:1].isalnum()
        continues = alike and not text.startswith(" ")
        # Half a letter decodes to a replacement mark and belongs to the token before.
        if words and (continues or "\ufffd" in (text[:1], before[-1:])):
            words[-1].append(place)
        else:
            words.append([place])
    return [(tokenizer.decode([ids[place] for place in places]).strip(), places) for places in words]


def align_text(trace: inspect.Trace) -> str:
    """Return each word of a translation with the word that it attended to most: "Je→I suis→am"."""
    best = trace.mean().argmax(1).tolist()
    return " ".join(f"{word}→{trace.sources[place]}" for word, place in zip(trace.words, best, strict=True))


def draw_alignments(traces: Sequence[inspect.Trace], path: Path) -> None:
    """Draw a heat map per sentence: a row for each word of the translation, a column for each word of the source."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(5, len(traces))
    lines = math.ceil(len(traces) / columns)
    figure = Figure(figsize=(3.2 * columns, 3.2 * lines))
    FigureCanvasAgg(figure)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for axis in axes:
        axis.axis("off")
    for axis, trace in zip(figure.axes, traces, strict=False):
        weights = trace.mean().tolist()
        axis.axis("on")
        axis.imshow(weights, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axis.set_xticks(range(len(trace.sources)), [_label(word) for word in trace.sources], rotation=60)
        axis.set_yticks(range(len(trace.words)), [_label(word) for word in trace.words])
        axis.xaxis.tick_top()
        axis.tick_params(length=0, labelsize=8)
        for row, shares in enumerate(weights):
            for column, share in enumerate(shares):
                if share >= 0.1:
                    colour = "white" if share > 0.6 else "black"
                    axis.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=6, color=colour)
    figure.subplots_adjust(wspace=0.6, hspace=0.6)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _label(word: str) -> str:
    # A dollar sign would begin a formula, and a word of a model may be long.
    return "".join(letter if letter.isprintable() else "·" for letter in word[:16]).replace("$", r"\$")
