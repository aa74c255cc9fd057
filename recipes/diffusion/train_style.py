"""Stage B: the UNet frozen, adapters learn to follow the style of an example.

An example is never the picture to be drawn, nor of the same class: it is one of the pictures of other classes whose
measures are nearest. What both share is the style, so that is what the adapter can learn from it; what to draw is said
by the text alone.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn

import mmattn
from mmattn import training

from .attributes import Subject, asked_for
from .data import Pictures
from .denoise import denoising_loss, fit
from .models import Models
from .settings import Config
from .style import WIDTH, StyleEncoder

NEAREST = 8


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

    def __init__(self, wanted: int, text_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        hidden = round((wanted - 2 * WIDTH - text_dim) / (WIDTH + text_dim + 1))
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, text_dim)

    def forward(self, text: Tensor, mask: Tensor, memory: mmattn.Memory) -> tuple[Tensor, Tensor]:
        """Text (b, m + 16, e) and its mask; rows whose memory is left out keep their text alone."""
        slots = self.down(nn.functional.gelu(self.up(self.norm(memory.tokens))))
        real = torch.ones(slots.shape[:2], dtype=torch.bool) if memory.mask is None else memory.mask
        return torch.cat([text, slots], 1), torch.cat([mask, real], 1)


def train_style(
    config: Config,
    data: Pictures,
    subject: Subject,
    model: mmattn.hosts.AdaptedUNet,
    models: Models,
    encoder: StyleEncoder,
    trained: nn.Module,
    label: str,
    run: training.RunFolder | None = None,
) -> training.FitResult:
    """Train the model's adapter (`trained` is `model.adapters`) or a `Concatenated` on pairs of like style."""
    torch.manual_seed(config.seed)
    random, settings = Random(config.seed), config.optim
    memories = encoder.encode(data.pictures)

    def compute_loss(step: int) -> Tensor:
        rows = [random.randrange(len(data)) for _ in range(settings.batch_size)]
        near = nearest(data, rows)
        like = [int(one[random.randrange(len(one))]) for one in near]
        names = subject.attributes.names
        told = [asked_for(names, data.measures[row], random, 0.2) for row in rows]
        said = [subject.describe(int(data.classes[row]), one, random) for row, one in zip(rows, told, strict=True)]
        kept = (torch.rand(len(rows), 1) >= config.conditioning_dropout_prob)[:, 0].tolist()
        with torch.no_grad():
            text, mask = models.words([one if here else None for one, here in zip(said, kept, strict=True)])
        memory = memories[like].drop_rows(config.conditioning_dropout_prob)
        given = {"memory": memory}
        if isinstance(trained, Concatenated):
            (text, mask), given = trained(text, mask, memory), {}
        return denoising_loss(
            models.schedule,
            lambda noisy, times: model(noisy, times, text, text_mask=mask, **given).sample,
            models.encode(data.pictures[rows]),
            settings.min_snr,
        )

    trained.train().requires_grad_(True)
    fitted = fit(config, trained, compute_loss, label, run)
    trained.eval()
    return fitted
