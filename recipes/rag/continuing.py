"""Continuations of texts by a chunked adapter, which retrieves passages for each chunk as it generates."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import mmattn
from mmattn import inspect, training

from .answering import device_of
from .documents import Passages, searchable

GENERATION = {"max_new_tokens": 48, "repetition_penalty": 1.2, "do_sample": False}


class Writer:
    """A model with a chunked adapter, and the passages that it retrieves from."""

    def __init__(self, model: Any, tokenizer: Any, library: Passages, encoder: mmattn.TextEncoder, top_k: int) -> None:
        self.model, self.tokenizer, self.library, self.encoder, self.top_k = model, tokenizer, library, encoder, top_k
        self.index = mmattn.Index.build(library.vectors)
        self.size: int = model.eval().adapter("default").config.chunk_size
        self.passages: dict[tuple[int, ...], list[str]] = {}  # of each slot, by the ids of the chunk before

    def retrieve(self, chunks: torch.Tensor) -> mmattn.Memory:
        """Return the slots of the passages nearest to chunks (c, s), each with the text that follows it."""
        texts = list(map(searchable, self.tokenizer.batch_decode(chunks)))
        hits = self.index.search(self.encoder.encode(texts).tokens[:, 0].cpu(), self.top_k)
        memories = []
        for chunk, rows in zip(chunks.tolist(), hits.ids, strict=True):
            slots = {row: self.library.slots(row, "both") for row in rows if row is not None}
            self.passages[tuple(chunk)] = [self.library.texts[row] for row, part in slots.items() for _ in part]
            memories.append(mmattn.Memory(torch.cat(list(slots.values()))[None]))
        return mmattn.Memory.stack(memories).to(chunks.device)

    @torch.no_grad()
    def write(self, text: str) -> tuple[str, list[tuple[str, float]], inspect.Trace]:
        """Return the continuation of a text, each passage's share of the attention, and the attention of each word."""
        ids = self.tokenizer(text)["input_ids"]
        # Padded to whole chunks, so that the last one ends with the prompt and is searched at once.
        line = self.tokenizer("\n")["input_ids"][-1:]
        prompt = torch.tensor([line * (-len(ids) % self.size) + ids], device=device_of(self.model))
        begin, memory = prompt.shape[1], self.model.prepare(self.retrieve)
        pad = training.bos_and_eos(self.tokenizer)[1]
        out = self.model.generate(prompt, memory=memory, pad_token_id=pad, **GENERATION)
        with inspect.record(self.model) as recorded:
            self.model(out, memory=memory)
        chunks = out[0].split(self.size)[: out.shape[1] // self.size]
        passages = [self.passages[tuple(chunk.tolist())] for chunk in chunks]
        shares: Counter[str] = Counter()
        weights = recorded.mean()[0].mean(1).tolist()  # (c, m)
        for names, row in zip(passages, weights, strict=False):
            for name, weight in zip(names, row, strict=False):
                shares[name] += weight / len(weights)
        new = out[0, begin:].tolist()
        words = [self.tokenizer.decode([token]) for token in new]
        written = self.tokenizer.decode(new, skip_special_tokens=True)
        return written, shares.most_common(), self._trace(recorded, passages, begin, words, text)

    def _trace(
        self, recorded: Any, passages: list[list[str]], begin: int, words: list[str], text: str
    ) -> inspect.Trace:
        """Return the weights (layers, h, words, passages) of each new word."""
        first = begin // self.size - 1
        names = list(dict.fromkeys(name for row in passages[first:] for name in row))
        attended = []
        for weights, *_ in recorded.values():  # (c, h, s, m)
            belongs = torch.zeros(weights.shape[0], weights.shape[3], len(names))
            for chunk in range(first, len(belongs)):
                for slot, name in enumerate(passages[chunk]):
                    belongs[chunk, slot, names.index(name)] = 1
            by_chunk = weights @ belongs[:, None]
            # The token at t was predicted at t - 1, the first position that a whole chunk informs.
            places = range(begin, begin + len(words))
            attended.append(torch.stack([by_chunk[t // self.size - 1, :, t % self.size] for t in places], 1))
        layers = [f"layer {layer}" for _, layer in recorded]
        return inspect.Trace(words, names, torch.stack(attended), layers, " ".join(text.split()))
