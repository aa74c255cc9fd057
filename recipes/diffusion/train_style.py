"""Stage B: the UNet or transformer frozen, adapters learn to follow the style of an example.

In training an example is never the picture itself, nor the same digit: it is one of the pictures of other digits with
the nearest measures. Both share nothing but the style, so the adapter can learn nothing else from it; the text alone
names the digit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmattn
from mmattn import inspect, training
from mmattn.encoders import StyleEncoder, StyleNetwork
from mmattn.pipelines import DiffusionHost, EncoderReference, ModelReference, PipelineConfig, load_diffusion_host

from .data import Pictures, choose_attributes, describe, load_data, plain, style_words
from .measure import Judge, style_rows
from .models import Concatenated, Denoiser, denoising_loss, minimise, predict, style_memory
from .pictures import EXPLORED, draw, grid, trace_drawing
from .settings import Config

NEAREST = 8  # pictures of other digits that may be the example of a picture


@dataclass(frozen=True)
class Row:
    """The numbers of a picture and its example, a sentence or None, whether the example is visible, noise and time."""

    picture: int
    example: int
    sentence: str | None
    with_example: bool
    noise: Tensor
    time: int


def train_style(config: Config, run: training.RunFolder, device: torch.device) -> dict[str, Any]:
    """Train an adapter and its control on the same rows; measure whether drawings follow the examples."""
    # Data, and an encoder of style.
    host = load_diffusion_host(config.unet, device=device)
    data, held_out, scale = load_data(host.size, host.channels)
    encoder = train_encoder(data, config)
    encoder.save(run.path / "style.safetensors")
    encoder.to(device)

    # Model.
    torch.manual_seed(config.seed)
    model = mmattn.attach(host.unet, mmattn.DecoupledAdapter(memory_dim=encoder.dim)).use_core()

    # Training.
    generator = torch.Generator().manual_seed(config.seed)
    arguments = (config, data, model, host, encoder, run, device, generator)
    results = {"decoupled": train(model.adapters, "decoupled", *arguments)}
    model.save_adapter(run.path / "adapter", encoder=encoder.fingerprint)
    make_pipeline_config(config, host, len(data)).save(run.path / "adapter")
    concatenated = None
    if config.style.control:
        torch.set_rng_state(generator.get_state())  # the first weights of the published table
        text_dim = host.prompts.encoder.config.hidden_size
        concatenated = Concatenated(model.trainable_parameters()[0], text_dim).to(device)
        generator.manual_seed(config.seed)
        results["concatenated"] = train(concatenated, "concatenated", *arguments)
    run.plot_losses()

    # Measuring.
    judge, examples = Judge(data, scale), held_out[: config.sample.examples]
    rows = style_rows(model, host, judge, encoder, examples, concatenated, config.sample, config.seed)
    save_examples(model, host, encoder, held_out, config, run)
    took = {name: {"steps": config.optim.max_steps, "seconds": round(seconds)} for name, seconds in results.items()}
    return {"rows": rows, "training": took, "judge": judge.credentials(held_out)}


def train_encoder(data: Pictures, config: Config) -> StyleEncoder:
    """Train a network on the measures of the training pictures, moved by up to a pixel."""
    torch.manual_seed(config.seed)
    network = StyleNetwork(data.pictures.shape[1], data.measures.shape[1]).train()

    def loss() -> Tensor:
        rows = torch.randint(0, len(data), (128,))
        down, right = torch.randint(-1, 2, (2,)).tolist()
        pictures = torch.roll(data.pictures[rows], (down, right), (2, 3))
        return F.mse_loss(network(pictures), data.measures[rows])

    optim = training.OptimSettings(max_steps=config.style.encoder_steps, weight_decay=0.05)
    for _ in minimise(network, loss, optim, label="style encoder", progress=config.progress):
        pass
    return StyleEncoder(network, data.pictures.shape[-1])


def train(
    module: nn.Module,
    name: str,
    config: Config,
    data: Pictures,
    model: Denoiser,
    host: DiffusionHost,
    encoder: StyleEncoder,
    run: training.RunFolder,
    device: torch.device,
    generator: torch.Generator,
) -> float:
    """Train the adapters of `model`, or a `Concatenated`; return the seconds."""
    memories, optim = style_memory(encoder, data.pictures), config.optim

    def loss(rows: Sequence[Row]) -> Tensor:
        sentences = [row.sentence for row in rows]
        with torch.no_grad():
            (text, mask), inputs = host.prompts(sentences), host.inputs(sentences)
        tokens = memories.tokens[[row.example for row in rows]]
        visible = torch.tensor([row.with_example for row in rows], device=device)
        memory: mmattn.Memory | None = mmattn.Memory(tokens, visible[:, None].expand(tokens.shape[:2]))
        if isinstance(module, Concatenated):
            (text, mask), memory = module(text, mask, memory), None
        errors = denoising_loss(
            host.schedule,
            lambda noisy, times: predict(model, noisy, times, text, mask, inputs, memory),
            host.encode(data.pictures[[row.picture for row in rows]]),
            torch.stack([row.noise for row in rows]).to(device),
            torch.tensor([row.time for row in rows], device=device),
            optim.min_snr,
        )
        return errors.mean()

    batches = make_batches(config, data, host, generator)

    class DenoisingTrainer(training.AdapterTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return loss(inputs["rows"])

    module.requires_grad_(True)
    trainer = DenoisingTrainer(
        module,
        optim.arguments(config, per_device_train_batch_size=1),
        data_collator=lambda _: {"rows": next(batches)},
        train_dataset=range(optim.max_steps),
    )
    return run.train(trainer, name, config.progress)


def make_batches(
    config: Config, data: Pictures, host: DiffusionHost, generator: torch.Generator
) -> Iterator[list[Row]]:
    """Yield random batches; sentence and example of a row are left out independently."""
    random, count, unet = Random(config.seed), config.optim.per_device_train_batch_size, host.unet.config
    shape = (unet.in_channels, unet.sample_size, unet.sample_size)
    while True:
        pictures = [random.randrange(len(data)) for _ in range(count)]
        examples = [int(near[random.randrange(len(near))]) for near in nearest(data, pictures)]
        signs = [choose_attributes(data.measures[row], random, 0.2) for row in pictures]
        sentences = [describe(int(data.classes[row]), one, random) for row, one in zip(pictures, signs, strict=True)]
        with_text, with_example = (
            (torch.rand(count, generator=generator) >= config.conditioning_dropout_prob).tolist() for _ in range(2)
        )
        noise = torch.randn(count, *shape, generator=generator)
        times = torch.randint(0, host.schedule.config.num_train_timesteps, (count,), generator=generator).tolist()
        texts = [text if keep else None for text, keep in zip(sentences, with_text, strict=True)]
        yield [Row(*row) for row in zip(pictures, examples, texts, with_example, noise, times, strict=True)]


def nearest(data: Pictures, rows: list[int]) -> Tensor:
    """Return for each row the numbers (b, n) of the pictures of other digits with the nearest measures."""
    distance = torch.cdist(data.measures[rows], data.measures)
    same = data.classes[rows, None] == data.classes[None]
    return distance.masked_fill(same, float("inf")).topk(NEAREST, largest=False).indices


def make_pipeline_config(config: Config, host: DiffusionHost, pictures: int) -> PipelineConfig:
    """Return the file that lets `mmattn draw` load the adapter with its models."""
    return PipelineConfig(
        task="text-to-image",
        host=ModelReference.of(config.unet, host.prompts.tokenizer),
        encoder=EncoderReference(name="../style.safetensors"),
        generation={"num_inference_steps": config.sample.steps, "guidance_scale": config.sample.guidance_scale},
        trained_on=f"{pictures:,} pictures of handwritten digits, of scikit-learn.",
        training={"recipe": "diffusion", "seed": config.seed, "steps": config.optim.max_steps},
    )


def save_examples(
    model: Denoiser,
    host: DiffusionHost,
    encoder: StyleEncoder,
    held_out: Pictures,
    config: Config,
    run: training.RunFolder,
) -> None:
    """Save a grid with an example and the ten digits in its style in each row, and the attention of some drawings."""
    rows = held_out.measures.abs().sum(1).topk(8).indices.tolist()
    sentences, sample, pictures = [plain(digit) for digit in range(10)], config.sample, []
    for row in rows:
        memory = style_memory(encoder, held_out.pictures[row : row + 1]).expand(10)
        drawings = draw(model, host, sentences, sample.steps, sample.guidance_scale, seed=config.seed, memory=memory)
        pictures += [held_out.pictures[row], *drawings]
    labels = [style_words(held_out.measures[row]) for row in rows]
    grid(torch.stack(pictures), 11, run.path / "examples.png", labels, ["example", *sentences])
    traces = []
    for row in rows[:EXPLORED]:
        sentence, example = plain((int(held_out.classes[row]) + 1) % 10), held_out.pictures[row]
        memory = style_memory(encoder, example[None])
        traces += trace_drawing(model, host, sentence, sample.steps, seed=config.seed, memory=memory, example=example)
    inspect.save_traces(traces, run.path)
