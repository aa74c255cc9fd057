"""Attention that searches every token of Python's documentation: bits per byte, and the controls.

`mmattn train recipes/rag/config_tokens.yaml`
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch

import mmattn
from mmattn import training

from .answering import learn, load_lm
from .documents import load_topics
from .reading import begin_as_lookup
from .settings import Config
from .tokens import Library, Text, batches, texts
from .train_docs import bits_per_byte, loss_on


def train_tokens(config: Config, run: training.RunFolder, accelerator: Any) -> dict[str, Any]:
    """Every row of the table: bits per byte on the held-out topics, and seconds of training."""
    tokens, seed = config.tokens, config.seed
    lm, tokenizer = load_lm(config.lm, accelerator.device)
    topics, held_out = load_topics()
    known, held = ([tokenizer(text)["input_ids"] for text in part.values()] for part in (topics, held_out))
    size = sum(len(text.encode()) for text in held_out.values())
    library = Library(lm, known, tokens.layer, tokens.window, tokens.folds)
    train, test = texts(known, tokens.window, tokens.folds), texts(held, tokens.window)
    memories = [library.index(without=fold).as_memory(tokens.per_query) for fold in range(tokens.folds)]
    random = Random(seed)

    def searched(part: Sequence[Text]) -> Any:
        """What a batch of training sees: what does not fit has to be met to be told from what does."""
        fold, drawn = part[0].fold, random.random()
        if drawn < tokens.at_random:
            return library.some(tokens.random, random.randrange(1 << 31), without=fold).as_memory(tokens.per_query)
        return memories[fold] if drawn >= tokens.at_random + tokens.without else None

    def bits(model: Any, index: mmattn.Index | None = None) -> float:
        memory = None if index is None else index.as_memory(tokens.per_query)
        return bits_per_byte(model, test, tokens.batch_size, size, lambda part: memory)

    rows: list[dict[str, Any]] = [{"name": "frozen LM", "bits": bits(lm)}]
    torch.manual_seed(seed)
    host = training.add_lora(lm, tokens.rank)
    width = library.folds[0].shape[1]
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=width, **tokens.adapter.model_dump()))
    begin_as_lookup(model.adapters["default"])
    trained = torch.nn.ModuleList([model.adapters, host])
    parameters = sum(parameter.numel() for parameter in trained.parameters() if parameter.requires_grad)
    order = batches(train, tokens.batch_size, seed)
    seconds = learn(config, trained, loss_on(model, searched), order, tokens.max_steps, "adapter", run, accelerator)
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
    order = batches(train, tokens.batch_size, seed)
    seconds = learn(config, lora, loss_on(lora), order, tokens.max_steps, "LoRA", run, accelerator)
    rows.append({"name": "LoRA, text only", "bits": bits(lora), "seconds": seconds})
    lora.unload()
    return {"rows": rows, "parameters": parameters, "bytes": size, "entries": len(library)}
