"""Augmentation of memories in training."""

from __future__ import annotations

import torch

from mmattn.errors import ConfigError, ShapeError, check_float
from mmattn.memory import Memory


def augment_memory(memory: Memory, *, keep_fraction: float = 1.0, noise_std: float = 0.0, seed: int = 0) -> Memory:
    """A memory with random slots of each row left out, and with noise on the others.

    Args:
        memory: (b, m, e); without padding where slots are left out.
        keep_fraction: share of the slots that stay, at least one; different ones in each row.
        noise_std: standard deviation of the noise, in units of the standard deviation of each of the e features.
        seed: of the slots and the noise.

    Returns:
        A memory of another length where slots are left out, and then without segments, scores and sources.

    Raises:
        ConfigError: a fraction outside (0, 1], or a negative standard deviation.
        ShapeError: slots cannot be left out of a padded memory.
    """
    if not 0 < check_float("keep_fraction", keep_fraction) <= 1:
        raise ConfigError(f"keep_fraction must be above 0 and at most 1, got {keep_fraction}")
    check_float("noise_std", noise_std, at_least=0)
    tokens, generator = memory.tokens, torch.Generator(memory.device).manual_seed(seed)
    length = max(1, round(keep_fraction * memory.length))
    if length < memory.length:
        if memory.mask is not None:
            raise ShapeError(
                "slots are left out at random of memories without padding; give keep_fraction=1 for this one"
            )
        order = torch.rand(tokens.shape[:2], generator=generator, device=tokens.device).argsort(1)[:, :length]
        tokens = tokens.gather(1, order[..., None].expand(-1, -1, memory.dim))
    if noise_std:
        spread = tokens.flatten(0, 1).std(0) if tokens.shape[0] * tokens.shape[1] > 1 else torch.zeros(memory.dim)
        tokens = tokens + noise_std * spread * torch.randn(tokens.shape, generator=generator, device=tokens.device)
    if length < memory.length:
        return Memory(tokens, check_finite=False)
    return memory.replace(tokens)
