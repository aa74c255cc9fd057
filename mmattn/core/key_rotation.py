"""How a host rotates the keys of its attention with their positions, inferred by reading one text at two places.

With rotary positions (arXiv 2104.09864, equation 34) the key of a token at position p is R(p) k: the key of the same
token at p + n is R(n) times that. Which of its channels are rotated, by which frequencies, and which two make a pair,
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
#: Relative errors of keys that were rotated, by bytes of a number.
WITHIN = {8: 1e-4, 4: 1e-4, 2: 3e-2}


@dataclass(frozen=True)
class KeyRotation:
    """Rotates keys by a number of positions.

    Args:
        frequencies: (k / 2,) angle of each pair for one position, in radians.
        start: first of the channels that are rotated.
        interleaved: neighbours make a pair; else a channel and the one half of the width further.
    """

    frequencies: Tensor
    start: int = 0
    interleaved: bool = False

    def __call__(self, keys: Tensor, distance: Tensor | int) -> Tensor:
        """Rotate keys (…, m, k) by a distance (…, m), or one for all, in positions."""
        channels = slice(self.start, self.start + 2 * len(self.frequencies))
        wide = torch.promote_types(keys.dtype, torch.float32)
        pairs = keys[..., channels].to(wide)
        distance = torch.as_tensor(distance, device=keys.device)
        angle = distance[..., None].double() * self.frequencies.to(keys.device).double()
        cos, sin = angle.cos().to(wide), angle.sin().to(wide)
        first, second = (pairs[..., ::2], pairs[..., 1::2]) if self.interleaved else pairs.chunk(2, -1)
        rotated = first * cos - second * sin, second * cos + first * sin
        out = keys.clone()
        out[..., channels] = (torch.stack(rotated, -1).flatten(-2) if self.interleaved else torch.cat(rotated, -1)).to(
            out
        )
        return out


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
        if _error(longer[layer][:, :, : one.shape[2]], one) > WITHIN[one.element_size()]:
            raise AttachError(
                f"the rotary frequencies of {name} change with the length of the text (dynamic NTK, LongRoPE), so keys "
                "read before it would not fit a longer one: take a GatedAdapter for this host"
            )


def find_rotations(
    host: nn.Module, here: Mapping[int, Tensor], there: Mapping[int, Tensor], distance: int = DISTANCE
) -> dict[int, KeyRotation | None] | None:
    """Return the rotation of each layer, None for a layer without one; None where no rotation explains the keys.

    Args:
        host: the model.
        here: keys (b, g, m, k) of a text by layer.
        there: those of the same text at later positions.
        distance: by how many positions.
    """
    rotations: dict[int, KeyRotation | None] = {}
    for layer, keys in here.items():
        tried: list[tuple[float, KeyRotation | None]] = [(_error(keys, there[layer]), None)]
        tried += [(_error(one(keys, distance), there[layer]), one) for one in _candidates(host, keys.shape[-1])]
        error, rotations[layer] = min(tried, key=lambda one: one[0])
        if not error <= WITHIN[keys.element_size()]:
            return None
    return rotations


def _error(keys: Tensor, expected: Tensor) -> float:
    expected = expected.float()
    return float((keys.float() - expected).norm() / expected.norm().clamp(min=1e-30))


def _candidates(host: nn.Module, width: int) -> Iterator[KeyRotation]:
    """Yield every rotation of keys of a width that the frequencies of a host allow."""
    different: list[Tensor] = []
    for name, frequencies in host.named_buffers():
        size = 2 * frequencies.numel()
        if not name.endswith("inv_freq") or frequencies.dim() != 1 or size > width:
            continue
        if any(one.shape == frequencies.shape and torch.equal(one, frequencies) for one in different):
            continue
        different.append(frequencies)
        for start in sorted({0, width - size}):
            for interleaved in (False, True):
                yield KeyRotation(frequencies.detach().float().cpu(), start, interleaved)
