"""Bits per description, perplexities, and the facts in generated captions.

Bits saved per description: the sum over a description's tokens of log2 p with the memory minus log2 p of the text-only
LoRA, averaged over all pairs of a held-out picture and a description of its species.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import training

from .data import Data, Picture, Species


@dataclass
class Row:
    """One line of the table. `nats` is the cross-entropy of each pair of picture and text."""

    name: str
    perplexity: float = math.nan
    bits_saved: float = math.nan
    species_perplexity: float = math.nan
    species_accuracy: float = math.nan
    attribute_accuracy: float = math.nan
    parameters: int = 0
    seconds: float = math.nan
    nats: list[float] = field(default_factory=list, repr=False)


class Measure:
    """Measure models on the same pairs, texts and pictures.

    Args:
        data: its held-out pictures are measured.
        tokenizer: of the language model.
        ids: of each text, as `training.encode_texts` returns them.
        max_new_tokens: of a caption.
        num_beams: of a caption.
    """

    def __init__(
        self, data: Data, tokenizer: Any, ids: Sequence[Sequence[int]], *, max_new_tokens: int = 64, num_beams: int = 1
    ) -> None:
        self.data, self.tokenizer, self.ids = data, tokenizer, ids
        self.max_new_tokens, self.num_beams = max_new_tokens, num_beams
        self.pairs = [(row, text) for row, picture in enumerate(data.held_out) for text in data.texts_of(picture)]
        self.spans = {
            text: name_span(tokenizer, data.texts[text], ids[text], one.name)
            for one in data.species
            for text in one.texts
        }

    def row(self, name: str, model: Any, memory: mmattn.Memory | None = None) -> tuple[Row, list[str]]:
        """Measure a model with a memory row per held-out picture, or none; return the line and the captions."""
        if memory is None:
            texts = sorted({text for _, text in self.pairs})
            by_text = dict(zip(texts, training.text_nats(model, [self.ids[t] for t in texts]), strict=True))
            nats = [by_text[text] for _, text in self.pairs]
        else:
            rows = [row for row, _ in self.pairs]
            nats = training.text_nats(model, [self.ids[text] for _, text in self.pairs], memory, rows)
        spans = [self.spans[text] for _, text in self.pairs]
        names = [sum(one[span]) for one, span in zip(nats, spans, strict=True) if span is not None]
        captions = self.captions(model, memory)
        species, attributes = self.check(captions)
        row = Row(name, training.perplexity([value for one in nats for value in one]))
        row.nats, row.species_perplexity = [sum(one) for one in nats], training.perplexity(names)
        row.species_accuracy, row.attribute_accuracy = species, attributes
        return row, captions

    def captions(self, model: Any, memory: mmattn.Memory | None) -> list[str]:
        """Return a caption of each held-out picture; without a memory all are the same."""
        captions = write_captions(model, self.tokenizer, memory, self.max_new_tokens, self.num_beams)
        return captions * len(self.data.held_out) if memory is None else captions

    def check(self, captions: Sequence[str]) -> tuple[float, float]:
        """Return the share of captions with the right species, and of right attributes among all in the captions."""
        names = [one.name for one in self.data.species]
        words = {word for one in self.data.species for word in one.attributes.values()}
        right, attributes = [], []
        for picture, caption in zip(self.data.held_out, captions, strict=True):
            species = self.data.species[picture.species]
            right.append(named_species(caption, names) == [species.name])
            attributes += self._check_attributes(species, caption, words)
        return sum(right) / len(right), sum(attributes) / len(attributes) if attributes else math.nan

    def _check_attributes(self, species: Species, caption: str, words: set[str]) -> list[bool]:
        """Compare each attribute word of a caption with the facts and the descriptions of the species."""
        descriptions = " ".join(self.data.texts[text] for text in species.texts)
        return [
            word in species.attributes.values() or _has(descriptions, word) for word in words if _has(caption, word)
        ]


def bits_saved(row: Row, control: Row) -> float:
    """Return the mean over pairs of the bits by which a description is cheaper than under the control."""
    pairs = zip(row.nats, control.nats, strict=True)
    return sum((b - a) / math.log(2) for a, b in pairs) / len(row.nats)


def name_span(tokenizer: Any, text: str, ids: Sequence[int], name: str) -> slice | None:
    """Return the entries of `text_nats` that are the tokens of the name, or None if the text lacks it."""
    hit = re.search(rf"\b{re.escape(name)}", text, re.IGNORECASE)
    if hit is None:
        return None
    # Entry j of the nats is token j of the text: nothing predicts the begin token.
    lengths = [len(tokenizer.decode(ids[1 : 1 + count])) for count in range(len(ids) - 1)]
    start = max(count for count, length in enumerate(lengths) if length <= hit.start())
    # A token may include the space before the name.
    if lengths[start] < hit.start() and not text[lengths[start] : hit.start()].isspace():
        start = max(0, start - 1)
    stop = next((count for count, length in enumerate(lengths) if length >= hit.end()), len(ids) - 2)
    return slice(start, max(stop, start + 1))


def named_species(caption: str, names: Sequence[str]) -> list[str]:
    """Return the species that a caption names, in order, each once; "oxeye daisy" does not name the daisy.

    >>> named_species("The oxeye daisy, not the daisy, is a Daisy.", ["daisy", "oxeye daisy"])
    ['oxeye daisy', 'daisy']
    """
    if not names:
        return []
    longest = sorted(names, key=len, reverse=True)
    hits = re.findall(rf"\b({'|'.join(map(re.escape, longest))})\b", caption, re.IGNORECASE)
    by_lower = {name.lower(): name for name in names}
    return list(dict.fromkeys(by_lower[hit.lower()] for hit in hits))


def other_species(pictures: Sequence[Picture], seed: int) -> list[int]:
    """Return for each picture the number of one of another species; with one species only, of another picture."""
    order = list(range(len(pictures)))
    Random(seed).shuffle(order)
    order.sort(key=lambda i: pictures[i].species)
    largest = max(sum(pictures[i].species == pictures[j].species for j in order) for i in order)
    shift = largest if largest < len(order) else 1
    out = [0] * len(order)
    for place, i in enumerate(order):
        out[i] = order[(place + shift) % len(order)]
    return out


@torch.no_grad()
def write_captions(
    model: Any, tokenizer: Any, memory: mmattn.Memory | None, max_new_tokens: int = 64, num_beams: int = 1
) -> list[str]:
    """Generate a caption for each row of the memory, or one without a memory, from the begin token alone."""
    begin, end = training.bos_and_eos(tokenizer)
    device = next(model.parameters()).device
    options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False, "eos_token_id": end}
    options["pad_token_id"] = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    captions: list[str] = []
    for start in range(0, 1 if memory is None else memory.batch, 64):
        part = {} if memory is None else {"memory": memory[slice(start, start + 64)]}
        ids = torch.full((part["memory"].batch if part else 1, 1), begin, device=device)
        training.check_prompt(ids, torch.ones_like(ids), model.config, max_new_tokens)
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **part, **options)
        captions += [text.strip() for text in tokenizer.batch_decode(output[:, 1:], skip_special_tokens=True)]
    return captions


def _has(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None
