"""Published IP-Adapters (arXiv 2308.06721) in single files: read onto a host, and written back.

- UNets, by the authors: `image_proj.proj`, `image_proj.norm`, and `ip_adapter.1.to_k_ip`, `.to_v_ip`, `3`, `5`, … in
  the order of the host's `attn_processors`. Files of the Plus, Full and FaceID kind are refused.
- Flux, by XLabs: `ip_adapter_proj_model`, and `double_blocks.0.processor.ip_adapter_double_stream_k_proj`, `…_v_proj`;
  what the queries find is added to the output of the block. Names of diffusers are read as well.
- Stable Diffusion 3.5, by InstantX: `image_proj` resamples an image under the time step, and `ip_adapter.0`, `1`, … are
  the blocks. Names of diffusers are read as well.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from typing import ClassVar

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.decoupled.adapter import DecoupledAdapter, DecoupledLayout
from mmattn.adapters.decoupled.joint import JointDecoupledAdapter
from mmattn.adapters.decoupled.timed_resampler import TimedResampler
from mmattn.errors import AdapterFileError, ConditionError, ConfigError
from mmattn.hosts.diffusion.base import AdaptedDenoiser
from mmattn.hosts.diffusion.heads import attention_names
from mmattn.storage.files import replacing
from mmattn.storage.safetensors import check_values

Path = str | PathLike[str]
Tensors = dict[str, Tensor]
#: Heads of released resamplers are this wide; their number is not in the file.
HEAD_DIM = 64
#: The projection of an image to slots, in files and as ours.
_PROJECTION = {
    "proj.weight": "projection.weight",
    "proj.bias": "projection.bias",
    "norm.weight": "memory_norm.weight",
    "norm.bias": "memory_norm.bias",
}


class PublishedLayout(ABC):
    """The names of tensors in files of one kind of published adapter.

    Args:
        model: the adapted host.
    """

    title: ClassVar[str]

    def __init__(self, model: AdaptedDenoiser) -> None:
        self.model = model

    @abstractmethod
    def our_name(self, name: str) -> str | None:
        """Return our name of a tensor in a file; None if the layout has none of this name."""

    @abstractmethod
    def file_name(self, name: str) -> str | None:
        """Return the name in a file of one of our tensors; None if the layout has none."""

    @abstractmethod
    def settings(self, state: Mapping[str, Tensor]) -> DecoupledAdapter | JointDecoupledAdapter:
        """Return the settings of an adapter by its tensors, which raises KeyError or ConfigError if one is missing."""

    def complete(self, state: Tensors) -> Tensors:
        """Return the state with tensors that files of this layout leave out."""
        return state

    def check_written(self, adapter: AdapterLayers, state: Tensors) -> Tensors:
        """Return what is written of an adapter's state, or raise ConditionError."""
        return state

    def read(self, tensors: Tensors, path: Path) -> tuple[DecoupledAdapter | JointDecoupledAdapter, Tensors]:
        """Return settings and weights of a file for this host."""
        host, found = self.model.host, {name: self.our_name(name) for name in tensors}
        unknown = [name for name, own in found.items() if own is None]
        if unknown:
            raise AdapterFileError(
                f"{str(path)!r} is not {self.title}: it holds {unknown[:3]}{' …' if len(unknown) > 3 else ''}"
            )
        state = {own: tensors[name] for name, own in found.items() if own is not None}
        try:
            settings = self.settings(state)
            state = self.complete(state)
            with torch.device("meta"):
                expected = _shapes(settings.build(settings.sites(self.model)).state_dict())
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise AdapterFileError(f"{str(path)!r} is not {self.title}: it lacks {error}") from error
        except ConfigError as error:
            raise AdapterFileError(f"{str(path)!r}: {error}") from error
        shapes = _shapes(state)
        if shapes != expected:
            wrong = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
            raise AdapterFileError(
                f"{str(path)!r} is for another base model than this {type(host).__name__} with "
                f"{len(self.model.layer_names)} layers: {wrong[0]} is {shapes.get(wrong[0])}, and "
                f"{expected.get(wrong[0])} here; load it onto that base"
            )
        for name, value in tensors.items():
            if not value.is_floating_point():
                raise AdapterFileError(f"{str(path)!r}: the tensor {name!r} is {value.dtype}, not floating point")
            check_values(name, value)
        return settings, state

    def write(self, path: Path, name: str) -> None:
        """Write an adapter as one file, atomically."""
        adapter = self.model.adapter(name)
        state = {key: value.detach().contiguous().cpu() for key, value in adapter.state_dict().items()}
        state = self.check_written(adapter, state)
        tensors = {other: value for key, value in state.items() if (other := self.file_name(key)) is not None}
        if len(tensors) != len(state) or not ("projection.weight" in state or "perceiver.latents" in state):
            raise _cannot_write(name, self.title, "tokens=, no resampler, and blocks at all layers")
        for key, value in tensors.items():
            check_values(key, value)
        with replacing(path) as file:
            file.write(save(tensors))
            file.flush()
            os.fsync(file.fileno())


class UNetLayout(PublishedLayout):
    """IP-Adapters of UNets."""

    title = "a plain IP-Adapter (Plus, Full and FaceID are not read)"
    _block = re.compile(r"ip_adapter\.(\d+)\.to_([kv])_ip\.weight")

    def our_name(self, name: str) -> str | None:
        """Return our name of a tensor in a file."""
        block = self._block.fullmatch(name)
        if block is None or int(block[1]) % 2 == 0:
            return _PROJECTION.get(name.removeprefix("image_proj."))
        return f"blocks.{int(block[1]) // 2}.{block[2]}_proj.weight"

    def file_name(self, name: str) -> str | None:
        """Return the name in a file of one of our tensors."""
        block = re.fullmatch(r"blocks\.(\d+)\.([kv])_proj\.weight", name)
        if block is None:
            return _projection_name(name, "image_proj")
        return f"ip_adapter.{2 * int(block[1]) + 1}.to_{block[2]}_ip.weight"

    def settings(self, state: Mapping[str, Tensor]) -> DecoupledAdapter:
        """Return the settings of an adapter by its tensors."""
        width = self.model.sites("inside")[0].width
        rows, memory_dim = _projection_sizes(state, width)
        return DecoupledAdapter(memory_dim=memory_dim, tokens=rows // width)

    def check_written(self, adapter: AdapterLayers, state: Tensors) -> Tensors:
        """Return the state of an adapter with blocks at all layers."""
        if len(adapter.layers) != len(self.model.layer_names):
            raise _cannot_write(adapter.name, self.title, "blocks at all layers")
        return state


class FluxLayout(PublishedLayout):
    """IP-Adapters of Flux."""

    title = "an IP-Adapter of Flux as XLabs released it"
    _block = re.compile(
        r"(?:ip_adapter\.(\d+)\.to_([kv])_ip|double_blocks\.(\d+)\.processor\.ip_adapter_double_stream_([kv])_proj)"
        r"\.(weight|bias)"
    )

    def __init__(self, model: AdaptedDenoiser, layers: list[int]) -> None:
        super().__init__(model)
        self.layers = layers  # of joint attention with text and picture in two streams

    def our_name(self, name: str) -> str | None:
        """Return our name of a tensor in a file."""
        block = self._block.fullmatch(name)
        if block is None:
            return _PROJECTION.get(name.removeprefix("image_proj.").removeprefix("ip_adapter_proj_model."))
        number = int(block[1] or block[3])
        layer = self.layers[number] if number < len(self.layers) else f"none_{number}"
        return f"blocks.{layer}.{block[2] or block[4]}_proj.{block[5]}"

    def file_name(self, name: str) -> str | None:
        """Return the name in a file of one of our tensors."""
        block = re.fullmatch(r"blocks\.(\d+)\.([kv])_proj\.(weight|bias)", name)
        if block is None:
            return _projection_name(name, "ip_adapter_proj_model")
        number = self.layers.index(int(block[1]))
        return f"double_blocks.{number}.processor.ip_adapter_double_stream_{block[2]}_proj.{block[3]}"

    def settings(self, state: Mapping[str, Tensor]) -> DecoupledAdapter:
        """Return the settings of an adapter by its tensors."""
        slot_dim = state["memory_norm.weight"].shape[0]
        rows, memory_dim = _projection_sizes(state, slot_dim)
        layout = DecoupledLayout(slot_dim=slot_dim, bias=True, added_to="block")
        default = [site.layer for site in self.model.sites("inside") if site.part != "stream"]
        blocks = None if self.layers == default else tuple(self.model.layer_names[layer] for layer in self.layers)
        return DecoupledAdapter(memory_dim, tokens=rows // slot_dim, blocks=blocks or None, layout=layout)

    def check_written(self, adapter: AdapterLayers, state: Tensors) -> Tensors:
        """Return the state of an adapter whose blocks are at all joint layers, and add to the output of blocks."""
        if list(adapter.layers) != self.layers or not adapter.adds_to_block:
            needs = "blocks at all joint layers and DecoupledLayout(bias=True, added_to='block')"
            raise _cannot_write(adapter.name, self.title, needs)
        return state


class SD3Layout(PublishedLayout):
    """IP-Adapters of Stable Diffusion 3.5, whose blocks follow the time step."""

    title = "an IP-Adapter of Stable Diffusion 3.5 as InstantX released it"
    #: Our prefixes, and in files the names of InstantX, then of diffusers where they differ.
    _names: ClassVar[dict[str, tuple[str, ...]]] = {
        "perceiver.latents": ("image_proj.latents",),
        "perceiver.time_in": ("image_proj.time_embedding.linear_1",),
        "perceiver.time_out": ("image_proj.time_embedding.linear_2",),
        "perceiver.proj_in": ("image_proj.proj_in",),
        "perceiver.proj_out": ("image_proj.proj_out",),
        "perceiver.norm_out": ("image_proj.norm_out",),
        "perceiver.layers.#.memory_norm": ("image_proj.layers.#.0.norm1", "image_proj.layers.#.ln0"),
        "perceiver.layers.#.latent_norm": ("image_proj.layers.#.0.norm2", "image_proj.layers.#.ln1"),
        "perceiver.layers.#.q_proj": ("image_proj.layers.#.0.to_q", "image_proj.layers.#.attn.to_q"),
        "perceiver.layers.#.kv_proj": ("image_proj.layers.#.0.to_kv", "image_proj.layers.#.attn.to_kv"),
        "perceiver.layers.#.out_proj": ("image_proj.layers.#.0.to_out", "image_proj.layers.#.attn.to_out.0"),
        "perceiver.layers.#.norm": ("image_proj.layers.#.1.0", "image_proj.layers.#.adaln_norm"),
        "perceiver.layers.#.up": ("image_proj.layers.#.1.1", "image_proj.layers.#.ff.net.0.proj"),
        "perceiver.layers.#.down": ("image_proj.layers.#.1.3", "image_proj.layers.#.ff.net.2"),
        "perceiver.layers.#.modulation": ("image_proj.layers.#.2.1", "image_proj.layers.#.adaln_proj"),
        "blocks.#.modulation": ("ip_adapter.#.norm_ip.linear",),
        "blocks.#.k_proj": ("ip_adapter.#.to_k_ip",),
        "blocks.#.v_proj": ("ip_adapter.#.to_v_ip",),
        "blocks.#.q_norm": ("ip_adapter.#.norm_q",),
        "blocks.#.k_norm": ("ip_adapter.#.norm_k",),
        "blocks.#.memory_k_norm": ("ip_adapter.#.norm_ip_k",),
    }
    _ours: ClassVar[dict[str, str]] = {name: own for own, names in _names.items() for name in names}

    def our_name(self, name: str) -> str | None:
        """Return our name of a tensor in a file."""
        return _renamed(name, self._ours)

    def file_name(self, name: str) -> str | None:
        """Return the name in a file of one of our tensors."""
        return _renamed(name, {own: names[0] for own, names in self._names.items()})

    def settings(self, state: Mapping[str, Tensor]) -> JointDecoupledAdapter:
        """Return the settings of an adapter by its tensors."""
        num_latents, width = state["perceiver.latents"].shape[-2:]
        resampler = TimedResampler(
            num_latents=num_latents,
            depth=1 + max(int(name.split(".")[2]) for name in state if name.startswith("perceiver.layers.")),
            width=width,
            num_heads=state["perceiver.layers.0.q_proj.weight"].shape[0] // HEAD_DIM,
            head_dim=HEAD_DIM,
            feed_forward=state["perceiver.layers.0.up.weight"].shape[0] // width,
            frequencies=state["perceiver.time_in.weight"].shape[1],
        )
        if len(attention_names(self.model.host)) != len(self.model.layer_names):
            raise ConfigError("blocks of the host have two attention layers each: it is for another base model")
        return JointDecoupledAdapter(state["perceiver.proj_in.weight"].shape[1], resampler=resampler)

    def complete(self, state: Tensors) -> Tensors:
        """Return the state with gates of 1."""
        gates = {f"blocks.{layer}.gate": torch.ones(()) for layer in range(len(self.model.layer_names))}
        return state | gates | {"perceiver.latents": state["perceiver.latents"].flatten(0, -2)}

    def check_written(self, adapter: AdapterLayers, state: Tensors) -> Tensors:
        """Return the state of an adapter without its gates, which must be 1."""
        gates = [name for name in state if name.endswith(".gate")]
        if len(adapter.layers) != len(self.model.layer_names) or any(float(state[name]) != 1 for name in gates):
            raise _cannot_write(adapter.name, self.title, "blocks at all layers and no gates (all are 1)")
        if adapter.config.resampler.head_dim != HEAD_DIM:
            raise _cannot_write(adapter.name, self.title, f"a resampler of head_dim={HEAD_DIM}")
        rest = {name: value for name, value in state.items() if name not in gates}
        return rest | {"perceiver.latents": state["perceiver.latents"][None]}


def read_file(path: Path) -> Tensors:
    """Return the tensors of a checkpoint by dotted name; a `.bin` is unpickled with `weights_only`."""
    try:
        if not os.fspath(path).endswith((".bin", ".pt", ".pth")):
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged pickles raise anything
        raise AdapterFileError(f"{str(path)!r} cannot be read as an IP-Adapter: {error}; fetch it again") from error
    flat = {}
    for part, tensors in content.items() if isinstance(content, dict) else ():
        for name, value in tensors.items() if isinstance(tensors, dict) else ():
            flat[f"{part}.{name}"] = value
    if not flat or not all(isinstance(value, Tensor) for value in flat.values()):
        raise AdapterFileError(f"{str(path)!r} holds no 'image_proj' and 'ip_adapter' with tensors")
    return flat


def _renamed(name: str, names: Mapping[str, str]) -> str | None:
    """Rename a tensor by patterns in which # stands for a number of a layer."""
    match = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name)
    assert match is not None
    numbered = re.match(r"((?:image_proj\.layers|perceiver\.layers|ip_adapter|blocks)\.)(\d+)(\..+)", match[1])
    pattern = match[1] if numbered is None else f"{numbered[1]}#{numbered[3]}"
    other = names.get(pattern)
    return None if other is None else other.replace("#", numbered[2] if numbered else "") + (match[2] or "")


def _projection_name(name: str, prefix: str) -> str | None:
    return next((f"{prefix}.{other}" for other, own in _PROJECTION.items() if own == name), None)


def _projection_sizes(state: Mapping[str, Tensor], width: int) -> tuple[int, int]:
    """Return the sizes of the projection, whose outputs are slots of this width."""
    missing = [name for name, own in _PROJECTION.items() if own not in state]
    if missing:
        raise KeyError(", ".join(missing))
    shapes = [tuple(state[own].shape) for own in _PROJECTION.values()]
    rows, memory_dim = shapes[0] if len(shapes[0]) == 2 else (0, 0)
    if not rows or rows % width or shapes != [(rows, memory_dim), (rows,), (width,), (width,)]:
        raise ConfigError(f"an image projection of {shapes} gives no whole number of slots {width} wide")
    return rows, memory_dim


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def _cannot_write(name: str, title: str, needs: str) -> ConditionError:
    return ConditionError(f"adapter {name!r} cannot be written as {title}, which has {needs}: use save_adapter")
