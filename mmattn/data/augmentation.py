"""Augmentation of memories in training."""

from __future__ import annotations

import torch
from torch import Tensor

from mmattn.errors import ConfigError, ShapeError, check_float
from mmattn.memory import Memory


def augment_memory(memory: Memory, *, keep_fraction: float = 1.0, noise_std: float = 0.0, seed: int = 0) -> Memory:
    """A memory with random slots of each row left out, and with noise on the others.

    Args:
        memory: (b, m, e); without padding where slots are left out.
        keep_fraction: share of the slots that stay, at least one; different ones in each row.
        noise_std: standard deviation of the noise, in units of the standard deviation of each of the e features.
        seed: of the slots and the noise.

    Raises:
        ConfigError: a fraction outside (0, 1], or a negative standard deviation.
        ShapeError: slots cannot be left out of a padded memory.
    """
    if not 0 < check_float("keep_fraction", keep_fraction) <= 1:
        raise ConfigError(f"keep_fraction must be above 0 and at most 1, got {keep_fraction}")
    check_float("noise_std", noise_std, at_least=0)
    generator = torch.Generator(memory.device).manual_seed(seed)
    length = max(1, round(keep_fraction * memory.length))
    if length < memory.length:
        if memory.mask is not None:
            raise ShapeError("slots are left out at random of memories without padding; give keep_fraction=1 here")
        shape = (memory.batch, memory.length)
        order = torch.rand(shape, generator=generator, device=memory.device).argsort(1)[:, :length]
        memory = _slots(memory, order)
    if noise_std:
        tokens = memory.tokens
        # Padding, whatever lies in it, has no part in how large the noise is.
        real = tokens.flatten(0, 1) if memory.mask is None else tokens[memory.mask]
        spread = real.std(0) if len(real) > 1 else torch.zeros_like(tokens[0, 0])
        noise = torch.randn(tokens.shape, generator=generator, device=tokens.device)
        memory = memory.replace(tokens + noise_std * spread * noise)
    return memory


def _slots(memory: Memory, order: Tensor) -> Memory:
    """The slots (b, n) of each row."""

    def chosen(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.gather(1, order)

    sources = memory.sources
    if sources is not None:
        sources = [[row[slot] for slot in slots] for row, slots in zip(sources, order.tolist(), strict=True)]
    tokens = memory.tokens.gather(1, order[..., None].expand(-1, -1, memory.dim))
    return Memory(
        tokens, None, chosen(memory.segments), chosen(memory.scores), sources, check_finite=memory.finite_checked
    )
