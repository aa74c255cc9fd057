"""How a host turns the keys of its attention with their positions, found by reading one text at two places.

With rotary positions (arXiv 2104.09864, equation 34) the key of a token at position p is R(p) k: the key of the same
token at p + n is R(n) times that. Which of its channels are turned, by which frequencies, and which two make a pair,
differs by family and by layer, and shows in the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmattn.errors import AttachError

#: By how many positions the text is moved: far enough that slow frequencies are told apart.
DISTANCE = 37
#: Position of a token beyond the length for which any host was trained.
BEYOND = 1 << 23
#: Relative errors of keys that were turned, by bytes of a number.
WITHIN = {8: 1e-4, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class KeyRotation:
    """Turns keys by a number of positions.

    Args:
        frequencies: (k / 2,) angle of each pair for one position, in radians.
        start: first of the channels that are turned.
        interleaved: neighbours make a pair; else a channel and the one half of the width further.
    """

    frequencies: Tensor
    start: int = 0
    interleaved: bool = False

    def __call__(self, keys: Tensor, distance: Tensor | int) -> Tensor:
        """Keys as they are at later positions, in their dtype.

        Args:
            keys: (…, m, k).
            distance: by how many positions, (…, m) or for all.
        """
        width = 2 * len(self.frequencies)
        wide = torch.promote_types(keys.dtype, torch.float32)
        turned = keys[..., self.start : self.start + width].to(wide)
        distance = torch.as_tensor(distance, device=keys.device)
        angle = distance[..., None].double() * self.frequencies.to(keys.device).double()
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        pairs = first * cos - second * sin, second * cos + first * sin
        turned = torch.stack(pairs, -1).flatten(-2) if self.interleaved else torch.cat(pairs, -1)
        out = keys.clone()
        out[..., self.start : self.start + width] = turned.to(keys.dtype)
        return out


def candidates(host: nn.Module, width: int) -> Iterator[KeyRotation]:
    """Every rotation that the frequencies of a host allow.

    Args:
        host: the model.
        width: k, of a key.
    """
    seen: list[Tensor] = []
    for name, frequencies in host.named_buffers():
        size = 2 * frequencies.numel()
        if not name.endswith("inv_freq") or frequencies.dim() != 1 or size > width:
            continue
        if any(one.shape == frequencies.shape and torch.equal(one, frequencies) for one in seen):
            continue
        seen.append(frequencies)
        for start in sorted({0, width - size}):
            for interleaved in (False, True):
                yield KeyRotation(frequencies.detach().float().cpu(), start, interleaved)


def has_frequencies(model: nn.Module) -> bool:
    """Return whether a model computes rotary positions from frequencies."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())


def check_frequencies(name: str, keys: Mapping[int, Tensor], longer: Mapping[int, Tensor]) -> None:
    """Refuse a model whose keys depend on the length of the text after them.

    Dynamic NTK scaling and LongRoPE (arXiv 2402.13753, section 3) change the frequencies of all positions once the text
    is longer than in pretraining.

    Args:
        name: class of the model.
        keys: (b, g, m, k) of a text by layer.
        longer: (b, g, m + 1, k), the same with one more token at position `BEYOND`.

    Raises:
        AttachError: the keys of the text differ.
    """
    for layer, one in keys.items():
        wanted, found = one.float(), longer[layer][:, :, : one.shape[2]].float()
        if (found - wanted).norm() / wanted.norm().clamp(min=1e-30) > WITHIN[one.element_size()]:
            raise AttachError(
                f"the rotary frequencies of {name} change with the length of the text (dynamic NTK, LongRoPE), so keys "
                "read before it would not fit a longer one: take a GatedAdapter for this host"
            )


def find_rotations(
    host: nn.Module, here: Mapping[int, Tensor], there: Mapping[int, Tensor], distance: int = DISTANCE
) -> dict[int, KeyRotation | None] | None:
    """How each layer turns its keys, None for a layer that does not; None where keys follow positions in no such way.

    Args:
        host: the model.
        here: keys (b, g, m, k) of a text by layer.
        there: those of the same text at later positions.
        distance: by how many positions.
    """
    found: dict[int, KeyRotation | None] = {}
    for layer, keys in here.items():
        most, wanted = WITHIN[keys.element_size()], there[layer].float()

        def error(turned: Tensor, wanted: Tensor = wanted) -> float:
            return float((turned.float() - wanted).norm() / wanted.norm().clamp(min=1e-30))

        ways: list[tuple[float, KeyRotation | None]] = [(error(keys), None)]
        ways += [(error(one(keys, distance)), one) for one in candidates(host, keys.shape[-1])]
        best, rotation = min(ways, key=lambda way: way[0])
        if not best <= most:
            return None
        found[layer] = rotation
    return found
