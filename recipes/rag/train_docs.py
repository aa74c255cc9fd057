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
from mmattn import inspect, training

from .answering import describe, device_of, learn, load_lm
from .documents import load_topics
from .passages import KINDS, Passages, Window, found_by_nobody, memory_of, neighbours, some_of, windows
from .reading import begin_as_lookup
from .settings import Config

Choice = Callable[[list[int]], list[int]]
#: The memory of a batch of windows, or of other texts with ids.
Memories = Callable[[Sequence[Any]], Any]


def train_documents(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Every row of the table: bits per byte on the held-out topics, and seconds of training."""
    docs = config.docs
    lm, tokenizer = load_lm(config.lm, accelerator.device)
    known, held = load_topics()
    library = Passages.of(list(known.values()), tokenizer, docs.chunk)
    asking = Passages.of(list(held.values()), tokenizer, docs.chunk)
    whole, _ = load_topics(copies=True)
    copies = Passages.of(list(whole.values()), tokenizer, docs.chunk)
    finder = mmattn.TextEncoder()
    for passages in (library, asking, copies):
        passages.encode(finder, lm, docs.layer, config.progress)
    train = windows(library, neighbours(library, library, docs.neighbours * docs.choice, same=True), docs.window)
    test = windows(asking, neighbours(asking, library, docs.neighbours, same=False), docs.window)
    size = sum(len(text.encode()) for text in held.values())

    leaky = windows(asking, neighbours(asking, copies, docs.neighbours, same=False), docs.window)

    def nobody() -> Choice:
        return found_by_nobody(docs.neighbours, library, Random(config.seed))

    def bits(model: Any, kind: str | None = None, choose: Choice = list) -> float:
        memory = None if kind is None else partial(memory_of, library=library, kind=kind, choose=choose)
        return bits_per_byte(model, test, docs.batch_size, size, memory)

    rows: list[dict[str, Any]] = [{"name": "frozen LM", "bits": bits(lm)}]
    parameters = 0
    for name in (*KINDS, "trained and read with random ones"):
        kind = name if name in KINDS else "both"
        choose = some_of(docs.neighbours, Random(config.seed)) if name in KINDS else nobody()
        torch.manual_seed(config.seed)
        host = training.add_lora(lm, docs.rank)
        width = library.states[0].shape[1]
        adapter = mmattn.ChunkedAdapter(memory_dim=width, chunk_size=docs.chunk, **docs.adapter.model_dump())
        model = mmattn.attach(host, adapter)
        begin_as_lookup(model.adapters["default"])
        trained = torch.nn.ModuleList([model.adapters, host])
        loss = loss_on(model, partial(memory_of, library=library, kind=kind, choose=choose))
        seconds = learn(config, trained, loss, batches(train, config), docs.max_steps, name, run, accelerator)
        parameters = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
        rows.append({"name": name, "bits": bits(model, kind, list if name in KINDS else nobody()), "seconds": seconds})
        if name in KINDS:
            rows.append({"name": f"{name}, random ones instead", "bits": bits(model, kind, nobody())})
        if name == "both":
            rows.append({"name": "both, no memory", "bits": bits(model)})
            memory = partial(memory_of, library=copies, kind=kind, choose=list)
            leaked = bits_per_byte(model, leaky, docs.batch_size, size, memory)
            rows.append({"name": "both, copies left in the library", "bits": leaked})
            model.save_adapter(run.path / "adapter", encoder=finder.fingerprint)
            host.save_pretrained(run.path / "lora")
            describe(config, tokenizer).save(run.path / "adapter")
            library.index(finder).save(run.path / "index")
        model.unload()
        host.unload()
    torch.manual_seed(config.seed)
    lora = training.matched_lora(lm, parameters)
    seconds = learn(config, lora, loss_on(lora), batches(train, config), docs.max_steps, "LoRA", run, accelerator)
    rows.append({"name": "LoRA, text only", "bits": bits(lora), "seconds": seconds})
    lora.unload()
    kept = sum(map(len, known.values())) / sum(map(len, whole.values()))
    return {"rows": rows, "parameters": parameters, "bytes": size, "chunks": len(library), "copies": 1 - kept}


def show(config: Config, run: training.RunFolder, count: int = 3) -> None:
    """Leave how the adapter of a run goes on with the openings of held-out topics, and what it attended to."""
    pipe: Any = mmattn.pipeline(run.path / "adapter", index=run.path / "index")
    openings = {name: " ".join(text.split()[:40]) for name, text in list(load_topics()[1].items())[:count]}
    texts = []
    for name, opening in openings.items():
        answer = pipe(opening)
        looked = [f"{source.weight:6.1%}  {' '.join(source.text.split())}" for source in answer.sources[:3]]
        texts.append("\n".join([f"{name}: {opening}", f"-> {' '.join(answer.text.split())}", *looked]))
    run.write_text("samples.txt", "\n\n".join(texts) + "\n")
    inspect.save_traces([pipe.trace(opening) for opening in openings.values()], run.path)


def batches(train: list[Window], config: Config) -> Iterator[list[Window]]:
    """The same windows in the same order for every row of the table."""
    order = Random(config.seed)
    while True:
        yield order.sample(train, config.docs.batch_size)


def loss_on(model: Any, memory: Memories | None = None) -> training.Loss:
    """Minus log p of the windows, with the memories that they are given."""

    def loss(part: Sequence[Any], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
        batch = training.collate([window.ids for window in part], memory and memory(part))
        return training.sum_nats(model, batch.to(device_of(model)))

    return loss


@torch.no_grad()
def bits_per_byte(model: Any, test: Sequence[Any], batch: int, size: int, memory: Memories | None) -> float:
    """Bits of all windows for each byte of their text; the first token of a window costs nothing, in every row."""
    nats = 0.0
    for start in range(0, len(test), batch):
        part = test[start : start + batch]
        batch_of = training.collate([window.ids for window in part], memory and memory(part))
        nats += float(training.token_nats(model, batch_of.to(device_of(model))).sum())
    return nats / math.log(2) / size
