"""Continuations of texts by a chunked adapter (RETRO), with passages from an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmattn.adapters.language_models import call_by_name, device_of
from mmattn.errors import AdapterFileError, TextError
from mmattn.inspect.record_attention import record
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

    def __call__(self, text: str, *, index: IndexSource | None = None, **options: object) -> Answer:
        """Return the continuation of a text, and the passages it attended to.

        Args:
            text: one text.
            index: replaces the index of the pipeline in this call.
            **options: of `generate`; they override those of the adapter's folder.

        Raises:
            TextError: an empty text.
            ConfigError: there is no index.
            AdapterFileError: the entries of the index have no ids of tokens.
        """
        return _Continuation(self, text, index, options).answer()

    def stream(self, text: str, *, index: IndexSource | None = None, **options: object) -> Iterator[str]:
        """Yield the continuation of a text piece by piece, as for a call; beams raise TextError."""
        return _Continuation(self, text, index, options).stream()

    def trace(self, text: str, *, index: IndexSource | None = None) -> Trace:
        """Return the passages that each word of the continuation attended to, of those for the chunk before."""
        return _Continuation(self, text, index, {}).trace()


class _Continuation:
    """One text with the passages found for its chunks."""

    def __init__(
        self, pipe: TextGenerationPipeline, text: str, index: IndexSource | None, options: Mapping[str, object]
    ) -> None:
        if not isinstance(text, str) or not text.strip():
            raise TextError(f"there is no text to go on with: give one; got {text!r:.40}")
        self.pipe, self.model, self.tokenizer, self.text = pipe, pipe.model, pipe.tokenizer, text
        self.index = pipe._chosen_index(index)
        self.size: int = vars(pipe.model.adapter("default").config)["chunk_size"]
        #: For each chunk the passage of each slot.
        self.passages: dict[tuple[int, ...], list[str]] = {}
        (ids,), _ = tokenize(self.tokenizer, text, add_special_tokens=True)
        # Padded to whole chunks, so that the last one ends with the prompt and is searched at once.
        line = call_tokenizer(self.tokenizer, "\n")["input_ids"][-1:]
        input_ids = torch.tensor([line * (-len(ids) % self.size) + ids], device=pipe.device)
        pad = self.tokenizer.pad_token_id
        self.arguments = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "do_sample": False,
            "pad_token_id": self.tokenizer.eos_token_id if pad is None else pad,
            **pipe.config.generation,
            **options,
        }
        self.begin = input_ids.shape[1]

    @torch.no_grad()
    def answer(self) -> Answer:
        """Return the continuation, and each passage's share of the attention over the whole text."""
        memory = self.model.prepare(self.retrieve)
        out = self.model.generate(**self.arguments, memory=memory)
        with record(self.model) as recorded:
            self.model(out, memory=memory)
        shares: Counter[str] = Counter()
        weights = recorded.mean()[0].mean(1)
        for chunk, row in zip(self.chunks(out).tolist(), weights.tolist(), strict=False):
            for passage, weight in zip(self.passages[tuple(chunk)], row, strict=False):
                shares[passage] += weight / len(weights)
        text = self.tokenizer.decode(out[0, self.begin :], skip_special_tokens=True)
        return Answer(text, tuple(Source(None, passage, 0.0, share) for passage, share in shares.most_common()))

    def stream(self) -> Iterator[str]:
        """Yield the continuation piece by piece."""
        memory = self.model.prepare(self.retrieve)
        return stream_generate(self.model, self.tokenizer, {**self.arguments, "memory": memory})

    @torch.no_grad()
    def trace(self) -> Trace:
        """Return the passages that each word attended to, and its probability without them."""
        out = self.model.generate(**self.arguments, memory=self.model.prepare(self.retrieve))
        ids, first = out[0].tolist(), self.begin // self.size - 1
        retrieved = self.retrieve(self.chunks(out))
        chunks, m, _ = retrieved.tokens.shape
        slots = [self.passages[tuple(chunk)] for chunk in self.chunks(out).tolist()]
        names = list(dict.fromkeys(name for row in slots[first:] for name in row))
        owner = torch.full((chunks, m), -1)
        for chunk in range(first, chunks):
            owner[chunk, : len(slots[chunk])] = torch.tensor([names.index(name) for name in slots[chunk]])
        visible = torch.ones(chunks, m, dtype=torch.bool) if retrieved.mask is None else retrieved.mask
        # One row with all passages, and for each passage one row without it.
        rows = torch.stack([visible, *(visible & (owner != number) for number in range(len(names)))]).flatten(1)
        segments = torch.arange(chunks).repeat_interleave(m).expand(len(rows), -1)
        memory = Memory(retrieved.tokens.flatten(0, 1).expand(len(rows), -1, -1), rows, segments)
        with record(self.model) as recorded:
            probability = self.probabilities(out, memory[:1])[0]
        belongs = torch.nn.functional.one_hot(owner + 1, 1 + len(names))[..., 1:].float()
        attended = []
        for calls in recorded.values():
            by_chunk = calls[0] @ belongs[:, None]  # (c, h, s, passages)
            # The token at t was predicted at t - 1, the first position that a whole chunk informs.
            attended.append(
                torch.stack([by_chunk[t // self.size - 1, :, t % self.size] for t in range(self.begin, len(ids))], 1)
            )
        return Trace(
            [self.tokenizer.decode([token]) for token in ids[self.begin :]],
            names,
            torch.stack(attended),
            [f"layer {layer}" for _, layer in recorded],
            " ".join(self.text.split()),
            probability=probability,
            without=self.probabilities(out, None)[0],
            dropped=self.probabilities(out, memory[1:]).T if names else None,
        )

    def chunks(self, ids: Tensor) -> Tensor:
        """Return the whole chunks (c, s) of a text (1, l)."""
        return ids[0, : ids.shape[1] // self.size * self.size].view(-1, self.size)

    def probabilities(self, ids: Tensor, memory: Memory | None) -> Tensor:
        """Return the probability (b, t) of each generated token of a text (1, l), for each row of a memory."""
        options = {} if memory is None else {"memory": memory}
        rows = ids if memory is None else ids.expand(memory.batch, -1)
        logs = call_by_name(self.model, input_ids=rows, **options).logits[:, self.begin - 1 : -1].log_softmax(-1)
        return logs.gather(2, rows[:, self.begin :, None])[..., 0].exp()

    def retrieve(self, chunks: Tensor) -> Memory:
        """Return slots of the passages nearest to chunks (c, s), each with the text that follows it."""
        config = self.pipe.config.memory
        assert config is not None and config.host_layer is not None
        texts = self.tokenizer.batch_decode(chunks)
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
