"""`adapter_scale` of a diffusion model: the factor of an adapter's result, by row, timestep, block, pixel or frame.

It is one of

* a number; 0 is exactly nothing;
* a tensor (b,), one for each row of the memory;
* a tensor (b, height, width), a map over the picture, of any size but of the picture's aspect ratio;
* a tensor (b, frames, height, width), such a map for each frame of a film, in any number of frames;
* a mapping from the beginnings of block names ("down", "up_blocks.1", "transformer_blocks.3", ...) to
  adapter_scales: the longest that fits counts, blocks that none fits get 0 (as in diffusers' `set_ip_adapter_scale`);
* a function of the timestep, called once per step, that returns any of these (a schedule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from mmattn.core.tracing import refuse_unless_finite
from mmattn.errors import ConditionError, ConfigError, NonFiniteError, ShapeError, check_float

AdapterScale: TypeAlias = "float | Tensor | Mapping[str, AdapterScale] | Callable[[float], AdapterScale]"
#: At one timestep.
Fixed: TypeAlias = "float | Tensor | Mapping[str, Fixed]"
#: Frames, height and width of a picture or film.
Grid = tuple[int, int, int]

# How far height / width of a map may be from the picture's: pixels are rounded to latents.
ASPECT = 0.02


def check_adapter_scale(scale: AdapterScale, layer_names: Sequence[str], rows: int | None) -> AdapterScale:
    """Validate `adapter_scale` against the rows of the memory and the names of attention layers."""
    if isinstance(scale, Mapping):
        for prefix in scale:
            if not isinstance(prefix, str) or not any(name.startswith(prefix) for name in layer_names):
                raise ConfigError(
                    f"adapter_scale names {prefix!r}, and no attention layer begins so; there are: {layer_names}"
                )
        return {prefix: check_adapter_scale(inner, layer_names, rows) for prefix, inner in scale.items()}
    if isinstance(scale, Tensor) and scale.dim():
        return _check_tensor(scale, rows)
    if isinstance(scale, Tensor):
        return check_float("adapter_scale", scale.item())
    return scale if callable(scale) else check_float("adapter_scale", scale)


def _check_tensor(scale: Tensor, rows: int | None) -> Tensor:
    if not scale.is_floating_point():
        raise ConfigError(f"adapter_scale must be floating point, got {scale.dtype}")
    if scale.dim() not in (1, 3, 4) or scale.shape[0] != rows or 0 in scale.shape[1:]:
        raise ShapeError(
            f"adapter_scale must be a number, (b,), (b, height, width) or (b, frames, height, width) with b = {rows} "
            f"rows of memory; got {tuple(scale.shape)}"
        )

    def refuse() -> None:
        if not bool(torch.isfinite(scale).all()):
            raise NonFiniteError("adapter_scale holds NaN or infinity")

    refuse_unless_finite([scale], refuse)
    return scale


def at_step(
    adapter_scale: AdapterScale, times: Tensor | float | None, layer_names: Sequence[str], rows: int | None
) -> Fixed:
    """Return the scale at one timestep: schedules are called, and their results checked."""
    if isinstance(adapter_scale, Mapping):
        return {prefix: at_step(inner, times, layer_names, rows) for prefix, inner in adapter_scale.items()}
    if callable(adapter_scale) and not isinstance(adapter_scale, Tensor):
        scale = check_adapter_scale(adapter_scale(one_time(times)), layer_names, rows)
        return at_step(scale, times, layer_names, rows)
    return adapter_scale


def one_time(times: Tensor | float | None) -> float:
    """Return the timestep as a number, for schedules, which need one timestep for all rows."""
    if times is None:
        raise ConditionError("a schedule of adapter_scale needs a call of the whole host with a timestep")
    times = torch.as_tensor(times)
    if bool((times != times.flatten()[0]).any()):
        raise ConditionError("a schedule of adapter_scale needs one timestep for all rows, as in sampling")
    return float(times.flatten()[0])


def times_by_row(times: Tensor, first: int, rows: int) -> Tensor | None:
    """Return the timestep (b,) of each row of a memory; None where frames of a film have timesteps of their own."""
    if times.dim() > 1:
        times = times.flatten(1)
        if bool((times != times[:, :1]).any()):
            return None
        times = times[:, 0]
    return times.flatten().expand(rows) if times.numel() == 1 else times[first : first + rows]


def at_layer(adapter_scale: Fixed, layer_name: str) -> float | Tensor:
    """Return the scale in one attention layer."""
    if not isinstance(adapter_scale, Mapping):
        return adapter_scale
    fitting = [prefix for prefix in adapter_scale if layer_name.startswith(prefix)]
    return at_layer(adapter_scale[max(fitting, key=len)], layer_name) if fitting else 0.0


def check_aspect(adapter_scale: Fixed, grid: Grid | None) -> None:
    """Refuse maps over another picture."""
    if isinstance(adapter_scale, Mapping):
        for inner in adapter_scale.values():
            check_aspect(inner, grid)
    if not isinstance(adapter_scale, Tensor) or adapter_scale.dim() < 3:
        return
    sides = adapter_scale.shape[-2:]
    if grid is None:
        raise ConditionError(
            f"adapter_scale is a map of {sides[0]} × {sides[1]}, and nothing says how its tokens lie in a picture: "
            "give a number, (b,) or one by block, or call the whole host"
        )
    frames, height, width = grid
    if abs(math.log(sides[0] * width / (sides[1] * height))) > ASPECT:
        raise ShapeError(
            f"adapter_scale is a map of {sides[0]} × {sides[1]}, and the picture is {height} × {width}: give one of "
            "its aspect ratio"
        )
    if adapter_scale.dim() == 4 and frames == 1 < adapter_scale.shape[1]:
        raise ShapeError(f"adapter_scale is a map of {adapter_scale.shape[1]} frames and this is one picture")


def over_queries(adapter_scale: Tensor, grid: Grid | None, q: Tensor) -> Tensor:
    """Return the factor of the result of queries q (b, h, l, k): (b, 1, 1, 1) or (b, 1, l, 1)."""
    adapter_scale = adapter_scale.to(q.device, q.dtype)
    if adapter_scale.dim() == 1:
        return adapter_scale[:, None, None, None]
    assert grid is not None  # or `check_aspect` has refused it
    length = q.shape[2]
    frames, height, width = grid
    while frames * height * width > length and height * width > 1:
        height, width = (height + 1) // 2, (width + 1) // 2
    if frames * height * width != length:
        raise ShapeError(
            f"adapter_scale is a map, and {length} tokens of a layer are no halving of {' × '.join(map(str, grid))}: "
            "text and picture in one stream, or frames alone; name others with blocks="
        )
    if adapter_scale.dim() == 3:
        level = F.interpolate(adapter_scale[:, None], size=(height, width), mode="area")
        return level.flatten(2).repeat(1, 1, frames)[..., None]
    level = F.interpolate(adapter_scale[:, None], size=(frames, height, width), mode="area")
    return level.flatten(2)[..., None]


def is_zero(adapter_scale: object) -> bool:
    """Return whether a scale is the number 0."""
    return isinstance(adapter_scale, float) and adapter_scale == 0
