"""How strongly an adapter speaks in one call: a number, or one for each sample, step, block or pixel.

A strength is one of

* a number; 0 is exactly nothing;
* a tensor (b,), one for each row of the memory;
* a tensor (b, height, width), a map over the picture, of any size but of the picture's aspect ratio;
* a mapping from the beginnings of block names ("down", "mid", "up_blocks.1", ...) to strengths: the longest that fits
  counts, blocks that none fits get 0 (as in diffusers' `set_ip_adapter_scale`);
* a function of the time step, called once per step, giving any of these (a schedule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.errors import ConditionError, ConfigError, NonFiniteError, ShapeError, check_float

Strength = float | Tensor | Mapping[str, Any] | Callable[[float], Any]
Fixed = float | Tensor | Mapping[str, Any]

# How far height / width of a map may be from the picture's: pixels are rounded to latents.
ASPECT = 0.02


def check_strength(given: Any, places: Sequence[str], rows: int) -> Strength:
    """A strength that can be used for a memory of `rows` rows on a host whose attention layers have these names.

    Raises:
        ConfigError: of another kind, or a block that the host lacks. ShapeError: other rows. NonFiniteError: NaN.
    """
    if isinstance(given, Mapping):
        for prefix in given:
            if not isinstance(prefix, str) or not any(place.startswith(prefix) for place in places):
                raise ConfigError(f"strength names {prefix!r}, and no attention layer begins so; there are: {places}")
        return {prefix: check_strength(inner, places, rows) for prefix, inner in given.items()}
    if callable(given) and not isinstance(given, Tensor):
        return given
    if not isinstance(given, Tensor):
        return check_float("strength", given)
    if not given.is_floating_point():
        raise ConfigError(f"strength must be floating point, got {given.dtype}")
    if given.dim() == 0:
        return check_float("strength", given.item())
    if given.dim() not in (1, 3) or given.shape[0] != rows or 0 in given.shape[1:]:
        raise ShapeError(
            f"strength must be a number, (b,) or (b, height, width) with b = {rows} rows of memory; got "
            f"{tuple(given.shape)}"
        )
    if not bool(torch.isfinite(given).all()):
        raise NonFiniteError("strength holds NaN or infinity")
    return given


def at_step(strength: Strength, timestep: Tensor | float, places: Sequence[str], rows: int) -> Fixed:
    """The strength at one time step: schedules called, what they give checked."""
    if isinstance(strength, Mapping):
        return {prefix: at_step(inner, timestep, places, rows) for prefix, inner in strength.items()}
    if callable(strength) and not isinstance(strength, Tensor):
        return at_step(check_strength(strength(first_time(timestep)), places, rows), timestep, places, rows)
    return strength


def first_time(timestep: Tensor | float) -> float:
    """The time step as a number; rows of a batch that stand at different times have no schedule.

    Raises:
        ConditionError: they differ.
    """
    if not isinstance(timestep, Tensor):
        return float(timestep)
    if timestep.numel() > 1 and not bool((timestep == timestep.flatten()[0]).all()):
        raise ConditionError("a strength that follows the time step needs one time step for all rows, as in sampling")
    return float(timestep.flatten()[0])


def at_place(strength: Fixed, place: str) -> float | Tensor:
    """The strength in one attention layer."""
    if not isinstance(strength, Mapping):
        return strength
    fitting = [prefix for prefix in strength if place.startswith(prefix)]
    return at_place(strength[max(fitting, key=len)], place) if fitting else 0.0


def check_aspect(strength: Any, height: int, width: int) -> None:
    """Refuse maps over another picture.

    Raises:
        ShapeError: a map whose height / width is not that of the picture.
    """
    if isinstance(strength, Mapping):
        for inner in strength.values():
            check_aspect(inner, height, width)
    if isinstance(strength, Tensor) and strength.dim() == 3:
        own = strength.shape[1:]
        if abs(math.log(own[0] * width / (own[1] * height))) > ASPECT:
            raise ShapeError(
                f"strength is a map of {own[0]} × {own[1]} and the picture is {height} × {width}: another aspect ratio"
            )


def over_queries(strength: float | Tensor, size: tuple[int, int], like: Tensor) -> float | Tensor:
    """What the heads `like` (b, l, h · k) are multiplied by: a number, (b, 1, 1) or (b, l, 1).

    Args:
        size: height and width of the picture at the host's edge; l is a level of its pyramid of halves.

    Raises:
        ShapeError: l is no such level.
    """
    if not isinstance(strength, Tensor):
        return strength
    strength = strength.to(like.device, like.dtype)
    if strength.dim() == 1:
        return strength[:, None, None]
    height, width = size
    while height * width > like.shape[1]:
        height, width = (height + 1) // 2, (width + 1) // 2
    if height * width != like.shape[1]:
        raise ShapeError(f"{like.shape[1]} pixels are no halving of a picture of {size[0]} × {size[1]}")
    level = F.interpolate(strength[:, None], size=(height, width), mode="area")
    return level.flatten(2).transpose(1, 2)
