"""Stage B: the UNet frozen, adapters learn to follow the style of an example digit.

An example is never the picture to be drawn, nor the same digit: it is one of the pictures of other digits whose
measures are nearest. What both share is the style, so that is what the adapter can learn from it; which digit to write
stands in the text alone.
"""

from __future__ import annotations

from random import Random

import torch
from denoise import denoising_loss, fit
from digits import Digits, asked_for, describe
from models import WIDTH as TEXT_WIDTH, Words, noise_schedule
from settings import Config
from style import WIDTH, StyleEncoder
from torch import Tensor, nn

import mmattn
from mmattn import training

NEAREST = 8


def examples(data: Digits) -> Tensor:
    """For each picture the numbers (n, NEAREST) of pictures of other digits nearest in their measures."""
    distance = torch.cdist(data.measures, data.measures)
    distance[data.digits[:, None] == data.digits[None]] = float("inf")
    return distance.topk(NEAREST, largest=False).indices


class Concatenated(nn.Module):
    """The other way, as a control: the example as more words behind the text, read by the host's own projections.

    Has as many trained parameters as `wanted`, to within one hidden unit.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        hidden = round((wanted - 2 * WIDTH - TEXT_WIDTH) / (WIDTH + TEXT_WIDTH + 1))
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, TEXT_WIDTH)

    def forward(self, text: Tensor, mask: Tensor, memory: mmattn.Memory) -> tuple[Tensor, Tensor]:
        """Text (b, m + 16, e) and its mask; rows whose memory is left out keep their text alone."""
        slots = self.down(nn.functional.gelu(self.up(self.norm(memory.tokens))))
        real = torch.ones(slots.shape[:2], dtype=torch.bool) if memory.mask is None else memory.mask
        return torch.cat([text, slots], 1), torch.cat([mask, real], 1)


def train_style(
    config: Config,
    data: Digits,
    model: mmattn.hosts.UNet,
    words: Words,
    encoder: StyleEncoder,
    trained: nn.Module,
    label: str,
    run: training.RunFolder | None = None,
) -> training.Fitted:
    """Train the model's adapter (`trained` is `model.adapters`) or a `Concatenated` on pairs of like style."""
    torch.manual_seed(config.seed)
    random, settings, near = Random(config.seed), config.optim, examples(data)
    memories = encoder.encode(data.pictures)
    scheduler = noise_schedule()

    def loss_at(step: int) -> Tensor:
        rows = [random.randrange(len(data)) for _ in range(settings.batch)]
        like = [int(near[row, random.randrange(NEAREST)]) for row in rows]
        said = [describe(int(data.digits[row]), asked_for(data.measures[row], random, 0.2), random) for row in rows]
        with torch.no_grad():
            text, mask = words(said)
        mask = mask & (torch.rand(len(mask), 1) >= config.drop)
        memory = memories[like].drop(config.drop)
        given = {"memory": memory}
        if isinstance(trained, Concatenated):
            (text, mask), given = trained(text, mask, memory), {}
        return denoising_loss(
            scheduler,
            lambda noisy, times: model(noisy, times, text, text_mask=mask, **given).sample,
            data.pictures[rows],
            settings.min_snr,
        )

    trained.train().requires_grad_(True)
    fitted = fit(config, trained, loss_at, label, run)
    trained.eval()
    return fitted
