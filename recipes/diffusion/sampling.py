"""From sentences, and a memory to look at, to pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from models import Words, sampler
from torch import Tensor

import mmattn
from mmattn import training


@torch.no_grad()
def draw(
    model: mmattn.hosts.UNet,
    words: Words,
    sentences: Sequence[str],
    steps: int,
    w: float,
    *,
    seed: int,
    memory: mmattn.Memory | None = None,
    strength: Any = 1.0,
    concatenated: Any = None,
    progress: bool = False,
) -> Tensor:
    """Pictures (b, 1, size, size) from -1 to 1, one for each sentence; equal seeds start from equal noise.

    Args:
        w: guidance; diffusers' guidance_scale is 1 + w. memory, strength: an example for each sentence.
        concatenated: put the memory behind the text with this module instead.
    """
    scheduler = sampler(steps)
    text, mask = words(list(sentences))
    if concatenated is not None:
        (text, mask), memory = concatenated(text, mask, memory), None
    size = model.host.config.sample_size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sentences), 1, size, size, generator=generator)
    guidance = mmattn.Guidance(w)
    with guidance.run(model, text, text_mask=mask, memory=memory, strength=strength) as predict:
        for index in training.tracked(len(scheduler.timesteps), "drawing", progress):
            time = scheduler.timesteps[index]
            # Guidance overshoots: the noise must be that of the clipped picture, or the next step starts from neither.
            x = scheduler.step(predict(x, time), time, x, use_clipped_model_output=True).prev_sample
    return x.clamp(-1, 1)
