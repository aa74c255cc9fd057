"""A diffusers UNet with adapters beside its cross-attention layers, and the published IP-Adapters for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.errors import AdapterFileError, import_extra
from mmattn.hosts.diffusion.attention import TextAttention
from mmattn.hosts.diffusion.base import AdaptedDenoiser
from mmattn.hosts.diffusion.heads import head_size, is_of_diffusers, takes_hidden_states
from mmattn.hosts.diffusion.ip_adapter_unet import read_ip_adapter, write_ip_adapter
from mmattn.hosts.diffusion.scale import Grid
from mmattn.hosts.diffusion.unet_layers import find_layer_names, text_width
from mmattn.hosts.registry import register_host


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

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(host, find_layer_names(host), require_memory)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether it has attention layers as the models of diffusers have, or is one of those."""
        return is_of_diffusers(model) and not takes_hidden_states(model)

    def forward(  # type: ignore[override]
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor | None = None,
        memory: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            sample: the host's own.
            timestep: the host's own.
            encoder_hidden_states: the host's own.
            memory: as in `AdaptedDenoiser.forward`, as all further arguments.
            kwargs: `adapter_scale`, `text_mask`, and the host's own.
        """
        return super().forward(sample, timestep, encoder_hidden_states, memory=memory, **kwargs)

    def grid_of(self, given: Mapping[str, Any]) -> Grid | None:
        """One picture of the sample's height and width."""
        sample = given["sample"]
        return 1, sample.shape[-2], sample.shape[-1]

    def text_attention(self, index: int) -> TextAttention:
        """The processor that puts the text of an attention layer through the core."""
        return TextAttention(self, index, self.layer(index))

    def sites(self, position: str) -> list[Site]:
        """Every cross-attention layer."""
        width = text_width(self.host)
        layers = [(index, name, self.layer(index)) for index, name in enumerate(self.layer_names)]
        return [Site(index, position, name, width, device_of(attn), head_size(attn)) for index, name, attn in layers]

    def key_value_weights(self, index: int) -> tuple[Tensor, Tensor]:
        """The weights of the host's own key and value projections of the text."""
        attn = self.layer(index)
        k, v = (attn.to_k, attn.to_v) if attn.added_kv_proj_dim is None else (attn.add_k_proj, attn.add_v_proj)
        return k.weight, v.weight

    def read_single_file(self, path: str | PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
        """The settings and weights in the single file of a published IP-Adapter.

        Raises:
            AdapterFileError: torn, of another kind, or made for another base model.
        """
        return read_ip_adapter(self.host, path)

    def save_ip_adapter(self, path: str | PathLike[str], name: str = "default") -> None:
        """Write one adapter as a single safetensors file in the layout of published IP-Adapters.

        Args:
            path: the file.
            name: of the adapter.

        Raises:
            ConditionError: the adapter is of another kind (`tokens` not given, a part of the blocks, a resampler).
        """
        write_ip_adapter(self, path, name)

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """A noisy picture, a time step and a text, with what the UNets of SDXL are given besides."""
        host: Any = self.host.config
        size = host.sample_size or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device_of(self.host))

        batch = {
            "sample": random(rows, host.in_channels, height, width),
            "timestep": 11,
            "encoder_hidden_states": random(rows, 7, text_width(self.host)),
        }
        if host.addition_embed_type == "text_time":
            pooled = host.projection_class_embeddings_input_dim - 6 * host.addition_time_embed_dim
            batch["added_cond_kwargs"] = {"text_embeds": random(rows, pooled), "time_ids": random(rows, 6)}
        return batch

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """The UNet in a folder, or the `unet` of a pipeline in a folder or under a name on the hub.

        Raises:
            AdapterFileError: there is none, or its weights are no safetensors.
        """
        unet: nn.Module = load_unet(name)
        return unet


def load_unet(name: str | PathLike[str]) -> Any:
    """The UNet in a folder, or the `unet` of a pipeline in a folder or under a name on the hub.

    Raises:
        AdapterFileError: there is none, or its weights are no safetensors.
    """
    diffusers: Any = import_extra("diffusers", "diffusion")
    inner = {} if os.path.isfile(os.path.join(name, "config.json")) else {"subfolder": "unet"}
    try:
        return diffusers.UNet2DConditionModel.from_pretrained(name, use_safetensors=True, **inner).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise AdapterFileError(
            f"no UNet can be loaded from {os.fspath(name)!r} ({error}); give a pipeline on the hub that is "
            "reachable or kept from before, or the folder of a UNet or a pipeline, with safetensors"
        ) from error
