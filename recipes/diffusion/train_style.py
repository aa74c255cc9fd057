"""Stage B: the UNet or transformer frozen, adapters learn to follow the style of an example.

An example is never the picture to be drawn, nor of the same class: it is one of the pictures of other classes whose
measures are nearest. What both share is the style, so that is what the adapter can learn from it; what to draw is said
by the text alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import mmattn
from mmattn import training
from mmattn.encoders import StyleEncoder
from mmattn.pipelines import DiffusionHost

from .attributes import Subject, asked_for
from .data import Pictures
from .models import Denoiser, denoising_loss, predict
from .settings import Config
from .style import style_memory

NEAREST = 8


@dataclass(frozen=True)
class Row:
    """A picture to draw with an example beside it: their numbers, what is said, and the noise at a time step."""

    picture: int
    example: int
    sentence: str | None
    sees_example: bool
    noise: Tensor
    time: int


def nearest(data: Pictures, rows: list[int]) -> Tensor:
    """For each row the numbers (b, n) of the at most NEAREST pictures of other classes nearest in their measures."""
    distance = torch.cdist(data.measures[rows], data.measures)
    same = data.classes[rows, None] == data.classes[None]
    fewest = int((~same).sum(1).min())
    return distance.masked_fill(same, float("inf")).topk(min(NEAREST, fewest), largest=False).indices


class Concatenated(nn.Module):
    """The other way, as a control: the example as more words after the text, read by the host's own projections.

    Has as many trained parameters as `wanted`, to within one hidden unit.
    """

    def __init__(self, wanted: int, text_dim: int, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        hidden = round((wanted - 2 * width - text_dim) / (width + text_dim + 1))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, text_dim)

    def forward(self, text: Tensor, mask: Tensor, memory: mmattn.Memory) -> tuple[Tensor, Tensor]:
        """Text (b, m + 16, e) and its mask; rows whose memory is left out keep their text alone."""
        slots = self.down(nn.functional.gelu(self.up(self.norm(memory.tokens))))
        real = torch.ones_like(slots[..., 0], dtype=torch.bool) if memory.mask is None else memory.mask
        return torch.cat([text, slots], 1), torch.cat([mask, real], 1)


def train_style(
    config: Config,
    data: Pictures,
    subject: Subject,
    model: Denoiser,
    host: DiffusionHost,
    encoder: StyleEncoder,
    trained: nn.Module,
    label: str,
    run: training.RunFolder,
    accelerator: Any,
    generator: torch.Generator,
) -> tuple[training.TrainingResult, list[tuple[int, float]]]:
    """Train the adapters of `model`, or a `Concatenated`, on the same rows; what was done, and the losses by step."""
    memories, settings = style_memory(encoder, data.pictures), config.optim

    def batches() -> Iterator[list[Row]]:
        random = Random(config.seed)
        seen, names = host.unet.config, subject.attributes.names
        count, shape = settings.batch_size, (seen.in_channels, seen.sample_size, seen.sample_size)
        while True:
            rows = [random.randrange(len(data)) for _ in range(count)]
            examples = [int(one[random.randrange(len(one))]) for one in nearest(data, rows)]
            told = [asked_for(names, data.measures[row], random, 0.2) for row in rows]
            said = [subject.describe(int(data.classes[row]), one, random) for row, one in zip(rows, told, strict=True)]
            reads, sees = (
                (torch.rand(count, generator=generator) >= config.conditioning_dropout_prob).tolist() for _ in range(2)
            )
            noise = torch.randn(count, *shape, generator=generator)
            times = torch.randint(0, host.schedule.config.num_train_timesteps, (count,), generator=generator)
            said = [one if here else None for one, here in zip(said, reads, strict=True)]
            yield [Row(*one) for one in zip(rows, examples, said, sees, noise, times.tolist(), strict=True)]

    def loss(rows: Sequence[Row], seeds: Sequence[int]) -> tuple[Tensor, int]:
        device = accelerator.device
        said = [row.sentence for row in rows]
        with torch.no_grad():
            (text, mask), inputs = host.prompts(said), host.inputs(said)
        tokens = memories.tokens[[row.example for row in rows]]
        sees = torch.tensor([row.sees_example for row in rows], device=device)
        memory: mmattn.Memory | None = mmattn.Memory(tokens, sees[:, None].expand(tokens.shape[:2]))
        if isinstance(trained, Concatenated):
            (text, mask), memory = trained(text, mask, memory), None
        errors = denoising_loss(
            host.schedule,
            lambda noisy, times: predict(model, noisy, times, text, mask, inputs, memory),
            host.encode(data.pictures[[row.picture for row in rows]]),
            torch.stack([row.noise for row in rows]).to(device),
            torch.tensor([row.time for row in rows], device=device),
            settings.min_snr,
        )
        return errors.sum(), len(rows)

    losses: list[tuple[int, float]] = []

    def log(**figures: Any) -> None:
        losses.append((figures["step"], figures["loss"]))
        run.log(model=label, **figures)

    learning = training.TrainingConfig(
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        warmup_steps=settings.warmup_steps,
        max_grad_norm=settings.max_grad_norm,
        seed=config.seed,
    )
    done = training.train(
        trained.requires_grad_(True),
        loss,
        batches(),
        learning,
        accelerator,
        log=log,
        label=label,
        progress=config.progress,
    )
    if done.interrupted:
        raise KeyboardInterrupt
    return done, losses
