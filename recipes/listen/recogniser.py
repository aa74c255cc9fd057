"""The speech recogniser: convolutions that hear, a language model that attends to what they heard; and its errors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import mmattn

from .learning import make_adapter
from .settings import RecogniserSettings
from .speech import END, START, VOCABULARY


class Ear(nn.Module):
    """Convolutions over log-mel energies, two frames to a state, with a learned vector for each place.

    Args:
        settings: of the recogniser.
        frames: of a clip.
    """

    def __init__(self, settings: RecogniserSettings, frames: int) -> None:
        super().__init__()
        width, layers = settings.width, []
        for place in range(settings.convolutions):
            given, stride = width if place else settings.bands, 2 if place == 1 else 1
            layers += [nn.Conv1d(given, width, 5, stride, padding=2), nn.BatchNorm1d(width), nn.ReLU()]
        self.layers, self.dropout = nn.Sequential(*layers), nn.Dropout(settings.dropout)
        self.places = nn.Parameter(torch.randn((frames + 1) // 2, width) / 2)
        self.words = nn.Linear(width, VOCABULARY)

    def forward(self, energies: Tensor) -> tuple[mmattn.Memory, Tensor]:
        """A memory (b, frames / 2, width), and the logits (b, frames / 2, v) of the word that is spoken at each place.

        Args:
            energies: (b, bands, frames).
        """
        heard = self.dropout(self.layers(energies).transpose(1, 2))
        return mmattn.Memory(heard + self.places, check_finite=False), self.words(heard)


class Recogniser(nn.Module):
    """A small Llama that writes down what an adapter "audio" attends to, all of random weights.

    Args:
        settings: of the recogniser.
        frames: of a clip.
    """

    def __init__(self, settings: RecogniserSettings, frames: int) -> None:
        super().__init__()
        width = settings.width
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads, num_key_value_heads=settings.heads, max_position_embeddings=64,
            tie_word_embeddings=True, bos_token_id=START, eos_token_id=END, pad_token_id=END, initializer_range=0.05,
        )  # fmt: skip
        self.ear, self.weight = Ear(settings, frames), settings.places
        lm = LlamaForCausalLM(config)
        self.model = mmattn.attach(lm, make_adapter(settings.adapter, width), "audio")
        # This time the language model has yet to learn, too.
        lm.requires_grad_(True)

    def forward(self, energies: Tensor, spoken: Tensor, read: Tensor, said: Tensor) -> Tensor:
        """The sum of the losses of all words, and of the ear's own, which learns sooner and so teaches where to attend.

        Args:
            energies: (b, bands, frames).
            spoken: (b, frames / 2) the word at each place.
            read: (b, l) ids.
            said: (b, l) ids that follow, -100 after the end.
        """
        heard, words = self.ear(energies)
        places = F.cross_entropy(words.flatten(0, 1), spoken.flatten()) * (said >= 0).sum()
        return text_loss(self.model(input_ids=read, memory={"audio": heard}).logits, said) + self.weight * places

    @torch.no_grad()
    def hear(self, energies: Tensor, words: Tensor | None = None) -> dict[str, mmattn.Memory]:
        """The memories of utterances, by adapter: "audio", and where there are lists of words "list".

        A word of a list is the vector that the frozen language model has of it, and how sure the ear is, where it is
        surest, to hear it anywhere in the utterance: so a list can be told from one that belongs to something else.

        Args:
            energies: (b, bands, frames).
            words: (b, n) of a list for each; None for none.
        """
        heard, logits = self.ear(energies)
        memories = {"audio": heard}
        if words is not None:
            sure = logits.softmax(-1).amax(1).gather(1, words)
            vectors = self.model.host.get_input_embeddings()(words)
            memories["list"] = mmattn.Memory(torch.cat([vectors, sure[..., None]], -1), check_finite=False)
        return memories

    @torch.no_grad()
    def transcribe(self, energies: Tensor, longest: int, words: Tensor | None = None) -> list[list[int]]:
        """The words of each row, greedily.

        Args:
            energies: (b, bands, frames).
            longest: words at most.
            words: (b, n) of a list for each; None for none.
        """
        ids = torch.full((len(energies), 1), START, device=energies.device)
        made = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            memory=self.hear(energies, words),
            max_new_tokens=longest,
            do_sample=False,
        )
        return [[*row, END][: [*row, END].index(END)] for row in made[:, 1:].tolist()]

    def save(self, folder: Path) -> None:
        """Write the language model, its adapter and the ear into a folder."""
        self.model.host.save_pretrained(str(folder))
        self.model.save_adapter(folder / "audio", "audio")
        save_file(self.ear.state_dict(), folder / "ear.safetensors")


def text_loss(logits: Tensor, said: Tensor) -> Tensor:
    """The sum of the cross-entropies of what is said (b, l), -100 aside."""
    return F.cross_entropy(logits.flatten(0, 1), said.flatten(), ignore_index=-100, reduction="sum")


def word_errors(said: Sequence[int], right: Sequence[int]) -> int:
    """Substitutions, insertions and deletions: the Levenshtein distance of two texts.

    >>> word_errors([1, 2, 3, 4], [1, 3, 5])
    2
    """
    costs = [*range(len(right) + 1)]
    for row, word in enumerate(said, start=1):
        before, costs[0] = costs[0], row
        for column, other in enumerate(right, start=1):
            best = min(before + (word != other), costs[column] + 1, costs[column - 1] + 1)
            before, costs[column] = costs[column], best
    return costs[-1]
