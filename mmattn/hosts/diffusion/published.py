"""Published IP-Adapters (arXiv 2308.06721) in single files: read onto a host, and written back.

- UNets, by the authors; files of the Plus, Full and FaceID kind are refused.
- Flux, by XLabs: what the queries find is added to the output of the block.
- Stable Diffusion 3.5, by InstantX: `image_proj` resamples an image under the time step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import ClassVar

import torch
from safetensors.torch import save
from torch import Tensor

from mmattn.adapters.base import AdapterLayers, build_layers
from mmattn.adapters.decoupled import DecoupledAdapter, DecoupledLayout, JointDecoupledAdapter, TimedResampler
from mmattn.errors import AdapterFileError, ConditionError, ConfigError
from mmattn.hosts.diffusion.heads import attention_names
from mmattn.hosts.model import AdaptedModel
from mmattn.storage.files import replacing
from mmattn.storage.safetensors import check_values

Path = str | PathLike[str]
Tensors = dict[str, Tensor]
Settings = DecoupledAdapter | JointDecoupledAdapter
#: Heads of released resamplers are this wide; their number is not in the file.
HEAD_DIM = 64


class PublishedLayout:
    """The names of tensors in files of one kind of published adapter; this one: of UNets."""

    title: ClassVar[str] = "a plain IP-Adapter (Plus, Full and FaceID are not read)"
    needs: ClassVar[str] = "tokens=, no resampler, and blocks at all layers"
    #: Our names, and those in files, of which the first is written; # is the number of a layer.
    names: ClassVar[dict[str, tuple[str, ...]]] = {
        "projection": ("image_proj.proj",),
        "memory_norm": ("image_proj.norm",),
        "blocks.#.k_proj": ("ip_adapter.#.to_k_ip",),
        "blocks.#.v_proj": ("ip_adapter.#.to_v_ip",),
    }
    #: In files of UNets self-attention layers are numbered, too.
    numbering: ClassVar[tuple[int, int]] = (1, 2)

    def __init__(self, model: AdaptedModel, layers: Iterable[int]) -> None:
        # The layers with a block, in the order of their numbers in files.
        self.model = model
        first, step = self.numbering
        self.numbers = {layer: first + step * place for place, layer in enumerate(layers)}

    def settings(self, state: Mapping[str, Tensor]) -> Settings:
        """Return the settings of an adapter by its tensors, which raises KeyError or ValueError if one is missing."""
        rows, memory_dim = state["projection.weight"].shape
        return DecoupledAdapter(memory_dim=memory_dim, tokens=rows // self.model.sites("inside")[0].width)

    def complete(self, state: Tensors) -> Tensors:
        """Return the state with tensors that files of this layout leave out."""
        return state

    def written(self, adapter: AdapterLayers, state: Tensors) -> Tensors | None:
        """Return what is written of an adapter's state; None if the layout has no such adapter."""
        return state if "projection.weight" in state else None

    def read(self, tensors: Tensors, path: Path) -> tuple[Settings, Tensors]:
        """Return settings and weights of a file for this host."""
        ours = {name: our_name for our_name, names in self.names.items() for name in names}
        layers = {number: layer for layer, number in self.numbers.items()}
        state = {_renamed(name, ours, layers) or name: value for name, value in tensors.items()}
        try:
            settings = self.settings(state)
            state = self.complete(state)
            with torch.device("meta"):
                expected = _shapes(build_layers(settings, settings.sites(self.model)).state_dict())
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise AdapterFileError(f"{str(path)!r} is not {self.title}: it lacks {error}") from error
        shapes = _shapes(state)
        wrong = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        if wrong:
            raise AdapterFileError(
                f"{str(path)!r} is not {self.title}, or is for another base model than this "
                f"{type(self.model.host).__name__}: {wrong[0]} is {shapes.get(wrong[0])} and must be "
                f"{expected.get(wrong[0])}"
            )
        for name, value in tensors.items():
            if not value.is_floating_point():
                raise AdapterFileError(f"{str(path)!r}: the tensor {name!r} is {value.dtype}, not floating point")
        return settings, state

    def write(self, path: Path, name: str) -> None:
        """Write an adapter as one file, atomically."""
        adapter = self.model.adapter(name)
        state = {key: value.detach().contiguous().cpu() for key, value in adapter.state_dict().items()}
        written = self.written(adapter, state) if list(adapter.layers) == list(self.numbers) else None
        theirs = {our_name: names[0] for our_name, names in self.names.items()}
        tensors = {_renamed(key, theirs, self.numbers) or "": value for key, value in (written or {}).items()}
        if not tensors or "" in tensors:
            raise ConditionError(
                f"adapter {name!r} cannot be written as {self.title}, which has {self.needs}: use save_adapter"
            )
        for key, value in tensors.items():
            check_values(key, value)
        with replacing(path) as file:
            file.write(save(tensors))


class FluxLayout(PublishedLayout):
    """IP-Adapters of Flux, with blocks at all layers of joint attention."""

    title = "an IP-Adapter of Flux as XLabs released it"
    needs = "tokens=, blocks at all joint layers and DecoupledLayout(bias=True, added_to='block')"
    names: ClassVar = {
        "projection": ("ip_adapter_proj_model.proj", "image_proj.proj"),
        "memory_norm": ("ip_adapter_proj_model.norm", "image_proj.norm"),
        "blocks.#.k_proj": ("double_blocks.#.processor.ip_adapter_double_stream_k_proj", "ip_adapter.#.to_k_ip"),
        "blocks.#.v_proj": ("double_blocks.#.processor.ip_adapter_double_stream_v_proj", "ip_adapter.#.to_v_ip"),
    }
    numbering = (0, 1)

    def settings(self, state: Mapping[str, Tensor]) -> Settings:
        (slot_dim,), (rows, memory_dim) = state["memory_norm.weight"].shape, state["projection.weight"].shape
        layout = DecoupledLayout(slot_dim=slot_dim, bias=True, added_to="block")
        return DecoupledAdapter(memory_dim, tokens=rows // slot_dim, layout=layout)

    def written(self, adapter: AdapterLayers, state: Tensors) -> Tensors | None:
        return super().written(adapter, state) if adapter.traits.adds_to_block else None


class SD3Layout(PublishedLayout):
    """IP-Adapters of Stable Diffusion 3.5, whose blocks follow the time step."""

    title = "an IP-Adapter of Stable Diffusion 3.5 as InstantX released it"
    needs = f"blocks at all layers, no gates (all are 1) and a resampler of head_dim={HEAD_DIM}"
    names: ClassVar = {
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
    numbering = (0, 1)

    def settings(self, state: Mapping[str, Tensor]) -> Settings:
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
        if len(attention_names(self.model.host)) != len(self.numbers):
            raise ConfigError("one attention layer in each block of the host: it is for another base model")
        return JointDecoupledAdapter(state["perceiver.proj_in.weight"].shape[1], resampler=resampler)

    def complete(self, state: Tensors) -> Tensors:
        gates = {f"blocks.{layer}.gate": torch.ones(1) for layer in self.numbers}
        return state | gates | {"perceiver.latents": state["perceiver.latents"].flatten(0, -2)}

    def written(self, adapter: AdapterLayers, state: Tensors) -> Tensors | None:
        gates = [name for name in state if name.endswith(".gate")]
        assert isinstance(adapter.config, JointDecoupledAdapter)
        if any(float(state[name]) != 1 for name in gates) or adapter.config.resampler.head_dim != HEAD_DIM:
            return None
        rest = {name: value for name, value in state.items() if name not in gates}
        return rest | {"perceiver.latents": state["perceiver.latents"][None]}


def _renamed(name: str, names: Mapping[str, str], layers: Mapping[int, int]) -> str | None:
    """Rename a tensor by patterns in which # is the number of a layer; None if none has this name."""
    stem, suffix = re.fullmatch(r"(.*?)(\.weight|\.bias)?", name).groups("")  # type: ignore[union-attr]
    number = re.search(r"\.(\d+)\.", stem)
    if number is None:
        return None if stem not in names else names[stem] + suffix
    pattern = names.get(f"{stem[: number.start(1)]}#{stem[number.end(1) :]}")
    layer = int(number[1]) if "layers.#" in (pattern or "") else layers.get(int(number[1]))
    return None if pattern is None or layer is None else pattern.replace("#", str(layer)) + suffix


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}
