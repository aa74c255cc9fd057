"""Keys and values of entries in 8 or 4 bits: keys with a scale for each channel, values with one for each slot.

A number x is an integer code c times a scale s that it shares with others (arXiv 2402.02750, section 3, without the
offsets):

    s = max |x| / c_max,    c = round(x / s),    |x - c s| <= s / 2.

Keys have channels that are large in every slot, values have none. A scale never reaches beyond its entry, so that
writing one entry changes no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mmattn.core.paged_cache import side_by_side

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[str, ...] = get_args(Quantization)

# Keys of shorter entries have a scale for each slot: one for each channel would hold for too few numbers.
CHANNEL_SLOTS = 16


@dataclass(frozen=True)
class QuantizedPages:
    """Tables of codes, keys and values in one, and of their scales.

    Args:
        quantization: "int8", codes (·, 2g, m, k), or "int4", bytes (·, g, m, k) of a value's code and a key's.
    """

    quantization: Quantization
    parts: ClassVar[tuple[str, ...]] = ("codes", "key_scales", "value_scales")

    def encode(self, keys: Tensor, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Rows of the tables for some entries.

        Args:
            keys: (n, g, m, k).
            values: (n, g, m, k).
            mask: (n, m) bool; the padding has no say in the scales.
        """
        keys, values = (numbers.masked_fill(~mask[:, None, :, None], 0) for numbers in (keys, values))
        largest = 127 if self.quantization == "int8" else 7
        key_codes, key_scales = quantize(keys, 2 if keys.shape[2] >= CHANNEL_SLOTS else 3, largest)
        value_codes, value_scales = quantize(values, 3, largest)
        if self.quantization == "int8":
            codes = torch.cat([key_codes, value_codes], 1)
        else:
            codes = (value_codes << 4) | (key_codes & 15)
            # `gather` reads a code of four bits as 16 times what it is.
            key_scales, value_scales = key_scales / 16, value_scales / 16
        return {"codes": codes, "key_scales": key_scales, "value_scales": value_scales}

    def gather(
        self, tables: Mapping[str, Tensor], rows: Tensor, real: Tensor | None, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of some entries, as `side_by_side` lays them out.

        Args:
            tables: of a layer, by the names in `parts`.
            rows: (b, n), which entries.
            real: (b, n·m) bool, which slots; None for all.
            device: of keys and values.
            dtype: of keys and values.
        """
        codes, slots = side_by_side(tables["codes"], rows, real), tables["codes"].shape[2]
        if self.quantization == "int4":
            codes = torch.cat([codes << 4, codes & -16], 1)
        keys, values = codes.to(device, dtype).chunk(2, 1)
        multiply(keys, tables["key_scales"], rows, real, slots)
        multiply(values, tables["value_scales"], rows, real, slots)
        return keys, values


def quantize(numbers: Tensor, over: int, largest: int) -> tuple[Tensor, Tensor]:
    """Codes int8 of the shape of `numbers`, and their scales bfloat16 with size 1 in dimension `over`.

    Args:
        numbers: floats of any shape.
        over: the dimension along which a scale is shared.
        largest: the largest code.
    """
    numbers = numbers.float()
    # In bfloat16, as far-reaching as float32; the codes are those of the scale as it is stored.
    scales = (numbers.abs().amax(over, keepdim=True) / largest).clamp(min=2.0**-120).bfloat16()
    return (numbers / scales).round().clamp(-largest, largest).to(torch.int8), scales


def multiply(codes: Tensor, scales: Tensor, rows: Tensor, real: Tensor | None, slots: int) -> None:
    """Multiply codes of entries side by side with their scales, in place.

    Args:
        codes: (b, g, n·m, k), or packed (1, g, r, k).
        scales: the table, (·, g, m, 1) by slot or (·, g, 1, k) by channel.
        rows: (b, n), which entries.
        real: (b, n·m) bool, which slots; None for all.
        slots: m.
    """
    if scales.shape[2] == slots:
        codes.mul_(side_by_side(scales, rows, real).to(codes.device))
    elif real is None:
        by_entry = side_by_side(scales, rows, None).to(codes.device)
        codes.unflatten(2, (rows.shape[1], slots)).mul_(by_entry.unsqueeze(3))
    else:
        row, slot = real.to(rows.device).nonzero().unbind(1)
        codes.mul_(side_by_side(scales, rows[row, slot // slots][None], None).to(codes.device))
