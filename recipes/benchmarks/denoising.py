"""A denoising step with keys and values kept, against diffusers as it ships.

    python -m recipes.benchmarks denoising [--dtype float32 bfloat16]

A UNet built as that of Stable Diffusion with fewer channels, over 32 × 32 latents. The memory is what the
host's own cross-attention reads; "30 % full" gives diffusers the padding as an `encoder_attention_mask`. Under guidance
the rows come twice.
"""

from __future__ import annotations

import copy

import torch

import mmattn
from recipes.benchmarks.timing import interleaved, ratio

WIDTH = 768
# Slots, rows, share of real slots, and whether the rows come twice under guidance.
SIZES = tuple((slots, 1, fill, guided) for slots in (77, 1024, 4096) for fill in (1.0, 0.3) for guided in (False, True))
SIZES += tuple((slots, 8, fill, False) for slots in (77, 1024, 4096) for fill in (1.0, 0.3))
QUICK = ((77, 1, 1.0, False), (1024, 1, 0.3, True))


def make_unet(dtype: torch.dtype) -> torch.nn.Module:
    """A random UNet; its answers do not matter, its shape does."""
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return (
        UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(128, 256, 256),
            layers_per_block=1,
            cross_attention_dim=WIDTH,
            attention_head_dim=8,
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        )
        .to(dtype)
        .eval()
    )


@torch.no_grad()
def measure(
    slots: int, rows: int, fill: float, dtype: torch.dtype, guided: bool = False, seconds: float = 4.0
) -> dict[str, float]:
    """Time of a step for each unit of diffusers', and of a step that makes keys and values anew."""
    theirs = make_unet(dtype)
    model = mmattn.attach(copy.deepcopy(theirs)).use_core()
    rows = 2 * rows if guided else rows
    x, text = torch.randn(rows, 4, 32, 32, dtype=dtype), torch.randn(rows, slots, WIDTH, dtype=dtype)
    mask = None
    if fill < 1:
        lengths = (torch.rand(rows) * 0.5 + 0.75) * fill * slots
        mask = torch.arange(slots) < lengths.round().clamp(1, slots)[:, None]

    def made_anew() -> None:
        with model.condition(None, text_mask=mask):
            model.host(x, 10, text)

    with mmattn.Guidance(0).run(model, text, text_mask=mask) as predict:
        times = interleaved(
            {
                "diffusers": lambda: theirs(x, 10, text, encoder_attention_mask=mask),
                "kept once": lambda: predict(x, 10),
                "made at every step": made_anew,
            },
            seconds=seconds,
        )
    return {name: ratio(times, name, "diffusers") for name in times}
