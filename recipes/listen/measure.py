"""Word error rates of held-out utterances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor

import mmattn
from mmattn.errors import import_extra

from .data import Clips, Speech
from .recogniser import Recogniser, SensorEncoder, most_likely_words, sensor_logits
from .settings import Config

CLEAN = 30.0  # dB of a clean voice


class Measure:
    """The held-out utterances, each in the same noise for every row."""

    def __init__(self, speech: Speech, config: Config) -> None:
        self.speech, self.seed = speech, config.seed
        self.longest = config.voices.most + 2  # two more than in any utterance, so that surplus words are counted
        random, speakers = Random(f"{config.seed} held out"), len(speech.spoken.speakers)
        self.utterances = [speech.draw(random, row % speakers) for row in range(config.sensor.held_out)]
        self.batches = [slice(start, start + 100) for start in range(0, len(self.utterances), 100)]
        self.encoded: dict[float, Clips] = {}

    def transcribe(
        self,
        recogniser: Recogniser,
        snr: float,
        sense: Callable[[Tensor, Tensor], mmattn.Memory] | None,
        shift: int,
    ) -> list[list[int]]:
        """Return the words for each utterance, with the sensor of the utterance `shift` further on."""
        clips, out = self.clips(snr), list[list[int]]()
        sensed = clips.sensed.roll(-shift, 0)
        for rows in self.batches:
            sensor = None if sense is None else sense(sensed[rows], clips.energies[rows])
            out += recogniser.transcribe(clips.energies[rows], self.longest, sensor)
        return out

    def transcribe_sensor(self, encoder: SensorEncoder) -> list[list[int]]:
        """Return the most likely words of the sensor encoder alone."""
        return most_likely_words(sensor_logits(encoder, self.clips(CLEAN).sensed))

    def clips(self, snr: float) -> Clips:
        """Return all utterances in their noise."""
        if snr not in self.encoded:
            seeds = [Random(f"{self.seed}/noise/{row}").getrandbits(63) for row in range(len(self.utterances))]
            parts = [(self.utterances[rows], seeds[rows]) for rows in self.batches]
            self.encoded[snr] = join([self.speech.batch(said, [snr] * len(said), seed) for said, seed in parts])
        return self.encoded[snr]

    def rate(self, transcripts: Sequence[Sequence[int]]) -> float:
        """Return the word error rate."""
        words = [" ".join(map(str, words)) for words in transcripts]
        references = [" ".join(map(str, one.words)) for one in self.utterances]
        return float(import_extra("torchmetrics.functional.text", "metrics").word_error_rate(words, references))


def join(clips: Sequence[Clips]) -> Clips:
    """Concatenate clips."""
    energies, spoken, sensed = zip(*((one.energies, one.spoken, one.sensed) for one in clips), strict=True)
    return Clips(torch.cat(energies), torch.cat(spoken), torch.cat(sensed))
