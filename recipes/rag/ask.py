"""Ask a trained adapter: what `mmattn ask` does.

An adapter of the facts answers; a chunked one goes on with the text, and looks for new passages as it writes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError, ConfigError, TextError
from mmattn.recipes import assets_folder, read_settings

from .answering import load_lm, looked_at, looks, trace, write_answers
from .passages import sayable
from .reading import read
from .settings import Config, DocsSettings


@dataclass(frozen=True)
class Source:
    """An entry that was attended to, and how much: its share of the weights."""

    text: str
    weight: float


class Asked:
    """An index, a language model with an adapter, and an encoder, loaded once for many questions.

    Raises:
        ConfigError: the entries of the index have no encoded tokens, and the adapter reads them.
    """

    def __init__(self, index: Path, adapter: Path | None = None, lm: str = "assets/rag", view: int = 100) -> None:
        self.encoder = mmattn.TextEncoder()
        self.index = mmattn.Index.load(index, encoder=self.encoder)
        folder = assets_folder() / "rag" / "adapter" if adapter is None else Path(adapter)
        host, self.tokenizer = load_lm(lm)
        if (folder.parent / "lora").is_dir():
            host = training.load_lora(host, folder.parent / "lora")
        self.model = mmattn.load(host, folder).eval()
        chunked = isinstance(self.model.adapters["default"].config, mmattn.ChunkedAdapter)
        if not chunked and len(self.index) and not self.index.has_tokens:
            raise ConfigError(
                f"the entries of {index} have no encoded tokens, which this adapter reads: ask an index that a run of "
                "this recipe left (RUN/index), or give tokens= when building one, as recipes/rag/entries.py does"
            )
        self.reader = load_lm(lm)[0] if chunked else None
        self.settings = resolved(folder.parent) if chunked else Config()
        self.view = view

    def __call__(self, question: str) -> tuple[str, list[Source]]:
        """An answer or a continuation, and the entries that were attended to, the most first.

        The weights are those of the first word of an answer, where what is left of 1 went to "nothing here", and the
        mean over all words that could look of a continuation.

        Raises:
            TextError: an empty question.
        """
        if not question.strip():
            raise TextError("the question is empty: ask something")
        if self.reader is not None:
            return Continuation(self.index, self.model, self.tokenizer, self.reader, self.settings.docs)(question)
        prompt, memory = self.given(question)
        answer = write_answers(self.model, self.tokenizer, [prompt], memory)[0]
        weights = looks(self.model, self.tokenizer, [prompt], memory)[0]
        named = memory.sources[0] if memory.sources else []
        found = [Source(one["text"], weight) for one, weight in zip(named, weights.tolist(), strict=False) if one]
        return answer, sorted(found, key=lambda source: -source.weight)

    def trace(self, question: str) -> mmattn.inspect.Trace:
        """What is written word by word: which entries each attended to, and what it would be without them."""
        if self.reader is not None:
            return Continuation(self.index, self.model, self.tokenizer, self.reader, self.settings.docs).trace(question)
        prompt, memory = self.given(question)
        answer = write_answers(self.model, self.tokenizer, [prompt], memory)[0]
        return trace(self.model, self.tokenizer, prompt, answer, memory)

    def given(self, question: str) -> tuple[str, mmattn.Memory]:
        """A question as the model reads it, and what the index holds for it."""
        memory = looked_at(self.index.search([question], self.view), self.settings.scores)
        return f"Question: {question.strip()}\nAnswer:", memory


class Continuation:
    """One text with the passages that its chunks found.

    Args:
        reader: the language model as it came, which reads the passages.
    """

    def __init__(self, index: mmattn.Index, model: Any, tokenizer: Any, reader: Any, settings: DocsSettings) -> None:
        self.index, self.model, self.tokenizer, self.reader, self.settings = index, model, tokenizer, reader, settings
        self.size = model.adapters["default"].config.chunk_size
        self.found: dict[tuple[int, ...], list[str]] = {}  # for each chunk the passage of each slot

    @torch.no_grad()
    def __call__(self, text: str, new: int = 48) -> tuple[str, list[Source]]:
        """What the model writes after a text, and the passages it attended to."""
        memory = self.model.prepare(self.retrieve)
        out, begin = self.write(text, memory, new)
        with mmattn.inspect.record(self.model) as weights:
            self.model(out, memory=memory)
        shares: Counter[str] = Counter()
        seen = weights.mean()[0].mean(1)
        for chunk, row in zip(self.chunks(out).tolist(), seen.tolist(), strict=False):
            for passage, weight in zip(self.found[tuple(chunk)], row, strict=False):
                shares[passage] += weight / len(seen)
        written = self.tokenizer.decode(out[0, begin:], skip_special_tokens=True)
        return written, [Source(passage, share) for passage, share in shares.most_common()]

    @torch.no_grad()
    def trace(self, text: str, new: int = 48) -> mmattn.inspect.Trace:
        """The same word by word: the passages that each could look at, those found for the whole chunk before it."""
        out, begin = self.write(text, self.model.prepare(self.retrieve), new)
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
        memory = mmattn.Memory(found.tokens.flatten(0, 1).expand(len(rows), -1, -1), rows, segments)
        with mmattn.inspect.record(self.model) as weights:
            everything = self.chances(out, begin, memory[:1])[0]
        belongs = torch.nn.functional.one_hot(owner + 1, 1 + len(names))[..., 1:].float()
        looks = []
        for calls in weights.values():
            by_chunk = calls[0] @ belongs[:, None]  # (c, h, s, passages)
            # What stands at place t was written from the state before it, the first that a whole chunk informs.
            looks.append(
                torch.stack([by_chunk[t // self.size - 1, :, t % self.size] for t in range(begin, len(ids))], 1)
            )
        return mmattn.inspect.Trace(
            [self.tokenizer.decode([one]) for one in ids[begin:]],
            names,
            torch.stack(looks),
            [f"layer {layer}" for _, layer in weights],
            " ".join(text.split()),
            probability=everything,
            without=self.chances(out, begin, None)[0],
            dropped=self.chances(out, begin, memory[1:]).T if len(names) else None,
        )

    def write(self, text: str, memory: Any, new: int) -> tuple[Tensor, int]:
        """Ids (1, l) of a text and what the model writes after it, and where that begins."""
        asked = self.tokenizer(text)["input_ids"]
        # Whole chunks, so that the last one ends with the question and what it finds is read at once.
        line = self.tokenizer("\n")["input_ids"][-1:]
        ids = torch.tensor([line * (-len(asked) % self.size) + asked])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), memory=memory, max_new_tokens=new, do_sample=False,
            repetition_penalty=1.2, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        return out, ids.shape[1]

    def chunks(self, ids: Tensor) -> Tensor:
        """The whole chunks (c, s) of a text (1, l)."""
        return ids[0, : ids.shape[1] // self.size * self.size].view(-1, self.size)

    def chances(self, ids: Tensor, begin: int, memory: mmattn.Memory | None) -> Tensor:
        """The probability (b, t) of each token of a text (1, l) from `begin` on, for each row of a memory."""
        given = {} if memory is None else {"memory": memory}
        rows = ids if memory is None else ids.expand(memory.batch, -1)
        logs = self.model(rows, **given).logits[:, begin - 1 : -1].log_softmax(-1)
        return logs.gather(2, rows[:, begin:, None])[..., 0].exp()

    def retrieve(self, chunks: Tensor) -> mmattn.Memory:
        """The passages nearest to chunks (c, s), each with what follows it, as the language model reads them.

        Raises:
            AdapterFileError: the index is not one of such a run.
        """
        texts = self.tokenizer.batch_decode(chunks)
        hits = self.index.search(list(map(sayable, texts)), self.settings.neighbours)
        rows = []
        for chunk, line, about in zip(chunks.tolist(), hits.texts, hits.metadata, strict=True):
            found = [(text, more.get("ids")) for text, more in zip(line, about, strict=True) if more is not None]
            if not all(ids for _, ids in found):
                raise AdapterFileError(
                    "entries of this index have no ids of tokens: ask the index that the adapter's own run left"
                )
            states = read(self.reader, [ids for _, ids in found], self.settings.layer)
            self.found[tuple(chunk)] = [text for (text, ids) in found for _ in ids]
            rows.append(mmattn.Memory(torch.cat(states)[None]))
        return mmattn.Memory.stack(rows)


def resolved(run: Path) -> Config:
    """The settings of a run.

    Raises:
        AdapterFileError: they are not there.
    """
    file = run / "config.resolved.yaml"
    if not file.is_file():
        raise AdapterFileError(
            f"{file} is missing: it says how a chunked adapter reads passages; keep it in the folder of its run"
        )
    given = read_settings(file)
    # What it was trained with is another matter: older runs have other names for it.
    for name in ("recipe", "optim"):
        given.pop(name, None)
    for name in ("steps", "batch", "max_steps", "batch_size"):
        given.get("docs", {}).pop(name, None)
    return Config.model_validate(given)
