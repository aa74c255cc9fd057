"""Ways to give a memory to a language model, each trained with as many parameters as the others.

A way is an adapter of mmattn, and a LoRA beside it if the adapter has fewer parameters than the others, as LLaVA and
xRAG train their language models, too. Passages have no parameters: there the LoRA learns to read passages that do not
see each other (Block-Attention, arXiv 2409.15355).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.errors import ConfigError

SMALLEST_LORA = 0.05  # share of all parameters below which an adapter has no LoRA beside it


@dataclass(frozen=True)
class Memories:
    """The memories of requests: a row of slots each, and the ids of their passages, or None for pictures."""

    slots: mmattn.Memory
    passages: Sequence[Sequence[Sequence[int]]] | None = None

    def __len__(self) -> int:
        return self.slots.batch

    def __getitem__(self, rows: Sequence[int]) -> Memories:
        passages = None if self.passages is None else [self.passages[row] for row in rows]
        return Memories(self.slots[torch.tensor(rows)], passages)


@dataclass(frozen=True)
class Batch:
    """Ids, mask and labels (b, l) of texts, -100 outside the answers, with their memories."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    memories: Memories | None


class Way:
    """A language model with or without an adapter, and with this many trained parameters within 5 %, or none."""

    def __init__(self, lm: Any, settings: Any, parameters: int) -> None:
        self.lm, self.lora = lm, None
        count = 0 if settings is None else _count_parameters(lm, settings)
        if count > 1.05 * parameters and parameters:
            raise ConfigError(f"{settings} has {count:,} parameters, more than parameters={parameters:,}: give more")
        if parameters - count > SMALLEST_LORA * parameters:
            self.lora = training.matched_lora(lm, parameters - count)
        self.host = self.lora or lm
        self.model = self.host if settings is None else mmattn.attach(self.host, settings)
        self.parameters = sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def close(self) -> None:
        """Restore the language model."""
        if self.model is not self.host:
            self.model.unload()
        if self.lora is not None:
            self.lora.unload()
        self.lm.requires_grad_(False)

    def memory(self, memories: Memories) -> Any:
        """Return `memory=` of a call, or None."""
        return memories.slots

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """Return the logits of texts (b, l)."""
        memory = None if memories is None else self.memory(memories)
        options = {} if memory is None else {"memory": memory}
        return self.model(input_ids=ids, attention_mask=mask, **options).logits

    def nats(self, batch: Batch, memories: Memories | None) -> Tensor:
        """Return -log p of each token (b, l - 1), 0 outside the answers."""
        logits = self.logits(batch.ids, batch.mask, memories)[:, :-1].float()
        labels = batch.labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


class NoMemory(Way):
    """No memory."""

    def memory(self, memories: Memories) -> None:
        """Return no memory."""


class Prefix(Way):
    """One trained prefix for all requests."""

    def memory(self, memories: Memories) -> list[int]:
        """Return the first prefix for each row."""
        return [0] * len(memories)


class Prompt(NoMemory):
    """Passages in the prompt."""

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """Return the logits of texts (b, l) after their passages."""
        if memories is None:
            return super().logits(ids, mask, None)
        before = _joined(memories).to(ids.device)
        whole, visible = torch.cat([before, ids], 1), torch.cat([torch.ones_like(before), mask], 1)
        return self.model(input_ids=whole, attention_mask=visible).logits[:, before.shape[1] :]


class Passages(Way):
    """Passages that the host has read one by one; in training under a mask that separates them."""

    def __init__(self, lm: Any, parameters: int = 0, recomputed_tokens: int = 0) -> None:
        super().__init__(lm, mmattn.adapters.PassageAdapter(), parameters)
        self.recomputed_tokens = recomputed_tokens

    def memory(self, memories: Memories) -> Any:
        """Return the passages of each request from a cache."""
        assert memories.passages is not None
        cache = mmattn.hosts.PassageCache(self.model)
        rows = [cache.add(row, progress=False) for row in memories.passages]
        return cache.select(rows, recomputed_tokens=self.recomputed_tokens)

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """Return the logits of texts (b, l) that see their passages, which do not see each other."""
        if memories is None or not torch.is_grad_enabled():
            return super().logits(ids, mask, memories)
        before, owners, places = (one.to(ids.device) for one in (_joined(memories), *_owners(memories)))
        count, length = before.shape[1], ids.shape[1]
        again = (owners > 0) & (places < self.recomputed_tokens)
        # The passages, then the tokens that are read again, then the text.
        tokens = torch.cat([before, before[:, again], ids], 1)
        positions = torch.arange(count + length, device=ids.device)
        positions = torch.cat([positions[:count], positions[:count][again], positions[count:]])
        owners = torch.cat([owners, torch.full_like(positions[count:], -1)])
        apart = owners >= 0
        replaced = torch.cat([again, torch.zeros_like(apart[count:])])
        same = owners[:, None] == owners
        visible = (positions[:, None] >= positions) & torch.where(apart[:, None], same, ~replaced)
        real = torch.cat([torch.ones_like(tokens[:, :-length]), mask], 1).bool()
        out = self.host(
            input_ids=tokens,
            attention_mask=(visible & real[:, None])[:, None],
            position_ids=positions.expand(len(tokens), -1),
        )
        return out.logits[:, -length:]


def prefix(lm: Any, parameters: int) -> Any:
    """Return a prefix of about this many parameters."""
    make: Callable[[int], Any] = mmattn.adapters.PrefixAdapter
    return make(max(1, parameters // _count_parameters(lm, make(1))))


def _count_parameters(lm: Any, settings: Any) -> int:
    with torch.random.fork_rng():
        model = mmattn.attach(lm, settings)
    count = model.trainable_parameters()[0]
    model.unload()
    return count


def _joined(memories: Memories) -> Tensor:
    """Return the passages of each request one after the other (b, m)."""
    assert memories.passages is not None, "a memory without words cannot stand in the prompt"
    return torch.tensor([[token for passage in row for token in passage] for row in memories.passages])


def _owners(memories: Memories) -> tuple[Tensor, Tensor]:
    """Return the passage of each of these tokens and its place in it (m,)."""
    assert memories.passages is not None
    lengths = [len(passage) for passage in memories.passages[0]]
    owners = [owner for owner, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(owners), torch.tensor([place for length in lengths for place in range(length)])
