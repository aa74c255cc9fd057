"""Spoken numbers in noise: utterances of words, white noise and other voices, features, and a sensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from mmattn.encoders import LogMelEncoder

from .settings import NoiseSettings, VoiceSettings
from .voices import WORDS, Sound, Spoken

END, START = len(WORDS), len(WORDS) + 1
VOCABULARY = len(WORDS) + 2


@dataclass(frozen=True)
class Utterance:
    """A speaker and words, as places in `Spoken.speakers` and in `WORDS`."""

    speaker: int
    words: tuple[int, ...]


@dataclass(frozen=True)
class Clips:
    """Log-mel energies (b, bands, frames) in noise, or states of Whisper; the word (b, t) at each time; the sensor."""

    energies: Tensor
    spoken: Tensor
    sensed: Tensor


class Speech:
    """Speakers and the noise around them, with encoders from sounds to features and to the sensor stream."""

    def __init__(
        self,
        spoken: Spoken,
        chatter: Spoken,
        voices: VoiceSettings,
        noise: NoiseSettings,
        ear: Callable[[list[Tensor]], Tensor],
        sensor: LogMelEncoder,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spoken, self.voices, self.noise, self.device = spoken, voices, noise, device
        self.ear, self.sensor = ear, sensor
        self.sentences = [clip for clips in chatter.clips for clip in clips]
        self.samples = round(noise.seconds * sensor.sampling_rate)

    def draw(self, random: Random, speaker: int | None = None) -> Utterance:
        """Draw a few words of a speaker, or of any."""
        speaker = random.randrange(len(self.spoken.speakers)) if speaker is None else speaker
        count = random.randint(self.voices.least, self.voices.most)
        return Utterance(speaker, tuple(random.choices(range(len(WORDS)), k=count)))

    def say(self, utterance: Utterance, random: np.random.Generator) -> tuple[Sound, list[tuple[int, int]]]:
        """Return the words with short pauses at a random place of a clip, and the span of each word."""
        clips = [self.spoken.clips[utterance.speaker][word] for word in utterance.words]
        pauses = random.uniform(*self.noise.pause, len(clips)) * self.sensor.sampling_rate
        pauses[0] = random.uniform(0, max(0.0, self.samples - sum(map(len, clips)) - pauses[1:].sum()))
        out, places, stop = np.zeros(self.samples, np.float32), [], 0
        for clip, pause in zip(clips, pauses.astype(int).tolist(), strict=True):
            # An utterance longer than the clip loses its pauses, and then its end.
            start = min(stop + pause, max(stop, self.samples - len(clip)))
            stop = min(start + len(clip), self.samples)
            out[start:stop] = clip[: stop - start]
            places.append((start, stop))
        return out, places

    def mix(
        self, utterance: Utterance, snr: float, random: np.random.Generator
    ) -> tuple[Sound, Sound, list[tuple[int, int]]]:
        """Return an utterance in noise, half white and half other voices; the utterance alone; and its spans."""
        alone, places = self.say(utterance, random)
        spoken = np.concatenate([alone[start:stop] for start, stop in places])
        noise = _unit(random.standard_normal(self.samples, np.float32)) + _unit(self.babble(random))
        mixed = alone + _unit(noise) * np.sqrt(np.mean(spoken**2)) * np.float32(10 ** (-snr / 20))
        return mixed / (2 * np.abs(mixed).max()), alone, places

    def babble(self, random: np.random.Generator) -> Sound:
        """Return several voices at once."""
        out = np.zeros(self.samples, np.float32)
        for row in random.integers(len(self.sentences), size=self.noise.talkers):
            voice = np.resize(self.sentences[row], self.samples)
            out += _unit(np.roll(voice, random.integers(self.samples)))
        return out

    def batch(self, utterances: Sequence[Utterance], snr: Sequence[float], seeds: Sequence[int]) -> Clips:
        """Return utterances in separate noise, each with its signal-to-noise ratio in dB and a seed."""
        clips = [
            self.mix(one, level, np.random.default_rng(seed))
            for one, level, seed in zip(utterances, snr, seeds, strict=True)
        ]
        energies = self.ear([torch.from_numpy(mixed) for mixed, _, _ in clips])
        sensed, spoken = self.sense(utterances, [(alone, places) for _, alone, places in clips])
        return Clips(energies.to(self.device), spoken, sensed)

    def sense(
        self, utterances: Sequence[Utterance], sounds: Sequence[tuple[Sound, list[tuple[int, int]]]]
    ) -> tuple[Tensor, Tensor]:
        """Return the sensor stream (b, frames / 2, c) of clean sounds, and the word (b, frames / 2) at each place."""
        # The loudest sample has half of full scale; below 0 no sensor would measure anything.
        sensed = self.sensor([torch.from_numpy(alone / 2) for alone, _ in sounds]).tokens.clamp_min(0)
        size = self.samples / sensed.shape[1]
        spoken = torch.full(sensed.shape[:2], START)
        for row, (one, (_, places)) in enumerate(zip(utterances, sounds, strict=True)):
            for word, (start, stop) in zip(one.words, places, strict=True):
                spoken[row, round(start / size) : round(stop / size)] = word
        return sensed.to(self.device), spoken.to(self.device)

    def texts(self, utterances: Sequence[Utterance]) -> tuple[Tensor, Tensor]:
        """Return ids (b, l) and their labels (b, l), -100 after the end."""
        longest = 1 + max(len(one.words) for one in utterances)
        ids = torch.full((len(utterances), longest), END)
        labels = torch.full((len(utterances), longest), -100)
        for row, one in enumerate(utterances):
            ids[row, : 1 + len(one.words)] = torch.tensor([START, *one.words])
            labels[row, : 1 + len(one.words)] = torch.tensor([*one.words, END])
        return ids.to(self.device), labels.to(self.device)


def log_energies(encoder: LogMelEncoder, sounds: list[Tensor]) -> Tensor:
    """Return the log-mel energies (b, bands, frames) of sounds, each band with a mean of 0 and a deviation of 1."""
    energies = encoder(sounds).tokens.transpose(1, 2)
    deviation, mean = torch.std_mean(energies, 2, correction=0, keepdim=True)
    return (energies - mean) / (deviation + 1e-5)


def _unit(sound: Sound) -> Sound:
    """Scale to a mean square of 1."""
    return sound / np.sqrt(np.mean(sound**2) + np.float32(1e-12))
