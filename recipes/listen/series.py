"""Series and the sentences that describe them: trend, period, and an anomaly with its tenth of the series.

falling , repeats every 97 samples , a dip in the sixth tenth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .settings import SeriesSettings

TRENDS = {"falling": -1, "steady": 0, "rising": 1}
PERIODS = {"never": None, "23": 23, "47": 47, "97": 97, "193": 193, "389": 389}
ANOMALIES = ("spike", "dip", "gap", "nothing")
TENTHS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
ATTRIBUTES = {"trend": tuple(TRENDS), "period": tuple(PERIODS), "anomaly": ANOMALIES, "time": (*TENTHS, "-")}
FILLERS = (",", "repeats", "every", "samples", "a", "in", "the", "part", "unusual")
WORDS = (*TRENDS, *PERIODS, *ANOMALIES, *TENTHS, *FILLERS)
IDS = {word: id for id, word in enumerate(WORDS)}
END, START = len(WORDS), len(WORDS) + 1
VOCABULARY = len(WORDS) + 2


@dataclass(frozen=True)
class Description:
    """The attributes of a series; `tenth` is "-" without an anomaly."""

    trend: str
    period: str
    anomaly: str
    tenth: str

    @staticmethod
    def draw(random: Random) -> Description:
        """Draw each attribute."""
        anomaly = random.choice(ANOMALIES)
        tenth = "-" if anomaly == "nothing" else random.choice(TENTHS)
        return Description(random.choice([*TRENDS]), random.choice([*PERIODS]), anomaly, tenth)

    def words(self) -> list[str]:
        """Return the sentence."""
        repeats = ["never", "repeats"] if self.period == "never" else ["repeats", "every", self.period, "samples"]
        unusual = ["nothing", "unusual"]
        if self.anomaly != "nothing":
            unusual = ["a", self.anomaly, "in", "the", self.tenth, "part"]
        return [self.trend, ",", *repeats, ",", *unusual]

    @staticmethod
    def read(words: Sequence[str]) -> Description:
        """Parse a sentence: the first word of each attribute, or "?"."""
        trend, period, anomaly, tenth = (
            next((word for word in words if word in values), "?") for values in (TRENDS, PERIODS, ANOMALIES, TENTHS)
        )
        return Description(trend, period, anomaly, "-" if anomaly == "nothing" else tenth)

    def attributes(self) -> dict[str, str]:
        """Return the attributes by the names of `ATTRIBUTES`."""
        return dict(zip(ATTRIBUTES, (self.trend, self.period, self.anomaly, self.tenth), strict=True))


def make_series(description: Description, settings: SeriesSettings, seed: int) -> NDArray[np.float32]:
    """Return a series (samples,) with these attributes; NaN in a gap."""
    random, n = np.random.default_rng(seed), settings.samples
    time = np.arange(n)
    values = settings.noise * random.standard_normal(n)
    values += TRENDS[description.trend] * random.uniform(1.5, 3) * (time / n - 0.5)
    period = PERIODS[description.period]
    if period is not None:
        values += np.sin(2 * np.pi * (time / period + random.uniform()))
    if description.anomaly != "nothing":
        width = int(random.integers(n // 200, n // 100))
        start = TENTHS.index(description.tenth) * n // 10 + int(random.integers(n // 10 - width))
        bump = random.uniform(4, 6) * np.hanning(width)
        if description.anomaly == "gap":
            values[start : start + width] = np.nan
        else:
            values[start : start + width] += bump if description.anomaly == "spike" else -bump
    return np.float32(10 ** random.uniform(-2, 2) * (values + random.uniform(-5, 5)))


def batch(descriptions: Sequence[Description], device: torch.device) -> dict[str, Tensor]:
    """Return ids, mask and labels (b, l) of sentences."""
    texts = [[START, *(IDS[word] for word in one.words()), END] for one in descriptions]
    longest = max(map(len, texts))
    ids = torch.tensor([text + [END] * (longest - len(text)) for text in texts], device=device)
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts], device=device)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def parse(ids: Sequence[int]) -> Description:
    """Parse the ids of a text, up to its end."""
    words = [WORDS[id] for id in [*ids, END][: [*ids, END].index(END)] if id < END]
    return Description.read(words)
