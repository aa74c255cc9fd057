"""Batches for the doctor: the memories in a batch as given, or a random batch for any adapter and host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmattn.adapters.cache_argument import given_cache
from mmattn.errors import ConditionError, ConfigError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.context import Call
from mmattn.inspect.memory_variants import has_rows
from mmattn.memory import Memory

# Rows of a random batch.
ROWS = 3


def memories_of(model: AdaptedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The memory of each active adapter in a batch, by name: a `Memory`, or what else has rows.

    Args:
        model: the adapted model.
        batch: what it is called with, by name, `memory` included.

    Raises:
        ConfigError: no batch with a memory that may be attended to.
        ConditionError: no adapter is active, or the batch has a cache.
    """
    if not isinstance(batch, Mapping) or batch.get("memory") is None:
        given = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            "doctor needs the arguments of a call by name, with a memory (dict(input_ids=..., memory=...)); got "
            f"{given}"
        )
    if given_cache(batch) is not None:
        raise ConditionError("doctor calls the model many times, which would fill its cache: give the whole text")
    prepared = {name: one for name, one in model.prepare_by_name(batch["memory"]).items() if name in model.active}
    memories = {name: one for name, one in prepared.items() if has_rows(one)}
    sources = model.bind({name: one for name, one in prepared.items() if name not in memories})
    if not prepared:
        raise ConditionError(f"no active adapter is given a memory (active: {model.active}): set_adapter(name) first")
    others = {name: value for name, value in batch.items() if name != "memory"}
    text = model.text_state(Call({}), (), others) if any(source.follows_text for source in sources.values()) else None
    with model.disable_adapter():
        memories |= {name: source.as_memory(text) for name, source in sources.items()}
    for name, memory in memories.items():
        if isinstance(memory, Memory) and not bool(memory.real_slots().any()):
            raise ConfigError(
                f"every slot of the memory for adapter {name!r} is masked: give doctor a memory with real slots"
            )
    return memories


def random_batch(model: AdaptedModel, name: str = "default") -> dict[str, Any]:
    """A random batch for one adapter of a model, some slots of the memory masked.

    Args:
        model: the adapted model.
        name: of the adapter.
    """
    generator = torch.Generator().manual_seed(0)
    adapter = model.adapter(name)
    device = adapter.weight.device
    batch = model.example_batch(generator, adapter.config, ROWS)
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return moved | {"memory": {name: adapter.config.example_memory(generator, ROWS).to(device)}}
