"""The measures: bits, perplexities, and what generated captions get right.

Bits saved per description: the sum over a description's tokens of log2 p with the memory minus log2 p of the text-only
LoRA, averaged over all pairs of a held-out picture and a description that is true of it.
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
    """One line of the table. `nats` holds, per pair of picture and text, what the text cost."""

    name: str
    perplexity: float = math.nan
    bits_saved: float = math.nan
    species_perplexity: float = math.nan
    species_accuracy: float = math.nan
    attribute_accuracy: float = math.nan
    parameters: int = 0
    seconds: float = math.nan
    nats: list[float] = field(default_factory=list, repr=False)

    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "nats"}


class Measure:
    """The same pairs, texts and pictures for every row of the table.

    Args:
        data: its held-out pictures are measured. ids: of each text, as `training.encode_texts` makes them.
        max_new_tokens, num_beams: of the captions.
    """

    def __init__(
        self, data: Data, tokenizer: Any, ids: Sequence[Sequence[int]], *, max_new_tokens: int = 64, num_beams: int = 1
    ) -> None:
        self.data, self.tokenizer, self.ids = data, tokenizer, ids
        self.max_new_tokens, self.num_beams = max_new_tokens, num_beams
        self.pairs = [(row, text) for row, picture in enumerate(data.held_out) for text in picture.texts]
        named = {text: one.name for one in data.species for text in one.texts}
        self.spans = {
            text: name_span(tokenizer, data.texts[text], ids[text], named[text]) if text in named else None
            for text in {text for _, text in self.pairs}
        }

    def row(
        self, name: str, model: Any, memory: mmattn.Memory | None = None, *, baseline: Row | None = None
    ) -> tuple[Row, list[str]]:
        """Measure a model that reads `memory` (a row per held-out picture; None: nothing); the row and its captions."""
        if memory is None:
            texts = sorted(self.spans)
            once = dict(zip(texts, training.text_nats(model, [self.ids[t] for t in texts]), strict=True))
            nats = [once[text] for _, text in self.pairs]
        else:
            rows = [row for row, _ in self.pairs]
            nats = training.text_nats(model, [self.ids[text] for _, text in self.pairs], memory, rows)
        made = Row(name, training.perplexity([value for one in nats for value in one]), nats=[sum(one) for one in nats])
        spans = [(one, self.spans[text]) for one, (_, text) in zip(nats, self.pairs, strict=True)]
        words = [sum(one[span.start : span.stop]) for one, span in spans if span is not None]
        made.species_perplexity = training.perplexity(words)
        if baseline is not None:
            saved = [(b - a) / math.log(2) for a, b in zip(made.nats, baseline.nats, strict=True)]
            made.bits_saved = sum(saved) / len(saved)
        captions = self.captions(model, memory)
        made.species_accuracy, made.attribute_accuracy = self.check(captions)
        return made, captions

    def captions(self, model: Any, memory: mmattn.Memory | None) -> list[str]:
        """A caption for each held-out picture; without a memory they are all the same."""
        count = len(self.data.held_out)
        made = write_captions(model, self.tokenizer, memory, self.max_new_tokens, self.num_beams)
        return made * count if memory is None else made

    def check(self, captions: Sequence[str]) -> tuple[float, float]:
        """Share of captions that name the right species, and share of attributes named that are true of it."""
        known = [
            (self.data.species[picture.species], caption)
            for picture, caption in zip(self.data.held_out, captions, strict=True)
            if picture.species is not None
        ]
        if not known:
            return math.nan, math.nan
        names = [one.name for one in self.data.species]
        right = [named_species(caption, names) == [one.name] for one, caption in known]
        words = {word for one in self.data.species for word in one.attributes.values()}
        named = [claim for one, caption in known for claim in self._claims(one, caption, words)]
        return sum(right) / len(right), sum(named) / len(named) if named else math.nan

    def _claims(self, one: Species, caption: str, words: set[str]) -> list[bool]:
        """For each attribute word in a caption, whether it is true: a fact of the species, or said of it somewhere."""
        said = " ".join(self.data.texts[text] for text in one.texts)
        found = [word for word in words if _has(caption, word)]
        return [word in one.attributes.values() or _has(said, word) for word in found]


def name_span(tokenizer: Any, text: str, ids: Sequence[int], name: str) -> slice | None:
    """Which entries of `text_nats` are the tokens of the species' name, None where the text does not name it."""
    hit = re.search(rf"\b{re.escape(name)}", text, re.IGNORECASE)
    if hit is None:
        return None
    # Entry j of the nats is token j of the text, the begin token being predicted by nothing.
    before = [len(tokenizer.decode(ids[1 : 1 + count])) for count in range(len(ids) - 1)]
    start = max(count for count, length in enumerate(before) if length <= hit.start())
    # A token may hold the space before the name.
    if before[start] < hit.start() and not text[before[start] : hit.start()].isspace():
        start = max(0, start - 1)
    stop = next((count for count, length in enumerate(before) if length >= hit.end()), len(ids) - 2)
    return slice(start, max(stop, start + 1))


def named_species(caption: str, names: Sequence[str]) -> list[str]:
    """The species a caption names, in order, each once; "oxeye daisy" does not name the daisy.

    >>> named_species("The oxeye daisy, not the daisy, is a Daisy.", ["daisy", "oxeye daisy"])
    ['oxeye daisy', 'daisy']
    """
    if not names:
        return []
    longest = sorted(names, key=len, reverse=True)
    found = re.findall(rf"\b({'|'.join(map(re.escape, longest))})\b", caption, re.IGNORECASE)
    by_lower = {name.lower(): name for name in names}
    return list(dict.fromkeys(by_lower[hit.lower()] for hit in found))


def strangers(pictures: Sequence[Picture], seed: int) -> list[int]:
    """For each picture another one: of another species where species are known, at random otherwise.

    Raises nothing where it cannot be: with one species only, pictures are exchanged within it.
    """
    order = list(range(len(pictures)))
    Random(seed).shuffle(order)
    order.sort(key=lambda i: -1 if pictures[i].species is None else pictures[i].species)
    counts = [sum(pictures[i].species == pictures[j].species for j in order) for i in order]
    shift = max(counts) if pictures and pictures[0].species is not None and max(counts) < len(order) else 1
    out = [0] * len(order)
    for place, i in enumerate(order):
        out[i] = order[(place + shift) % len(order)]
    return out


@torch.no_grad()
def write_captions(
    model: Any, tokenizer: Any, memory: mmattn.Memory | None, max_new_tokens: int = 64, num_beams: int = 1
) -> list[str]:
    """Captions, from nothing but the begin token: one per row of the memory, or one without."""
    begin, end = training.bos_and_eos(tokenizer)
    device = next(model.parameters()).device
    options = {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False, "eos_token_id": end}
    options["pad_token_id"] = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    texts: list[str] = []
    for start in range(0, 1 if memory is None else memory.batch, 64):
        part = None if memory is None else memory[slice(start, start + 64)]
        ids = torch.full((1 if part is None else part.batch, 1), begin, device=device)
        training.check_prompt(ids, torch.ones_like(ids), model.config, max_new_tokens)
        seen = {} if part is None else {"memory": part}
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **seen, **options)
        texts += [text.strip() for text in tokenizer.batch_decode(made[:, 1:], skip_special_tokens=True)]
    return texts


def _has(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None
