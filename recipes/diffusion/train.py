"""A small diffusion model that follows a sentence, and then, frozen, the style of an example.

    mmattn train config.yaml                              # stage A: UNet and text encoder from scratch
    mmattn train config_style.yaml unet=runs/diffusion    # stage B: the UNet frozen, an adapter follows an example

Stage B is in train_style.py.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from mmattn import inspect, training
from mmattn.errors import import_extra
from mmattn.pipelines import DiffusionHost, load_diffusion_host, noise_schedule

from . import models
from .data import WORDS, Pictures, choose_attributes, describe, load_data, sample_sentences
from .measure import Judge, text_rows
from .models import Denoiser, denoising_loss, minimise, predict
from .pictures import EXPLORED, draw, grid, trace_drawing
from .settings import Config
from .train_style import train_style


def main(settings: dict[str, Any]) -> Path:
    """Run one stage with these settings (see settings.py) and return the run's folder."""
    config = Config(**settings)
    import_extra("matplotlib", "viz")  # fail now rather than after the last step
    run = training.RunFolder(config.out)
    if run.begin(config.model_dump(mode="json")):
        device = config.optim.arguments(config).device
        stage = train_text if config.stage == "text" else train_style
        content = {"stage": config.stage, "seed": config.seed, **stage(config, run, device)}
        run.finish(content, table)
    return run.path


def train_text(config: Config, run: training.RunFolder, device: torch.device) -> dict[str, Any]:
    """Stage A: train a UNet or transformer and a text encoder; measure whether drawings follow the sentences."""
    # Data, and models with random weights.
    data, held_out, scale = load_data(config.model.size)
    torch.manual_seed(config.seed)
    prompts = models.make_prompt_encoder(attends_to_padding=config.model.kind == "transformer")
    denoiser = models.make_denoiser(config.model)
    host = DiffusionHost(denoiser, prompts, noise_schedule()).to(device)
    model = models.attach_without_adapter(host)
    denoiser.requires_grad_(True)
    both = nn.ModuleDict({"denoiser": denoiser, "prompts": prompts}).train()
    average = EMAModel(both.parameters(), decay=config.optim.ema_decay, use_ema_warmup=True, power=0.75, foreach=True)
    random, labels, sample = Random(config.seed), sample_sentences(), config.sample

    # Training.
    began, recent, losses = time.perf_counter(), [], {}
    steps = minimise(
        both,
        lambda: text_loss(config, data, host, model, random),
        config.optim,
        label="stage A",
        progress=config.progress,
    )
    for step, loss in enumerate(steps, start=1):
        average.step(both.parameters())
        recent.append(loss)
        if step % config.optim.logging_steps == 0 or step == config.optim.max_steps:
            losses[step] = sum(recent) / len(recent)
            recent.clear()
            run.log(step=step, loss=losses[step])
    average.copy_to(both.parameters())
    both.eval().requires_grad_(False)
    seconds = round(time.perf_counter() - began)
    inspect.plot_curves({"loss": {"training": losses}}, run.path / "loss.png", log=True)
    model.unload()
    models.save_models(run.path, denoiser, prompts)

    # Measuring, with the weights of the files.
    host = load_diffusion_host(run.path, device=device)
    model, judge = models.attach_without_adapter(host), Judge(data, scale)
    sentences = [text for text in labels for _ in range(8)]
    drawings = draw(model, host, sentences, sample.steps, sample.guidance_scale, seed=0)
    grid(drawings, 8, run.path / "samples.png", labels)
    rows = text_rows(model, host, judge, sample, config.seed)
    if model.through_core:
        traces = [
            trace
            for sentence in labels[:EXPLORED]
            for trace in trace_drawing(model, host, sentence, sample.steps, seed=config.seed)
        ]
        inspect.plot_heat_maps(traces[0], run.path / "words.png")
        inspect.save_traces(traces, run.path)
    name = {"unet": "UNet", "transformer": "transformer"}[config.model.kind]
    took = {f"{name} and text encoder": {"steps": config.optim.max_steps, "seconds": seconds}}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


def text_loss(config: Config, data: Pictures, host: DiffusionHost, model: Denoiser, random: Random) -> Tensor:
    """Return the loss of a random batch of pictures with sentences about them, some of them left out."""
    rows = [random.randrange(len(data)) for _ in range(config.optim.per_device_train_batch_size)]
    sentences: list[str | None] = [
        describe(int(data.classes[row]), choose_attributes(data.measures[row], random), random) for row in rows
    ]
    dropped = (torch.rand(len(rows), 1) < config.conditioning_dropout_prob)[:, 0].tolist()
    sentences = [None if drop else text for text, drop in zip(sentences, dropped, strict=True)]
    clean = data.pictures[rows]
    noise, times = torch.randn_like(clean), torch.randint(0, host.schedule.config.num_train_timesteps, (len(rows),))
    (text, mask), inputs = host.prompts(sentences), host.inputs(sentences)
    return denoising_loss(
        host.schedule,
        lambda noisy, times: predict(model, noisy, times, text, mask, inputs),
        *(tensor.to(text.device) for tensor in (clean, noise, times)),
        config.optim.min_snr,
    ).mean()


def table(contents: list[dict[str, Any]]) -> str:
    """Return the table of one stage from one or several `table.json`, and the cost of its training."""
    share, ratio, correlation = (100, ".1f", " %"), (1, ".2f", ""), (1, "+.2f", "")
    if contents[0]["stage"] == "text":
        columns = {
            "read": ("read as asked", *share),
            "attribute": ("attribute on the asked side", *share),
            "clearly": ("attribute clearly", *share),
            "diversity": ("diversity", *ratio),
            "frechet": ("Fréchet", *ratio),
        }
    else:
        columns = {name: (name, *correlation) for name in WORDS}
        columns |= {"likeness": ("mean likeness", *correlation), "read": ("read as asked", *share)}
    title = "guidance_scale" if contents[0]["stage"] == "text" else ""
    rows, costs = training.spread_table(title, columns, [content["rows"] for content in contents]), []
    for name in contents[0]["training"]:
        runs = [content["training"][name] for content in contents]
        seconds = training.mean_and_spread([run["seconds"] for run in runs], 1, ".0f", " s")
        costs.append(f"{name}: {runs[0]['steps']} steps in {seconds}")
    return "\n\n".join([rows, "; ".join(costs) + ".", contents[0]["judge"]])
