"""Chunked adapters over Python's documentation: bits per byte with neighbours, continuations, both, and the controls.

`mmattn train recipes/rag/config_docs.yaml`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import training

from .answering import Loss, load_lm, train
from .documents import (
    KINDS,
    Choice,
    Passages,
    Window,
    load_topics,
    memory_of,
    neighbours,
    random_passages,
    sample_of,
    windows,
)
from .settings import Config

Memories = Callable[[Sequence[Window]], Any]  # the memory of a batch of windows
RANDOM = "trained and read with random ones"


def train_documents(config: Config, run: training.RunFolder) -> dict[str, Any]:
    """Return every row of the table: bits per byte on the held-out topics, and seconds of training."""
    docs = config.docs

    # Data: chunks of topics, and the neighbours of each among the chunks of other topics.
    device = config.optim.arguments(config).device
    lm, tokenizer = load_lm(config.lm, device)
    topics, held_out = load_topics()
    whole, _ = load_topics(copies=True)
    library, queries, copies = (
        Passages.of(list(part.values()), tokenizer, docs.chunk) for part in (topics, held_out, whole)
    )
    encoder = mmattn.TextEncoder()
    for passages in (queries, library, copies):
        passages.encode(encoder, config.progress)
    for passages in (library, copies):
        passages.read(lm, docs.layer)
    train_windows = windows(
        library, neighbours(library, library, docs.neighbours * docs.choice, same=True), docs.window
    )
    test = windows(queries, neighbours(queries, library, docs.neighbours, same=False), docs.window)
    size = sum(len(text.encode()) for text in held_out.values())

    def random_ones() -> Choice:
        return random_passages(docs.neighbours, library, Random(config.seed))

    def bits(model: Any, kind: str | None = None, choose: Choice = list) -> float:
        memory = None if kind is None else partial(memory_of, library=library, kind=kind, choose=choose)
        return bits_per_byte(model, test, docs.batch_size, size, memory)

    def learn(module: torch.nn.Module, loss: Loss, name: str) -> float:
        batches = sample_windows(train_windows, config)
        return train(config, module, loss, batches, docs.max_steps, name, run)

    # Training and measuring: an adapter and a LoRA for each kind of passages, and one with random passages.
    rows: list[dict[str, Any]] = [{"name": "frozen LM", "bits": bits(lm)}]
    parameters = 0
    adapter = mmattn.ChunkedAdapter(library.states[0].shape[1], chunk_size=docs.chunk, **docs.adapter.model_dump())
    for name in (*KINDS, RANDOM):
        kind = name if name in KINDS else "both"
        choose = sample_of(docs.neighbours, Random(config.seed)) if name in KINDS else random_ones()
        torch.manual_seed(config.seed)
        host = training.add_lora(lm, docs.rank)
        model = mmattn.attach(host, adapter)
        memory = partial(memory_of, library=library, kind=kind, choose=choose)
        module = torch.nn.ModuleList([model.adapters, host])
        begin_as_lookup(model.adapters["default"])
        seconds = learn(module, loss_on(model, memory), name)
        parameters = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
        rows.append({"name": name, "bits": bits(model, kind, list if name in KINDS else random_ones())})
        rows[-1]["seconds"] = seconds
        if name in KINDS:
            rows.append({"name": f"{name}, random ones instead", "bits": bits(model, kind, random_ones())})
        if name == "both":
            rows.append({"name": "both, no memory", "bits": bits(model)})
            leaky = windows(queries, neighbours(queries, copies, docs.neighbours, same=False), docs.window)
            memory = partial(memory_of, library=copies, kind=kind, choose=list)
            leaked = bits_per_byte(model, leaky, docs.batch_size, size, memory)
            rows.append({"name": "both, copies left in the library", "bits": leaked})
            model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
            host.save_pretrained(run.path / "lora")
        model.unload()
        host.unload()
    torch.manual_seed(config.seed)
    lora = training.matched_lora(lm, parameters)
    seconds = learn(lora, loss_on(lora), "LoRA")
    rows.append({"name": "LoRA, text only", "bits": bits(lora), "seconds": seconds})
    lora.unload()
    unique = sum(map(len, topics.values())) / sum(map(len, whole.values()))
    return {"rows": rows, "parameters": parameters, "bytes": size, "chunks": len(library), "copies": 1 - unique}


@torch.no_grad()
def begin_as_lookup(adapter: Any, sharpness: float = 6.0) -> None:
    """Initialise an adapter over slots of `read_passages` as a look-up; it still adds nothing until its gate opens.

    Queries and keys are the same map of states, so that like finds like, and values go out through the transpose of
    the map they came in by, so that a token found is the token predicted. From random maps 250 steps learned little.
    """
    for block in adapter.blocks.values():
        attention = block.attention
        width = attention.q_proj.in_features
        attention.q_proj.weight.mul_(sharpness**0.5)
        attention.kv_proj.k_proj.weight.zero_()[:, :width] = attention.q_proj.weight
        attention.kv_proj.v_proj.weight.zero_()[:, width:] = attention.out_proj.weight.T


def sample_windows(train_windows: list[Window], config: Config) -> Iterator[list[Window]]:
    """Yield batches of the same windows in the same order for every row of the table."""
    order = Random(config.seed)
    while True:
        yield order.sample(train_windows, config.docs.batch_size)


def loss_on(model: Any, memory: Memories | None = None) -> Loss:
    """Return the loss: minus log p of the texts, with their memories."""

    def loss(part: Sequence[Window]) -> tuple[torch.Tensor, int]:
        batch = training.collate([text.ids for text in part], memory and memory(part))
        return training.sum_nats(model, batch.to(model.device))

    return loss


@torch.no_grad()
def bits_per_byte(model: Any, test: Sequence[Window], batch: int, size: int, memory: Memories | None) -> float:
    """Return the bits of all texts for each of their bytes; the first token of a text costs nothing, in every row."""
    nats = 0.0
    for start in range(0, len(test), batch):
        part = test[start : start + batch]
        texts = training.collate([text.ids for text in part], memory and memory(part))
        nats += float(training.token_nats(model, texts.to(model.device)).sum())
    return nats / math.log(2) / size
