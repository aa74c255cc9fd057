"""Texts continued with retrieved passages: each chunk of the text finds its own, also those that are being written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import AdapterFileError, TextError
from mmattn.inspect.record_attention import record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.base import IndexPipeline
from mmattn.pipelines.build import load_host
from mmattn.pipelines.config import ModelReference, PipelineConfig
from mmattn.pipelines.generation import stream_generate
from mmattn.pipelines.passage_slots import read_passages, searchable
from mmattn.pipelines.question_answering import Answer, Source
from mmattn.retrieval.index import Index


class TextGenerationPipeline(IndexPipeline):
    """Continuations of texts by a chunked adapter (RETRO, arXiv 2112.04426), with passages from an index."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        # Passages are read by the language model as it came, without the LoRA of the one that writes.
        reader = ModelReference(name=self.config.host.name, revision=self.config.host.revision)
        self._reader = load_host(reader, self.folder, self.device, None)[0]

    def __call__(self, text: str, *, index: Any = None, **options: Any) -> Answer:
        """What the model writes after a text, and the passages it attended to.

        Args:
            text: one text.
            index: continue from this index, or folder of one, instead of that of the pipeline.
            **options: of `generate`, before those of the adapter's folder.

        Raises:
            TextError: an empty text.
            ConfigError: there is no index.
            AdapterFileError: the entries of the index have no ids of tokens.
        """
        return self._continuation(index).answer(_checked(text), self.config.generation | options)

    def stream(self, text: str, *, index: Any = None, **options: Any) -> Iterator[str]:
        """What the model writes after a text, piece by piece.

        Args:
            text: one text.
            index: as in a call.
            **options: as in a call.

        Raises:
            TextError: an empty text, or beams, which have no first word before the last.
            ConfigError: as in a call.
            AdapterFileError: as in a call.
        """
        return self._continuation(index).stream(_checked(text), self.config.generation | options)

    def trace(self, text: str, *, index: Any = None) -> Trace:
        """The same word by word: the passages that each could see, those found for the whole chunk before it.

        Args:
            text: one text.
            index: as in a call.
        """
        return self._continuation(index).trace(_checked(text), self.config.generation)

    def _continuation(self, index: Any) -> Continuation:
        return Continuation(self._chosen_index(index), self.model, self.tokenizer, self._reader, self.config)


class Continuation:
    """One text with the passages that its chunks found.

    Args:
        index: of the passages.
        model: the adapted language model.
        tokenizer: of its host.
        reader: the language model as it came, which reads the passages.
        config: what the adapter's folder says.
    """

    def __init__(self, index: Index, model: Any, tokenizer: Any, reader: Any, config: PipelineConfig) -> None:
        self.index, self.model, self.tokenizer, self.reader, self.config = index, model, tokenizer, reader, config
        self.size = model.adapters["default"].config.chunk_size
        self.found: dict[tuple[int, ...], list[str]] = {}  # for each chunk the passage of each slot

    @torch.no_grad()
    def answer(self, text: str, options: dict[str, Any]) -> Answer:
        """What the model writes after a text, and the passages it attended to."""
        memory = self.model.prepare(self.retrieve)
        out, begin = self.write(text, memory, options)
        with record(self.model) as weights:
            self.model(out, memory=memory)
        shares: Counter[str] = Counter()
        seen = weights.mean()[0].mean(1)
        for chunk, row in zip(self.chunks(out).tolist(), seen.tolist(), strict=False):
            for passage, weight in zip(self.found[tuple(chunk)], row, strict=False):
                shares[passage] += weight / len(seen)
        written = self.tokenizer.decode(out[0, begin:], skip_special_tokens=True)
        return Answer(written, tuple(Source(None, text, 0.0, share) for text, share in shares.most_common()))

    def stream(self, text: str, options: dict[str, Any]) -> Iterator[str]:
        """What the model writes after a text, piece by piece."""
        memory = self.model.prepare(self.retrieve)
        return stream_generate(self.model, self.tokenizer, {**self.arguments(text, options), "memory": memory})

    @torch.no_grad()
    def trace(self, text: str, options: dict[str, Any]) -> Trace:
        """Which passages each word attended to, and its probability without them."""
        out, begin = self.write(text, self.model.prepare(self.retrieve), options)
        ids, first = out[0].tolist(), begin // self.size - 1
        found = self.retrieve(self.chunks(out))
        chunks, m, _ = found.tokens.shape
        slots = [self.found[tuple(chunk)] for chunk in self.chunks(out).tolist()]
        names = list(dict.fromkeys(name for row in slots[first:] for name in row))
        owner = torch.full((chunks, m), -1)
        for chunk in range(first, chunks):
            owner[chunk, : len(slots[chunk])] = torch.tensor([names.index(name) for name in slots[chunk]])
        kept = torch.ones(chunks, m, dtype=torch.bool) if found.mask is None else found.mask
        # One row for all that was found, and one for each passage that is hidden.
        rows = torch.stack([kept, *(kept & (owner != number) for number in range(len(names)))]).flatten(1)
        segments = torch.arange(chunks).repeat_interleave(m).expand(len(rows), -1)
        memory = Memory(found.tokens.flatten(0, 1).expand(len(rows), -1, -1), rows, segments)
        with record(self.model) as weights:
            everything = self.probabilities(out, begin, memory[:1])[0]
        belongs = torch.nn.functional.one_hot(owner + 1, 1 + len(names))[..., 1:].float()
        attended = []
        for calls in weights.values():
            by_chunk = calls[0] @ belongs[:, None]  # (c, h, s, passages)
            # The token at position t was written from the state before it, the first that a whole chunk informs.
            attended.append(
                torch.stack([by_chunk[t // self.size - 1, :, t % self.size] for t in range(begin, len(ids))], 1)
            )
        return Trace(
            [self.tokenizer.decode([one]) for one in ids[begin:]],
            names,
            torch.stack(attended),
            [f"layer {layer}" for _, layer in weights],
            " ".join(text.split()),
            probability=everything,
            without=self.probabilities(out, begin, None)[0],
            dropped=self.probabilities(out, begin, memory[1:]).T if len(names) else None,
        )

    def write(self, text: str, memory: Any, options: dict[str, Any]) -> tuple[Tensor, int]:
        """Ids (1, l) of a text and what the model writes after it, and where that begins."""
        given = self.arguments(text, options)
        return self.model.generate(**given, memory=memory), given["input_ids"].shape[1]

    def arguments(self, text: str, options: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` for a text."""
        asked = self.tokenizer(text)["input_ids"]
        # Whole chunks, so that the last one ends with the question and what it finds is read at once.
        line = self.tokenizer("\n")["input_ids"][-1:]
        device = next(self.model.parameters()).device
        ids = torch.tensor([line * (-len(asked) % self.size) + asked], device=device)
        pad = self.tokenizer.pad_token_id
        given = {"do_sample": False, "pad_token_id": self.tokenizer.eos_token_id if pad is None else pad, **options}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **given}

    def chunks(self, ids: Tensor) -> Tensor:
        """The whole chunks (c, s) of a text (1, l)."""
        return ids[0, : ids.shape[1] // self.size * self.size].view(-1, self.size)

    def probabilities(self, ids: Tensor, begin: int, memory: Memory | None) -> Tensor:
        """The probability (b, t) of each token of a text (1, l) from `begin` on, for each row of a memory."""
        given = {} if memory is None else {"memory": memory}
        rows = ids if memory is None else ids.expand(memory.batch, -1)
        logs = self.model(rows, **given).logits[:, begin - 1 : -1].log_softmax(-1)
        found: Tensor = logs.gather(2, rows[:, begin:, None])[..., 0].exp()
        return found

    def retrieve(self, chunks: Tensor) -> Memory:
        """The passages nearest to chunks (c, s), each with what follows it, as the language model reads them.

        Raises:
            AdapterFileError: the entries of the index have no ids of tokens.
        """
        memory = self.config.memory
        assert memory is not None and memory.host_layer is not None
        texts = self.tokenizer.batch_decode(chunks)
        hits = self.index.search(list(map(searchable, texts)), memory.top_k)
        rows = []
        assert hits.texts is not None and hits.metadata is not None
        for chunk, line, about in zip(chunks.tolist(), hits.texts, hits.metadata, strict=True):
            found = [(text, more.get("ids")) for text, more in zip(line, about, strict=True) if more is not None]
            if not all(ids for _, ids in found):
                raise AdapterFileError(
                    "entries of this index have no ids of tokens: ask the index that the adapter's own run left"
                )
            states = read_passages(self.reader, [ids for _, ids in found], memory.host_layer)
            self.found[tuple(chunk)] = [str(text) for (text, ids) in found for _ in ids]
            rows.append(Memory(torch.cat(states)[None]))
        return Memory.stack(rows)


def _checked(text: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise TextError(f"there is no text to go on with: give one; got {text!r:.40}")
    return text
