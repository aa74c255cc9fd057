"""Stage B: the UNet or transformer frozen, adapters learn to follow the style of an example.

In training an example is never the picture itself, nor the same digit: it is one of the pictures of other digits with
the nearest measures. Both share nothing but the style, so the adapter can learn nothing else from it; the text alone
names the digit.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from .models import Concatenated, denoising_loss, minimise, predict, style_memory
from .pictures import EXPLORED, draw, grid, trace_drawing
from .settings import Config

NEAREST = 8  # pictures of other digits that may be the example of a picture


Batch = tuple[list[int], list[int], list[str | None], list[bool], Tensor, list[int]]
"""Numbers of pictures and of their examples, sentences or None, whether an example is visible, noise and times."""


def train_style(config: Config, run: training.RunFolder, device: torch.device) -> dict[str, Any]:
    """Train an adapter and its control on the same rows; measure whether drawings follow the examples."""
    return Stage(config, run, device).results()


class Stage:
    """One run: the frozen host with its adapters, the digits, and the encoder of their style."""

    def __init__(self, config: Config, run: training.RunFolder, device: torch.device) -> None:
        self.config, self.run, self.device = config, run, device
        # Data, and an encoder of style.
        self.host = load_diffusion_host(config.unet, device=device)
        self.data, self.held_out, self.scale = load_data(self.host.size, self.host.channels)
        self.encoder = train_encoder(self.data, config)
        self.encoder.save(run.path / "style.safetensors")
        self.encoder.to(device)
        # Model.
        torch.manual_seed(config.seed)
        self.model = mmattn.attach(self.host.unet, mmattn.DecoupledAdapter(memory_dim=self.encoder.dim)).use_core()
        self.generator = torch.Generator().manual_seed(config.seed)

    def results(self) -> dict[str, Any]:
        """Return the rows of the table, the cost of the trainings, and how good the judges are."""
        config, run, model = self.config, self.run, self.model

        # Training.
        seconds = {"decoupled": self.train(model.adapters, "decoupled")}
        model.save_adapter(run.path / "adapter", encoder=self.encoder.fingerprint)
        make_pipeline_config(config, self.host, len(self.data)).save(run.path / "adapter")
        concatenated = None
        if config.style.control:
            torch.set_rng_state(self.generator.get_state())  # the first weights of the published table
            text_dim = self.host.prompts.encoder.config.hidden_size
            concatenated = Concatenated(model.trainable_parameters()[0], text_dim).to(self.device)
            self.generator.manual_seed(config.seed)
            seconds["concatenated"] = self.train(concatenated, "concatenated")
        run.plot_losses()

        # Measuring.
        judge, examples = Judge(self.data, self.scale), self.held_out[: config.sample.examples]
        rows = style_rows(model, self.host, judge, self.encoder, examples, concatenated, config.sample, config.seed)
        self.save_examples()
        took = {name: {"steps": config.optim.max_steps, "seconds": round(value)} for name, value in seconds.items()}
        return {"rows": rows, "training": took, "judge": judge.credentials(self.held_out)}

    def train(self, module: nn.Module, name: str) -> float:
        """Train the adapters of the model, or a `Concatenated`; return the seconds."""
        config, host, device, batches = self.config, self.host, self.device, self.batches()
        memories = style_memory(self.encoder, self.data.pictures)

        def loss(batch: Batch) -> Tensor:
            pictures, examples, sentences, with_example, noise, times = batch
            with torch.no_grad():
                (text, mask), inputs = host.prompts(sentences), host.inputs(sentences)
            tokens = memories.tokens[examples]
            visible = torch.tensor(with_example, device=device)
            memory: mmattn.Memory | None = mmattn.Memory(tokens, visible[:, None].expand(tokens.shape[:2]))
            if isinstance(module, Concatenated):
                (text, mask), memory = module(text, mask, memory), None
            errors = denoising_loss(
                host.schedule,
                lambda noisy, times: predict(self.model, noisy, times, text, mask, inputs, memory),
                host.encode(self.data.pictures[pictures]),
                noise.to(device),
                torch.tensor(times, device=device),
                config.optim.min_snr,
            )
            return errors.mean()

        class DenoisingTrainer(training.AdapterTrainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
                return loss(inputs["batch"])

        module.requires_grad_(True)
        trainer = DenoisingTrainer(
            module,
            config.optim.arguments(config, per_device_train_batch_size=1),
            data_collator=lambda _: {"batch": next(batches)},
            train_dataset=range(config.optim.max_steps),
        )
        return self.run.train(trainer, name, config.progress)

    def batches(self) -> Iterator[Batch]:
        """Yield random batches; sentence and example of a row are left out independently."""
        config, data, generator, unet = self.config, self.data, self.generator, self.host.unet.config
        random, count = Random(config.seed), config.optim.per_device_train_batch_size
        shape = (unet.in_channels, unet.sample_size, unet.sample_size)
        while True:
            pictures = [random.randrange(len(data)) for _ in range(count)]
            examples = [int(near[random.randrange(len(near))]) for near in nearest(data, pictures)]
            signs = [choose_attributes(data.measures[row], random, 0.2) for row in pictures]
            texts = [describe(int(data.classes[row]), one, random) for row, one in zip(pictures, signs, strict=True)]
            with_text, with_example = (
                (torch.rand(count, generator=generator) >= config.conditioning_dropout_prob).tolist() for _ in range(2)
            )
            noise = torch.randn(count, *shape, generator=generator)
            most = self.host.schedule.config.num_train_timesteps
            times = torch.randint(0, most, (count,), generator=generator).tolist()
            sentences = [text if keep else None for text, keep in zip(texts, with_text, strict=True)]
            yield pictures, examples, sentences, with_example, noise, times

    def save_examples(self) -> None:
        """Save a grid with an example and the ten digits in its style in each row, and some drawings' attention."""
        model, host, held_out = self.model, self.host, self.held_out
        sample, seed = self.config.sample, self.config.seed
        rows = held_out.measures.abs().sum(1).topk(8).indices.tolist()
        sentences, pictures = [plain(digit) for digit in range(10)], []
        for row in rows:
            memory = style_memory(self.encoder, held_out.pictures[row : row + 1]).expand(10)
            drawings = draw(model, host, sentences, sample.steps, sample.guidance_scale, seed=seed, memory=memory)
            pictures += [held_out.pictures[row], *drawings]
        labels = [style_words(held_out.measures[row]) for row in rows]
        grid(torch.stack(pictures), 11, self.run.path / "examples.png", labels, ["example", *sentences])
        traces = []
        for row in rows[:EXPLORED]:
            sentence, example = plain((int(held_out.classes[row]) + 1) % 10), held_out.pictures[row]
            memory = style_memory(self.encoder, example[None])
            traces += trace_drawing(model, host, sentence, sample.steps, seed=seed, memory=memory, example=example)
        inspect.save_traces(traces, self.run.path)


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
