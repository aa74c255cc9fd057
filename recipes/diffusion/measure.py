"""Judges that took no part in training: who reads the drawn digits, and how they are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn.encoders import StyleEncoder
from mmattn.evaluation import frechet_distance
from mmattn.pipelines import DiffusionHost

from .attributes import THRESHOLD, Subject
from .data import Pictures
from .models import Denoiser
from .sampling import draw
from .style import style_memory

GUIDANCE_SCALES = (1.0, 1.1, 1.3, 2.0, 3.0, 5.0)
ADAPTER_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass
class Asked:
    """What was asked for: sentences, classes (n,), and (n, 3) signs of the attributes, 0 where none was named."""

    sentences: list[str]
    classes: Tensor
    signs: Tensor

    def __len__(self) -> int:
        return len(self.sentences)


def questions(subject: Subject, each: int, seed: int) -> Asked:
    """Every class, plain and with every single attribute, `each` times in random words."""
    random, names = Random(seed), subject.attributes.names
    asked = Asked([], torch.empty(0), torch.empty(0))
    plain: list[dict[str, int]] = [{}, *({name: sign} for name, sign in product(names, (1, -1)))]
    classes, signs = [], []
    for number, said, _ in product(range(len(subject.classes)), plain, range(each)):
        asked.sentences.append(subject.describe(number, said, random))
        classes.append(number)
        signs.append([said.get(name, 0) for name in names])
    asked.classes, asked.signs = torch.tensor(classes), torch.tensor(signs)
    return asked


class Judge:
    """A support vector machine that reads classes, and a kernel regression that sees the style, from 8 × 8 pixels.

    Both are fitted to the real training pictures only; neither took part in training any model here.
    """

    def __init__(self, real: Pictures, subject: Subject) -> None:
        from sklearn.kernel_ridge import KernelRidge
        from sklearn.svm import SVC

        self.real, self.subject = real, subject
        features = pixels(real.pictures)
        self.reader = SVC(C=10, gamma=0.1, decision_function_shape="ovr").fit(features, real.classes.numpy())
        self.styles = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.02).fit(features, real.measures.numpy())
        self.seen = self.values(real.pictures)

    def read(self, pictures: Tensor) -> Tensor:
        """The classes (n,) that pictures show."""
        return torch.tensor(self.reader.predict(pixels(pictures)))

    def style(self, pictures: Tensor) -> Tensor:
        """The measures (n, 3) as the regression sees them."""
        return torch.tensor(self.styles.predict(pixels(pictures)), dtype=torch.float32)

    def values(self, pictures: Tensor) -> Tensor:
        """The reader's decision values (n, classes), or (n, 1) for two classes."""
        return torch.tensor(self.reader.decision_function(pixels(pictures))).reshape(len(pictures), -1)

    def frechet(self, pictures: Tensor) -> float:
        """The Fréchet distance between drawn and real pictures in the reader's decision values."""
        return frechet_distance(self.seen, self.values(pictures))

    def credentials(self, held_out: Pictures) -> str:
        """How right the judges are about real pictures that they never saw."""
        right = float((self.read(held_out.pictures) == held_out.classes).float().mean())
        seen = similarity(held_out.measures, self.style(held_out.pictures))
        styles = ", ".join(
            f"{name} {value:+.2f}" for name, value in zip(self.subject.attributes.names, seen, strict=True)
        )
        return (
            f"Of {len(held_out)} real held-out pictures the judge reads {100 * right:.1f} % right; its "
            f"correlation with what is measured: {styles}; "
            f"their Fréchet distance: {self.frechet(held_out.pictures):.2f}."
        )

    def obedience(self, asked: Asked, pictures: Tensor) -> dict[str, float]:
        """Shares of pictures that show the asked class, and of named attributes that are there.

        *read*: read as asked. *attribute*: measured on the asked side of the middle of its class. *clearly*: beyond
        the threshold from which real pictures are called so. *diversity*: mean distance between pictures of one
        class, for each unit of that between real ones.
        """
        measured = self.subject.measure(pictures, asked.classes)
        named = asked.signs != 0
        towards = (measured * asked.signs)[named]
        return {
            "read": float((self.read(pictures) == asked.classes).float().mean()),
            "attribute": float((towards > 0).float().mean()),
            "clearly": float((towards > THRESHOLD).float().mean()),
            "diversity": spread(pictures, asked.classes) / spread(self.real.pictures, self.real.classes),
            "frechet": self.frechet(pictures),
        }


class WithExamples(torch.nn.Module):
    """Prompts with their examples as more words, for a host without adapters."""

    def __init__(self, prompts: Any, concatenated: Any, memory: mmattn.Memory) -> None:
        super().__init__()
        self.prompts, self.concatenated, self.memory = prompts, concatenated, memory
        self.null, self.pooled = prompts.null, prompts.pooled

    def forward(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """States (b, m + 16, e) and their mask."""
        states, mask = self.prompts(sentences)
        found: tuple[Tensor, Tensor] = self.concatenated(states, mask, self.memory.to(states.device, states.dtype))
        return found


def text_rows(
    model: Denoiser, host: DiffusionHost, judge: Judge, steps: int, seed: int, each: int
) -> list[dict[str, Any]]:
    """For each guidance scale: classes and attributes as asked, diversity, and the distance to real pictures."""
    asked, rows = questions(judge.subject, each, seed), []
    for guidance_scale in GUIDANCE_SCALES:
        made = draw(model, host, asked.sentences, steps, guidance_scale, seed=seed)
        rows.append({"name": f"{guidance_scale:g}", **judge.obedience(asked, made)})
    return rows


def style_rows(
    model: Denoiser,
    host: DiffusionHost,
    judge: Judge,
    encoder: StyleEncoder,
    held_out: Pictures,
    concatenated: Any,
    steps: int,
    guidance_scale: float,
    seed: int,
) -> list[dict[str, Any]]:
    """For each adapter_scale: likeness to a held-out example of another class, and the class read as the text asked."""
    generator = torch.Generator().manual_seed(seed)
    n, classes = len(held_out), len(judge.subject.classes)
    asked = (held_out.classes + torch.randint(1, classes, (n,), generator=generator)) % classes
    sentences = [judge.subject.plain(number) for number in asked.tolist()]
    wanted = judge.style(held_out.pictures)
    memory = style_memory(encoder, held_out.pictures)
    # Each example exchanged for the one half the pictures further on.
    shuffled = memory[[(index + n // 2) % n for index in range(n)]]

    def row(name: str, host: DiffusionHost = host, **given: Any) -> dict[str, Any]:
        made = draw(model, host, sentences, steps, guidance_scale, seed=seed, **given)
        found = similarity(wanted, judge.style(made))
        return {
            "name": name,
            **dict(zip(judge.subject.attributes.names, found, strict=True)),
            "likeness": mean(found),
            "read": float((judge.read(made) == asked).float().mean()),
        }

    rows = [row("no example")]
    rows += [
        row(f"decoupled, adapter_scale {adapter_scale}", memory=memory, adapter_scale=adapter_scale)
        for adapter_scale in ADAPTER_SCALES
    ]
    rows.append(row("decoupled, adapter_scale 1.0, shuffled examples", memory=shuffled))
    if concatenated is not None:
        for name, examples in (("concatenated with the text", memory), ("concatenated, shuffled examples", shuffled)):
            rows.append(row(name, replace(host, prompts=WithExamples(host.prompts, concatenated, examples))))
    return rows


def pixels(pictures: Tensor) -> np.ndarray:
    """Pictures (n, c, size, size) from -1 to 1 as 64 numbers from 0 to 1 for each channel."""
    return F.adaptive_avg_pool2d((pictures + 1) / 2, 8).flatten(1).numpy().astype(np.float64)


def spread(pictures: Tensor, classes: Tensor) -> float:
    """Mean distance between pictures of one class, as the mean over classes."""
    parts = [torch.pdist(pictures[classes == number].flatten(1)).mean() for number in classes.unique()]
    return float(torch.stack(parts).mean())


def similarity(wanted: Tensor, found: Tensor) -> list[float]:
    """Correlation over pictures between two estimates (n, 3) of style, for each measure."""

    def correlation(a: Tensor, b: Tensor) -> float:
        return float(torch.corrcoef(torch.stack([a, b]))[0, 1])

    return [correlation(wanted[:, index], found[:, index]) for index in range(wanted.shape[1])]


def mean(values: Sequence[float]) -> float:
    """The mean of a list."""
    return sum(values) / len(values)
