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
import torch.nn.functional as F

import mmattn
from mmattn import inspect, training

from .answering import Loss, device_of, hidden_states, load_lm, lora_layers, train
from .continuing import Writer
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

Memories = Callable[[Sequence[Any]], Any]  # the memory of a batch of windows, or of other texts with ids


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
    read = [library, copies] if docs.copies else [library]
    for passages in (queries, *read):
        passages.encode(encoder, config.progress)
    with torch.autocast(device.type, torch.bfloat16, enabled=config.optim.bf16):
        for passages in read:
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
    for name in docs.rows:
        kind = name if name in KINDS else "both"
        choose = sample_of(docs.neighbours, Random(config.seed)) if name in KINDS else random_ones()
        torch.manual_seed(config.seed)
        host = training.add_lora(lm, docs.rank, layers=lora_layers(config, lm, docs.adapter.layers))
        model = mmattn.attach(host, adapter)
        memory = partial(memory_of, library=library, kind=kind, choose=choose)
        module = torch.nn.ModuleList([model.adapters, host])
        with hidden_states(config, model):
            if docs.calibrate:
                first = next(sample_windows(train_windows, config))
                texts = training.collate([text.ids for text in first], memory(first)).to(device_of(model))
                model.calibrate(texts.input_ids, attention_mask=texts.attention_mask, memory=texts.memory)
                standardise_slots(model.adapters["default"], library)
            begin_as_lookup(model.adapters["default"])
            seconds = learn(module, loss_on(model, memory), name)
            parameters = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
            rows.append({"name": name, "bits": bits(model, kind, list if name in KINDS else random_ones())})
            rows[-1]["seconds"] = seconds
            if name in KINDS:
                rows.append({"name": f"{name}, random ones instead", "bits": bits(model, kind, random_ones())})
            if name == "both":
                rows.append({"name": "both, no memory", "bits": bits(model)})
            if name == "both" and docs.copies:
                leaky = windows(queries, neighbours(queries, copies, docs.neighbours, same=False), docs.window)
                memory = partial(memory_of, library=copies, kind=kind, choose=list)
                leaked = bits_per_byte(model, leaky, docs.batch_size, size, memory)
                rows.append({"name": "both, copies left in the library", "bits": leaked})
        if name == "both":
            model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
            host.save_pretrained(run.path / "lora")
            save_samples(run, Writer(model, tokenizer, library, encoder, docs.neighbours))
        model.unload()
        host.unload()
    torch.manual_seed(config.seed)
    lora = training.matched_lora(lm, parameters, layers=lora_layers(config, lm, docs.adapter.layers))
    with hidden_states(config, lora):
        seconds = learn(lora, loss_on(lora), "LoRA")
        rows.append({"name": "LoRA, text only", "bits": bits(lora), "seconds": seconds})
    lora.unload()
    unique = sum(map(len, topics.values())) / sum(map(len, whole.values()))
    return {"rows": rows, "parameters": parameters, "bytes": size, "chunks": len(library), "copies": 1 - unique}


@torch.no_grad()
def standardise_slots(adapter: Any, library: Passages, count: int = 200) -> None:
    """Let the norm of the memory standardise states of slots per channel, as calibration does for queries."""
    slots = torch.cat(library.states[:count])
    states = F.layer_norm(slots, slots.shape[-1:])[:, : slots.shape[1] // 2]
    spread, mean = torch.std_mean(states, 0)
    spread = spread.clamp(min=0.01)
    adapter.memory_norm.weight[: len(mean)] = 1 / spread
    adapter.memory_norm.bias[: len(mean)] = -mean / spread


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
        if block.calibration is not None:  # of the size of what differs between the host's states
            attention.out_proj.weight.mul_(block.calibration.spread.square().mean().sqrt())


def sample_windows(train_windows: list[Window], config: Config) -> Iterator[list[Window]]:
    """Yield batches of the same windows in the same order for every row of the table."""
    order = Random(config.seed)
    while True:
        yield order.sample(train_windows, config.docs.batch_size)


def loss_on(model: Any, memory: Memories | None = None) -> Loss:
    """Return the loss: minus log p of the texts, with their memories."""

    def loss(part: Sequence[Any]) -> tuple[torch.Tensor, int]:
        batch = training.collate([text.ids for text in part], memory and memory(part))
        return training.sum_nats(model, batch.to(device_of(model)))

    return loss


@torch.no_grad()
def bits_per_byte(model: Any, test: Sequence[Any], batch: int, size: int, memory: Memories | None) -> float:
    """Return the bits of all texts for each of their bytes; the first token of a text costs nothing, in every row."""
    nats = 0.0
    for start in range(0, len(test), batch):
        part = test[start : start + batch]
        texts = training.collate([text.ids for text in part], memory and memory(part))
        nats += float(training.token_nats(model, texts.to(device_of(model))).sum())
    return nats / math.log(2) / size


def save_samples(run: training.RunFolder, writer: Writer, count: int = 3) -> None:
    """Write how the adapter continues the openings of held-out topics, and what it attended to."""
    openings = {name: " ".join(text.split()[:40]) for name, text in list(load_topics()[1].items())[:count]}
    texts, traces = [], []
    for name, opening in openings.items():
        written, shares, trace = writer.write(opening)
        sources = [f"{share:6.1%}  {' '.join(passage.split())}" for passage, share in shares[:3]]
        texts.append("\n".join([f"{name}: {opening}", f"-> {' '.join(written.split())}", *sources]))
        traces.append(trace)
    run.write_text("samples.txt", "\n\n".join(texts) + "\n")
    inspect.save_traces(traces, run.path)
