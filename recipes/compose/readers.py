"""How one model reads with another: what memory it is given while it learns, and how it writes.

`Alone` has no memory. `Along` is the composition. `PromptOnly` and `Leaky` are what a reader without a causal rule can
be: an encoder of the prompt, or one that is shown in training the other model's states of what it must say.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import mmattn

from .expressions import World
from .settings import AdapterSettings


class Alone:
    """A model that reads nothing besides its text."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch, what is right being known up to the token before."""
        return self.model(**batch, **self.beside(batch)).loss

    def beside(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What else the model is given with a batch."""
        return {}

    @torch.no_grad()
    def forced(self, batch: dict[str, Tensor]) -> list[bool]:
        """For each row whether every token of the answer is the likeliest, the true ones before it being given."""
        likeliest = self.model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], **self.beside(batch)
        ).logits[:, :-1].argmax(-1)  # fmt: skip
        right = batch["labels"][:, 1:]
        return ((likeliest == right) | (right == -100)).all(1).tolist()

    @torch.no_grad()
    def write(self, prompts: dict[str, Tensor], longest: int) -> Tensor:
        """The new tokens (b, longest or fewer) after prompts, greedily."""
        out = self.model.generate(**prompts, **self.beside(prompts), max_new_tokens=longest, do_sample=False)
        return out[:, prompts["input_ids"].shape[1] :]


class Along(Alone):
    """A model with a composed adapter, and the model that reads along."""

    def __init__(self, anchor: Any, lm: Any, settings: AdapterSettings) -> None:
        given = settings.model_dump()
        adapter = mmattn.ComposedAdapter(memory_dim=lm.config.hidden_size, **given)
        super().__init__(mmattn.attach(anchor, adapter))
        self.memory = mmattn.AugmentingModel(lm)

    def beside(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The model that reads along."""
        return {"memory": self.memory}


class Leaky(Alone):
    """A model that looks at all states of the other one, of whatever text there is, later tokens included."""

    def __init__(self, anchor: Any, lm: Any, settings: AdapterSettings) -> None:
        given = settings.model_dump(exclude={"augmenting_layers", "rotary", "own_place"})
        super().__init__(mmattn.attach(anchor, mmattn.GatedAdapter(memory_dim=lm.config.hidden_size, **given)))
        self.lm = lm

    @torch.no_grad()
    def states(self, ids: Tensor, mask: Tensor) -> mmattn.Memory:
        """The last states of the other model for a text."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found = self.lm(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True)
        return mmattn.Memory(found.hidden_states[-1], mask.bool())

    def beside(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The states of the whole text."""
        return {"memory": self.states(batch["input_ids"], batch["attention_mask"])}

    @torch.no_grad()
    def write(self, prompts: dict[str, Tensor], longest: int) -> Tensor:
        """Word by word, with the states of what has been written so far."""
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        for _ in range(longest):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            said = self.model(ids, attention_mask=mask, position_ids=positions, memory=self.states(ids, mask))
            ids = torch.cat([ids, said.logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        return ids[:, prompts["input_ids"].shape[1] :]


class PromptOnly(Leaky):
    """A model that looks at the other one's states of the prompt, and of nothing that is written."""

    def beside(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The states of the prompt: of a batch to learn from, what stands before the answer."""
        mask = batch["attention_mask"]
        if "labels" in batch:
            mask = mask * (batch["labels"] == -100)
        return {"memory": self.states(batch["input_ids"], mask)}

    def write(self, prompts: dict[str, Tensor], longest: int) -> Tensor:
        """With the states of the prompt, made once."""
        return Alone.write(self, prompts, longest)


def measure(reader: Alone, world: World, task: str, count: int, seed: int, filled: bool = False) -> dict[str, float]:
    """Shares of answers that are right, written and teacher-forced, over expressions of held-out keys.

    Args:
        filled: the values stand there instead of the keys.
    """
    pairs = [one.pair("arithmetic" if filled else task) for one in world.asked(task, count, seed)]
    longest = max(len(right) for _, right in pairs) + 1
    right = forced = 0
    for start in range(0, count, 100):
        part = pairs[start : start + 100]
        said = reader.write(world.prompts(part), longest).tolist()
        right += sum(world.said(ids) == answer for ids, (_, answer) in zip(said, part, strict=True))
        forced += sum(reader.forced(world.batch([[pair] for pair in part])))
    return {"written": right / count, "forced": forced / count}
