"""How one model reads with others: what memory it is given while it learns, and how it writes.

`Alone` has no memory. `Along` is the composition, `Fused` has the caches that the other models have of the prompt.
`PromptOnly` and `Leaky` are what a reader without a causal rule can be: an encoder of the prompt, or one that is shown
in training the other model's states of what it must say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import mmattn

from .settings import AdapterSettings, FusedSettings


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


class Several(Alone, ABC):
    """A model with an adapter for each of several others.

    Args:
        anchor: the model. lms: the others. adapters: settings, one for each.
    """

    def __init__(self, anchor: Any, lms: Sequence[Any], adapters: Sequence[Any]) -> None:
        self.names = ["default", "second"][: len(lms)]
        model = anchor
        for name, adapter in zip(self.names, adapters, strict=True):
            model = mmattn.attach(model, adapter, name)
        model.set_adapter(self.names)
        super().__init__(model)
        #: Of each adapter, the model that it is given; controls give fewer, or others.
        self.given = dict(zip(self.names, map(mmattn.AugmentingModel, lms), strict=True))

    def beside(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """What each adapter is given."""
        return {"memory": {name: self.memory(one, batch) for name, one in self.given.items()}}

    @abstractmethod
    def memory(self, lm: mmattn.AugmentingModel, batch: dict[str, Tensor]) -> Any:
        """What an adapter is given of a model."""


class Along(Several):
    """A model with composed adapters, and the models that read along."""

    def __init__(self, anchor: Any, lms: Sequence[Any], settings: AdapterSettings) -> None:
        given = settings.model_dump()
        super().__init__(anchor, lms, [mmattn.ComposedAdapter(memory_dim=lm.config.hidden_size, **given) for lm in lms])

    def memory(self, lm: mmattn.AugmentingModel, batch: dict[str, Tensor]) -> mmattn.AugmentingModel:
        """The model itself, which reads along."""
        return lm


class Fused(Several):
    """A model with the caches of others of the prompt."""

    def __init__(self, anchor: Any, lms: Sequence[Any], settings: FusedSettings) -> None:
        given, expanded = settings.model_dump(), [expand(lm) for lm in lms]
        widths = [mmattn.AugmentingModel(lm).cache_dim for lm in expanded]
        adapters = [mmattn.adapters.FusedCacheAdapter(width, **given) for width in widths]
        super().__init__(anchor, expanded, adapters)

    def memory(self, lm: mmattn.AugmentingModel, batch: dict[str, Tensor]) -> Any:
        """What the model has cached of the prompt: of a batch to learn from, of what stands before the answer."""
        mask = batch["attention_mask"]
        if "labels" in batch:
            mask = mask * (batch["labels"] == -100)
        return lm.prefill(batch["input_ids"], mask)


@torch.no_grad()
def expand(lm: Any) -> LlamaForCausalLM:
    """The model with one more layer that adds nothing, as LLaMA Pro begins its own (arXiv 2401.02415, section 3.2).

    A layer caches what the layers before it have computed: without this one, nothing would cache what the last has.
    """
    config = type(lm.config).from_dict({**lm.config.to_dict(), "num_hidden_layers": lm.config.num_hidden_layers + 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = LlamaForCausalLM(config).to(lm.device).eval().requires_grad_(False)
        made.load_state_dict(lm.state_dict(), strict=False)
        layer = made.model.layers[-1]
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.orthogonal_(part.weight)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    return made


class Leaky(Alone):
    """A model that looks at all states of the other one, of whatever text there is, later tokens included."""

    def __init__(self, anchor: Any, lms: Sequence[Any], settings: AdapterSettings) -> None:
        (lm,) = lms
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
