"""Chunked adapters over Python's documentation: bits per byte with neighbours, continuations, both, and the controls.

`mmattn train recipes/rag/config_docs.yaml`
"""

from __future__ import annotations

import math
from random import Random
from typing import Any

import torch
from answering import load_lm
from documents import load_topics
from fitting import fit
from passages import KINDS, Passages, Window, memory_of, neighbours, windows
from settings import Config

import mmattn
from mmattn import training


def train_documents(config: Config, run: training.RunFolder) -> dict[str, Any]:
    """Every row of the table: bits per byte on the held-out topics, and seconds of training."""
    docs = config.docs
    lm, tokenizer = load_lm(config.lm)
    known, held = load_topics(seed=config.seed)
    library = Passages.of(list(known.values()), tokenizer, docs.chunk)
    asking = Passages.of(list(held.values()), tokenizer, docs.chunk)
    finder, reader = mmattn.TextEncoder(), mmattn.TextEncoder(pooling="none")
    for passages in (library, asking):
        passages.encode(finder, reader, config.progress)
    train = windows(library, neighbours(library, library, docs.neighbours, same=True), docs.window)
    test = windows(asking, neighbours(asking, library, docs.neighbours, same=False), docs.window)
    size = sum(len(text.encode()) for text in held.values())
    rows = [{"name": "frozen LM", "bits": bits_per_byte(config, lm, test, size)}]
    parameters = 0
    for kind in KINDS:
        model, seconds = train_adapter(config, lm, train, library, kind, run)
        parameters, _ = model.trainable_parameters()
        bits = bits_per_byte(config, model, test, size, library, kind)
        rows.append({"name": kind, "bits": bits, "seconds": seconds})
        shuffled = Random(config.seed)
        bits = bits_per_byte(config, model, test, size, library, kind, shuffled)
        rows.append({"name": f"{kind}, random ones instead", "bits": bits})
        if kind == "both":
            model.save_adapter(run.path / "adapter")
            library.index(finder).save(run.path / "index")
            rows.append({"name": "the same without memory", "bits": bits_per_byte(config, model, test, size)})
        model.detach()
    model, seconds = train_adapter(config, lm, train, library, "both", None, Random(config.seed))
    bits = bits_per_byte(config, model, test, size, library, "both", Random(config.seed))
    rows.append({"name": "trained and read with random ones", "bits": bits, "seconds": seconds})
    model.detach()
    lora, seconds = train_lora(config, lm, train, parameters)
    rows.append({"name": "LoRA, text only", "bits": bits_per_byte(config, lora, test, size), "seconds": seconds})
    lora.unload()
    return {"rows": rows, "parameters": parameters, "bytes": size, "chunks": len(library)}


def train_adapter(
    config: Config,
    lm: Any,
    train: list[Window],
    library: Passages,
    kind: str,
    run: training.RunFolder | None,
    random: Random | None = None,
) -> tuple[Any, float]:
    """Attach a chunked adapter and teach it to read what was found."""
    torch.manual_seed(config.seed)
    given = config.docs.adapter.model_dump()
    adapter = mmattn.ChunkedAdapter(memory_dim=library.states[0].shape[1], chunk_size=config.docs.chunk, **given)
    model = mmattn.attach(lm, adapter)
    order = Random(config.seed)

    def loss_at(step: int) -> torch.Tensor:
        part = order.sample(train, config.docs.batch)
        batch = training.collate([window.ids for window in part], memory_of(part, library, kind, random))
        return training.mean_nats(model, batch)

    seconds = fit(config, model, model.adapters, loss_at, config.docs.steps, kind if random is None else "random", run)
    return model, seconds


def train_lora(config: Config, lm: Any, train: list[Window], parameters: int) -> tuple[Any, float]:
    """The control: as many parameters, the same text, nothing retrieved."""
    torch.manual_seed(config.seed)
    lora, order = training.matched_lora(lm, parameters), Random(config.seed)

    def loss_at(step: int) -> torch.Tensor:
        part = order.sample(train, config.docs.batch)
        return training.mean_nats(lora, training.collate([window.ids for window in part]))

    return lora, fit(config, lora, lora, loss_at, config.docs.steps, "LoRA", None)


@torch.no_grad()
def bits_per_byte(
    config: Config,
    model: Any,
    test: list[Window],
    size: int,
    library: Passages | None = None,
    kind: str = "both",
    random: Random | None = None,
) -> float:
    """Bits of all windows for each byte of their text; the first token of a window costs nothing, in every row."""
    nats = 0.0
    for start in range(0, len(test), config.docs.batch):
        part = test[start : start + config.docs.batch]
        memory = None if library is None else memory_of(part, library, kind, random)
        nats += float(training.token_nats(model, training.collate([window.ids for window in part], memory)).sum())
    return nats / math.log(2) / size
