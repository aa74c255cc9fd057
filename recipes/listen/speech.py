"""Spoken numbers in noise: clips mixed with white noise and other voices, their features, and lists of expected words."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import mmattn

from .settings import NoiseSettings
from .voices import WORDS, Spoken

END, START = len(WORDS), len(WORDS) + 1
VOCABULARY = len(WORDS) + 2


class Speech:
    """Utterances of one part in noise.

    Args:
        spoken: the utterances.
        chatter: what is said behind them.
        settings: of the noise.
        ear: from sounds to log-mel energies, one token for each frame.
        device: of batches.
    """

    def __init__(
        self, spoken: Spoken, chatter: Spoken, settings: NoiseSettings, ear: mmattn.LogMelEncoder, device: torch.device
    ) -> None:
        self.spoken, self.chatter, self.settings, self.ear, self.device = spoken, chatter, settings, ear, device
        self.samples = round(settings.seconds * ear.sampling_rate)

    def __len__(self) -> int:
        return len(self.spoken)

    def mixed(self, row: int, snr: float | None, random: np.random.Generator) -> NDArray[np.float32]:
        """A clip at a random place in `seconds` of noise; without noise for None.

        Args:
            row: of the utterances.
            snr: power of the voice over that of all noise, in dB.
            random: draws the place and the noise.
        """
        clip = self.spoken.clips[row][: self.samples]
        out = np.zeros(self.samples, np.float32)
        start = random.integers(self.samples - len(clip) + 1)
        out[start : start + len(clip)] = clip
        if snr is not None:
            noise = _unit(random.standard_normal(self.samples, np.float32)) + _unit(self.babble(random))
            out += _unit(noise) * np.sqrt(np.mean(clip**2)) * np.float32(10 ** (-snr / 20))
        return out / (2 * np.abs(out).max())

    def babble(self, random: np.random.Generator) -> NDArray[np.float32]:
        """Several voices at once, none of which says a number."""
        out = np.zeros(self.samples, np.float32)
        for row in random.integers(len(self.chatter), size=self.settings.talkers):
            voice = np.resize(self.chatter.clips[row], self.samples)
            out += _unit(np.roll(voice, random.integers(self.samples)))
        return out

    def features(self, rows: Sequence[int], snr: Sequence[float | None], seeds: Sequence[int]) -> Tensor:
        """Log-mel energies (b, bands, frames) of utterances, each in its own noise."""
        sounds = [
            torch.from_numpy(self.mixed(row, one, np.random.default_rng(seed)))
            for row, one, seed in zip(rows, snr, seeds, strict=True)
        ]
        return self.ear(sounds).tokens.transpose(1, 2).to(self.device)

    def texts(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the decoder reads (b, l), and what it should say (b, l), -100 after its end."""
        words = [self.spoken.words(row) for row in rows]
        longest = 1 + max(map(len, words))
        read = torch.full((len(rows), longest), END)
        said = torch.full((len(rows), longest), -100)
        for place, ids in enumerate(words):
            read[place, : 1 + len(ids)] = torch.tensor([START, *ids])
            said[place, : 1 + len(ids)] = torch.tensor([*ids, END])
        return read.to(self.device), said.to(self.device)

    def expected(self, rows: Sequence[int], size: int, seeds: Sequence[int]) -> Tensor:
        """Lists (b, size) of words that each speaker is expected to say: those that are said, among others."""
        lists = []
        for row, seed in zip(rows, seeds, strict=True):
            random, spoken = Random(seed), set(self.spoken.words(row))
            others = random.sample(sorted(set(range(len(WORDS))) - spoken), size - len(spoken))
            lists.append(random.sample([*spoken, *others], size))
        return torch.tensor(lists, device=self.device)


def _unit(sound: NDArray[np.float32]) -> NDArray[np.float32]:
    """With a mean square of 1."""
    return sound / np.sqrt(np.mean(sound**2) + 1e-12)
