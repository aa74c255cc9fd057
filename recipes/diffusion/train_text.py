"""Stage A: a small UNet and a text encoder learn to write digits as they are told."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from denoise import denoising_loss, fit
from diffusers.training_utils import EMAModel
from digits import Digits, asked_for, describe
from models import Words, make_unet, make_words, noise_schedule, save_models
from pictures import grid, plot_losses
from sampling import draw
from settings import Config
from torch import Tensor

import mmattn
from mmattn import training

SHOWN = (
    "a thick seven",
    "a thin seven",
    "a wide three",
    "a narrow three",
    "a four slanted left",
    "a four slanted right",
)


def train_text(
    config: Config, data: Digits, run: training.RunFolder
) -> tuple[mmattn.hosts.UNet, Words, training.Fitted]:
    """Train UNet and text encoder; the averaged weights are kept, and written to the run's folder."""
    torch.manual_seed(config.seed)
    random, settings = Random(config.seed), config.optim
    words = make_words()
    unet = make_unet(config.model.size, config.model.channels)
    model = mmattn.attach(unet).use_core()
    unet.requires_grad_(True)
    both = torch.nn.ModuleDict({"unet": unet, "words": words}).train()
    average = EMAModel(both.parameters(), decay=settings.ema, use_ema_warmup=True, power=0.75, foreach=True)
    scheduler = noise_schedule()

    def batch() -> tuple[Tensor, list[str]]:
        rows = [random.randrange(len(data)) for _ in range(settings.batch)]
        said = [describe(int(data.digits[row]), asked_for(data.measures[row], random), random) for row in rows]
        return data.pictures[rows], said

    def loss_at(step: int) -> Tensor:
        if step:
            average.step(both.parameters())
        if step and step % config.sample.every == 0:
            show(step)
        pictures, sentences = batch()
        text, mask = words(sentences)
        # Left out is left out: those rows see no text at all.
        mask = mask & (torch.rand(len(mask), 1) >= config.drop)
        return denoising_loss(
            scheduler, lambda noisy, times: model(noisy, times, text, text_mask=mask).sample, pictures, settings.min_snr
        )

    @torch.no_grad()
    def show(step: int) -> None:
        average.store(both.parameters())
        average.copy_to(both.parameters())
        both.eval()
        made = draw(
            model, words, [text for text in SHOWN for _ in range(8)], config.sample.steps, config.sample.w, seed=0
        )
        grid(made, 8, run.path / f"samples_{step:05d}.png", SHOWN)
        both.train()
        average.restore(both.parameters())

    fitted = fit(config, both, loss_at, "stage A", run)
    average.step(both.parameters())
    average.copy_to(both.parameters())
    both.eval().requires_grad_(False)
    plot_losses(fitted.losses, run.path / "loss.png")
    return model, words, fitted


def save_text(model: mmattn.hosts.UNet, words: Words, folder: Path) -> None:
    """Write both in half precision, and give the model back as it will be read."""
    save_models(folder, model.detach(), words)
