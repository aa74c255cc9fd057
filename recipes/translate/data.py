"""Sentence pairs from a file or from the CLDR, the split, the tokenizer, and ids."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mmattn import training
from mmattn.errors import ConfigError

from .dates import write_pairs
from .settings import DataSettings

PAD, START, END = "<pad>", "<s>", "</s>"


@dataclass(frozen=True)
class Pair:
    source: str
    target: str


@dataclass(frozen=True)
class HeldOut:
    """A held-out source with all its translations."""

    source: str
    references: tuple[str, ...]


def load_pairs(settings: DataSettings, seed: int) -> tuple[list[Pair], list[HeldOut]]:
    """Return pairs to train on, and held-out sources."""
    if settings.pairs is None:
        pairs = [Pair(*one) for one in write_pairs(settings.written, settings.languages, seed)]
    else:
        pairs = read_pairs(Path(settings.pairs))
    return split(pairs, settings.held_out, seed)


def read_pairs(path: Path) -> list[Pair]:
    """Read lines with a source, a tab and its translation; a second tab ends the translation; each pair counts once."""
    if not path.is_file():
        raise ConfigError(f"data.pairs: there is no file {path}")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error.reason} at byte {error.start})") from error
    pairs = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        parts = [" ".join(unicodedata.normalize("NFC", part).split()) for part in line.split("\t")[:2]]
        if len(parts) < 2 or not all(parts):
            raise ConfigError(f"{path}, line {number}: a source, a tab and its translation expected, got {line!r:.60}")
        pairs[Pair(*parts)] = True
    return list(pairs)


def split(pairs: list[Pair], held_out: int, seed: int) -> tuple[list[Pair], list[HeldOut]]:
    """Hold out sources with all their translations; leave out pairs that share either with them."""
    sources: dict[str, list[Pair]] = {}
    for pair in pairs:
        sources.setdefault(plain(pair.source), []).append(pair)
    order = sorted(sources)
    Random(seed).shuffle(order)
    held = {name: sources[name] for name in order[:held_out]}
    targets = {plain(pair.target) for group in held.values() for pair in group}
    train = [pair for pair in pairs if plain(pair.source) not in held and plain(pair.target) not in targets]
    if not train:
        raise ConfigError(
            f"data.held_out={held_out} of {len(sources)} different sources leave nothing to train on: give more pairs, "
            "or hold out fewer"
        )
    references: dict[str, dict[str, bool]] = {}
    for pair in (pair for group in held.values() for pair in group):
        references.setdefault(pair.source, {})[pair.target] = True
    return train, [HeldOut(source, tuple(texts)) for source, texts in references.items()]


def plain(text: str) -> str:
    """Return a sentence without case, spaces and punctuation, except inside numbers; or as it is if nothing is left.

    >>> plain("It's 1.5 km, Tom!")
    'its1.5kmtom'
    """
    text = text.casefold()
    letters = [
        letter
        for before, letter, after in zip(f" {text}", text, f"{text[1:]} ", strict=False)
        if unicodedata.category(letter)[0] not in "PZ" or (before.isdigit() and after.isdigit())
    ]
    return "".join(letters) or text


def train_tokenizer(pairs: Sequence[Pair], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer for both sides: every text comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    # With a space before it the first word has the same token as others.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for pair in pairs for text in (pair.source, pair.target)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=START, eos_token=END)


def encode_sources(tokenizer: Any, texts: Sequence[str], max_tokens: int | None = None) -> list[list[int]]:
    """Return the ids of each source, without begin and end."""
    texts = [text.strip() if isinstance(text, str) else text for text in texts]
    return [ids[1:-1] for ids in training.encode_texts(tokenizer, texts, max_tokens)]


def encode_pairs(tokenizer: Any, pairs: Sequence[Pair], max_tokens: int) -> list[dict[str, list[int]]]:
    """Return the ids of the pairs with at most `max_tokens` tokens on either side; a label ends with the end token."""
    sources = training.encode_texts(tokenizer, [pair.source for pair in pairs])
    targets = training.encode_texts(tokenizer, [pair.target for pair in pairs])
    short = [both for both in zip(sources, targets, strict=True) if max(map(len, both)) <= max_tokens]
    if not short:
        raise ConfigError(f"no pair has at most data.max_tokens={max_tokens} tokens: raise it")
    return [{"input_ids": source[1:-1], "labels": target[1:]} for source, target in short]
