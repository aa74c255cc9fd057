"""Continuations of texts by a chunked adapter (RETRO), with passages from an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.adapters.language_models import call_by_name, device_of
from mmattn.errors import AdapterFileError, TextError
from mmattn.inspect.record_attention import RecordedWeights, record
from mmattn.inspect.trace import Trace
from mmattn.memory import Memory
from mmattn.pipelines.build import load_host
from mmattn.pipelines.config import ModelReference
from mmattn.pipelines.generation import stream_generate
from mmattn.pipelines.question_answering import Answer, IndexPipeline, Source
from mmattn.tokenization import call_tokenizer, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmattn.pipelines.base import IndexSource


class TextGenerationPipeline(IndexPipeline):
    """Continuations of texts by a chunked adapter (RETRO, arXiv 2112.04426), with passages from an index."""

    def _set_up(self, index: IndexSource | None) -> None:
        super()._set_up(index)
        # The unadapted language model, without LoRA, reads the passages.
        reference = ModelReference(name=self.config.host.name, revision=self.config.host.revision)
        self._reader = load_host(reference, self.folder, self.device, None)[0]
        self._chunk_size: int = vars(self.model.adapter("default").config)["chunk_size"]

    def __call__(self, text: str, *, index: IndexSource | None = None, **options: object) -> Answer:
        """Return the continuation of a text, and each passage's share of the attention over the whole text.

        Args:
            text: one text.
            index: replaces the index of the pipeline in this call.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: an empty text.
            ConfigError: there is no index.
            AdapterFileError: the entries of the index have no ids of tokens.
        """
        out, begin, passages, recorded = self._generate(text, index, options)
        shares: Counter[str] = Counter()
        weights = recorded.mean()[0].mean(1).tolist()  # (c, m)
        for texts, row in zip(passages, weights, strict=False):
            for passage, weight in zip(texts, row, strict=False):
                shares[passage] += weight / len(weights)
        sources = tuple(Source(None, passage, 0.0, share) for passage, share in shares.most_common())
        return Answer(self.tokenizer.decode(out[0, begin:], skip_special_tokens=True), sources)

    def stream(self, text: str, *, index: IndexSource | None = None, **options: object) -> Iterator[str]:
        """Yield the continuation of a text piece by piece, as for a call; beams raise TextError."""
        memory = self.model.prepare(_Retriever(self, index))
        return stream_generate(self.model, self.tokenizer, {**self._arguments(text, options), "memory": memory})

    def trace(self, text: str, *, index: IndexSource | None = None) -> Trace:
        """Return the passages that each word of the continuation attended to: those retrieved for the chunk before."""
        out, begin, passages, recorded = self._generate(text, index, {})
        ids, size = out[0].tolist(), self._chunk_size
        names = list(dict.fromkeys(name for row in passages[begin // size - 1 :] for name in row))
        (chunks, _, _, slots), *_ = (calls[0].shape for calls in recorded.values())
        belongs = torch.zeros(chunks, slots, len(names))
        for chunk in range(begin // size - 1, chunks):
            for slot, name in enumerate(passages[chunk]):
                belongs[chunk, slot, names.index(name)] = 1
        attended = []
        for calls in recorded.values():
            by_chunk = calls[0] @ belongs[:, None]  # (c, h, s, passages)
            # The token at t was predicted at t - 1, the first position that a whole chunk informs.
            attended.append(torch.stack([by_chunk[t // size - 1, :, t % size] for t in range(begin, len(ids))], 1))
        words = [self.tokenizer.decode([token]) for token in ids[begin:]]
        return Trace(
            words, names, torch.stack(attended), [f"layer {layer}" for _, layer in recorded], " ".join(text.split())
        )

    @torch.no_grad()
    def _generate(
        self, text: str, index: IndexSource | None, options: Mapping[str, object]
    ) -> tuple[Tensor, int, list[list[str]], RecordedWeights]:
        """Return the ids (1, l), where the continuation begins, the passage of each slot by chunk, and the weights."""
        retriever, arguments = _Retriever(self, index), self._arguments(text, options)
        memory = self.model.prepare(retriever)
        out = self.model.generate(**arguments, memory=memory)
        with record(self.model) as recorded:
            self.model(out, memory=memory)
        chunks = out[0].split(self._chunk_size)[: out.shape[1] // self._chunk_size]
        passages = [retriever.passages[tuple(chunk.tolist())] for chunk in chunks]
        return out, arguments["input_ids"].shape[1], passages, recorded

    def _arguments(self, text: str, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the arguments of `generate` for a text."""
        if not isinstance(text, str) or not text.strip():
            raise TextError(f"there is no text to continue: give one; got {text!r:.40}")
        (ids,), _ = tokenize(self.tokenizer, text, add_special_tokens=True)
        # Padded to whole chunks, so that the last one ends with the prompt and is searched at once.
        line = call_tokenizer(self.tokenizer, "\n")["input_ids"][-1:]
        input_ids = torch.tensor([line * (-len(ids) % self._chunk_size) + ids], device=self.device)
        pad = self.tokenizer.pad_token_id
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "do_sample": False,
            "pad_token_id": self.tokenizer.eos_token_id if pad is None else pad,
            **self.config.generation,
            **options,
        }


class _Retriever:
    """Finds the passages for the chunks of a text, and keeps the passage of each slot."""

    def __init__(self, pipe: TextGenerationPipeline, index: IndexSource | None) -> None:
        self.pipe, self.index = pipe, pipe._chosen_index(index)
        self.passages: dict[tuple[int, ...], list[str]] = {}

    def __call__(self, chunks: Tensor) -> Memory:
        """Return slots of the passages nearest to chunks (c, s), each with the text that follows it."""
        config = self.pipe.config.memory
        assert config is not None and config.host_layer is not None
        texts = self.pipe.tokenizer.batch_decode(chunks)
        hits = self.index.search(list(map(searchable, texts)), config.top_k)
        rows = []
        assert hits.texts is not None and hits.metadata is not None
        for chunk, line, metadata in zip(chunks.tolist(), hits.texts, hits.metadata, strict=True):
            entries = [(text, more.get("ids")) for text, more in zip(line, metadata, strict=True) if more is not None]
            if not all(ids for _, ids in entries):
                raise AdapterFileError(
                    "entries of this index have no ids of tokens: use the index that the adapter's own run left"
                )
            states = read_passages(self.pipe._reader, [ids for _, ids in entries], config.host_layer)
            self.passages[tuple(chunk)] = [str(text) for text, ids in entries for _ in ids]
            rows.append(Memory(torch.cat(states)[None]))
        return Memory.stack(rows)


@torch.no_grad()
def read_passages(
    host: PreTrainedModel, texts: Sequence[Sequence[int]], layer: int, batch_size: int = 64
) -> list[Tensor]:
    """Encode each text as slots (r, 2 d): the hidden state before each token, and the token's embedding.

    The state stands for the context, so that it resembles the state of a token in another text after the same words,
    and the embedding for the next token: keys and values of a kNN-LM (arXiv 1911.00172), to be attended to. Both are
    scaled to a mean square of 1.

    Args:
        host: a language model without adapters.
        texts: ids of each passage.
        layer: whose hidden states are used.
        batch_size: passages at once.
    """
    embeddings, decoder = host.get_input_embeddings(), host.get_decoder() or host.base_model
    slots: list[Tensor] = []
    for start in range(0, len(texts), batch_size):
        part = texts[start : start + batch_size]
        longest = max(map(len, part))
        # Any padding will do: attention is causal.
        ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part])
        ids = ids.to(device_of(embeddings))
        states = call_by_name(decoder, input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[layer]
        before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        both = torch.cat([_scaled(before), _scaled(embeddings(ids))], -1)
        slots += [row[: len(text)].clone() for row, text in zip(both, part, strict=True)]
    return slots


def searchable(text: str) -> str:
    """Return the text, or a full stop if a text encoder would read nothing in it: blanks, half a character."""
    return text if any(letter.isprintable() and letter not in " \ufffd" for letter in text) else "."


def _scaled(states: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(states.float(), states.shape[-1:])
