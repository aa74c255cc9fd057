"""A transformer of diffusers with adapters inside its attention: SD3, Flux, PixArt, Wan, DiT and their like."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.host_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.attach import register_host
from mmattn.hosts.context import Arguments, Keywords
from mmattn.hosts.diffusion.attention import CoreProcessor, JointAttention, TextAttention
from mmattn.hosts.diffusion.find_attention import CROSS, JOINT, SELF, PictureAttention, check_reaches, find_attention
from mmattn.hosts.diffusion.heads import (
    check_projections,
    head_size,
    is_of_diffusers,
    keys_and_values_of,
    takes_hidden_states,
    weight_of,
)
from mmattn.hosts.diffusion.model import AdaptedDenoiser
from mmattn.hosts.diffusion.published import FluxLayout, PublishedLayout, SD3Layout
from mmattn.hosts.diffusion.scale import Grid


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
    part: ClassVar[str] = "transformer"

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        structure = find_attention(host)
        super().__init__(host, [layer.name for layer in structure.layers], require_memory)
        self.structure = structure

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return is_of_diffusers(model) and takes_hidden_states(model)

    def attention(self, index: int) -> PictureAttention:
        """Return the attention layer of this number."""
        return self.structure.layers[index]

    def sites(self, position: str) -> list[Site]:
        apart = any(layer.kind != SELF and not layer.stream for layer in self.structure.layers)
        sites = []
        for index, layer in enumerate(self.structure.layers):
            attn, part = self.layer(index), "stream" if layer.stream and apart else None
            sites.append(Site(index, position, layer.name, layer.width, device_of(attn), head_size(attn), part))
        return sites

    def picture_part(self, index: int) -> int:
        return self.attention(index).part

    def changed_output(self, adapter: AdapterLayers, index: int) -> tuple[nn.Module, int]:
        if not adapter.traits.adds_to_block:
            return self.layer(index), self.attention(index).part
        block, part = self.block_of(index)
        return self.host.get_submodule(block), part

    def check_adapter(self, adapter: AdapterLayers) -> None:
        changed = []
        for site in adapter.sites:
            layer = self.attention(site.layer)
            if getattr(adapter.block(site.layer), "reads_projections", False):
                check_projections(self.layer(site.layer), layer.name, layer.kind == CROSS)
            changed.append(self.block_of(site.layer) if adapter.traits.adds_to_block else (layer.name, layer.part))
        with self.open_blocks.conditioned(None):
            check_reaches(self.host, self.structure, changed)

    def block_of(self, index: int) -> tuple[str, int]:
        layer, size = self.attention(index), head_size(self.layer(index))
        if layer.block_width != size.num_heads * size.head_dim:
            raise AttachError(
                f"layout.added_to='block' needs a block whose output is {size.num_heads * size.head_dim} wide, and "
                f"{layer.block!r} is not: leave it out"
            )
        return layer.block, layer.block_part

    def key_value_weights(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the weights of the host's key and value projections of the text, or of the picture without one."""
        attn = self.layer(index)
        joint = self.attention(index).kind == JOINT and getattr(attn, "add_k_proj", None) is not None
        k, v = (attn.add_k_proj, attn.add_v_proj) if joint else keys_and_values_of(attn)
        if not isinstance(k, nn.Module) or not isinstance(v, nn.Module):
            raise AttachError(
                f"start='host' copies key and value projections, and {self.layer_names[index]} has none of their own: "
                "give start='nothing'"
            )
        return weight_of(k, self.host), weight_of(v, self.host)

    def published_layout(self, follows_time: bool) -> PublishedLayout:
        if follows_time:
            return SD3Layout(self, range(len(self.layer_names)))
        return FluxLayout(self, [index for index, layer in enumerate(self.structure.layers) if layer.kind == JOINT])

    def grid_of(self, kwargs: Keywords) -> Grid | None:
        return self.structure.layout.grid_of(kwargs, kwargs[self.picture_name])

    def text_attention(self, index: int) -> type[CoreProcessor]:
        kind = self.attention(index).kind
        if kind == SELF:
            raise ConditionError(
                f"use_core: {self.layer_names[index]} of {type(self.host).__name__} reads no text of its own that the "
                "core could mask; adapters work there"
            )
        return TextAttention if kind == CROSS else JointAttention

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: object, rows: int) -> Arguments:
        return self.structure.inputs(self.host, rows, generator)
