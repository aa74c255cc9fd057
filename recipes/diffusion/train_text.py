"""Stage A: a small UNet or transformer and a text encoder learn to draw what a sentence says."""

from __future__ import annotations

import time
from random import Random

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor

from mmattn import inspect, training
from mmattn.pipelines import DiffusionHost, noise_schedule

from .attributes import Subject, asked_for
from .data import Pictures
from .models import attach_bare, denoising_loss, make_denoiser, make_prompt_encoder, predict
from .pictures import grid
from .sampling import draw
from .settings import Config


def train_text(
    config: Config, data: Pictures, subject: Subject, run: training.RunFolder, device: torch.device
) -> tuple[DiffusionHost, float]:
    """Train the denoiser and the text encoder; returns them with the averaged weights, and seconds."""
    torch.manual_seed(config.seed)
    random, settings = Random(config.seed), config.optim
    prompts, schedule = make_prompt_encoder(subject, config.model.kind == "transformer"), noise_schedule()
    denoiser = make_denoiser(config.model, data.pictures.shape[1])
    host = DiffusionHost(denoiser, prompts, schedule).to(device)
    model = attach_bare(host)
    denoiser.requires_grad_(True)
    both = torch.nn.ModuleDict({"denoiser": denoiser, "prompts": prompts}).train()
    average = EMAModel(both.parameters(), decay=settings.ema_decay, use_ema_warmup=True, power=0.75, foreach=True)
    groups = training.parameter_groups(both, settings.learning_rate, weight_decay=settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    learning_rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: training.learning_rate_factor(step, settings.max_steps, settings.warmup_steps)
    )

    def compute_loss() -> Tensor:
        rows = [random.randrange(len(data)) for _ in range(settings.batch_size)]
        names = subject.attributes.names
        said = [
            subject.describe(int(data.classes[i]), asked_for(names, data.measures[i], random), random) for i in rows
        ]
        # Left out is left out: those rows see no text at all, or that of no sentence.
        kept = (torch.rand(len(rows), 1) >= config.conditioning_dropout_prob)[:, 0].tolist()
        clean = data.pictures[rows]
        noise, times = torch.randn_like(clean), torch.randint(0, schedule.config.num_train_timesteps, (len(rows),))
        said = [one if here else None for one, here in zip(said, kept, strict=True)]
        text, mask = prompts(said)
        inputs = host.inputs(said)
        return denoising_loss(
            schedule,
            lambda noisy, times: predict(model, noisy, times, text, mask, inputs),
            clean.to(device),
            noise.to(device),
            times.to(device),
            settings.min_snr,
        ).mean()

    @torch.no_grad()
    def show(step: int) -> None:
        average.store(both.parameters())
        average.copy_to(both.parameters())
        both.eval()
        labels = shown(subject)
        sentences = [text for text in labels for _ in range(8)]
        made = draw(model, host, sentences, config.sample.steps, config.sample.guidance_scale, seed=0)
        grid(made, 8, run.path / f"samples_{step:05d}.png", labels)
        both.train()
        average.restore(both.parameters())

    began, recent, losses = time.perf_counter(), [], []
    for step in training.tracked(settings.max_steps, "stage A", config.progress):
        if step and step % config.sample.every == 0:
            show(step)
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), settings.max_grad_norm)
        optimizer.step()
        learning_rate.step()
        average.step(both.parameters())
        recent.append(float(loss.detach()))
        if (step + 1) % 20 == 0 or step + 1 == settings.max_steps:
            losses.append((step + 1, sum(recent) / len(recent)))
            recent.clear()
            run.log(step=step + 1, loss=losses[-1][1])
    average.copy_to(both.parameters())
    both.eval().requires_grad_(False)
    inspect.plot_curves({"loss": {"training": [dict(losses)]}}, run.path / "loss.png", log=True)
    model.unload()
    return host, time.perf_counter() - began


def shown(subject: Subject) -> list[str]:
    """Sentences for the grids: a class for each word, for much and for little of each measure."""
    sides = [(name, sign) for name in subject.attributes.names for sign in (1, -1)]
    count, random = len(subject.classes), Random(1)
    return [
        subject.describe((7 + index // 2) % count, {name: sign}, random) for index, (name, sign) in enumerate(sides)
    ]
