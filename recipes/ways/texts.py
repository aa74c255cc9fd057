"""The two tasks about texts: facts, each an entry by itself, and passages in an order that matters.

Both ask about names that nothing was trained on: "? home mira", "tino". The memories of adapters are made of what the
language model itself has: for a fact its embeddings of property, name and value side by side; for each token of a
passage the state before it and its embedding, the key and value of a kNN-LM (arXiv 1911.00172), and where its passage
stands.

Requests of training are short at first. To look for what is asked among hundreds of slots from the start, an adapter
finds no beginning: in 1,000 steps the loss stays that of guessing.
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

from .learning import Batch
from .memories import Memories
from .settings import Config
from .ways import Way
from .world import Reading, World

#: Numbers that say where a passage stands.
PLACES = 16
#: Statements of the first requests, and the share of the training in which they become all.
FEWEST, GROWING = 4, 0.8
#: How many times as many requests a step has at most while they are short.
MOST = 8


class Texts:
    """Requests, what they are given to read, and their questions."""

    def __init__(self, config: Config, lm: Any, world: World) -> None:
        self.config, self.settings, self.lm, self.world = config, config.texts, lm, world
        # What memories are made of stays the same while a LoRA is trained on the other one.
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
        """Requests about names to train on, or about those that are held out."""
        one, known = self.settings, self.world.some_names(held_out)
        facts = self.config.task == "facts"
        whole = one.entries if facts else one.passages * one.statements
        total = max(FEWEST, round(share * whole))
        length = 1 if facts else min(total, one.statements)
        passages = math.ceil(total / length)
        ask = min(one.ask, max(2, passages * length // 2))
        count = max(count, min(MOST * count, count * whole // (passages * length))) if share < 1 else count
        again = 0.0 if facts else 0.2
        return [self.world.draw(random, known, passages, length, ask, again) for _ in range(count)]

    @torch.no_grad()
    def memories(self, readings: Sequence[Reading]) -> Memories:
        """What the requests are given to read."""
        passages = [self.world.passages(one) for one in readings]
        ids = torch.tensor(passages, device=self.device)  # (b, passages, tokens)
        embeddings = self.encoder.get_input_embeddings()(ids)
        if self.config.task == "facts":
            return Memories(mmattn.Memory(embeddings[:, :, :3].flatten(2)), passages)
        b, count, length = ids.shape
        # The states that know a token and the one before it: of the first layer.
        states = self.encoder(ids.flatten(0, 1), output_hidden_states=True, use_cache=False).hidden_states[1]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1).view(b, count, length, -1)
        where = _places(count).to(ids.device)[None, :, None].expand(b, -1, length, -1)
        slots = torch.cat([before, embeddings, where], -1)
        return Memories(mmattn.Memory(slots.flatten(1, 2)), passages)

    def batches(self) -> Iterator[list[Reading]]:
        """Requests of each step: of few statements at first, whole ones for the last part of the training."""
        random, optim = Random(f"{self.config.seed} training"), self.config.optim
        for step in range(optim.max_steps):
            grown = min(1.0, step / (GROWING * optim.max_steps))
            yield self.readings(random, optim.batch_size, held_out=False, share=grown**2)

    def batch(self, readings: Sequence[Reading]) -> Batch:
        """A batch to train on."""
        ids, labels = (one.to(self.device) for one in self._asked(readings))
        return Batch(ids, torch.ones_like(ids), labels, self.memories(readings))

    @torch.no_grad()
    def score(self, way: Way, memories: Memories | None) -> dict[str, Any]:
        """How many answers are right, and what each costs."""
        right: list[bool] = []
        spent: list[float] = []
        for start in range(0, len(self.held_out), 20):
            rows = list(range(start, min(start + 20, len(self.held_out))))
            ids, labels = self.asked.ids[rows].to(self.device), self.asked.labels[rows].to(self.device)[:, 1:]
            given = None if memories is None else memories[rows]
            logits = way.logits(ids, torch.ones_like(ids), given)[:, :-1].float()
            asked = labels != -100
            right += (logits.argmax(-1) == labels)[asked].tolist()
            spent += F.cross_entropy(logits[asked], labels[asked], reduction="none").tolist()
        return {"accuracy": sum(right) / len(right), "nats": spent}

    def request(self) -> tuple[Tensor, Memories]:
        """A question, and what it is asked about."""
        return self.asked.ids[:1, :3].to(self.device), self.held_out[[0]]

    def bound(self) -> float:
        """Bits that an answer has."""
        return math.log2(len(self.world.names))

    def _asked(self, readings: Sequence[Reading]) -> tuple[Tensor, Tensor]:
        """The questions of each request with their answers, (b, l), and labels of the answers; as many of each."""
        count = min(len(one.asked) for one in readings)
        ids, labels = zip(*(self.world.questions(one.asked[:count]) for one in readings), strict=True)
        return torch.tensor(ids), torch.tensor(labels)


def _places(count: int) -> Tensor:
    """Sines and cosines of the numbers of passages (count, PLACES)."""
    angles = torch.arange(count)[:, None] / 4.0 ** torch.arange(PLACES // 2)
    return torch.cat([angles.sin(), angles.cos()], 1)
