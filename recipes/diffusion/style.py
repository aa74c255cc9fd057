"""A small encoder of handwriting style, trained here: a picture to a memory of 16 patches."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mmattn
from mmattn import training

from .data import Pictures

WIDTH = 64
SEEN = 32  # larger pictures are scaled down to it


class StyleEncoder(nn.Module):
    """Pictures (b, c, size, size) to 4 × 4 patches, trained on the measures of the pictures."""

    def __init__(self, channels: int = 1, measures: int = 3) -> None:
        super().__init__()
        widths = (channels, 32, 64, WIDTH)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.GELU(), nn.AvgPool2d(2)]
        self.body = nn.Sequential(*layers[:-1], nn.AdaptiveAvgPool2d(4))
        self.head = nn.Linear(WIDTH, measures)

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> mmattn.Memory:
        """A memory (b, 16, 64), on the device of the encoder."""
        pictures = pictures.to(self.head.weight.device)
        return mmattn.Memory(self.body(small(pictures)).flatten(2).transpose(1, 2))

    def forward(self, pictures: Tensor) -> Tensor:
        """The measures (b, 3), predicted from the mean of the patches."""
        return self.head(self.body(small(pictures)).mean((2, 3)))


def small(pictures: Tensor) -> Tensor:
    """Pictures no larger than the encoder reads."""
    return F.adaptive_avg_pool2d(pictures, SEEN) if pictures.shape[-1] > SEEN else pictures


def train_encoder(data: Pictures, steps: int, seed: int, progress: bool) -> StyleEncoder:
    """Train it on the measures of the training pictures, moved by up to a pixel."""
    torch.manual_seed(seed)
    encoder = StyleEncoder(data.pictures.shape[1], data.measures.shape[1]).train()

    groups = training.parameter_groups(encoder, 2e-3, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    learning_rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: training.learning_rate_factor(step, steps, 50)
    )
    for _ in training.tracked(steps, "style encoder", progress):
        rows = torch.randint(0, len(data), (128,))
        down, right = torch.randint(-1, 2, (2,)).tolist()
        pictures = torch.roll(data.pictures[rows], (down, right), (2, 3))
        optimizer.zero_grad()
        F.mse_loss(encoder(pictures), data.measures[rows]).backward()
        torch.nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        optimizer.step()
        learning_rate.step()
    return encoder.eval().requires_grad_(False)


def save_encoder(encoder: StyleEncoder, path: Path) -> None:
    """Write it in half precision."""
    save_file({name: value.half().contiguous() for name, value in encoder.state_dict().items()}, path)


def load_encoder(path: Path) -> StyleEncoder:
    """Read what `save_encoder` wrote."""
    state = {name: value.float() for name, value in load_file(path).items()}
    encoder = StyleEncoder(state["body.0.weight"].shape[1], len(state["head.bias"]))
    encoder.load_state_dict(state)
    return encoder.eval().requires_grad_(False)
