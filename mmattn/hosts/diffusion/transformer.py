"""A transformer of diffusers with adapters inside its attention: SD3, Flux, PixArt, Wan, DiT and their like."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.decoupled.joint import JointDecoupledAdapter
from mmattn.adapters.language_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AdapterFileError, AttachError, ConditionError, import_extra
from mmattn.hosts.diffusion.attention import TextAttention
from mmattn.hosts.diffusion.base import AdaptedDenoiser
from mmattn.hosts.diffusion.find_attention import (
    CROSS,
    JOINT,
    SELF,
    PictureAttention,
    check_reaches,
    find_attention,
)
from mmattn.hosts.diffusion.heads import (
    check_projections,
    head_size,
    is_of_diffusers,
    keys_and_values_of,
    takes_hidden_states,
)
from mmattn.hosts.diffusion.ip_adapter_files import read_file
from mmattn.hosts.diffusion.ip_adapter_flux import read_flux, write_flux
from mmattn.hosts.diffusion.ip_adapter_sd3 import is_sd3, read_sd3, write_sd3
from mmattn.hosts.diffusion.joint_attention import JointAttention
from mmattn.hosts.diffusion.packed_grid import packed_grid
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.registry import register_host


@register_host
class AdaptedDiffusionTransformer(AdaptedDenoiser):
    """A transformer of diffusers and the adapters beside its attention layers.

    In each block they act beside the layer that reads the text (PixArt, Sana, Wan, LTX), else beside that which has
    one softmax over text and picture (SD3, Flux, Qwen-Image), else beside the only one there is (DiT). The queries are
    those of the picture.

    >>> from diffusers import SD3Transformer2DModel
    >>> import mmattn
    >>> transformer = SD3Transformer2DModel(sample_size=8, in_channels=4, num_layers=2, num_attention_heads=2,
    ...     attention_head_dim=8, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10).eval()
    >>> model = mmattn.attach(transformer, mmattn.DecoupledAdapter(memory_dim=24))
    >>> given = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([3.0]),
    ...     "encoder_hidden_states": torch.randn(1, 5, 12), "pooled_projections": torch.randn(1, 10)}
    >>> out = model(**given, memory=mmattn.Memory(torch.randn(1, 7, 24))).sample
    >>> torch.equal(out, model(**given).sample)  # fresh
    True
    """

    kind: ClassVar[str] = "diffusion_transformer"

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        self.__dict__["found"] = found = find_attention(host)
        super().__init__(host, [layer.name for layer in found.layers], require_memory)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether it is a model of diffusers that is called with `hidden_states` and a `timestep`."""
        return is_of_diffusers(model) and takes_hidden_states(model)

    def attention(self, index: int) -> PictureAttention:
        """What is known of the attention layer of this number."""
        layer: PictureAttention = self.found.layers[index]
        return layer

    def sites(self, position: str) -> list[Site]:
        """The attention layer of every block whose queries are the picture's."""
        apart = any(layer.kind != SELF and not layer.stream for layer in self.found.layers)
        found = []
        for index, layer in enumerate(self.found.layers):
            attn, part = self.layer(index), "stream" if layer.stream and apart else None
            size = head_size(attn)
            found.append(Site(index, position, layer.name, layer.width, device_of(attn), size, part))
        return found

    def picture_part(self, index: int) -> int:
        """Which of the outputs of an attention layer is that of the picture."""
        return self.attention(index).part

    def changed_output(self, adapter: Any, index: int) -> tuple[nn.Module, int]:
        """The attention layer or the block around it, whose output an adapter changes, and the picture's part."""
        if not adapter.adds_to_block:
            return self.layer(index), self.attention(index).part
        block, part = self.block_of(index)
        return self.host.get_submodule(block), part or 0

    def check_adapter(self, adapter: Any) -> None:
        """Prove that what an adapter adds at its layers reaches the prediction.

        Raises:
            ConditionError: it does not.
            AttachError: it adds to blocks that are of another width, or hand on no picture; it reads keys and values
                of the picture that a layer does not have.
        """
        changed = []
        for site in adapter.sites:
            layer = self.attention(site.layer)
            if isinstance(adapter.config, JointDecoupledAdapter):
                check_projections(self.layer(site.layer), layer.name, layer.kind == CROSS)
            name, part = self.block_of(site.layer) if adapter.adds_to_block else (layer.name, layer.part)
            changed.append((name, part or 0))
        with self.open_blocks.conditioned(None):
            check_reaches(self.host, self.found, changed)

    def block_of(self, index: int) -> tuple[str, int | None]:
        """Name of the block around an attention layer, and which of its outputs is the picture's; None is its only one.

        Raises:
            AttachError: the block hands on no picture as wide as the layer's heads.
        """
        layer, size = self.attention(index), head_size(self.layer(index))
        if layer.block_part is None or layer.block_width != size.num_heads * size.head_dim:
            raise AttachError(
                f"layout.added_to='block' adds what {layer.name} finds, {size.num_heads * size.head_dim} wide, to what "
                f"{layer.block!r} hands on, which is no picture of that width: leave it out"
            )
        return layer.block, None if layer.block_part == -1 else layer.block_part

    def key_value_weights(self, index: int) -> tuple[Tensor, Tensor]:
        """The weights of the host's own key and value projections of the text, of the picture where it reads none.

        Raises:
            AttachError: it has none of their own.
        """
        attn = self.layer(index)
        joint = self.attention(index).kind == JOINT and getattr(attn, "add_k_proj", None) is not None
        k, v = (attn.add_k_proj, attn.add_v_proj) if joint else keys_and_values_of(attn)
        if k is None or v is None:
            raise AttachError(
                f"start='host' copies key and value projections, of which {self.layer_names[index]} of "
                f"{type(self.host).__name__} has none of their own (they are one with others): give start='nothing'"
            )
        return k.weight, v.weight

    def read_single_file(self, path: str | PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
        """The settings and weights in the single file of an IP-Adapter of Flux (XLabs) or SD 3.5 (InstantX).

        Raises:
            AdapterFileError: torn, of another kind, or made for another base model.
        """
        tensors = read_file(path)
        return read_sd3(self, tensors, path) if is_sd3(tensors) else read_flux(self, tensors, path)

    def save_ip_adapter(self, path: str | PathLike[str], name: str = "default") -> None:
        """Write one adapter as a single safetensors file in the layout of published IP-Adapters.

        Args:
            path: the file.
            name: of the adapter.

        Raises:
            ConditionError: the adapter is built otherwise than those.
        """
        joint = isinstance(self.adapter(name).config, JointDecoupledAdapter)
        (write_sd3 if joint else write_flux)(self, path, name)

    def grid_of(self, given: Mapping[str, Any]) -> Grid | None:
        """Frames, height and width, in tokens, of the picture that the host is given; None where it does not say."""
        picture = given[self.picture_name]
        return self.found.layout.grid_of(picture) or packed_grid(given, picture.shape[1])

    def predict(self, sample: Tensor, timestep: Any, text: Tensor, **inputs: Any) -> Tensor:
        """What the host makes of a sample, its time step given to every row; (1, frames) where each has its own."""
        time = torch.as_tensor(timestep, device=sample.device)
        return super().predict(sample, time.expand(sample.shape[0], *time.shape[1:]), text, **inputs)

    def text_attention(self, index: int) -> Any:
        """The processor that puts the text of an attention layer through the core.

        Raises:
            ConditionError: the core cannot compute it.
        """
        kind = self.attention(index).kind
        if kind == CROSS:
            return TextAttention(self, index, self.layer(index))
        if kind == JOINT:
            return JointAttention(self, index)
        raise ConditionError(
            f"use_core: {self.layer_names[index]} of {type(self.host).__name__} reads no text of its own that the core "
            "could mask; adapters work there"
        )

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """A noisy picture, a time step, a text, and whatever else the host is called with."""
        inputs: dict[str, Any] = self.found.inputs(self.host, rows, generator)
        return inputs

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """The transformer in a folder, or the `transformer` of a pipeline in a folder or under a name on the hub.

        Raises:
            AdapterFileError: there is none, or its weights are no safetensors.
        """
        diffusers: Any = import_extra("diffusers", "diffusion")
        inner = {} if os.path.isfile(os.path.join(name, "config.json")) else {"subfolder": "transformer"}
        try:
            host: nn.Module = diffusers.AutoModel.from_pretrained(name, use_safetensors=True, **inner).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterFileError(
                f"no transformer can be loaded from {os.fspath(name)!r} ({error}); give a pipeline on the hub that is "
                "reachable or kept from before, or the folder of a transformer or a pipeline, with safetensors"
            ) from error
        return host
