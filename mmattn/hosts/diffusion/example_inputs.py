"""Example arguments of transformers of diffusers, by the names of their arguments and by their config."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.interop.peft import inner_host

#: Names under which configs give the width of the text that the model is given; the first that is there counts.
TEXT_WIDTHS = (
    "caption_channels",
    "joint_attention_dim",
    "text_embed_dim",
    "text_dim",
    "cap_feat_dim",
    "cross_attention_input_dim",
    "encoder_hidden_states_channels",
    "cross_attention_dim",
    "in_text_dim",
    "text_in_dim",
    "context_in_dim",
    "text_hidden_dim",
    "dit_text_dim",
    "cond_token_dim",
    "encoder_hidden_size",
)
#: Names under which configs give the channels of a picture or a sound; the first that is there counts.
CHANNELS = ("audio_acoustic_hidden_dim", "in_channels", "io_channels", "in_dim", "in_visual_dim", "latent_dim")
#: Tokens of the text.
TEXT = 5
#: Frames of a film, before a patch of several frames.
FRAMES = 3


@dataclass(frozen=True)
class Layout:
    """Axes of a picture in `hidden_states`.

    Args:
        axes: letters of its axes: b rows, c channels, f frames, h and w height and width, l tokens, t moments of which
            several make a token.
        patch: frames, height and width of one token.
        channels: c.
    """

    axes: str
    patch: Grid
    channels: int

    def example_grids(self) -> tuple[Grid, Grid]:
        """Return small pictures as frames, height and width in tokens: a wide one, and a square."""
        frames = FRAMES if "f" in self.axes else 1
        return (frames, 2, 4), (frames, 3, 3)

    def shape(self, rows: int, grid: Grid) -> tuple[int, ...]:
        """Return the shape of `hidden_states` for a grid of tokens."""
        frames, height, width = (tokens * size for tokens, size in zip(grid, self.patch, strict=True))
        if self.axes == "bcl":
            return rows, self.channels, grid[1] * grid[2]
        sizes = {"b": rows, "c": self.channels, "f": frames, "h": height, "w": width}
        sizes["l"] = grid[0] * grid[1] * grid[2]
        sizes["t"] = sizes["l"] * self.patch[2]
        return tuple(sizes[axis] for axis in self.axes)

    def grid_of(self, kwargs: Mapping[str, Any], x: Tensor) -> Grid | None:
        """Return frames, height and width in tokens of the picture x of a call; None where the call does not say."""
        return self._grid_by_axes(x) or _packed_grid(kwargs, x.shape[1])

    def _grid_by_axes(self, x: Tensor) -> Grid | None:
        if self.axes == "bcl":
            return 1, 1, x.shape[2]
        if self.axes == "btc":
            return 1, 1, -(-x.shape[1] // self.patch[2])
        if x.dim() != len(self.axes) or "h" not in self.axes:
            return None
        sizes = dict(zip(self.axes, x.shape, strict=True))
        frames, height, width = (sizes.get(axis, 1) // size for axis, size in zip("fhw", self.patch, strict=True))
        return max(frames, 1), height, width


def _packed_grid(kwargs: Mapping[str, Any], length: int) -> Grid | None:
    """Return the grid of packed tokens by `img_ids` (Flux), `img_shapes` (Qwen-Image), or `num_frames`, … (LTX)."""
    grids: list[Grid] = []
    ids, shapes = kwargs.get("img_ids"), kwargs.get("img_shapes")
    if isinstance(ids, Tensor):
        positions = ids.reshape(-1, ids.shape[-1])[:, :3]
        frames, height, width = (int(size) for size in (positions.amax(0) - positions.amin(0) + 1).tolist())
        grids.append((frames, height, width))
    while isinstance(shapes, (list, tuple)) and shapes and isinstance(shapes[0], (list, tuple)):
        if len(shapes) == 1 and len(shapes[0]) == 3 and all(isinstance(size, int) for size in shapes[0]):
            grids.append(tuple(shapes[0]))
        shapes = shapes[0]  # one row; several pictures of it have no grid
    sizes = [size for name in ("num_frames", "height", "width") if isinstance(size := kwargs.get(name), int)]
    if len(sizes) == 3:
        grids.append((sizes[0], sizes[1], sizes[2]))
    return next((grid for grid in grids if math.prod(grid) == length), None)


def layouts(host: nn.Module) -> list[Layout]:
    """Return the layouts of pictures to try on a host, one after the other."""
    config: Any = getattr(host, "config", {})
    channels = next((config[name] for name in CHANNELS if config.get(name)), 4)
    channels = channels[0] if isinstance(channels, (tuple, list)) else channels
    channels = 2 * channels + 1 if config.get("visual_cond") else channels  # a picture to go on from, and its mask
    size = config.get("patch_size") or 1
    patch = tuple(size) if isinstance(size, (tuple, list)) else (config.get("patch_size_t") or 1, size, size)
    patch = (1,) * (3 - len(patch)) + patch
    axes_to_try = (
        ("btc",) if config.get("audio_acoustic_hidden_dim") else ("bchw", "bcfhw", "bfchw", "bfhwc", "blc", "bcl")
    )
    return [Layout(axes, patch, channels) for axes in axes_to_try]


def example_inputs(
    host: nn.Module, layout: Layout, grid: Grid, rows: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Yield arguments of a host for each width that its text may have, with masks of the text and without."""
    config: Any = getattr(host, "config", {})
    widths = dict.fromkeys(width for name in TEXT_WIDTHS if isinstance(width := config.get(name), int) and width)
    device, dtype = device_of(host), _dtype_of(host)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def whole(*shape: int, value: int = 1) -> Tensor:
        return torch.full(shape, value, device=device)

    parameters = list(inspect.signature(type(inner_host(host)).forward).parameters.values())[1:]
    for width, masked in itertools.product(widths or (None,), (True, False)):
        case = _Example(config, rows, layout, grid, random, whole, width)
        kwargs: dict[str, Any] = {"hidden_states": random(*layout.shape(rows, grid))}
        for parameter in parameters:
            make = _ARGUMENTS.get(parameter.name) if masked or not parameter.name.endswith("_mask") else None
            value = None if make is None else make(case)
            if value is not None:
                kwargs[parameter.name] = value
        yield kwargs


def _dtype_of(host: nn.Module) -> torch.dtype:
    """Return the dtype of the host's inputs: not that of weights that `from_pretrained` in half keeps in float32."""
    dtype = getattr(inner_host(host), "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((one.dtype for one in host.parameters() if one.is_floating_point()), torch.float32)


@dataclass(frozen=True)
class _Example:
    """One set of example arguments."""

    config: Mapping[str, Any]
    rows: int
    layout: Layout
    grid: Grid
    random: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    width: int | None

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    def times(self, step: int) -> Tensor:
        """Return a timestep (b,), or (b, frames) for hosts whose frames have timesteps of their own."""
        each = (self.grid[0],) if "deltatime_type" in self.config else ()
        return self.whole(self.rows, *each, value=step).to(self.random(1))

    def vectors(self, name: str) -> Tensor | None:
        """Return vectors (b, width) where the config has a width."""
        width = self.config.get(name)
        return self.random(self.rows, width) if isinstance(width, int) and width else None

    def text(self, name: str | None = None) -> Tensor | None:
        width = self.width if name is None else self.config.get(name)
        return None if not width else self.random(self.rows, TEXT, width)

    def positions(self) -> Tensor:
        """Return frame, row and column (l, 3) of each token; (l, 4) where the host has one axis more."""
        axes = [torch.arange(size) for size in self.grid]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
        more = len(self.config.get("axes_dims_rope") or grid[0]) - 3
        return F.pad(grid, (0, max(more, 0))).to(self.random(1))

    def like_picture(self, name: str, fewer: int = 0) -> Tensor | None:
        """Return another picture of this size with the channels of the config; a film some frames shorter."""
        channels, (frames, height, width) = self.config.get(name), self.grid
        if not channels or fewer >= frames:
            return None
        return self.random(*replace(self.layout, channels=channels).shape(self.rows, (frames - fewer, height, width)))

    def layers_of_text(self) -> Tensor | None:
        """Return text of several layers of an encoder in the host's order of axes, or of one."""
        layers = self.config.get("num_text_layers")
        if layers and self.width:
            return self.random(self.rows, TEXT, layers, self.width)
        injected = self.config.get("injection_layer_ids")
        if injected and self.width:
            return self.random(self.rows, len(injected) + 1, TEXT, self.width)
        return self.text()

    def sizes(self) -> Tensor:
        return self.whole(self.rows, 2, value=16).to(self.random(1))


def _rotations(case: _Example) -> Tensor | None:
    """Return complex rotations (height, width, k / 2), for hosts that take rotary positions from their pipeline."""
    if not case.config.get("scaling_factor"):
        return None
    size = case.config["hidden_size"] // case.config["num_attention_heads"] // 2
    angles = case.random(32, 32, size).float()
    return torch.polar(torch.ones_like(angles), angles)


def _added(case: _Example) -> dict[str, Any]:
    sized = case.config.get("use_additional_conditions")
    if sized is None:
        sized = case.config.get("sample_size") == 128
    return {"resolution": case.sizes() if sized else None, "aspect_ratio": case.sizes()[:, :1] if sized else None}


#: Example values by name of the argument; None to leave it out.
_ARGUMENTS: dict[str, Callable[[_Example], Any]] = {
    "timestep": lambda case: case.times(7),
    "r_timestep": lambda case: case.times(3),
    "timestep_r": lambda case: None if case.config.get("use_meanflow") is False else case.times(3),
    "chunk_partition": lambda case: (1, case.grid[0] - 1),
    "encoder_hidden_states": lambda case: case.layers_of_text(),
    "encoder_hidden_states_2": lambda case: case.text("text_embed_2_dim"),
    "audio_encoder_hidden_states": lambda case: case.text(),
    "text_bth": lambda case: case.text(),
    "text_lens": lambda case: case.whole(case.rows, value=TEXT),
    "image_embeds": lambda case: case.text("image_embed_dim"),
    "encoder_hidden_states_t5": lambda case: case.text("cross_attention_dim_t5"),
    "encoder_hidden_states_mask": lambda case: case.whole(case.rows, TEXT).bool(),
    "encoder_attention_mask": lambda case: case.whole(case.rows, TEXT).bool(),
    "encoder_attention_mask_2": lambda case: case.whole(case.rows, TEXT).bool(),
    "encoder_mask": lambda case: case.whole(case.rows, TEXT).bool(),
    "text_embedding_mask": lambda case: case.whole(case.rows, TEXT),
    "text_embedding_mask_t5": lambda case: case.whole(case.rows, TEXT),
    "pooled_projections": lambda case: case.vectors(
        "in_text_dim2" if "in_text_dim2" in case.config else "pooled_projection_dim"
    ),
    "global_hidden_states": lambda case: (
        case.vectors("global_cond_dim")
        if not case.config.get("global_states_input_dim")
        else case.vectors("global_states_input_dim")[:, None]  # type: ignore[index]
    ),
    "class_labels": lambda case: case.whole(case.rows, value=1) if case.config.get("num_embeds_ada_norm") else None,
    "guidance": lambda case: case.whole(case.rows).float() if case.config.get("guidance_embeds") else None,
    "img_ids": lambda case: case.positions(),
    "txt_ids": lambda case: case.positions()[:1].repeat(TEXT, 1) * 0,
    "position_ids": lambda case: torch.cat([case.positions()[:1].repeat(TEXT, 1) * 0, case.positions()]),
    "visual_rope_pos": lambda case: tuple(torch.arange(size, device=case.random(1).device) for size in case.grid),
    "text_rope_pos": lambda case: torch.arange(TEXT, device=case.random(1).device),
    "image_rotary_emb": _rotations,
    "cross_attention_kwargs": lambda case: {} if case.config.get("scaling_factor") else None,
    "img_mask": lambda case: torch.cat(
        [case.whole(case.rows, TEXT, value=0), case.whole(case.rows, case.length // 4)], 1
    ).bool(),
    "prior_token_id": lambda case: case.whole(case.rows, case.length),
    "prior_token_drop": lambda case: case.whole(case.rows, value=0).bool(),
    "pose_hidden_states": lambda case: case.like_picture("latent_channels", fewer=1),
    "face_pixel_values": lambda case: case.random(
        case.rows, 3, 4 * case.grid[0] - 4, *[case.config["motion_encoder_size"]] * 2
    ),
    "text_encoder_layers": lambda case: [
        case.text("text_encoder_dim") for _ in range(case.config["num_layers"] + case.config["num_single_layers"])
    ],
    "control_hidden_states": lambda case: case.like_picture("vace_in_channels"),
    "context_latents": lambda case: (
        None
        if not case.config.get("audio_acoustic_hidden_dim")
        else case.random(
            *case.layout.shape(case.rows, case.grid)[:2],
            case.config["in_channels"] - case.config["audio_acoustic_hidden_dim"],
        )
    ),
    "audio_hidden_states": lambda case: (
        case.random(case.rows, FRAMES, case.config["audio_in_channels"]) if "audio_in_channels" in case.config else None
    ),
    "audio_num_frames": lambda case: FRAMES,
    "img_shapes": lambda case: [[case.grid]] * case.rows,
    "num_frames": lambda case: case.grid[0],
    "height": lambda case: case.grid[1],
    "width": lambda case: case.grid[2],
    "original_size": lambda case: case.sizes(),
    "target_size": lambda case: case.sizes(),
    "crop_coords": lambda case: case.sizes() * 0,
    "added_cond_kwargs": _added,
    "image_meta_size": lambda case: case.whole(case.rows, 6).float(),
    "style": lambda case: case.whole(case.rows, value=0),
    "fps": lambda case: 24,
    "padding_mask": lambda case: case.random(1, 1, 8, 8) * 0,
}
