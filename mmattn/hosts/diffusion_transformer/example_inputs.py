"""What a transformer of diffusers is called with, made up from the names of its arguments and from its config.

Used to see which of its layers attend to what, and to prove that what is written there reaches the answer.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.hosts.denoising.adapter_scale import Grid

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
    "context_in_dim",
)
#: Tokens of the text.
TEXT = 5
#: Frames of a film, before a patch of several frames.
FRAMES = 3


@dataclass(frozen=True)
class Layout:
    """How a picture lies in `hidden_states`.

    Args:
        axes: letters of its axes: b rows, c channels, f frames, h and w height and width, l tokens.
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
        return tuple(sizes[axis] for axis in self.axes)

    def grid_of(self, x: Tensor) -> Grid | None:
        """Frames, height and width, in tokens, of what a host is given; None where they are packed."""
        if self.axes == "bcl":
            return 1, 1, x.shape[2]
        if x.dim() != len(self.axes) or "h" not in self.axes:
            return None
        sizes = dict(zip(self.axes, x.shape, strict=True))
        frames, height, width = (sizes.get(axis, 1) // size for axis, size in zip("fhw", self.patch, strict=True))
        return max(frames, 1), height, width


def layouts(host: nn.Module) -> list[Layout]:
    """The ways in which a picture may be given to a host, to be tried one after the other."""
    config: Any = getattr(host, "config", {})
    channels = config.get("in_channels") or config.get("io_channels") or config.get("in_dim") or 4
    channels = channels[0] if isinstance(channels, (tuple, list)) else channels
    size = config.get("patch_size") or 1
    patch = tuple(size) if isinstance(size, (tuple, list)) else (config.get("patch_size_t") or 1, size, size)
    patch = (1,) * (3 - len(patch)) + patch
    return [Layout(axes, patch, channels) for axes in ("bchw", "bcfhw", "bfchw", "blc", "bcl")]


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
        made = _Made(config, rows, grid, random, whole, width)
        given: dict[str, Any] = {"hidden_states": random(*layout.shape(rows, grid))}
        for parameter in parameters:
            make = _ARGUMENTS.get(parameter.name) if masked or not parameter.name.endswith("_mask") else None
            value = None if make is None else make(made)
            if value is not None:
                given[parameter.name] = value
        yield given


def _dtype_of(host: nn.Module) -> torch.dtype:
    """Of what the host computes in: that of its first weights that are not quantised."""
    return next((one.dtype for one in host.parameters() if one.is_floating_point()), torch.float32)


def _inner(host: nn.Module) -> nn.Module:
    get_base: Any = getattr(host, "get_base_model", None)
    inner: nn.Module = host if get_base is None else get_base()
    return inner


@dataclass(frozen=True)
class _Made:
    config: Mapping[str, Any]
    rows: int
    grid: Grid
    random: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    width: int | None

    @property
    def length(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

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

    def sizes(self) -> Tensor:
        return self.whole(self.rows, 2, value=16).to(self.random(1))


def _added(made: _Made) -> dict[str, Any]:
    sized = made.config.get("use_additional_conditions")
    if sized is None:
        sized = made.config.get("sample_size") == 128
    return {"resolution": made.sizes() if sized else None, "aspect_ratio": made.sizes()[:, :1] if sized else None}


#: What each argument is given, by its name; None where it may be left out.
_ARGUMENTS: dict[str, Callable[[_Made], Any]] = {
    "timestep": lambda made: made.whole(made.rows, value=7).to(made.random(1)),
    "encoder_hidden_states": lambda made: made.text(),
    "encoder_hidden_states_t5": lambda made: made.text("cross_attention_dim_t5"),
    "encoder_hidden_states_mask": lambda made: made.whole(made.rows, TEXT).bool(),
    "encoder_attention_mask": lambda made: made.whole(made.rows, TEXT).bool(),
    "text_embedding_mask": lambda made: made.whole(made.rows, TEXT),
    "text_embedding_mask_t5": lambda made: made.whole(made.rows, TEXT),
    "pooled_projections": lambda made: made.vectors("pooled_projection_dim"),
    "global_hidden_states": lambda made: (
        None if not made.config.get("global_states_input_dim") else made.vectors("global_states_input_dim")[:, None]  # type: ignore[index]
    ),
    "class_labels": lambda made: made.whole(made.rows, value=1) if made.config.get("num_embeds_ada_norm") else None,
    "guidance": lambda made: made.whole(made.rows).float() if made.config.get("guidance_embeds") else None,
    "img_ids": lambda made: made.positions(),
    "txt_ids": lambda made: made.positions()[:1].repeat(TEXT, 1) * 0,
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
