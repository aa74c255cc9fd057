"""Word error rates of a recogniser on the voices held out, with a sensor and without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from mmattn import training
from mmattn.errors import import_extra
from mmattn.evaluation import text_scores

from .recogniser import Recogniser, feel, read_off
from .settings import Config
from .speech import Heard, Speech

# Missed here, before anything is trained.
import_extra("torchmetrics", "metrics")
#: dB at which a voice counts as clean: as much noise as hardly anybody hears.
CLEAN = 30.0


class Measure:
    """The utterances held out, each in the same noise whoever is measured."""

    def __init__(self, speech: Speech, config: Config) -> None:
        self.speech, self.seed = speech, config.seed
        random, speakers = Random(f"{config.seed} held out"), len(speech.spoken.speakers)
        self.asked = [speech.draw(random, row % speakers) for row in range(config.sensor.held_out)]

    def written(
        self, recogniser: Recogniser, snr: float, longest: int, sensor: Any = None, shift: int = 0, least: float = -1.0
    ) -> list[list[int]]:
        """What is written of each utterance."""
        out: list[list[int]] = []
        for start in range(0, len(self.asked), 100):
            rows = range(start, min(start + 100, len(self.asked)))
            heard = self.heard(rows, snr)
            memory = {"audio": recogniser.hear(heard.energies)}
            if sensor is not None:
                sensed = heard.sensed if not shift else self.heard(rows, snr, shift).sensed
                memory["sensor"] = recogniser.sense(feel(sensor, sensed), heard.energies, least)
            out += recogniser.transcribe(memory, longest)
        return out

    def read_off(self, encoder: Any) -> list[list[int]]:
        """What the encoder of the sensor says of each utterance by itself."""
        out: list[list[int]] = []
        for start in range(0, len(self.asked), 100):
            out += read_off(feel(encoder, self.heard(range(start, min(start + 100, len(self.asked))), CLEAN).sensed))
        return out

    def heard(self, rows: Sequence[int], snr: float, shift: int = 0) -> Heard:
        """Utterances in their noise, or those so many further on."""
        rows = [(row + shift) % len(self.asked) for row in rows]
        seeds = [training.derive_seed(self.seed, "noise", row) for row in rows]
        return self.speech.batch([self.asked[row] for row in rows], [snr] * len(rows), seeds)

    def rate(self, written: Sequence[Sequence[int]], voice: str | None = None) -> float:
        """The word error rate, of all voices or of one."""
        speakers = self.speech.spoken.speakers
        pairs = [
            (" ".join(map(str, said)), " ".join(map(str, one.words)))
            for said, one in zip(written, self.asked, strict=True)
            if voice in (None, speakers[one.speaker].voice)
        ]
        said, right = zip(*pairs, strict=True)
        return text_scores(said, right, ["wer"])["wer"]

    def by_voice(self, written: Sequence[Sequence[int]]) -> dict[str, float]:
        """The word error rate of each voice."""
        speakers = self.speech.spoken.speakers
        voices = dict.fromkeys(speakers[one.speaker].voice for one in self.asked)
        return {voice: self.rate(written, voice) for voice in voices}


def draw_voices(rates: dict[str, dict[str, float]], path: Path) -> None:
    """The word error rate of each voice, by row of the table."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4), constrained_layout=True)
    wide = 0.8 / len(rates)
    for place, (name, own) in enumerate(rates.items()):
        axes.bar([x + place * wide for x in range(len(own))], [100 * rate for rate in own.values()], wide, label=name)
    voices = list(next(iter(rates.values())))
    axes.set_xticks([x + 0.4 - wide / 2 for x in range(len(voices))], voices, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("word error rate in %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
