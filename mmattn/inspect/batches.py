"""What the doctor asks with: the memories in a user's batch, or a batch of random ones for any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.adapters.chunked import ChunkedLayers
from mmattn.errors import ConditionError, ConfigError
from mmattn.hosts.augmenting import AugmentingModel
from mmattn.hosts.causal_lm.layer_search import text_config
from mmattn.hosts.neighbours import Found
from mmattn.hosts.unet.attention_layers import text_width
from mmattn.hosts.unet.model import AdaptedUNet
from mmattn.inspect.trial import real_slots
from mmattn.memory import Memory

if TYPE_CHECKING:
    from mmattn.hosts.adapted import AdaptedModel

# Sizes of a random batch, no two alike.
ROWS, SLOTS, TOKENS = 3, 5, 7


def memories_of(model: AdaptedModel, batch: Mapping[str, Any]) -> dict[str, Memory]:
    """The memory of each active adapter in a batch, checked.

    Raises:
        ConfigError: no batch with a memory to look at. ConditionError: no adapter is active, or the batch has a cache.
    """
    if not isinstance(batch, Mapping) or batch.get("memory") is None:
        given = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ConfigError(
            f"doctor needs a batch as the model takes it, by name and with a memory (dict(input_ids=..., memory=...)); "
            f"got {given}"
        )
    if batch.get("past_key_values") is not None:
        raise ConditionError("doctor asks many times, which would fill past_key_values: give the whole text instead")
    prepared = {name: one for name, one in model._prepare(batch["memory"]).items() if name in model.active}
    if not prepared:
        raise ConditionError(f"no active adapter is given a memory (active: {model.active}): set_adapter(name) first")
    along = [name for name, one in prepared.items() if isinstance(one, AugmentingModel)]
    if along:
        raise ConfigError(
            f"doctor asks with other memories, and adapters {along} read along with a model: give it a batch with a "
            "memory for the others"
        )
    memories = {
        name: found_for(one, model, name, batch) if isinstance(one, Found) else one.memory.detach()
        for name, one in prepared.items()
    }
    for name, memory in memories.items():
        if not bool(real_slots(memory).any()):
            raise ConfigError(f"no slot of the memory for adapter {name!r} may be looked at: give doctor one that may")
    return memories


def found_for(found: Found, model: AdaptedModel, name: str, batch: Mapping[str, Any]) -> Memory:
    """What a function finds for the complete chunks of a text, as one memory with segments.

    Raises:
        ConfigError: there is no complete chunk.
    """
    adapter, ids = model._adapter(name), batch["input_ids"]
    assert isinstance(adapter, ChunkedLayers)
    size, mask = adapter.config.chunk_size, batch.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    texts = [
        row[keep].unfold(0, size, size) if keep.sum() >= size else row.new_empty(0, size)
        for row, keep in zip(ids, real, strict=True)
    ]
    counts = [len(text) for text in texts]
    if not any(counts):
        raise ConfigError(f"no row has a chunk of {size} tokens to find neighbours for: give doctor a longer text")
    with model.disabled():
        memory = found._find(torch.cat(texts), name)
    begins = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    chunk = torch.arange(max(counts))
    there = (chunk < torch.tensor(counts)[:, None]).to(memory.device)
    pick = (begins[:, None] + chunk).to(memory.device).where(there, 0)
    real = (real_slots(memory)[pick] & there[..., None]).flatten(1)
    segments = chunk.repeat_interleave(memory.length).expand(len(ids), -1).to(memory.device)
    scores = None if memory.scores is None else memory.scores[pick].flatten(1)
    return Memory(memory.tokens[pick].flatten(1, 2), real, segments, scores)


def random_batch(model: AdaptedModel, name: str = "default") -> dict[str, Any]:
    """A batch of random numbers for one adapter of a model, some of the memory's slots masked."""
    generator = torch.Generator().manual_seed(0)
    adapter = model._adapter(name)
    device = adapter.weight.device

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device)

    batch = (
        random_picture(model, random)
        if isinstance(model, AdaptedUNet)
        else random_text(model, adapter.config, generator)
    )
    parts = 2 if adapter.config.kind == "chunked" or getattr(adapter.config, "look", "all") != "all" else 1
    m = parts * SLOTS
    segments = torch.arange(parts).repeat_interleave(SLOTS).expand(ROWS, m).to(device) if parts > 1 else None
    mask = (torch.arange(m) % SLOTS < torch.tensor([SLOTS, SLOTS - 2, SLOTS - 1])[:, None]).to(device)
    scores = random(ROWS, m) if adapter.score_bias else None
    moved = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return moved | {"memory": {name: Memory(random(ROWS, m, adapter.config.memory_dim), mask, segments, scores)}}


def random_text(model: AdaptedModel, config: Any, generator: torch.Generator) -> dict[str, Any]:
    """Ids of a text, long enough for two chunks where there are chunks, and where images are in it."""
    known = text_config(model.host)
    wanted = max(TOKENS, 2 * getattr(config, "chunk_size", 0) + 2)
    length = min(wanted, getattr(known, "max_position_embeddings", None) or wanted)
    size = getattr(known, "vocab_size", 2)
    batch = {"input_ids": torch.randint(size, (ROWS, length), generator=generator)}
    if getattr(config, "look", "all") != "all":
        batch["images"] = (torch.arange(length) // 3).clamp(max=2).expand(ROWS, -1)
    return batch


def random_picture(model: AdaptedUNet, random: Any) -> dict[str, Any]:
    """A noisy picture, a time and a text, with what the UNets of SDXL are told besides."""
    config: Any = model.host.config
    size = config.sample_size or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    batch = {
        "sample": random(ROWS, config.in_channels, height, width),
        "timestep": 11,
        "encoder_hidden_states": random(ROWS, TOKENS, text_width(model.host)),
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {"text_embeds": random(ROWS, pooled), "time_ids": random(ROWS, 6)}
    return batch
