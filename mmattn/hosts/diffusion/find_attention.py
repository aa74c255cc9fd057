"""Find the attention layers of a diffusion transformer that can read a memory, by one small forward.

The kind of an attention layer follows from its inputs and outputs. Its class does not tell, because every model has its
own, nor do its sizes, because text is often as wide as pictures.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of, dtype_of
from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.context import Arguments, Keywords, Positional
from mmattn.hosts.diffusion.call import Output
from mmattn.hosts.diffusion.heads import attention_names, forward_arguments, is_attention, stack_rows
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.probe import Handle, disturb, in_eval_mode, unreached

#: Kinds of attention layers: over text, one softmax over text and picture, or over what is in the layer's stream.
CROSS, JOINT, SELF = "cross", "joint", "self"


class LayerCall(NamedTuple):
    """Hidden states, text and output of a layer in one call."""

    x: object
    text: object
    output: object


@dataclass(frozen=True)
class PictureAttention:
    """An attention layer with queries of the picture."""

    name: str  # dotted name in the host
    kind: str  # "cross", "joint" or "self"
    stream: bool  # its tokens are those of picture and text
    width: int  # of the inputs of its keys and values: of the text, or of its stream if it reads no text
    part: int  # index of the picture among its outputs
    block: str  # dotted name of the block around it
    block_part: int  # index of the picture among the outputs of the block
    block_width: int  # d of that output; 0 if none fits


@dataclass(frozen=True)
class TransformerLayers:
    """The attention layers of a diffusion transformer, and arguments that it accepts."""

    layers: tuple[PictureAttention, ...]  # attention layers that can read a memory, in the order of the host
    layout: Layout  # of its pictures
    grid: Grid  # of a picture that it accepts

    def inputs(self, host: nn.Module, rows: int, generator: torch.Generator) -> Arguments:
        """Return random arguments that the host accepts."""
        return example_inputs(host, self.layout, self.grid, rows, generator)


@torch.no_grad()
def find_attention(host: nn.Module) -> TransformerLayers:
    """Return the attention layers of a diffusion transformer at which a picture can attend to a memory."""
    name, rows = type(host).__name__, 2
    layers = [each for each in attention_names(host) if is_attention(host.get_submodule(each))]
    if not layers:
        raise AttachError(f"{name} has no attention layers with queries, so none can attend to a memory")
    watched = {each: host.get_submodule(each) for layer in layers for each in (layer, layer.rpartition(".")[0])}
    failure = ""
    for layout, grid in [(each, grid) for each in layouts(host) for grid in each.example_grids()]:
        kwargs = example_inputs(host, layout, grid, rows, torch.Generator().manual_seed(0))
        with _calls(watched) as calls, in_eval_mode(host):
            try:
                fits = _has_size_of(prediction(host, kwargs), kwargs["hidden_states"], layout)
            except MmattnError:
                raise
            except Exception as error:  # the first layout is that of most hosts
                failure = failure or f"{type(error).__name__}: {error}"
                continue
        if fits:
            return TransformerLayers(_choose(name, layers, calls, rows, math.prod(grid)), layout, grid)
    raise AttachError(
        f"there are no example inputs for {name}, by which to find the attention of its picture "
        f"({failure or 'it predicts nothing of the size of its picture'})"
    )


def prediction(host: nn.Module, kwargs: Keywords) -> Tensor:
    """Call a host and return what it predicts of its picture."""
    output = host(**kwargs)
    return output if isinstance(output, Tensor) else output[0]


def _has_size_of(output: Tensor, picture: Tensor, layout: Layout) -> bool:
    """Return whether a prediction has the rows and size of the picture: some hosts take any picture for a square."""
    sides = [at - len(layout.axes) for at, axis in enumerate(layout.axes) if axis in "hw"]
    return output.shape[0] == picture.shape[0] and all(output.shape[at] == picture.shape[at] for at in sides)


@contextlib.contextmanager
def _calls(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, LayerCall]]:
    """Record the first call of each module inside the block."""
    calls: dict[str, LayerCall] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Positional, kwargs: Arguments, output: object) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            text = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
            calls.setdefault(name, LayerCall(x, text, output))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in modules.items():
            hooks.enter_context(module.register_forward_hook(record(name), with_kwargs=True))
        yield calls


def _choose(
    host: str, layers: Collection[str], calls: Mapping[str, LayerCall], rows: int, tokens: int
) -> tuple[PictureAttention, ...]:
    """Return one layer for each block: the one that reads text, else the one joined with it, else the first."""
    blocks: dict[str, list[PictureAttention]] = {}
    for name in (name for name in calls if name in layers):
        if (layer := _picture_attention(name, calls, rows, tokens)) is not None:
            blocks.setdefault(layer.block, []).append(layer)
    order = (CROSS, JOINT, SELF)
    best = [min(block, key=lambda layer: order.index(layer.kind)) for block in blocks.values()]
    if any(layer.kind != SELF for layer in best):
        best = [layer for layer in best if layer.kind != SELF or layer.stream]
    if not best:
        raise AttachError(
            f"{host} has no attention layer with a query for each token of its picture: its {len(layers)} are of "
            "another shape, or take frames of a film as rows"
        )
    return tuple(best)


def _picture_attention(name: str, calls: Mapping[str, LayerCall], rows: int, tokens: int) -> PictureAttention | None:
    x, text, output = calls[name]
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[0] != rows or x.shape[1] < tokens:
        return None
    part, width = _picture_output(output, x.shape[:2])
    if not width:
        return None
    block = name.rpartition(".")[0]
    around = block, *_picture_output(calls[block].output if block in calls else None, x.shape[:2])
    if not isinstance(text, Tensor) or text is x:
        return PictureAttention(name, SELF, x.shape[1] >= tokens + TEXT, x.shape[-1], part, *around)
    kind = JOINT if isinstance(output, (tuple, list)) and len(output) > 1 else CROSS
    return PictureAttention(name, kind, False, text.shape[-1], part, *around)


def _picture_output(output: object, size: torch.Size) -> tuple[int, int]:
    """Return index and width of the output (b, l, d) of this size; 0 and 0 for none."""
    for part, value in enumerate(output if isinstance(output, (tuple, list)) else (output,)):
        if isinstance(value, Tensor) and value.dim() == 3 and value.shape[:2] == size:
            return part, value.shape[-1]
    return 0, 0


@torch.no_grad()
def check_reaches(host: nn.Module, found: TransformerLayers, outputs: Sequence[tuple[str, int]]) -> None:
    """Check that changes of outputs, names of modules and indices, reach the prediction of a host."""

    def site(name: str, part: int) -> Callable[[int], Handle]:
        def change(row: int, output: Output) -> Output:
            if isinstance(output, Tensor):
                return disturb(output, row)
            return (*output[:part], disturb(output[part], row), *output[part + 1 :])

        module = host.get_submodule(name)
        return lambda row: module.register_forward_hook(lambda _, args, output: change(row, output))

    def output(rows: int) -> Tensor:
        inputs = found.inputs(host, 1, torch.Generator().manual_seed(0))
        return prediction(host, {name: stack_rows(name, [value] * rows) for name, value in inputs.items()})

    lost = unreached(host, [site(name, part) for name, part in outputs], output)
    if lost:
        raise ConditionError(
            f"changes of {[outputs[each][0] for each in lost]} do not reach the prediction of {type(host).__name__}, "
            "so memory would be lost: choose other layers with blocks="
        )


# Example inputs -------------------------------------------------------------------------------------------------------


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
    """Axes of a picture in `hidden_states`."""

    #: letters of its axes: b rows, c channels, f frames, h and w height and width, l tokens, t moments of which several
    #: make a token
    axes: str
    patch: Grid  # frames, height and width of one token
    channels: int  # c

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

    def grid_of(self, kwargs: Keywords, x: Tensor) -> Grid | None:
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


def _packed_grid(kwargs: Keywords, length: int) -> Grid | None:
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
    config = getattr(host, "config", {})
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


def example_inputs(host: nn.Module, layout: Layout, grid: Grid, rows: int, generator: torch.Generator) -> Arguments:
    """Return random arguments of a host, by the names that its forward has."""
    config: Keywords = getattr(host, "config", {})
    device, dtype, (frames, height, width) = device_of(host), dtype_of(host), grid

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device).to(device, dtype)

    def full(*shape: int, value: int = 1) -> Tensor:
        return torch.full(shape, value, device=device)

    def vectors(name: str, *length: int) -> Tensor | None:
        """Return vectors (b, …, width) where the config has this width."""
        size = config.get(name)
        return random(rows, *length, size) if isinstance(size, int) and size else None

    def like_picture(channels: int | None, frames: int) -> Tensor | None:
        """Return another picture of this size with as many channels and frames."""
        if not channels or not frames:
            return None
        return random(*replace(layout, channels=channels).shape(rows, (frames, height, width)))

    def times(step: int) -> Tensor:
        """Return a timestep (b,), or (b, frames) for hosts whose frames have timesteps of their own."""
        by_frame = (frames,) if "deltatime_type" in config else ()
        return full(rows, *by_frame, value=step).to(dtype)

    # A text; of several layers of an encoder in the host's order of axes.
    size = next((size for name in TEXT_WIDTHS if isinstance(size := config.get(name), int) and size), None)
    text = states = None if size is None else random(rows, TEXT, size)
    if size and config.get("num_text_layers"):
        states = random(rows, TEXT, config["num_text_layers"], size)
    elif size and config.get("injection_layer_ids"):
        states = random(rows, len(config["injection_layer_ids"]) + 1, TEXT, size)
    blocks, mask = config.get("num_layers", 0) + config.get("num_single_layers", 0), full(rows, TEXT)
    # Frame, row and column (l, 3) of each token, (l, 4) where the host has one axis more.
    axes = [torch.arange(size, device=device) for size in grid]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3).to(dtype)
    places = F.pad(places, (0, max(len(config.get("axes_dims_rope") or axes) - 3, 0)))
    text_places, rotations = places[:1].repeat(TEXT, 1) * 0, None
    if config.get("scaling_factor"):  # hosts that take rotary positions from their pipeline
        angles = random(32, 32, config["hidden_size"] // config["num_attention_heads"] // 2).float()
        rotations = torch.polar(torch.ones_like(angles), angles)
    face, sound = config.get("motion_encoder_size"), config.get("audio_in_channels")
    shape, acoustic = layout.shape(rows, grid), config.get("audio_acoustic_hidden_dim")
    sizes = full(rows, 2, value=16).to(dtype)
    sized = config.get("use_additional_conditions", config.get("sample_size") == 128)
    global_states = vectors("global_states_input_dim", 1)
    pooled = "in_text_dim2" if "in_text_dim2" in config else "pooled_projection_dim"
    values = {
        # The picture or sound, which tells the rows.
        "hidden_states": random(*shape),
        # Texts.
        "encoder_hidden_states": states,
        "encoder_hidden_states_2": vectors("text_embed_2_dim", TEXT),
        "encoder_hidden_states_t5": vectors("cross_attention_dim_t5", TEXT),
        "encoder_hidden_states_mask": mask.bool(),
        "encoder_attention_mask": mask.bool(),
        "encoder_attention_mask_2": mask.bool(),
        "encoder_mask": mask.bool(),
        "text_embedding_mask": mask,
        "text_embedding_mask_t5": mask,
        "image_embeds": vectors("image_embed_dim", TEXT),
        "audio_encoder_hidden_states": text,
        "text_bth": text,
        "text_lens": full(rows, value=TEXT),
        "text_encoder_layers": [vectors("text_encoder_dim", TEXT) for _ in range(blocks)],
        "img_mask": torch.cat([0 * mask, full(rows, math.prod(grid) // 4)], 1).bool(),
        # Positions.
        "img_ids": places,
        "txt_ids": text_places,
        "position_ids": torch.cat([text_places, places]),
        "visual_rope_pos": tuple(axes),
        "text_rope_pos": torch.arange(TEXT, device=device),
        "image_rotary_emb": rotations,
        "cross_attention_kwargs": None if rotations is None else {},
        "img_shapes": [[grid]] * rows,
        "num_frames": frames,
        "height": height,
        "width": width,
        # Pictures and sounds beside it.
        "pose_hidden_states": like_picture(config.get("latent_channels"), frames - 1),
        "control_hidden_states": like_picture(config.get("vace_in_channels"), frames),
        "context_latents": random(*shape[:2], config["in_channels"] - acoustic) if acoustic else None,
        "face_pixel_values": random(rows, 3, 4 * frames - 4, face, face) if face else None,
        "audio_hidden_states": random(rows, FRAMES, sound) if sound else None,
        "audio_num_frames": FRAMES,
        "prior_token_id": full(rows, math.prod(grid)),
        "prior_token_drop": full(rows, value=0).bool(),
        "padding_mask": random(1, 1, 8, 8) * 0,
        # Timesteps, pooled texts, classes and sizes.
        "timestep": times(7),
        "r_timestep": times(3),
        "timestep_r": None if config.get("use_meanflow") is False else times(3),
        "chunk_partition": (1, frames - 1),
        "pooled_projections": vectors(pooled),
        "global_hidden_states": vectors("global_cond_dim") if global_states is None else global_states,
        "class_labels": full(rows) if config.get("num_embeds_ada_norm") else None,
        "guidance": full(rows).float() if config.get("guidance_embeds") else None,
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": sizes * 0,
        "added_cond_kwargs": dict.fromkeys(("resolution", "aspect_ratio"))
        | ({"resolution": sizes, "aspect_ratio": sizes[:, :1]} if sized else {}),
        "image_meta_size": full(rows, 6).float(),
        "style": full(rows, value=0),
        "fps": 24,
    }
    names = forward_arguments(host)
    return {name: value for name, value in values.items() if name in names and value is not None}
