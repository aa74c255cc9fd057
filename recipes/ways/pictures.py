"""The tasks about pictures: name the flower in a picture, with the data and measures of the vision recipe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines, recipes, training

from .settings import Config
from .ways import Batch, Memories, Way


def vision(file: str) -> Any:
    """Load a file of the vision recipe of this installation."""
    return recipes.load_recipe(recipes.find_recipe("vision").folder, file)


class Pictures:
    """Training pictures and held-out pictures, with their descriptions."""

    def __init__(self, config: Config, device: torch.device) -> None:
        settings = {**config.vision, "seed": config.seed, "progress": config.progress}
        self.settings = vision("settings").Config.model_validate(settings)
        self.config, self.device = config, device
        self.data = vision("data").load_data(self.settings.data, config.seed)
        encoder = pipelines.load_image_encoder(self.settings.encoder, device)
        encode = partial(
            vision("data").encode, encoder, folder=Path(self.settings.data.cache), progress=config.progress
        )
        mirrors = [False, True] if self.settings.data.flip else [False]
        self.memory = mmattn.Memory.stack([encode(self.data.train, mirror=mirror) for mirror in mirrors])
        held_out = encode(self.data.held_out, mirror=False)
        self.lm, tokenizer = pipelines.load_language_model(self.settings.lm, device)
        self.ids = training.encode_texts(tokenizer, self.data.texts, self.lm.config.max_position_embeddings)
        self.tokenizer = tokenizer
        measure = vision("measure")
        self.check_captions = measure.check_captions
        self.pairs = measure.Measure(self.data, tokenizer, self.ids).pairs
        self.held_out = Memories(held_out.to(device))
        self.shuffled = self.held_out[measure.other_species(self.data.held_out, config.seed)]
        self.memory_dim = held_out.dim
        self.slots = held_out.length

    def batches(self) -> Iterator[list[tuple[int, int, int]]]:
        """Yield rows of a step, a picture (or its mirror image) and one of its descriptions."""
        optim = self.config.optim
        texts = [picture.species.texts for picture in self.data.train] * (2 if self.settings.data.flip else 1)
        order = training.PairSampler(texts, optim.per_device_train_batch_size, self.config.seed)
        for step in range(optim.max_steps):
            yield [(step, *pair) for pair in order.pairs(step)]

    def batch(self, rows: Sequence[tuple[int, int, int]]) -> Batch:
        """Return a batch to train on, with nine of ten slots of each picture."""
        (step, *_), items, texts = zip(*rows, strict=True)
        seed = self.config.seed * 1_000_003 + step
        memory = training.augment_memory(self.memory[torch.tensor(items)], keep_fraction=0.9, seed=seed)
        return self._batch(texts, Memories(memory.to(self.device)))

    def score(self, way: Way, memories: Memories | None) -> dict[str, Any]:
        """Return the share of captions with the right flower, and the nats of each description."""
        pairs, nats = self.pairs, []
        for start in range(0, len(pairs), 64):
            rows, texts = zip(*pairs[start : start + 64], strict=True)
            batch_memories = None if memories is None else memories[rows]
            with torch.no_grad():
                nats += way.nats(self._batch(texts, batch_memories), batch_memories).sum(1).tolist()
        right, _ = self.check_captions(self.data, self.captions(way, memories))
        return {"accuracy": right, "nats": nats}

    def captions(self, way: Way, memories: Memories | None) -> list[str]:
        """Return a caption of each held-out picture, from the start token alone."""
        captions: list[str] = []
        for start in range(0, len(self.held_out), 64):
            rows = range(start, min(start + 64, len(self.held_out)))
            memory = None if memories is None else way.memory(memories[list(rows)])
            options = {"max_new_tokens": 64}
            captions += pipelines.generate_texts(way.model, self.tokenizer, [""] * len(rows), memory, options=options)
        return captions

    def bound(self) -> float:
        """Return the bits of the name of a flower."""
        return math.log2(len(self.data.species))

    def _batch(self, texts: Sequence[int], memories: Memories | None) -> Batch:
        one = training.collate([self.ids[text] for text in texts]).to(self.device)
        assert one.attention_mask is not None
        return Batch(one.input_ids, one.attention_mask, one.labels, memories)
