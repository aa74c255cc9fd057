"""A diffusers UNet with adapters beside its cross-attention layers, and the published IP-Adapters for it."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AttachError
from mmattn.hosts.attach import register_host
from mmattn.hosts.context import Arguments, Keywords
from mmattn.hosts.diffusion.attention import CoreProcessor, TextAttention
from mmattn.hosts.diffusion.heads import (
    attention_names,
    head_size,
    is_of_diffusers,
    takes_hidden_states,
    weight_of,
)
from mmattn.hosts.diffusion.model import AdaptedDenoiser
from mmattn.hosts.diffusion.published import PublishedLayout
from mmattn.hosts.diffusion.scale import Grid

#: Attributes of the `Attention` of diffusers in which only the picture has queries, with one output.
_ATTENTION = ("heads", "inner_dim", "inner_kv_dim", "spatial_norm", "group_norm", "norm_q", "rescale_output_factor")


@register_host
class AdaptedUNet(AdaptedDenoiser):
    """A UNet of diffusers and the adapters beside its cross-attention layers.

    >>> from diffusers import UNet2DConditionModel
    >>> import mmattn
    >>> unet = UNet2DConditionModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
    ...     down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2, cross_attention_dim=12,
    ...     up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")).eval()
    >>> model = mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=24))
    >>> picture, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 12)
    >>> out = model(picture, 3, text, memory=mmattn.Memory(torch.randn(1, 7, 24))).sample
    >>> torch.equal(out, model(picture, 3, text).sample)  # fresh
    True
    """

    kind: ClassVar[str] = "unet"
    part: ClassVar[str] = "unet"

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(host, _text_layers(host), require_memory)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        return is_of_diffusers(model) and not takes_hidden_states(model)

    def grid_of(self, kwargs: Keywords) -> Grid | None:
        height, width = kwargs["sample"].shape[-2:]
        return 1, height, width

    def text_attention(self, index: int) -> type[CoreProcessor]:
        return TextAttention

    def published_layout(self, follows_time: bool) -> PublishedLayout:
        return PublishedLayout(self, range(len(self.layer_names)))

    def sites(self, position: str) -> list[Site]:
        width = _text_width(self.host)
        layers = [(index, name, self.layer(index)) for index, name in enumerate(self.layer_names)]
        return [Site(index, position, name, width, device_of(attn), head_size(attn)) for index, name, attn in layers]

    def key_value_weights(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the weights of the host's key and value projections of the text."""
        attn = self.layer(index)
        k, v = (attn.to_k, attn.to_v) if attn.added_kv_proj_dim is None else (attn.add_k_proj, attn.add_v_proj)
        return weight_of(k, self.host), weight_of(v, self.host)

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: object, rows: int) -> Arguments:
        host = getattr(self.host, "config")  # noqa: B009
        size = host.sample_size or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=generator.device).to(device_of(self.host))

        batch = {
            "sample": random(rows, host.in_channels, height, width),
            "timestep": 11,
            "encoder_hidden_states": random(rows, 7, _text_width(self.host)),
        }
        if host.addition_embed_type == "text_time":
            pooled = host.projection_class_embeddings_input_dim - 6 * host.addition_time_embed_dim
            batch["added_cond_kwargs"] = {"text_embeds": random(rows, pooled), "time_ids": random(rows, 6)}
        return batch


def _text_layers(host: nn.Module) -> tuple[str, ...]:
    """Return the names of the cross-attention layers of a UNet, in the order of its `attn_processors`."""
    layers = {name: host.get_submodule(name) for name in attention_names(host)}
    layers = {
        name: attn
        for name, attn in layers.items()
        if getattr(attn, "is_cross_attention", False) or getattr(attn, "added_kv_proj_dim", None) is not None
    }
    for attn in layers.values():
        if not all(hasattr(attn, name) for name in _ATTENTION) or getattr(attn, "add_q_proj", None) is not None:
            raise AttachError(
                f"no adapter can act beside {type(attn).__name__} layers of {type(host).__name__}, which are not those "
                "of UNets: use a UNet2DConditionModel"
            )
    if not layers:
        raise AttachError(
            f"{type(host).__name__} has no cross-attention layers: use a UNet2DConditionModel with such blocks"
        )
    return tuple(layers)


def _text_width(host: nn.Module) -> int:
    """Return the width e of the text that the host attends to."""
    width = getattr(getattr(host, "config", None), "cross_attention_dim", None)
    width = width[-1] if isinstance(width, (list, tuple)) else width
    if not isinstance(width, int):
        raise AttachError(f"the config of {type(host).__name__} has no cross_attention_dim")
    return width
