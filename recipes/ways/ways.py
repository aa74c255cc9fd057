"""Ways to give a memory to a language model, each trained with as many parameters as the others.

A way is an adapter of mmattn, and where that has fewer parameters than the others a LoRA beside it, as LLaVA and xRAG
train their language models, too. Passages have no parameters of their own: there the LoRA learns to read passages
that do not see each other (Block-Attention, arXiv 2409.15355).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.errors import ConfigError

from .memories import Memories

#: A LoRA beside an adapter is left out below this share of all parameters.
LEAST = 0.05


class Way:
    """A language model with a way to be given a memory."""

    def __init__(self, lm: Any, settings: Any, parameters: int) -> None:
        self.lm, self.lora = lm, None
        own = 0 if settings is None else _parameters_of(lm, settings)
        if own > 1.05 * parameters and parameters:
            raise ConfigError(f"{settings} has {own:,} parameters, more than parameters={parameters:,}: give more")
        if parameters - own > LEAST * parameters:
            self.lora = training.matched_lora(lm, parameters - own)
        self.host = self.lora or lm
        self.model = self.host if settings is None else mmattn.attach(self.host, settings)
        self.parameters = sum(one.numel() for one in self.model.parameters() if one.requires_grad)

    def close(self) -> None:
        """Give the language model back as it was."""
        if self.model is not self.host:
            self.model.unload()
        if self.lora is not None:
            self.lora.unload()
        self.lm.requires_grad_(False)

    def memory(self, memories: Memories) -> Any:
        """What a call is given as `memory=`; None is none."""
        return memories.slots

    def prepared(self, memories: Memories) -> Any:
        """The same, with what can be computed of it beforehand."""
        return self.model.prepare(self.memory(memories))

    def nbytes(self, prepared: Any, memories: Memories) -> int:
        """Bytes that are kept of a prepared memory, once a call has read it."""
        kept: int = prepared.nbytes()
        return kept

    def text(self, ids: Tensor, memories: Memories) -> Tensor:
        """What the language model is given as text, of a question (1, l)."""
        return ids

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """The logits of texts (b, l)."""
        memory = None if memories is None else self.memory(memories)
        given = {} if memory is None else {"memory": memory}
        return self.model(input_ids=ids, attention_mask=mask, **given).logits


class Alone(Way):
    """No memory."""

    def memory(self, memories: Memories) -> None:
        """None."""

    def prepared(self, memories: Memories) -> None:
        """None."""

    def nbytes(self, prepared: None, memories: Memories) -> int:
        """None."""
        return 0


class Prefix(Way):
    """One prefix for all requests: it is trained, and knows nothing of any."""

    def memory(self, memories: Memories) -> list[int]:
        """The first prefix for each row."""
        return [0] * len(memories)


class Prompt(Alone):
    """Passages in the prompt."""

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """The logits of texts (b, l) after their passages."""
        if memories is None:
            return super().logits(ids, mask, None)
        before = _joined(memories).to(ids.device)
        whole, seen = torch.cat([before, ids], 1), torch.cat([torch.ones_like(before), mask], 1)
        return self.model(input_ids=whole, attention_mask=seen).logits[:, before.shape[1] :]

    def text(self, ids: Tensor, memories: Memories) -> Tensor:
        """The passages, and the question."""
        return torch.cat([_joined(memories).to(ids.device), ids], 1)

    def nbytes(self, prepared: None, memories: Memories) -> int:
        """Those of keys and values of the passages."""
        out = self.lm(_joined(memories).to(self.lm.device), use_cache=True)
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in out[cache_name(out)].layers)


class Passages(Way):
    """Passages that the host has read one by one; while it is trained, under a mask that keeps them apart."""

    def __init__(self, lm: Any, parameters: int = 0, recomputed_tokens: int = 0, turned: bool = True) -> None:
        super().__init__(lm, mmattn.adapters.PassageAdapter(), parameters)
        self.recomputed_tokens = recomputed_tokens
        if not turned:  # as caches do that put keys one after the other as they are
            adapter = self.model.adapter("default")
            adapter.rotations = dict.fromkeys(adapter.layers)

    def memory(self, memories: Memories) -> Any:
        """The passages of each request, selected from what the host has read."""
        assert memories.passages is not None
        cache = mmattn.hosts.PassageCache(self.model)
        rows = [cache.add(row, progress=False) for row in memories.passages]
        return cache.select(rows, recomputed_tokens=self.recomputed_tokens)

    def prepared(self, memories: Memories) -> Any:
        """The same."""
        return self.memory(memories)

    def logits(self, ids: Tensor, mask: Tensor, memories: Memories | None) -> Tensor:
        """The logits of texts (b, l) that see their passages, which do not see each other."""
        if memories is None or not torch.is_grad_enabled():
            return super().logits(ids, mask, memories)
        before, owners, places = (one.to(ids.device) for one in (_joined(memories), *_owners(memories)))
        count, length = before.shape[1], ids.shape[1]
        again = (owners > 0) & (places < self.recomputed_tokens)
        # Each passage by itself, then the tokens that are read again, then the text.
        tokens = torch.cat([before, before[:, again], ids], 1)
        positions = torch.arange(count + length, device=ids.device)
        positions = torch.cat([positions[:count], positions[:count][again], positions[count:]])
        owners = torch.cat([owners, torch.full_like(positions[count:], -1)])
        apart = owners >= 0
        replaced = torch.cat([again, torch.zeros_like(apart[count:])])
        own = owners[:, None] == owners
        seen = (positions[:, None] >= positions) & torch.where(apart[:, None], own, ~replaced)
        real = torch.cat([torch.ones_like(tokens[:, :-length]), mask], 1).bool()
        out = self.host(
            input_ids=tokens,
            attention_mask=(seen & real[:, None])[:, None],
            position_ids=positions.expand(len(tokens), -1),
        )
        return out.logits[:, -length:]


def cache_name(out: Any) -> str:
    """Under which name a host returns its cache, and takes it: as transformers has it since 5.24, or before."""
    return "cache" if "cache" in out else "past_key_values"


def prefix(lm: Any, parameters: int) -> Any:
    """As many virtual tokens as there are parameters for."""
    make: Callable[[int], Any] = mmattn.adapters.PrefixAdapter
    return make(max(1, parameters // _parameters_of(lm, make(1))))


def _parameters_of(lm: Any, settings: Any) -> int:
    with torch.random.fork_rng():
        model = mmattn.attach(lm, settings)
    count = model.trainable_parameters()[0]
    model.unload()
    return count


def _joined(memories: Memories) -> Tensor:
    """The passages of each request one after the other, (b, m); each request has as many tokens."""
    assert memories.passages is not None, "a memory without words cannot stand in the prompt"
    return torch.tensor([[token for passage in row for token in passage] for row in memories.passages])


def _owners(memories: Memories) -> tuple[Tensor, Tensor]:
    """The passage of each of these tokens and its place in it, (m,); each request has passages of the same lengths."""
    assert memories.passages is not None
    lengths = [len(passage) for passage in memories.passages[0]]
    owners = [owner for owner, length in enumerate(lengths) for _ in range(length)]
    return torch.tensor(owners), torch.tensor([place for length in lengths for place in range(length)])
