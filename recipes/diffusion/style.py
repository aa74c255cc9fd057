"""The encoder of style, trained here on the measures of the pictures."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import training
from mmattn.encoders import StyleEncoder, StyleNetwork

from .attributes import INK, Attributes
from .data import Pictures


@torch.no_grad()
def style_memory(encoder: StyleEncoder, pictures: Tensor) -> mmattn.Memory:
    """A memory (b, 16, 64) of pictures (b, c, size, size) from -1 to 1, on the device of the encoder."""
    return mmattn.Memory(encoder.features(pictures.to(encoder.device)).flatten(2).transpose(1, 2))


def train_encoder(data: Pictures, attributes: Attributes, steps: int, seed: int, progress: bool) -> StyleEncoder:
    """Train it on the measures of the training pictures, moved by up to a pixel."""
    torch.manual_seed(seed)
    network = StyleNetwork(data.pictures.shape[1], data.measures.shape[1]).train()

    groups = training.parameter_groups(network, 2e-3, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))
    learning_rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: training.learning_rate_factor(step, steps, 50)
    )
    for _ in training.tracked(steps, "style encoder", progress):
        rows = torch.randint(0, len(data), (128,))
        down, right = torch.randint(-1, 2, (2,)).tolist()
        pictures = torch.roll(data.pictures[rows], (down, right), (2, 3))
        optimizer.zero_grad()
        F.mse_loss(network(pictures), data.measures[rows]).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        learning_rate.step()
    return StyleEncoder(network, data.pictures.shape[-1], attributes is INK)
