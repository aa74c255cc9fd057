"""Judges that took no part in training, and the rows of both tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmattn
from mmattn.encoders import StyleEncoder
from mmattn.errors import import_extra
from mmattn.pipelines import DiffusionHost, PromptEncoder

from .data import THRESHOLD, WORDS, Pictures, Scale, describe, plain
from .models import Concatenated, Denoiser, style_memory
from .pictures import draw
from .settings import SampleSettings

GUIDANCE_SCALES = (1.0, 1.1, 1.3, 2.0, 3.0, 5.0)
ADAPTER_SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)


@dataclass
class Prompts:
    """Sentences, their classes (n,), and the signs (n, 3) of their attributes, 0 without a word for it."""

    sentences: list[str]
    classes: Tensor
    signs: Tensor


def make_prompts(each: int, seed: int) -> Prompts:
    """Return `each` random sentences for every digit alone and with every single attribute."""
    random = Random(seed)
    attributes: list[dict[str, int]] = [{}, *({name: sign} for name, sign in product(WORDS, (1, -1)))]
    rows = [(digit, signs) for digit, signs, _ in product(range(10), attributes, range(each))]
    sentences = [describe(digit, signs, random) for digit, signs in rows]
    signs = torch.tensor([[signs.get(name, 0) for name in WORDS] for _, signs in rows])
    return Prompts(sentences, torch.tensor([digit for digit, _ in rows]), signs)


class Judge:
    """A support vector machine for classes and a kernel regression for style, on 8 × 8 pixels."""

    def __init__(self, real: Pictures, scale: Scale) -> None:
        from sklearn.kernel_ridge import KernelRidge
        from sklearn.svm import SVC

        self.real, self.scale = real, scale
        pixels = to_pixels(real.pictures)
        self.classifier = SVC(C=10, gamma=0.1, decision_function_shape="ovr").fit(pixels, real.classes.numpy())
        self.regression = KernelRidge(alpha=0.1, kernel="rbf", gamma=0.02).fit(pixels, real.measures.numpy())
        self.real_decisions = self.decisions(real.pictures)

    def read(self, pictures: Tensor) -> Tensor:
        """Return the classes (n,) of pictures."""
        return torch.tensor(self.classifier.predict(to_pixels(pictures)))

    def style(self, pictures: Tensor) -> Tensor:
        """Return the measures (n, 3) of pictures by the regression."""
        return torch.tensor(self.regression.predict(to_pixels(pictures)), dtype=torch.float32)

    def decisions(self, pictures: Tensor) -> Tensor:
        """Return the classifier's decision values (n, classes)."""
        return torch.tensor(self.classifier.decision_function(to_pixels(pictures)))

    def frechet(self, pictures: Tensor) -> float:
        """Return the Fréchet distance (arXiv 1706.08500, equation 6) of drawn and real pictures in decision values."""
        network: Any = nn.Identity()  # torchmetrics passes features through the network that it expects
        network.num_features = self.real_decisions.shape[1]
        library = import_extra("torchmetrics.image.fid", "metrics")
        distance = library.FrechetInceptionDistance(feature=network, normalize=True)
        distance.set_dtype(torch.float64)
        distance.update(self.real_decisions.double(), real=True)
        distance.update(self.decisions(pictures).double(), real=False)
        return float(distance.compute())

    def credentials(self, held_out: Pictures) -> str:
        """Describe the accuracy of the judges on held-out real pictures."""
        right = float((self.read(held_out.pictures) == held_out.classes).float().mean())
        correlations = similarity(held_out.measures, self.style(held_out.pictures))
        styles = ", ".join(f"{name} {value:+.2f}" for name, value in zip(WORDS, correlations, strict=True))
        return (
            f"Of {len(held_out)} real held-out pictures the judge reads {100 * right:.1f} % right; its "
            f"correlation with what is measured: {styles}; "
            f"their Fréchet distance: {self.frechet(held_out.pictures):.2f}."
        )

    def obedience(self, prompts: Prompts, pictures: Tensor) -> dict[str, float]:
        """Return the figures of a row of stage A."""
        measures = self.scale.measure(pictures, prompts.classes)
        towards = (measures * prompts.signs)[prompts.signs != 0]
        return {
            "read": float((self.read(pictures) == prompts.classes).float().mean()),
            "attribute": float((towards > 0).float().mean()),
            "clearly": float((towards > THRESHOLD).float().mean()),
            "diversity": spread(pictures, prompts.classes) / spread(self.real.pictures, self.real.classes),
            "frechet": self.frechet(pictures),
        }


class PromptsWithExamples(torch.nn.Module):
    """A prompt encoder that appends examples as words, for a host without adapters."""

    def __init__(self, prompts: PromptEncoder, concatenated: Concatenated, memory: mmattn.Memory) -> None:
        super().__init__()
        self.prompts, self.concatenated, self.memory = prompts, concatenated, memory
        self.null, self.pooled = prompts.null, prompts.pooled

    def forward(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return states (b, m + 16, e) and their mask."""
        states, mask = self.prompts(sentences)
        output: tuple[Tensor, Tensor] = self.concatenated(states, mask, self.memory.to(states.device, states.dtype))
        return output


def text_rows(
    model: Denoiser, host: DiffusionHost, judge: Judge, settings: SampleSettings, seed: int
) -> list[dict[str, Any]]:
    """Return the row of each guidance scale."""
    prompts, rows = make_prompts(settings.each, seed), []
    for guidance_scale in GUIDANCE_SCALES:
        drawings = draw(model, host, prompts.sentences, settings.steps, guidance_scale, seed=seed)
        rows.append({"name": f"{guidance_scale:g}", **judge.obedience(prompts, drawings)})
    return rows


def style_rows(
    model: Denoiser,
    host: DiffusionHost,
    judge: Judge,
    encoder: StyleEncoder,
    held_out: Pictures,
    concatenated: Concatenated | None,
    settings: SampleSettings,
    seed: int,
) -> list[dict[str, Any]]:
    """Return the row of each adapter_scale and control; each example has a sentence that asks for another class."""
    generator = torch.Generator().manual_seed(seed)
    n = len(held_out)
    others = (held_out.classes + torch.randint(1, 10, (n,), generator=generator)) % 10
    sentences = [plain(digit) for digit in others.tolist()]
    styles = judge.style(held_out.pictures)
    memory = style_memory(encoder, held_out.pictures)
    # Each example exchanged for the one half the pictures further on.
    shuffled = memory[[(index + n // 2) % n for index in range(n)]]

    def row(name: str, host: DiffusionHost = host, **options: Any) -> dict[str, Any]:
        drawings = draw(model, host, sentences, settings.steps, settings.guidance_scale, seed=seed, **options)
        correlations = similarity(styles, judge.style(drawings))
        return {
            "name": name,
            **dict(zip(WORDS, correlations, strict=True)),
            "likeness": sum(correlations) / len(correlations),
            "read": float((judge.read(drawings) == others).float().mean()),
        }

    rows = [row("no example")]
    rows += [row(f"decoupled, adapter_scale {s}", memory=memory, adapter_scale=s) for s in ADAPTER_SCALES]
    rows.append(row("decoupled, adapter_scale 1.0, shuffled examples", memory=shuffled))
    if concatenated is not None:
        for name, examples in (("concatenated with the text", memory), ("concatenated, shuffled examples", shuffled)):
            prompts: Any = PromptsWithExamples(host.prompts, concatenated, examples)
            rows.append(row(name, DiffusionHost(host.unet, prompts, host.schedule, host.vae)))
    return rows


def to_pixels(pictures: Tensor) -> np.ndarray:
    """Return pictures (n, c, size, size) from -1 to 1 as 8 × 8 numbers from 0 to 1 for each channel."""
    return F.adaptive_avg_pool2d((pictures + 1) / 2, 8).flatten(1).numpy().astype(np.float64)


def spread(pictures: Tensor, classes: Tensor) -> float:
    """Return the mean distance between pictures of one class, as the mean over classes."""
    parts = [torch.pdist(pictures[classes == number].flatten(1)).mean() for number in classes.unique()]
    return float(torch.stack(parts).mean())


def similarity(expected: Tensor, measured: Tensor) -> list[float]:
    """Return for each measure the correlation over pictures between two estimates (n, 3)."""
    return [float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(expected.T, measured.T, strict=True)]
