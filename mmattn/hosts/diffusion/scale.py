"""`adapter_scale` of a diffusion model: what multiplies the result of an adapter, a number or one for each row, step,
block, pixel or frame.

It is one of

* a number; 0 is exactly nothing;
* a tensor (b,), one for each row of the memory;
* a tensor (b, height, width), a map over the picture, of any size but of the picture's aspect ratio;
* a tensor (b, frames, height, width), such a map for each frame of a film, in any number of frames;
* a mapping from the beginnings of block names ("down", "up_blocks.1", "transformer_blocks.3", ...) to
  adapter_scales: the longest that fits counts, blocks that none fits get 0 (as in diffusers' `set_ip_adapter_scale`);
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

AdapterScale = float | Tensor | Mapping[str, Any] | Callable[[float], Any]
Fixed = float | Tensor | Mapping[str, Any]
#: Frames, height and width of a picture or film.
Grid = tuple[int, int, int]

# How far height / width of a map may be from the picture's: pixels are rounded to latents.
ASPECT = 0.02


def check_adapter_scale(given: Any, layer_names: Sequence[str], rows: int | None) -> AdapterScale:
    """A adapter_scale that can be used for a memory of `rows` rows on a host whose attention layers have these names.

    Raises:
        ConfigError: of another kind, or a block that the host lacks.
        ShapeError: other rows.
        NonFiniteError: NaN or infinity.
    """
    if isinstance(given, Mapping):
        for prefix in given:
            if not isinstance(prefix, str) or not any(name.startswith(prefix) for name in layer_names):
                raise ConfigError(
                    f"adapter_scale names {prefix!r}, and no attention layer begins so; there are: {layer_names}"
                )
        return {prefix: check_adapter_scale(inner, layer_names, rows) for prefix, inner in given.items()}
    if callable(given) and not isinstance(given, Tensor):
        return given
    if not isinstance(given, Tensor):
        return check_float("adapter_scale", given)
    if not given.is_floating_point():
        raise ConfigError(f"adapter_scale must be floating point, got {given.dtype}")
    if given.dim() == 0:
        return check_float("adapter_scale", given.item())
    if given.dim() not in (1, 3, 4) or given.shape[0] != rows or 0 in given.shape[1:]:
        raise ShapeError(
            f"adapter_scale must be a number, (b,), (b, height, width) or (b, frames, height, width) with b = {rows} "
            f"rows of memory; got {tuple(given.shape)}"
        )
    if not bool(torch.isfinite(given).all()):
        raise NonFiniteError("adapter_scale holds NaN or infinity")
    return given


def at_step(
    adapter_scale: AdapterScale, timestep: Tensor | float | None, layer_names: Sequence[str], rows: int
) -> Fixed:
    """The adapter_scale at one time step: schedules called, what they give checked."""
    if isinstance(adapter_scale, Mapping):
        return {prefix: at_step(inner, timestep, layer_names, rows) for prefix, inner in adapter_scale.items()}
    if callable(adapter_scale) and not isinstance(adapter_scale, Tensor):
        return at_step(
            check_adapter_scale(adapter_scale(first_time(timestep)), layer_names, rows), timestep, layer_names, rows
        )
    return adapter_scale


def first_time(timestep: Tensor | float | None) -> float:
    """The time step as a number; rows of a batch that stand at different times have no schedule.

    Raises:
        ConditionError: they differ, or the host is given none.
    """
    if timestep is None:
        raise ConditionError("an adapter_scale that follows the time step needs one, and the host is given none")
    if not isinstance(timestep, Tensor):
        return float(timestep)
    if timestep.numel() > 1 and not bool((timestep == timestep.flatten()[0]).all()):
        raise ConditionError(
            "a adapter_scale that follows the time step needs one time step for all rows, as in sampling"
        )
    return float(timestep.flatten()[0])


def times_by_row(timestep: Any, first: int, rows: int) -> Tensor | None:
    """The time step (b,) of each row of a memory; None where the frames of a film stand at different ones.

    Args:
        timestep: one for all, (b,), or (b, frames) or (b, l) as some hosts of films take it.
        first: row of the host that is the memory's first.
        rows: b of the memory.
    """
    times = torch.as_tensor(timestep)
    if times.dim() > 1:
        times = times.flatten(1)
        if bool((times != times[:, :1]).any()):
            return None
        times = times[:, 0]
    return times.flatten().expand(rows) if times.numel() == 1 else times[first : first + rows]


def at_layer(adapter_scale: Fixed, layer_name: str) -> float | Tensor:
    """The adapter_scale in one attention layer."""
    if not isinstance(adapter_scale, Mapping):
        return adapter_scale
    fitting = [prefix for prefix in adapter_scale if layer_name.startswith(prefix)]
    return at_layer(adapter_scale[max(fitting, key=len)], layer_name) if fitting else 0.0


def check_aspect(adapter_scale: Any, grid: Grid | None) -> None:
    """Refuse maps over another picture.

    Args:
        adapter_scale: at one time step.
        grid: frames, height and width of the picture; None where the host does not say.

    Raises:
        ShapeError: a map whose height / width is not that of the picture, or more frames than it has.
        ConditionError: a map over a picture of unknown shape.
    """
    if isinstance(adapter_scale, Mapping):
        for inner in adapter_scale.values():
            check_aspect(inner, grid)
    if not isinstance(adapter_scale, Tensor) or adapter_scale.dim() < 3:
        return
    own = adapter_scale.shape[-2:]
    if grid is None:
        raise ConditionError(
            f"adapter_scale is a map of {own[0]} × {own[1]}, and this call does not say how its tokens lie in a "
            "picture: give a number, (b,) or one for each block"
        )
    frames, height, width = grid
    if abs(math.log(own[0] * width / (own[1] * height))) > ASPECT:
        raise ShapeError(
            f"adapter_scale is a map of {own[0]} × {own[1]} and the picture is {height} × {width}: another aspect ratio"
        )
    if adapter_scale.dim() == 4 and frames == 1 < adapter_scale.shape[1]:
        raise ShapeError(f"adapter_scale is a map of {adapter_scale.shape[1]} frames and this is one picture")


def over_queries(adapter_scale: float | Tensor, grid: Grid | None, q: Tensor) -> float | Tensor:
    """What the result of queries q (b, h, l, k) is multiplied by: a number, (b, 1, 1, 1) or (b, 1, l, 1).

    Args:
        adapter_scale: a number, (b,), (b, height, width) or (b, frames, height, width).
        grid: of the picture at the host's edge; l is a level of its pyramid of halves.
        q: the queries.

    Raises:
        ShapeError: l is no such level.
    """
    if not isinstance(adapter_scale, Tensor):
        return adapter_scale
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
            f"adapter_scale is a map and a layer has {length} tokens, which are no halving of a picture of "
            f"{' × '.join(map(str, grid))} (text and picture in one stream, or frames alone): name other layers with "
            "blocks="
        )
    if adapter_scale.dim() == 3:
        level = F.interpolate(adapter_scale[:, None], size=(height, width), mode="area")
        return level.flatten(2).repeat(1, 1, frames)[..., None]
    level = F.interpolate(adapter_scale[:, None], size=(frames, height, width), mode="area")
    return level.flatten(2)[..., None]


def is_zero(adapter_scale: Any) -> bool:
    """Whether a scale is the number 0."""
    return isinstance(adapter_scale, float) and adapter_scale == 0


def doubled(adapter_scale: AdapterScale) -> AdapterScale:
    """The same scale for two halves of rows."""
    if isinstance(adapter_scale, Tensor):
        return torch.cat([adapter_scale, adapter_scale])
    if isinstance(adapter_scale, Mapping):
        return {prefix: doubled(inner) for prefix, inner in adapter_scale.items()}
    if callable(adapter_scale):
        schedule = adapter_scale
        return lambda timestep: doubled(schedule(timestep))
    return adapter_scale
