"""Judges that took no part in training: who reads the drawn digits, and how they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from digits import MEASURES, THRESHOLD, Digits, Scale, describe, measure
from scipy.linalg import sqrtm
from torch import Tensor


@dataclass
class Asked:
    """What was asked for: sentences, digits (n,), and (n, 3) signs of the attributes, 0 where none was named."""

    sentences: list[str]
    digits: Tensor
    signs: Tensor

    def __len__(self) -> int:
        return len(self.sentences)


def questions(each: int, seed: int) -> Asked:
    """Every digit, plain and with every single attribute, `each` times in random words."""
    random, sentences, digits, signs = Random(seed), [], [], []
    plain: list[dict[str, int]] = [{}, *({name: sign} for name, sign in product(MEASURES, (1, -1)))]
    for digit, said, _ in product(range(10), plain, range(each)):
        sentences.append(describe(digit, said, random))
        digits.append(digit)
        signs.append([said.get(name, 0) for name in MEASURES])
    return Asked(sentences, torch.tensor(digits), torch.tensor(signs))


class Judge:
    """A support vector machine that reads digits, and a kernel regression that sees their style, from 8 × 8 pixels.

    Both are fitted to the real training pictures only; neither took part in training any model here.
    """

    def __init__(self, real: Digits, scale: Scale) -> None:
        from sklearn.kernel_ridge import KernelRidge
        from sklearn.svm import SVC

        self.scale = scale
        features = pixels(real.pictures)
        self.reader = SVC(C=10, gamma=0.1, decision_function_shape="ovr").fit(features, real.digits.numpy())
        self.styles = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.02).fit(features, real.measures.numpy())
        self.real = self.reader.decision_function(features)

    def read(self, pictures: Tensor) -> Tensor:
        """The digits (n,) that pictures show."""
        return torch.tensor(self.reader.predict(pixels(pictures)))

    def style(self, pictures: Tensor) -> Tensor:
        """Stroke, slant and width (n, 3) as the regression sees them."""
        return torch.tensor(self.styles.predict(pixels(pictures)), dtype=torch.float32)

    def frechet(self, pictures: Tensor) -> float:
        """The Fréchet distance between drawn and real pictures in the reader's ten decision values."""
        made = self.reader.decision_function(pixels(pictures))
        mean = self.real.mean(0) - made.mean(0)
        own, other = np.cov(self.real.T), np.cov(made.T)
        return float(mean @ mean + np.trace(own + other - 2 * np.real(sqrtm(own @ other))))

    def credentials(self, held_out: Digits) -> str:
        """How right the judges are about real pictures that they never saw."""
        right = float((self.read(held_out.pictures) == held_out.digits).float().mean())
        seen = similarity(held_out.measures, self.style(held_out.pictures))
        styles = ", ".join(f"{name} {value:+.2f}" for name, value in zip(MEASURES, seen, strict=True))
        return (
            f"Of {len(held_out)} real held-out pictures the judge reads {100 * right:.1f} % right; its "
            f"correlation with what is measured: {styles}; "
            f"their Fréchet distance: {self.frechet(held_out.pictures):.2f}."
        )

    def obedience(self, asked: Asked, pictures: Tensor) -> dict[str, float]:
        """Shares of pictures that show the asked digit, and of named attributes that are there.

        *digit*: read as asked. *attribute*: measured on the asked side of the middle of its digit. *clearly*: beyond
        the threshold from which real pictures are called so. *diversity*: mean distance between pictures of one
        question, for each unit of that between real pictures of one digit.
        """
        measured = self.scale(measure((pictures + 1) / 2), asked.digits)
        named = asked.signs != 0
        towards = (measured * asked.signs)[named]
        return {
            "digit": float((self.read(pictures) == asked.digits).float().mean()),
            "attribute": float((towards > 0).float().mean()),
            "clearly": float((towards > THRESHOLD).float().mean()),
            "frechet": self.frechet(pictures),
        }


def pixels(pictures: Tensor) -> np.ndarray:
    """Pictures (n, 1, size, size) from -1 to 1 as 64 numbers from 0 to 1."""
    return F.adaptive_avg_pool2d((pictures + 1) / 2, 8).flatten(1).numpy().astype(np.float64)


def diversity(pictures: Tensor, digits: Tensor, real: Digits) -> float:
    """Mean distance between pictures of one digit, for each unit of that between real pictures of it."""

    def spread(given: Tensor, labels: Tensor) -> float:
        parts = [torch.pdist(given[labels == digit].flatten(1)).mean() for digit in range(10)]
        return float(torch.stack(parts).mean())

    return spread(pictures, digits) / spread(real.pictures, real.digits)


def similarity(wanted: Tensor, found: Tensor) -> list[float]:
    """Correlation over pictures between two estimates (n, 3) of style, for each measure."""

    def correlation(a: Tensor, b: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a, b]))[0, 1])

    return [correlation(wanted[:, index], found[:, index]) for index in range(len(MEASURES))]


def mean(values: Sequence[float]) -> float:
    """The mean of a list."""
    return sum(values) / len(values)
