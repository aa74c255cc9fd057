"""Stage A: a small UNet and a text encoder learn to draw what a sentence says."""

from __future__ import annotations

from random import Random

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor

import mmattn
from mmattn import training

from .attributes import Subject, asked_for
from .data import Pictures
from .denoise import denoising_loss, fit
from .models import Models, make_unet, make_words, noise_schedule
from .pictures import grid, plot_losses
from .sampling import draw
from .settings import Config


def train_text(
    config: Config, data: Pictures, subject: Subject, run: training.RunFolder
) -> tuple[Models, training.FitResult]:
    """Train UNet and text encoder; returns them with the averaged weights, and the record of the loop."""
    torch.manual_seed(config.seed)
    random, settings = Random(config.seed), config.optim
    words = make_words(subject)
    unet = make_unet(config.model.size, config.model.channels, data.pictures.shape[1])
    models = Models(unet, words, noise_schedule())
    model = mmattn.attach(unet).use_core()
    unet.requires_grad_(True)
    both = torch.nn.ModuleDict({"unet": unet, "words": words}).train()
    average = EMAModel(both.parameters(), decay=settings.ema_decay, use_ema_warmup=True, power=0.75, foreach=True)

    def compute_loss(step: int) -> Tensor:
        if step:
            average.step(both.parameters())
        if step and step % config.sample.every == 0:
            show(step)
        rows = [random.randrange(len(data)) for _ in range(settings.batch_size)]
        names = subject.attributes.names
        said = [
            subject.describe(int(data.classes[i]), asked_for(names, data.measures[i], random), random) for i in rows
        ]
        # Left out is left out: those rows see no text at all.
        kept = (torch.rand(len(rows), 1) >= config.conditioning_dropout_prob)[:, 0].tolist()
        text, mask = words([one if here else None for one, here in zip(said, kept, strict=True)])
        return denoising_loss(
            models.schedule,
            lambda noisy, times: model(noisy, times, text, text_mask=mask).sample,
            data.pictures[rows],
            settings.min_snr,
        )

    @torch.no_grad()
    def show(step: int) -> None:
        average.store(both.parameters())
        average.copy_to(both.parameters())
        both.eval()
        labels = shown(subject)
        sentences = [text for text in labels for _ in range(8)]
        made = draw(model, models, sentences, config.sample.steps, config.sample.guidance_scale, seed=0)
        grid(made, 8, run.path / f"samples_{step:05d}.png", labels)
        both.train()
        average.restore(both.parameters())

    fitted = fit(config, both, compute_loss, "stage A", run)
    average.step(both.parameters())
    average.copy_to(both.parameters())
    both.eval().requires_grad_(False)
    plot_losses(fitted.losses, run.path / "loss.png")
    model.unload()
    return models, fitted


def shown(subject: Subject) -> list[str]:
    """Sentences for the grids: a class for each word, for much and for little of each measure."""
    sides = [(name, sign) for name in subject.attributes.names for sign in (1, -1)]
    count, random = len(subject.classes), Random(1)
    return [
        subject.describe((7 + index // 2) % count, {name: sign}, random) for index, (name, sign) in enumerate(sides)
    ]
