"""What the doctor asks with: the memories in a user's batch, or a batch of random ones for any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConditionError, ConfigError
from mmattn.hosts.adapted import AdaptedModel
from mmattn.hosts.calls import Call
from mmattn.inspect.trial import real_slots
from mmattn.memory import Memory

# Rows of a random batch.
ROWS = 3


def memories_of(model: AdaptedModel, batch: Mapping[str, Any]) -> dict[str, Memory]:
    """The memory of each active adapter in a batch, checked.

    Args:
        model: the adapted model.
        batch: what it takes, by name, `memory` with it.

    Raises:
        ConfigError: no batch with a memory to look at.
        ConditionError: no adapter is active, or the batch has a cache.
    """
    if not isinstance(batch, Mapping) or batch.get("memory") is None:
        given = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f"doctor needs a batch as the model takes it, by name and with a memory (dict(input_ids=..., memory=...)); "
            f"got {given}"
        )
    if batch.get("past_key_values") is not None:
        raise ConditionError("doctor asks many times, which would fill past_key_values: give the whole text instead")
    sources = {name: source for name, source in model.bind(batch["memory"]).items() if name in model.active}
    if not sources:
        raise ConditionError(f"no active adapter is given a memory (active: {model.active}): set_adapter(name) first")
    others = {name: value for name, value in batch.items() if name != "memory"}
    text = model.text_state(Call({}), (), others) if any(source.follows_text for source in sources.values()) else None
    with model.disable_adapter():
        memories = {name: source.as_memory(text) for name, source in sources.items()}
    for name, memory in memories.items():
        if not bool(real_slots(memory).any()):
            raise ConfigError(
                f"no slot of the memory for adapter {name!r} may be attended to: give doctor one that may"
            )
    return memories


def random_batch(model: AdaptedModel, name: str = "default") -> dict[str, Any]:
    """A batch of random numbers for one adapter of a model, some of the memory's slots masked."""
    generator = torch.Generator().manual_seed(0)
    adapter = model.adapter(name)
    device = adapter.weight.device
    batch = model.example_batch(generator, adapter.config, ROWS)
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return moved | {"memory": {name: adapter.config.example_memory(generator, ROWS).to(device)}}
