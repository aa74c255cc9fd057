"""A prefix for each small set of entries, trained on their questions (Cartridges, arXiv 2506.06266): no slot to search.

It is trained on the very facts that it is asked for, and again for every other set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import training

from .answering import answer_batch, device_of, train as train_module
from .entries import EntrySet
from .measure import Measure
from .settings import Config
from .territories import UNKNOWN, prompt

Row = tuple[int, str, str]  # number of the set, question, answer


def train_prefixes(
    config: Config, lm: Any, tokenizer: Any, measure: Measure, run: training.RunFolder
) -> list[dict[str, Any]]:
    """Train a prefix for each of the smallest sets; return the rows of the right prefix and of another one."""
    sets = measure.sets[min(measure.sets)]
    torch.manual_seed(config.seed)
    adapter = mmattn.adapters.PrefixAdapter(config.prefix.num_virtual_tokens, num_prefixes=len(sets))
    model = mmattn.attach(lm, adapter)
    copy_sentences(model, tokenizer, measure, sets)

    def loss(rows: list[Row]) -> tuple[torch.Tensor, int]:
        numbers, prompts, answers = zip(*rows, strict=True)
        batch = answer_batch(tokenizer, prompts, answers).to(device_of(model))
        return training.sum_nats(model, replace(batch, memory=list(numbers)))

    settings = config.model_copy(update={"optim": config.prefix})
    batches = questions(settings, measure, sets)
    train_module(settings, model, loss, batches, config.prefix.max_steps, "prefixes", run)
    rows = measure.rows("prefix trained on the entries", model, "prefix")
    rows += measure.rows("prefix of other entries", model, "other prefix")
    model.unload()
    return rows


def copy_sentences(model: Any, tokenizer: Any, measure: Measure, sets: list[EntrySet]) -> None:
    """Initialise each prefix with keys and values of the first facts of its set, as the host computes them."""
    mmattn.attach(model, mmattn.adapters.PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    begin = training.bos_and_eos(tokenizer)[0]
    texts = ["\n".join(measure.entries.facts[row].sentence for row in one.rows) for one in sets]
    passages.add([[begin, *ids] for ids in tokenizer(texts)["input_ids"]], progress=False)
    prefixes = model.adapter("default")
    prefixes.copy_passages(passages.select([[number] for number in range(len(sets))]), model.adapter("read"))
    model.delete_adapter("read")


def questions(config: Config, measure: Measure, sets: list[EntrySet]) -> Iterator[list[Row]]:
    """Yield batches of questions about sets; some have no answer there, half of those about a key of the set."""
    random, facts, by_key = Random(config.seed), measure.entries.facts, measure.entries.by_key
    asked = {row for one in sets for row in one.questions}
    others = [row for row in range(len(facts)) if row not in asked]
    absent = []
    for one in sets:
        same_key = {row for member in one.rows for row in by_key[facts[member].key]} - asked - set(one.rows)
        absent.append((sorted(same_key), [row for row in others if row not in one.rows]))
    while True:
        batch = []
        for _ in range(config.optim.per_device_train_batch_size):
            number, there = random.randrange(len(sets)), random.random() >= config.data.absent
            rows = sets[number].rows if there else random.choice(absent[number])
            fact = facts[random.choice(rows)]
            batch.append((number, prompt(fact), fact.value if there else UNKNOWN))
        yield batch
