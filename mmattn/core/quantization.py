"""Numbers in 8 bits: an integer code c times a scale s that several numbers share (arXiv 2402.02750, section 3).

s = max |x| / c_max,    c = round(x / s),    |x - c s| <= s / 2.
"""

from __future__ import annotations

import torch
from torch import Tensor


def quantize(numbers: Tensor, over: int, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Return codes int8 of the shape of `numbers`, and their scales bfloat16 with size 1 in dimension `over`."""
    numbers = numbers.float()
    # In bfloat16, as far-reaching as float32; the codes are those of the scale as it is stored.
    scales = (numbers.abs().amax(over, keepdim=True) / largest).clamp(min=2.0**-120).bfloat16()
    return (numbers / scales).round().clamp(-largest, largest).to(torch.int8), scales
