"""Captions with few words to choose from: how often each word is right, beside a linear probe of the same features."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn import training

from .data import has_memory

VALUES = 20  # most values of a word, or of a whole text, that a probe tells apart
ROWS, MEASURED = 5000, 256  # rows that the probe is trained on, and rows that are measured, at most


def measure(host: Any, model: Any, rows: Iterable[Any], held_out: Iterable[Any]) -> dict[str, dict[str, float]]:
    """Return for the adapter and for a linear probe the share of held-out texts in which each word is right.

    It is empty where no word has a few values that come back, or where texts answer different prompts.
    """
    test = [row for row in itertools.islice(held_out, MEASURED) if has_memory(row)]
    few = itertools.islice(rows, ROWS)
    train = [row | {"memory": row["memory"].float().mean(0)} for row in few if has_memory(row)]
    prompts, known = [row.get("prompt") or "" for row in (*test, *train)], [row["text"] for row in train]
    words, right = read_words(known, known), read_words([row["text"] for row in test], known)
    if not words or not test or len(set(prompts)) > 1:
        return {}
    written = read_words(host.write(model, training.stack_memories(test), prompts[: len(test)]), known)
    features = (
        torch.stack([row["memory"] for row in train]),
        torch.stack([row["memory"].float().mean(0) for row in test]),
    )
    probed = {name: probe(*features, of_train) for name, of_train in words.items()}
    return {"adapter, its own memory": shares(written, right), "linear probe": shares(probed, right)}


def read_words(texts: Sequence[str], known: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of texts at each position where `known` has a few; whole texts where its lengths differ."""
    whole = len({len(text.split()) for text in known}) != 1
    cut = [[text.strip()] if whole else text.split() for text in (*known, *texts)]
    columns, most = enumerate(itertools.zip_longest(*cut)), min(VALUES, len(known) // 2)
    few = {at: column for at, column in columns if 1 < len(set(column[: len(known)])) <= most}
    return {"text" if whole else f"word {at + 1}": list(column[len(known) :]) for at, column in few.items()}


def shares(words: dict[str, list[str]], right: dict[str, list[str]]) -> dict[str, float]:
    """Return the share of equal words at each position."""
    return {name: sum(map(operator.eq, words[name], right[name])) / len(right[name]) for name in right}


def probe(train: Tensor, test: Tensor, words: Sequence[str]) -> list[str]:
    """Fit a logistic regression from features (b, e) to their words, and return the words for the other features."""
    mean, std = train.mean(0), train.std(0) + 1e-6
    train, test, values = (train - mean) / std, (test - mean) / std, sorted(set(words))
    target = torch.tensor([values.index(word) for word in words])
    linear = nn.Linear(train.shape[1], len(values))
    nn.init.zeros_(linear.weight)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        penalty = linear.weight.square().sum() / (2 * len(train))  # as strong as that of scikit-learn
        error = nn.functional.cross_entropy(linear(train), target) + penalty
        error.backward()
        return error

    optimizer.step(loss)
    return [values[index] for index in linear(test).argmax(1)]
