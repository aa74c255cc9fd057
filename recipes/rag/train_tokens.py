"""Attention that searches every token of Python's documentation: bits per byte, and the controls.

`mmattn train recipes/rag/config_tokens.yaml`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.pipelines import read_passages

from .answering import load_lm, train
from .documents import load_topics
from .settings import Config
from .train_docs import begin_as_lookup, bits_per_byte, loss_on, trained_parameters


def train_tokens(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Return every row of the table: bits per byte on the held-out topics, and seconds of training."""
    tokens, seed = config.tokens, config.seed

    # Data: texts of topics, and every token of them as a slot.
    lm, tokenizer = load_lm(config.lm, accelerator.device)
    topics, held_out = load_topics()
    documents, others = ([tokenizer(text)["input_ids"] for text in part.values()] for part in (topics, held_out))
    size = sum(len(text.encode()) for text in held_out.values())
    library = Library(lm, documents, tokens.layer, tokens.window, tokens.folds)
    train_texts, test = cut(documents, tokens.window, tokens.folds), cut(others, tokens.window)
    memories = [library.index(without=fold).as_memory(tokens.per_query) for fold in range(tokens.folds)]
    random = Random(seed)

    def memory_of(part: Sequence[Text]) -> Any:
        """Return the memory of a batch of training: an adapter learns to leave alone what does not fit from such."""
        fold, drawn = part[0].fold, random.random()
        if drawn < tokens.at_random:
            return library.some(tokens.random, random.randrange(1 << 31), without=fold).as_memory(tokens.per_query)
        return memories[fold] if drawn >= tokens.at_random + tokens.without else None

    def bits(model: Any, index: mmattn.Index | None = None) -> float:
        memory = None if index is None else index.as_memory(tokens.per_query)
        return bits_per_byte(model, test, tokens.batch_size, size, lambda part: memory)

    def learn(module: torch.nn.Module, loss: training.Loss, name: str) -> float:
        batches = batches_of(train_texts, tokens.batch_size, seed)
        return train(config, module, loss, batches, tokens.max_steps, name, run, accelerator)

    # Model: one adapter that begins as a look-up, and a LoRA that learns the kind of text.
    rows: list[dict[str, Any]] = [{"name": "frozen LM", "bits": bits(lm)}]
    torch.manual_seed(seed)
    host = training.add_lora(lm, tokens.rank)
    width = library.folds[0].shape[1]
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=width, **tokens.adapter.model_dump()))
    begin_as_lookup(model.adapters["default"])
    module = torch.nn.ModuleList([model.adapters, host])
    parameters = trained_parameters(module)

    # Training and measuring, with the controls.
    seconds = learn(module, loss_on(model, memory_of), "adapter")
    whole = library.index()
    rows.append({"name": "every token", "bits": bits(model, whole), "seconds": seconds})
    rows.append({"name": "every token, random ones instead", "bits": bits(model, library.some(tokens.random, seed))})
    rows.append({"name": "every token, exchanged ones instead", "bits": bits(model, library.exchanged(seed))})
    rows.append({"name": "every token, no memory", "bits": bits(model)})
    model.save_adapter(run.path / "adapter")
    host.save_pretrained(run.path / "lora")
    whole.save(run.path / "index")
    model.unload()
    host.unload()
    torch.manual_seed(seed)
    lora = training.matched_lora(lm, parameters)
    seconds = learn(lora, loss_on(lora), "LoRA")
    rows.append({"name": "LoRA, text only", "bits": bits(lora), "seconds": seconds})
    lora.unload()
    return {"rows": rows, "parameters": parameters, "bytes": size, "entries": sum(map(len, library.folds))}


@dataclass(frozen=True)
class Text:
    """Some tokens of one document, which belongs to a fold."""

    ids: list[int]
    fold: int


def cut(documents: Sequence[Sequence[int]], size: int, folds: int = 1) -> list[Text]:
    """Cut documents into texts of `size` tokens; document i belongs to fold i mod `folds`."""
    return [
        Text(list(ids[start : start + size]), number % folds)
        for number, ids in enumerate(documents)
        for start in range(0, len(ids), size)
        if len(ids) > start + 1
    ]


def batches_of(texts: Sequence[Text], count: int, seed: int) -> Iterator[list[Text]]:
    """Yield texts of one fold at a time, as often as it has texts."""
    random = Random(seed)
    while True:
        fold = random.choice(texts).fold
        part = [text for text in texts if text.fold == fold]
        yield random.sample(part, min(count, len(part)))


class Library:
    """Every token of some documents as a slot (2 d,): the state of a frozen language model before it, and the token.

    Document i belongs to fold i mod `folds`. `size` tokens are read together, half of them for context alone.
    """

    def __init__(self, lm: Any, documents: Sequence[Sequence[int]], layer: int, size: int, folds: int) -> None:
        slots: list[list[Tensor]] = [[] for _ in range(folds)]
        half = size // 2
        for number, ids in enumerate(documents):
            starts = range(0, max(1, len(ids) - half), half)
            states = read_passages(lm, [ids[start : start + size] for start in starts], layer, batch_size=16)
            # Nothing came before the first token, so that it is no slot.
            slots[number % folds] += [part[half if start else 1 :] for start, part in zip(starts, states, strict=True)]
        self.folds = [torch.cat(parts) for parts in slots]

    def slots(self, without: int | None = None) -> Tensor:
        """Return the slots (n, 2 d) of all documents, or of those of all folds but one."""
        return torch.cat([part for fold, part in enumerate(self.folds) if fold != without])

    def index(self, without: int | None = None) -> mmattn.Index:
        """Return an index of `slots`: approximate for training, which goes without a fold, else exact."""
        settings: dict[str, Any] = {"store": "exact"} if without is None else {"store": "ivf", "visited": 24}
        return mmattn.Index.build(self.slots(without), metric="ip", **settings)

    def some(self, count: int, seed: int, without: int | None = None) -> mmattn.Index:
        """Return an index of some tokens at random: the control."""
        slots = self.slots(without)
        rows = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))[:count]
        return mmattn.Index.build(slots[rows], metric="ip")

    def exchanged(self, seed: int) -> mmattn.Index:
        """Return an index of all tokens, each after the state before another one: the control."""
        states, tokens = self.slots().chunk(2, 1)
        rows = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        return mmattn.Index.build(torch.cat([states, tokens[rows]], 1), metric="ip", store="exact")
