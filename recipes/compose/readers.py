"""Readers: a model alone, or with the memory of other models, in training and in generation.

`Composed` is the composition, `Fused` has the caches that the other models have of the prompt.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import mmattn

from .data import World
from .settings import AdapterSettings, FusedSettings

TOKENS = 24  # tokens that are generated to be timed
Batch = dict[str, Tensor]


class Single:
    """A model that reads nothing besides its text."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def beside(self, batch: Batch) -> dict[str, Any]:
        """Return further arguments of the model."""
        return {}

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        return self.model(**batch, **self.beside(batch)).loss

    @torch.no_grad()
    def forced(self, batch: Batch) -> list[bool]:
        """Return for each row if every token of the answer is the likeliest after the true ones before it."""
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        likeliest = self.model(**inputs, **self.beside(batch)).logits[:, :-1].argmax(-1)
        right = batch["labels"][:, 1:]
        return ((likeliest == right) | (right == -100)).all(1).tolist()

    @torch.no_grad()
    def write(self, prompts: Batch, longest: int) -> Tensor:
        """Generate the tokens (b, longest or fewer) after prompts, greedily."""
        output = self.model.generate(**prompts, **self.beside(prompts), max_new_tokens=longest, do_sample=False)
        return output[:, prompts["input_ids"].shape[1] :]


class Ensemble(Single):
    """A model with an adapter for each of several other models; `lms` has the active ones by adapter name."""

    def __init__(self, anchor: Any, lms: Sequence[Any], adapters: Sequence[Any]) -> None:
        self.names = ["default", "second"][: len(lms)]
        model = anchor
        for name, adapter in zip(self.names, adapters, strict=True):
            model = mmattn.attach(model, adapter, name)
        model.set_adapter(self.names)
        super().__init__(model)
        self.lms = dict(zip(self.names, map(mmattn.AugmentingModel, lms), strict=True))

    def beside(self, batch: Batch) -> dict[str, Any]:
        """Return the memory of each adapter."""
        return {"memory": {name: self.memory(lm, batch) for name, lm in self.lms.items()}}

    def memory(self, lm: mmattn.AugmentingModel, batch: Batch) -> Any:
        """Return the memory that an adapter has of a model."""
        return lm


class Composed(Ensemble):
    """A model with composed adapters, and the models that read along."""

    def __init__(self, anchor: Any, lms: Sequence[Any], settings: AdapterSettings) -> None:
        options = settings.model_dump()
        adapters = [mmattn.ComposedAdapter(memory_dim=lm.config.hidden_size, **options) for lm in lms]
        super().__init__(anchor, lms, adapters)


class Fused(Ensemble):
    """A model with other models' caches of the prompt."""

    def __init__(self, anchor: Any, lms: Sequence[Any], settings: FusedSettings) -> None:
        options, expanded = settings.model_dump(), [expand(lm) for lm in lms]
        widths = [mmattn.AugmentingModel(lm).cache_dim for lm in expanded]
        super().__init__(anchor, expanded, [mmattn.adapters.FusedCacheAdapter(width, **options) for width in widths])

    def memory(self, lm: mmattn.AugmentingModel, batch: Batch) -> Any:
        """Return the cache that the model has of the prompt."""
        return lm.prefill(batch["input_ids"], prompt_mask(batch))


def prompt_mask(batch: Batch) -> Tensor:
    """Return the mask of the tokens before the answer; of a batch without labels that is all of it."""
    mask = batch["attention_mask"]
    return mask * (batch["labels"] == -100) if "labels" in batch else mask


@torch.no_grad()
def expand(lm: Any) -> LlamaForCausalLM:
    """Add a layer that changes nothing, initialised as in LLaMA Pro (arXiv 2401.02415, section 3.2).

    A layer caches the output of the layers before it, so this layer caches the output of the last.
    """
    config = type(lm.config).from_dict({**lm.config.to_dict(), "num_hidden_layers": lm.config.num_hidden_layers + 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expanded = LlamaForCausalLM(config).to(lm.device).eval().requires_grad_(False)
        expanded.load_state_dict(lm.state_dict(), strict=False)
        layer = expanded.model.layers[-1]
        for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            torch.nn.init.orthogonal_(part.weight)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    return expanded


@torch.no_grad()
def respell(lm: Any, world: World, anchor: World, size: int) -> LlamaForCausalLM:
    """Convert a model for the tokens of `world` to another vocabulary of this size."""
    config = type(lm.config).from_dict({**lm.config.to_dict(), "vocab_size": size, "pad_token_id": None})
    respelled = LlamaForCausalLM(config).to(lm.device).eval().requires_grad_(False)
    weights = lm.state_dict()
    embeddings = weights.pop("model.embed_tokens.weight")
    respelled.load_state_dict({name: one for name, one in weights.items() if name != "lm_head.weight"}, strict=False)
    rows = respelled.get_input_embeddings().weight.zero_()
    for token, id in anchor.ids.items():
        rows[id] = embeddings[world.ids[token]]
    return respelled


def measure(reader: Single, world: World, task: str, count: int, seed: int, filled: bool = False) -> dict[str, float]:
    """Return the shares of right answers about held-out keys, generated and teacher-forced; `filled`: with values."""
    pairs = [one.pair("arithmetic" if filled else task) for one in world.expressions(task, count, seed)]
    longest = max(len(world.spell(right)) for _, right in pairs) + 1
    right = forced = 0
    for start in range(0, count, 100):
        part = pairs[start : start + 100]
        written = reader.write(world.prompts(part), longest).tolist()
        right += sum(
            "".join(world.answer(ids)) == "".join(answer) for ids, (_, answer) in zip(written, part, strict=True)
        )
        forced += sum(reader.forced(world.batch([[pair] for pair in part])))
    return {"written": right / count, "forced": forced / count}


def token_times(readers: Mapping[str, Single], world: World, rounds: int = 20) -> dict[str, float]:
    """Return the milliseconds per further token of readers with separate models: medians over alternating rounds."""
    prompts = world.prompts([world.expressions("KV-arithmetic", 1, 0)[0].pair("KV-arithmetic")])
    times: dict[str, list[float]] = {name: [] for name in readers}
    for _ in range(rounds + 1):
        for name, reader in readers.items():
            first, many = (generation_time(reader, prompts, tokens) for tokens in (1, TOKENS))
            times[name].append((many - first) / (TOKENS - 1))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


@torch.no_grad()
def generation_time(reader: Single, prompts: Batch, tokens: int) -> float:
    """Return the milliseconds to generate this many tokens."""
    start = time.perf_counter()
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    reader.model.generate(**prompts, **reader.beside(prompts), **options)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3
