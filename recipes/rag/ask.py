"""Ask a trained adapter: what `mmattn ask` does.

An adapter of the facts answers; a chunked one goes on with the text, and looks for new passages as it writes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from answering import load_lm, looked_at, looks, trace, write_answers
from passages import sayable
from reading import read
from settings import Config, DocsSettings
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.errors import AdapterFileError, TextError
from mmattn.recipes import assets_folder, read_settings


@dataclass(frozen=True)
class Source:
    """An entry that was looked at, and how much: its share of the weights."""

    text: str
    weight: float


class Asked:
    """An index, a language model with an adapter, and an encoder, loaded once for many questions."""

    def __init__(self, index: Path, adapter: Path | None = None, lm: str = "assets/rag", view: int = 100) -> None:
        self.encoder = mmattn.TextEncoder()
        self.index = mmattn.Index.load(index, encoder=self.encoder)
        folder = assets_folder() / "rag" / "adapter" if adapter is None else Path(adapter)
        host, self.tokenizer = load_lm(lm)
        if (folder.parent / "lora").is_dir():
            host = training.load_lora(host, folder.parent / "lora")
        self.model = mmattn.load(host, folder).eval()
        chunked = isinstance(self.model.adapters["default"].config, mmattn.ChunkedAdapter)
        self.reader = load_lm(lm)[0] if chunked else None
        self.settings = resolved(folder.parent) if chunked else Config()
        self.view = view

    def __call__(self, question: str) -> tuple[str, list[Source]]:
        """An answer or a continuation, and the entries that were looked at, the most first.

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

    def trace(self, question: str) -> mmattn.Trace:
        """The answer word by word: which entries each looked at, and what it would be without them."""
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
        """What the model writes behind a text, and the passages it looked at."""
        asked = self.tokenizer(text)["input_ids"]
        # Whole chunks, so that the last one ends with the question and what it finds is read at once.
        line = self.tokenizer("\n")["input_ids"][-1:]
        ids = torch.tensor([line * (-len(asked) % self.size) + asked])
        memory = self.model.prepare(self.retrieve)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), memory=memory, max_new_tokens=new, do_sample=False,
            repetition_penalty=1.2, pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        with mmattn.record(self.model) as weights:
            self.model(out, memory=memory)
        shares: Counter[str] = Counter()
        seen = weights.mean()[0].mean(1)
        chunks = out[0][: len(out[0]) // self.size * self.size].view(-1, self.size).tolist()
        for chunk, row in zip(chunks, seen.tolist(), strict=False):
            for passage, weight in zip(self.found[tuple(chunk)], row, strict=False):
                shares[passage] += weight / len(seen)
        written = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return written, [Source(passage, share) for passage, share in shares.most_common()]

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
    given.pop("recipe", None)
    return Config.model_validate(given)
