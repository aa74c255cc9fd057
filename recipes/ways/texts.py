"""The two tasks about texts: facts, each a separate entry, and passages in an order that matters.

Both ask about held-out names: "? home mira", "tino". Memories come from the language model: for a fact its embeddings
of property, name and value side by side; for each token of a passage the state before it and its embedding, the key and
value of a kNN-LM (arXiv 1911.00172), and the place of the passage.

Requests of training are short at first: among hundreds of slots from the start an adapter learns nothing, and in 1,000
steps the loss stays that of guessing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn

from .data import Reading, World
from .settings import Config
from .ways import Batch, Memories, Way

PLACES = 16  # numbers of the place of a passage
FEWEST, GROWING = 4, 0.8  # statements of the first requests, and the share of the training until all are there
MOST = 8  # times as many requests in a step of short ones, at most


class Texts:
    """Requests, their memories, and their questions."""

    def __init__(self, config: Config, lm: Any, world: World) -> None:
        self.config, self.settings, self.lm, self.world = config, config.texts, lm, world
        # A copy: memories stay the same while a LoRA is trained.
        self.encoder = copy.deepcopy(lm).eval()
        self.device = lm.device
        readings = self.readings(Random(f"{config.seed} held out"), self.settings.requests, held_out=True)
        ids, labels = self._asked(readings)
        self.asked = Batch(ids, torch.ones_like(ids), labels, None)
        self.held_out = self.memories(readings)
        self.shuffled = self.held_out[[*range(1, len(readings)), 0]]
        self.memory_dim = self.held_out.slots.dim
        self.slots = self.held_out.slots.length

    def readings(self, random: Random, count: int, held_out: bool, share: float = 1.0) -> list[Reading]:
        """Draw requests about names to train on, or held-out ones; for a smaller share more and shorter requests."""
        one, names = self.settings, self.world.some_names(held_out)
        facts = self.config.task == "facts"
        whole = one.entries if facts else one.passages * one.statements
        total = max(FEWEST, round(share * whole))
        length = 1 if facts else min(total, one.statements)
        passages = math.ceil(total / length)
        ask = min(one.ask, max(2, passages * length // 2))
        count = max(count, min(MOST * count, count * whole // (passages * length))) if share < 1 else count
        again = 0.0 if facts else 0.2
        return [self.world.draw(random, names, passages, length, ask, again) for _ in range(count)]

    @torch.no_grad()
    def memories(self, readings: Sequence[Reading]) -> Memories:
        """Return the memories of requests."""
        passages = [self.world.passages(one) for one in readings]
        ids = torch.tensor(passages, device=self.device)  # (b, passages, tokens)
        embeddings = self.encoder.get_input_embeddings()(ids)
        if self.config.task == "facts":
            return Memories(mmattn.Memory(embeddings[:, :, :3].flatten(2)), passages)
        b, count, length = ids.shape
        # States of the first layer depend on a token and the one before it.
        states = self.encoder(ids.flatten(0, 1), output_hidden_states=True, use_cache=False).hidden_states[1]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1).view(b, count, length, -1)
        where = _places(count).to(ids.device)[None, :, None].expand(b, -1, length, -1)
        slots = torch.cat([before, embeddings, where], -1)
        return Memories(mmattn.Memory(slots.flatten(1, 2)), passages)

    def batches(self) -> Iterator[list[Reading]]:
        """Yield the requests of each step: of few statements at first, whole ones in the last part of the training."""
        random, optim = Random(f"{self.config.seed} training"), self.config.optim
        for step in range(optim.max_steps):
            grown = min(1.0, step / (GROWING * optim.max_steps))
            yield self.readings(random, optim.per_device_train_batch_size, held_out=False, share=grown**2)

    def batch(self, readings: Sequence[Reading]) -> Batch:
        """Return a batch to train on."""
        ids, labels = (one.to(self.device) for one in self._asked(readings))
        return Batch(ids, torch.ones_like(ids), labels, self.memories(readings))

    @torch.no_grad()
    def score(self, way: Way, memories: Memories | None) -> dict[str, Any]:
        """Return the share of right answers, and the nats of each."""
        right: list[bool] = []
        nats: list[float] = []
        for start in range(0, len(self.held_out), 20):
            rows = list(range(start, min(start + 20, len(self.held_out))))
            ids, labels = self.asked.ids[rows].to(self.device), self.asked.labels[rows].to(self.device)[:, 1:]
            batch_memories = None if memories is None else memories[rows]
            logits = way.logits(ids, torch.ones_like(ids), batch_memories)[:, :-1].float()
            answers = labels != -100
            right += (logits.argmax(-1) == labels)[answers].tolist()
            nats += F.cross_entropy(logits[answers], labels[answers], reduction="none").tolist()
        return {"accuracy": sum(right) / len(right), "nats": nats}

    def bound(self) -> float:
        """Return the bits of an answer."""
        return math.log2(len(self.world.names))

    def _asked(self, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
        """Return equally many questions of each request with their answers (b, l), and labels of the answers."""
        count = min(len(one.asked) for one in readings)
        ids, labels = zip(*(self.world.questions(one.asked[:count]) for one in readings), strict=True)
        return torch.tensor(ids), torch.tensor(labels)


def _places(count: int) -> Tensor:
    """Return sines and cosines of the numbers of passages (count, PLACES)."""
    angles = torch.arange(count)[:, None] / 4.0 ** torch.arange(PLACES // 2)
    return torch.cat([angles.sin(), angles.cos()], 1)
