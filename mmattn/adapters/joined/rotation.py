"""Rotations of a host's keys with their positions, inferred from one text at two places.

With rotary positions (arXiv 2104.09864, equation 34) the key of a token at position p is R(p) k: the key of the same
token at p + n is R(n) times that. Which of its channels are rotated, by which frequencies, and which two make a pair,
differs by family and by layer, and shows in the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import is_on_disk
from mmattn.errors import AttachError

#: By how many positions the text is moved: far enough that slow frequencies are told apart.
DISTANCE = 37
#: Position of a token beyond the length for which any host was trained.
BEYOND = 1 << 23
#: Relative errors of keys that were rotated, by bytes of a number.
WITHIN = {8: 1e-4, 4: 1e-4, 2: 3e-2}
#: Numbers that are rotated at once: on the CPU what its caches hold, on a device what bounds the memory it takes.
AT_ONCE, AT_ONCE_ON_DEVICE = 1 << 20, 1 << 26


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """Rotates keys by a number of positions; layers that rotate alike share the object."""

    frequencies: Tensor  # (k / 2,) angle of each pair for one position, in radians
    start: int = 0  # first of the channels that are rotated
    interleaved: bool = False  # neighbours make a pair; else a channel and the one half of the width further
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)  # frequencies by device

    def __call__(self, keys: Tensor, distance: Tensor | int) -> Tensor:
        """Rotate keys (…, m, k) by a distance (…, m), or one for all, in positions."""
        out = keys.clone()
        self._rotate(out, *self._turns(out, distance))
        return out

    def rotate_layers_(self, keys: Tensor, distance: Tensor) -> None:
        """Rotate keys of layers (layers, …, m, k) in place by a distance (…, m), the same in each layer."""
        turns = self._turns(keys, distance)
        at_once = AT_ONCE if keys.device.type == "cpu" else AT_ONCE_ON_DEVICE
        for layers in keys.split(max(1, at_once * len(keys) // max(keys.numel(), 1))):
            self._rotate(layers, *turns)

    def _turns(self, keys: Tensor, distance: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return the cosine and sine of each pair of channels (…, m, pairs)."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        if keys.device not in self._copies:
            self._copies[keys.device] = self.frequencies.to(keys.device).double()
        distance = distance[..., None].to(keys.device).double() if isinstance(distance, Tensor) else distance
        angle = distance * self._copies[keys.device]
        return angle.cos().to(wide), angle.sin().to(wide)

    def _rotate(self, keys: Tensor, cos: Tensor, sin: Tensor) -> None:
        start, count = self.start, len(self.frequencies)
        places = [slice(start, start + count), slice(start + count, start + 2 * count)]
        if self.interleaved:
            places = [slice(start + place, start + 2 * count, 2) for place in (0, 1)]
        first, second = (keys[..., place].to(cos.dtype) for place in places)
        turned = first * cos - second * sin, second * cos + first * sin
        for place, channels in zip(places, turned, strict=True):
            keys[..., place] = channels


#: By layer; None for a layer whose keys do not follow positions, and for all where keys follow them by no rotation.
Rotations = Mapping[int, KeyRotation | None] | None


def read_rotations(
    host: nn.Module,
    keys_at: Callable[[Tensor], Mapping[int, Tensor]],
    positions: Tensor,
    max_positions: int | None,
) -> Rotations:
    """Return the rotation of the keys of each layer with their positions."""
    length = positions.shape[1]
    distance = max(min(DISTANCE, (max_positions or length + DISTANCE) - length), 1)
    if is_on_disk(host):
        raise AttachError(
            f"the rotary frequencies of {type(host).__name__} are on the disk, and its keys are turned by them: leave "
            "offload_to_disk_path out, or attach before apply_group_offloading"
        )
    has_frequencies = any(name.endswith("inv_freq") for name, _ in host.named_buffers())
    longer = keys_at(torch.cat([positions, positions[:, :1] + BEYOND], 1)) if has_frequencies else {}
    unmoved, moved = keys_at(positions), keys_at(positions + distance)
    # Dynamic NTK scaling and LongRoPE (arXiv 2402.13753, section 3) change the frequencies of all positions once the
    # text is longer than in pretraining.
    if any(_error(keys[:, :, :length], unmoved[layer]) > WITHIN[keys.element_size()] for layer, keys in longer.items()):
        raise AttachError(
            f"the rotary frequencies of {type(host).__name__} change with the length of the text (dynamic NTK, "
            "LongRoPE): take a GatedAdapter for this host"
        )
    rotations: dict[int, KeyRotation | None] = {}
    candidates: dict[int, list[KeyRotation]] = {}
    for layer, keys in unmoved.items():
        errors: list[tuple[float, KeyRotation | None]] = [(_error(keys, moved[layer]), None)]
        width = keys.shape[-1]
        if width not in candidates:
            candidates[width] = list(_candidates(host, width))
        for candidate in candidates[width]:
            errors.append((_error(candidate(keys, distance), moved[layer]), candidate))
        error, rotation = min(errors, key=lambda pair: pair[0])
        if not error <= WITHIN[keys.element_size()]:
            return None
        rotations[layer] = rotation
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
