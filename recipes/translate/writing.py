"""A trained model with its tokenizer: translations, and where each word of them looked.

python -m recipes.translate.writing "I am a guy" --run runs/translate-pairs --picture guy.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mmattn
from mmattn.errors import ConfigError

from .alignment import Alignment, aligned, draw, words
from .sentences import padded, read_sources
from .settings import AlignmentSettings, WritingSettings


@dataclass(frozen=True)
class Translator:
    """What turns sentences into sentences; a source has at most `max_tokens` tokens, begin and end included."""

    model: mmattn.seq2seq.EncoderDecoder
    tokenizer: Any
    settings: WritingSettings
    max_tokens: int

    def __post_init__(self) -> None:
        known, made = self.model.settings["vocab_size"], len(self.tokenizer)
        if known != made:
            raise ConfigError(
                f"the model was trained with {known} tokens and this tokenizer has {made}: take that of its run"
            )

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return next(self.model.parameters()).device

    @classmethod
    def load(cls, run: Path, settings: WritingSettings | None = None) -> Translator:
        """What a run left in its folder.

        Raises:
            ConfigError: the folder holds no trained model.
        """
        from transformers import PreTrainedTokenizerFast

        if not (run / "model.safetensors").is_file() or not (run / "tokenizer").is_dir():
            raise ConfigError(f"{run} is not the folder of a finished run: it needs model.safetensors and tokenizer/")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(run / "tokenizer")
        model = mmattn.seq2seq.EncoderDecoder.load(run / "model.safetensors").eval()
        return cls(model, tokenizer, settings or WritingSettings(), model.max_length)

    def __call__(self, texts: Sequence[str]) -> list[str]:
        """The translations of some sentences, in their order.

        Raises:
            TextError: a sentence is empty, no string, or too long.
        """
        sources = read_sources(self.tokenizer, texts, self.max_tokens)
        written: list[list[int]] = [[] for _ in sources]
        for rows in self.parts(sources):
            for row, ids in zip(rows, self.write([sources[row] for row in rows]), strict=True):
                written[row] = ids
        return [self.tokenizer.decode(ids).strip() for ids in written]

    def parts(self, sources: Sequence[Sequence[int]]) -> list[list[int]]:
        """Which sources are translated together: those of like length."""
        order = sorted(range(len(sources)), key=lambda row: len(sources[row]))
        return [order[begin : begin + self.settings.batch] for begin in range(0, len(order), self.settings.batch)]

    def write(self, sources: Sequence[Sequence[int]], **given: Any) -> list[list[int]]:
        """Ids of the translations of some sources; `given` goes to `generate` before the settings."""
        ids, mask = padded(sources, self.tokenizer.pad_token_id, self.device)
        asked = {
            "beams": self.settings.beams,
            "length_penalty": self.settings.length_penalty,
            "max_length": self.max_tokens,
            "start": self.tokenizer.bos_token_id,
            "end": self.tokenizer.eos_token_id,
        }
        return self.model.generate(ids, mask=mask, **{**asked, **given})

    def look(self, source: str, settings: AlignmentSettings) -> Alignment:
        """A translation, and where each word of it looked in the source.

        Raises:
            ConfigError: the model has no such layer, or was trained without a source.
        """
        places = len(self.model.attentions())
        if not places or (settings.layer is not None and settings.layer >= places):
            raise ConfigError(
                f"alignment.layer={settings.layer}: the decoder looks at the source in {places} layers, from 0"
            )
        ids, written = self._written(source)
        weights = self._weights(ids, written).mean(1)
        sources, targets = words(self.tokenizer, ids), words(self.tokenizer, written)
        chosen = weights.mean(0) if settings.layer is None else weights[settings.layer]
        shares = aligned(sources, targets, chosen, settings.read)
        return Alignment([word for word, _ in sources], [word for word, _ in targets], shares)

    @torch.no_grad()
    def trace(self, source: str) -> mmattn.inspect.Trace:
        """By layer and head what each word attended to when it was written, and its probability without that.

        Raises:
            ConfigError: the model was trained without a source.
        """
        if not self.model.attentions():
            raise ConfigError("this model was trained without cross-attention: there is no look to be shown")
        ids, written = self._written(source)
        sources, targets = words(self.tokenizer, ids), words(self.tokenizer, written)
        # A row that sees all, one that sees nothing, and one for each word that is hidden.
        seen = torch.ones(2 + len(sources), len(ids), dtype=torch.bool)
        seen[1] = False
        for row, (_, tokens) in enumerate(sources, start=2):
            seen[row, tokens] = False
        encoded = self.model.encode(torch.tensor([ids], device=self.device)).tokens
        memory = mmattn.Memory(encoded.expand(len(seen), -1, -1), seen.to(self.device))
        target = torch.tensor([[self.tokenizer.bos_token_id, *written]], device=self.device).expand(len(seen), -1)
        logs = self.model.decode(target[:, :-1], memory).log_softmax(-1).gather(2, target[:, 1:, None])[..., 0]
        chances = torch.stack([logs[:, tokens].sum(1) for _, tokens in targets], 1).exp().cpu()
        return mmattn.inspect.Trace(
            [word for word, _ in targets],
            [word for word, _ in sources],
            aligned(sources, targets, self._weights(ids, written), read=False),
            [f"layer {layer} of the decoder" for _, layer in self.model.attentions()],
            f"{source} → {self.tokenizer.decode(written).strip()}",
            probability=chances[0],
            without=chances[1],
            dropped=chances[2:].T,
        )

    def _written(self, source: str) -> tuple[list[int], list[int]]:
        """Ids of a source and of its translation."""
        (ids,) = read_sources(self.tokenizer, [source], self.max_tokens)
        return ids, self.write([ids])[0]

    @torch.no_grad()
    def _weights(self, source: list[int], target: list[int]) -> Tensor:
        """Weights (layers, h, 1 + l, m) of the start and each token of a target."""
        with mmattn.inspect.record(self.model) as weights:
            written = torch.tensor([[self.tokenizer.bos_token_id, *target]], device=self.device)
            self.model(torch.tensor([source], device=self.device), written)
        return torch.cat([calls[0] for calls in weights.values()]).cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentences", nargs="+")
    parser.add_argument("--run", type=Path, required=True, help="the folder of a run")
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--picture", type=Path, help="where to draw what each word attended to")
    parser.add_argument("--layer", type=int, help="of the decoder; the mean of all by default")
    parser.add_argument("--read", action="store_true", help="where a word looks when it is read, not written")
    given = parser.parse_args(arguments)
    translator = Translator.load(given.run, WritingSettings(beams=given.beams))
    for text in translator(given.sentences):
        print(text)
    if given.picture is not None:
        settings = AlignmentSettings(layer=given.layer, read=given.read)
        draw([translator.look(text, settings) for text in given.sentences], given.picture)


if __name__ == "__main__":
    main()
