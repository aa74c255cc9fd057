"""What a transformer of diffusers is called with, made up from the names of its arguments and from its config.

Used to see which of its layers attend to what, and to prove that what is written there reaches the answer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.hosts.diffusion.scale import Grid

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
    """How a picture lies in `hidden_states`.

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
        """Frames, height and width, in tokens, of small pictures: one wider than high, and one for hosts of squares."""
        frames = FRAMES if "f" in self.axes else 1
        return (frames, 2, 4), (frames, 3, 3)

    def shape(self, rows: int, grid: Grid) -> tuple[int, ...]:
        """Of `hidden_states`, for a picture of so many tokens."""
        frames, height, width = (tokens * size for tokens, size in zip(grid, self.patch, strict=True))
        if self.axes == "bcl":
            return rows, self.channels, grid[1] * grid[2]
        sizes = {"b": rows, "c": self.channels, "f": frames, "h": height, "w": width}
        sizes["l"] = grid[0] * grid[1] * grid[2]
        sizes["t"] = sizes["l"] * self.patch[2]
        return tuple(sizes[axis] for axis in self.axes)

    def grid_of(self, x: Tensor) -> Grid | None:
        """Frames, height and width, in tokens, of what a host is given; None where they are packed."""
        if self.axes == "bcl":
            return 1, 1, x.shape[2]
        if self.axes == "btc":
            return 1, 1, -(-x.shape[1] // self.patch[2])
        if x.dim() != len(self.axes) or "h" not in self.axes:
            return None
        sizes = dict(zip(self.axes, x.shape, strict=True))
        frames, height, width = (sizes.get(axis, 1) // size for axis, size in zip("fhw", self.patch, strict=True))
        return max(frames, 1), height, width


def layouts(host: nn.Module) -> list[Layout]:
    """The ways in which a picture may be given to a host, to be tried one after the other."""
    config: Any = getattr(host, "config", {})
    channels = next((config[name] for name in CHANNELS if config.get(name)), 4)
    channels = channels[0] if isinstance(channels, (tuple, list)) else channels
    channels = 2 * channels + 1 if config.get("visual_cond") else channels  # a picture to go on from, and its mask
    size = config.get("patch_size") or 1
    patch = tuple(size) if isinstance(size, (tuple, list)) else (config.get("patch_size_t") or 1, size, size)
    patch = (1,) * (3 - len(patch)) + patch
    known = ("btc",) if config.get("audio_acoustic_hidden_dim") else ("bchw", "bcfhw", "bfchw", "bfhwc", "blc", "bcl")
    return [Layout(axes, patch, channels) for axes in known]


def example_inputs(
    host: nn.Module, layout: Layout, grid: Grid, rows: int, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """Arguments to call a host with, for each width that its text may have, with masks of the text and without.

    Args:
        host: the transformer.
        layout: how the picture is given.
        grid: frames, height and width of the picture, in tokens.
        rows: b.
        generator: of the random numbers, on the CPU.
    """
    config: Any = getattr(host, "config", {})
    named = [(name, config.get(name)) for name in TEXT_WIDTHS]
    widths = dict.fromkeys(int(width) for _, width in named if isinstance(width, int) and width)
    device, dtype = device_of(host), _dtype_of(host)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def whole(*shape: int, value: int = 1) -> Tensor:
        return torch.full(shape, value, device=device)

    parameters = list(inspect.signature(type(_inner(host)).forward).parameters.values())[1:]
    for width, masked in itertools.product(widths or (None,), (True, False)):
        made = _Made(config, rows, layout, grid, random, whole, width)
        given: dict[str, Any] = {"hidden_states": random(*layout.shape(rows, grid))}
        for parameter in parameters:
            make = _ARGUMENTS.get(parameter.name) if masked or not parameter.name.endswith("_mask") else None
            value = None if make is None else make(made)
            if value is not None:
                given[parameter.name] = value
        yield given


def _dtype_of(host: nn.Module) -> torch.dtype:
    """Return the dtype of the host's inputs: not that of weights that `from_pretrained` in half keeps in float32."""
    dtype = getattr(_inner(host), "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    return next((one.dtype for one in host.parameters() if one.is_floating_point()), torch.float32)


def _inner(host: nn.Module) -> nn.Module:
    get_base: Any = getattr(host, "get_base_model", None)
    inner: nn.Module = host if get_base is None else get_base()
    return inner


@dataclass(frozen=True)
class _Made:
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
        """(b,) of a time step; (b, frames) for hosts whose frames may be at different ones."""
        each = (self.grid[0],) if "deltatime_type" in self.config else ()
        return self.whole(self.rows, *each, value=step).to(self.random(1))

    def vectors(self, name: str) -> Tensor | None:
        """(b, width) where the config names a width."""
        width = self.config.get(name)
        return self.random(self.rows, width) if isinstance(width, int) and width else None

    def text(self, name: str | None = None) -> Tensor | None:
        width = self.width if name is None else self.config.get(name)
        return None if not width else self.random(self.rows, TEXT, width)

    def positions(self) -> Tensor:
        """(l, 3): frame, row and column of each token; (l, 4) where the host counts one axis more."""
        axes = [torch.arange(size) for size in self.grid]
        found = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
        more = len(self.config.get("axes_dims_rope") or found[0]) - 3
        return F.pad(found, (0, max(more, 0))).to(self.random(1))

    def like_picture(self, name: str, fewer: int = 0) -> Tensor | None:
        """Another picture of the same size, with as many channels as the config names; a film some frames shorter."""
        channels, (frames, height, width) = self.config.get(name), self.grid
        if not channels or fewer >= frames:
            return None
        return self.random(*replace(self.layout, channels=channels).shape(self.rows, (frames - fewer, height, width)))

    def layers_of_text(self) -> Tensor | None:
        """Text as several layers of an encoder see it, in the host's order of axes; else as one does."""
        layers = self.config.get("num_text_layers")
        if layers and self.width:
            return self.random(self.rows, TEXT, layers, self.width)
        injected = self.config.get("injection_layer_ids")
        if injected and self.width:
            return self.random(self.rows, len(injected) + 1, TEXT, self.width)
        return self.text()

    def sizes(self) -> Tensor:
        return self.whole(self.rows, 2, value=16).to(self.random(1))


def _rotations(made: _Made) -> Tensor | None:
    """(height, width, k / 2) of complex numbers, for hosts that leave rotary positions to their pipeline."""
    if not made.config.get("scaling_factor"):
        return None
    size = made.config["hidden_size"] // made.config["num_attention_heads"] // 2
    angles = made.random(32, 32, size).float()
    return torch.polar(torch.ones_like(angles), angles)


def _added(made: _Made) -> dict[str, Any]:
    sized = made.config.get("use_additional_conditions")
    if sized is None:
        sized = made.config.get("sample_size") == 128
    return {"resolution": made.sizes() if sized else None, "aspect_ratio": made.sizes()[:, :1] if sized else None}


#: What each argument is given, by its name; None where it may be left out.
_ARGUMENTS: dict[str, Callable[[_Made], Any]] = {
    "timestep": lambda made: made.times(7),
    "r_timestep": lambda made: made.times(3),
    "timestep_r": lambda made: None if made.config.get("use_meanflow") is False else made.times(3),
    "chunk_partition": lambda made: (1, made.grid[0] - 1),
    "encoder_hidden_states": lambda made: made.layers_of_text(),
    "encoder_hidden_states_2": lambda made: made.text("text_embed_2_dim"),
    "audio_encoder_hidden_states": lambda made: made.text(),
    "text_bth": lambda made: made.text(),
    "text_lens": lambda made: made.whole(made.rows, value=TEXT),
    "image_embeds": lambda made: made.text("image_embed_dim"),
    "encoder_hidden_states_t5": lambda made: made.text("cross_attention_dim_t5"),
    "encoder_hidden_states_mask": lambda made: made.whole(made.rows, TEXT).bool(),
    "encoder_attention_mask": lambda made: made.whole(made.rows, TEXT).bool(),
    "encoder_attention_mask_2": lambda made: made.whole(made.rows, TEXT).bool(),
    "encoder_mask": lambda made: made.whole(made.rows, TEXT).bool(),
    "text_embedding_mask": lambda made: made.whole(made.rows, TEXT),
    "text_embedding_mask_t5": lambda made: made.whole(made.rows, TEXT),
    "pooled_projections": lambda made: made.vectors(
        "in_text_dim2" if "in_text_dim2" in made.config else "pooled_projection_dim"
    ),
    "global_hidden_states": lambda made: (
        made.vectors("global_cond_dim")
        if not made.config.get("global_states_input_dim")
        else made.vectors("global_states_input_dim")[:, None]  # type: ignore[index]
    ),
    "class_labels": lambda made: made.whole(made.rows, value=1) if made.config.get("num_embeds_ada_norm") else None,
    "guidance": lambda made: made.whole(made.rows).float() if made.config.get("guidance_embeds") else None,
    "img_ids": lambda made: made.positions(),
    "txt_ids": lambda made: made.positions()[:1].repeat(TEXT, 1) * 0,
    "position_ids": lambda made: torch.cat([made.positions()[:1].repeat(TEXT, 1) * 0, made.positions()]),
    "visual_rope_pos": lambda made: tuple(torch.arange(size, device=made.random(1).device) for size in made.grid),
    "text_rope_pos": lambda made: torch.arange(TEXT, device=made.random(1).device),
    "image_rotary_emb": _rotations,
    "cross_attention_kwargs": lambda made: {} if made.config.get("scaling_factor") else None,
    "img_mask": lambda made: torch.cat(
        [made.whole(made.rows, TEXT, value=0), made.whole(made.rows, made.length // 4)], 1
    ).bool(),
    "prior_token_id": lambda made: made.whole(made.rows, made.length),
    "prior_token_drop": lambda made: made.whole(made.rows, value=0).bool(),
    "pose_hidden_states": lambda made: made.like_picture("latent_channels", fewer=1),
    "face_pixel_values": lambda made: made.random(
        made.rows, 3, 4 * made.grid[0] - 4, *[made.config["motion_encoder_size"]] * 2
    ),
    "text_encoder_layers": lambda made: [
        made.text("text_encoder_dim") for _ in range(made.config["num_layers"] + made.config["num_single_layers"])
    ],
    "control_hidden_states": lambda made: made.like_picture("vace_in_channels"),
    "context_latents": lambda made: (
        None
        if not made.config.get("audio_acoustic_hidden_dim")
        else made.random(
            *made.layout.shape(made.rows, made.grid)[:2],
            made.config["in_channels"] - made.config["audio_acoustic_hidden_dim"],
        )
    ),
    "audio_hidden_states": lambda made: (
        made.random(made.rows, FRAMES, made.config["audio_in_channels"]) if "audio_in_channels" in made.config else None
    ),
    "audio_num_frames": lambda made: FRAMES,
    "img_shapes": lambda made: [[made.grid]] * made.rows,
    "num_frames": lambda made: made.grid[0],
    "height": lambda made: made.grid[1],
    "width": lambda made: made.grid[2],
    "original_size": lambda made: made.sizes(),
    "target_size": lambda made: made.sizes(),
    "crop_coords": lambda made: made.sizes() * 0,
    "added_cond_kwargs": _added,
    "image_meta_size": lambda made: made.whole(made.rows, 6).float(),
    "style": lambda made: made.whole(made.rows, value=0),
    "fps": lambda made: 24,
    "padding_mask": lambda made: made.random(1, 1, 8, 8) * 0,
}
