"""Bits per description, perplexities, and the facts in generated captions.

Bits saved per description: the sum over a description's tokens of log2 p with the memory minus log2 p of the text-only
LoRA, averaged over all pairs of a held-out picture and a description of its species.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

import mmattn
from mmattn import pipelines, training

from .data import Data, Picture


class Measure:
    """Measure models on the same pairs of a held-out picture and a description; `ids` has the ids of each text."""

    def __init__(
        self, data: Data, tokenizer: PreTrainedTokenizerBase, ids: Sequence[Sequence[int]], max_new_tokens: int = 64
    ) -> None:
        self.data, self.tokenizer, self.ids, self.max_new_tokens = data, tokenizer, ids, max_new_tokens
        self.pairs = [(row, text) for row, picture in enumerate(data.held_out) for text in picture.species.texts]
        self.spans = {
            text: name_span(tokenizer, data.texts[text], ids[text], one.name)
            for one in data.species
            for text in one.texts
        }

    def row(self, name: str, model: Any, memory: mmattn.Memory | None = None) -> tuple[dict[str, Any], list[str]]:
        """Measure a model with a memory for each picture, or none; return a row (with nats of pairs) and captions."""
        rows, texts = zip(*self.pairs, strict=True)
        if memory is None:  # without a picture each text is measured once
            unique = sorted(set(texts))
            once = dict(zip(unique, self.text_nats(model, unique), strict=True))
            nats = [once[text] for text in texts]
        else:
            nats = self.text_nats(model, texts, memory, rows)
        spans = [self.spans[text] for text in texts]
        names = [sum(one[span]) for one, span in zip(nats, spans, strict=True) if span is not None]
        captions = self.captions(model, memory)
        species, attributes = check_captions(self.data, captions)
        row = {
            "name": name,
            "perplexity": perplexity([value for one in nats for value in one]),
            "bits_saved": math.nan,
            "species_perplexity": perplexity(names),
            "species_accuracy": species,
            "attribute_accuracy": attributes,
            "parameters": 0,
            "seconds": math.nan,
            "nats": [sum(one) for one in nats],
        }
        return row, captions

    @torch.no_grad()
    def text_nats(
        self, model: Any, texts: Sequence[int], memory: mmattn.Memory | None = None, rows: Sequence[int] = ()
    ) -> list[list[float]]:
        """Return -log p of each token of texts but the first, each given its row of a memory."""
        nats, device = list[list[float]](), next((weight.device for weight in model.parameters()), "cpu")
        for start in range(0, len(texts), 32):
            part = slice(start, start + 32)
            ids = [self.ids[text] for text in texts[part]]
            batch = training.collate(ids, None if memory is None else memory[list(rows[part])])
            lines = training.token_nats(model, batch.to(device)).tolist()
            nats += [line[: len(row) - 1] for line, row in zip(lines, ids, strict=True)]
        return nats

    def captions(self, model: Any, memory: mmattn.Memory | None) -> list[str]:
        """Return a caption of each held-out picture; without a memory all are the same."""
        count, length = len(self.data.held_out), self.max_new_tokens
        captions = write_captions(model, self.tokenizer, memory, length)
        return captions * count if memory is None else captions


def perplexity(nats: Sequence[float]) -> float:
    """Return exp of the mean cross-entropy per token; nan without tokens."""
    return math.exp(sum(nats) / len(nats)) if nats else math.nan


def bits_saved(nats: Sequence[float], control: Sequence[float]) -> float:
    """Return the bits that a description costs less than under the control, as the mean over pairs."""
    return sum((b - a) / math.log(2) for a, b in zip(nats, control, strict=True)) / len(nats)


def write_captions(
    model: Any, tokenizer: PreTrainedTokenizerBase, memory: mmattn.Memory | None, max_new_tokens: int = 64
) -> list[str]:
    """Generate a caption for each row of the memory, or one without a memory, from the start token alone."""
    prompts = [""] * (1 if memory is None else memory.batch)
    return pipelines.generate_texts(model, tokenizer, prompts, memory, options={"max_new_tokens": max_new_tokens})


def check_captions(data: Data, captions: Sequence[str]) -> tuple[float, float]:
    """Return the share of captions with the right species, and of right attributes among all in the captions."""
    names = [one.name for one in data.species]
    words = {word for one in data.species for word in one.attributes.values()}
    right, attributes = [], []
    for picture, caption in zip(data.held_out, captions, strict=True):
        species = picture.species
        right.append(named_species(caption, names) == [species.name])
        facts = " ".join([*species.attributes.values(), *(data.texts[text] for text in species.texts)])
        attributes += [has_word(facts, word) for word in words if has_word(caption, word)]
    return sum(right) / len(right), sum(attributes) / len(attributes) if attributes else math.nan


def has_word(text: str, word: str) -> bool:
    """Return True if the text has this word."""
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def named_species(caption: str, names: Sequence[str]) -> list[str]:
    """Return the species that a caption names, in order, each once; "oxeye daisy" does not name the daisy."""
    longest = sorted(names, key=len, reverse=True)
    hits = re.findall(rf"\b({'|'.join(map(re.escape, longest))})\b", caption, re.IGNORECASE)
    by_lower = {name.lower(): name for name in names}
    return list(dict.fromkeys(by_lower[hit.lower()] for hit in hits))


def name_span(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], name: str) -> slice | None:
    """Return the entries of `text_nats` that are the tokens of the name, or None if the text lacks it."""
    hit = re.search(rf"\b{re.escape(name)}", text, re.IGNORECASE)
    if hit is None:
        return None
    # Entry j of the nats is token j of the text: nothing predicts the start token.
    lengths = [len(tokenizer.decode(ids[1 : 1 + count])) for count in range(len(ids) - 1)]
    start = max(count for count, length in enumerate(lengths) if length <= hit.start())
    # A token may include the space before the name.
    if lengths[start] < hit.start() and not text[lengths[start] : hit.start()].isspace():
        start = max(0, start - 1)
    stop = next((count for count, length in enumerate(lengths) if length >= hit.end()), len(ids) - 2)
    return slice(start, max(stop, start + 1))


def other_species(pictures: Sequence[Picture], seed: int) -> list[int]:
    """Return for each picture the number of one of another species; with one species only, of another picture."""
    order = list(range(len(pictures)))
    Random(seed).shuffle(order)
    names = [picture.species.name for picture in pictures]
    place = {name: number for number, name in enumerate(dict.fromkeys(names))}
    order.sort(key=lambda i: place[names[i]])
    largest = max(map(names.count, names))
    shift = largest if largest < len(order) else 1
    other = {i: order[(position + shift) % len(order)] for position, i in enumerate(order)}
    return [other[i] for i in range(len(order))]
