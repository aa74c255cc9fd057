"""A language model of vLLM with gated blocks, whose keys and values lie in vLLM's cache of cross-attention.

The host is vLLM's own class, whatever its family; a block acts on what a layer hands on, as `attach` has it. Keys and
values of new memories are written before the host runs, so that its compiled graph never sees a memory. Blocks are
small, and whole on every rank of a tensor-parallel group. A memory is a multimodal input: vectors as they are, pictures
through the encoder that the adapter was trained with.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import CacheConfig, VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import CrossAttention as PagedCrossAttention
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.model_executor.models.utils import init_vllm_registered_model
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.parse import ModalityDataItems, MultiModalDataItems, MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    PromptReplacement,
)
from vllm.utils.torch_utils import set_default_torch_dtype

from mmattn.adapters.files import load_folder
from mmattn.adapters.gated import GatedAdapter, GatedLayers
from mmattn.adapters.gated.block import GatedBlock
from mmattn.adapters.protocols import Site
from mmattn.core.cross_attention import CrossAttention
from mmattn.core.projection import norm_heads
from mmattn.encoders.images import ImageEncoder, load_image_encoder
from mmattn.errors import AttachError, ShapeError
from mmattn.hosts.probe import outermost_lists
from mmattn.memory import Memory
from mmattn.pipelines.build import check_encoder
from mmattn.serving.vllm.engine import served_settings


class MemoryItems(ModalityDataItems[list[Tensor], Tensor]):
    """The memory (m, e) of a request."""

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> Tensor:
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, object]:
        return {}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return {"memory": self.data}


class MemoryParser(MultiModalDataParser):
    """Reads `multi_modal_data`: vectors (m, e) as "memory"; where the adapter has an encoder a picture, as "image"."""

    def __init__(self, info: MemoryInfo) -> None:
        super().__init__()
        self.info = info

    def parse_mm_data(self, mm_data: Mapping[str, Any]) -> MultiModalDataItems:
        name, items = self.info.modality, MultiModalDataItems()
        if set(mm_data) - {name}:
            raise ShapeError(f"this adapter reads a memory as {name!r}, got {sorted(mm_data)}")
        if name in mm_data:
            value = mm_data[name]
            tokens = [self.read(item) for item in (value if isinstance(value, list) else [value])]
            # No slots are no memory: all tokens pass through, and a null slot is not seen either.
            items[name] = MemoryItems(tokens if len(tokens) > 1 or len(tokens[0]) else [], name)
        return items

    def read(self, value: Any) -> Tensor:
        """Return the memory (m, e) of a picture or of vectors, checked."""
        value, adapter = getattr(value, "media", value), self.info.adapter
        if not isinstance(value, Tensor) and self.info.encoder is not None:
            return self.info.encoder([value]).tokens[0].float()
        tokens = torch.as_tensor(value).float()
        if tokens.dim() != 2 or tokens.shape[1] != adapter.memory_dim:
            raise ShapeError(f"a memory must be (m, {adapter.memory_dim}), got {tuple(tokens.shape)}")
        if adapter.resampler is None and len(tokens) > self.info.slots:
            most = self.info.slots
            raise ShapeError(f"a memory has at most {most} slots here, got {len(tokens)}: raise max_source_positions")
        return Memory(tokens[None]).tokens[0]  # refuses NaN and infinity


class MemoryInfo(BaseProcessingInfo):
    """Settings and encoder of the adapter."""

    @cached_property
    def adapter(self) -> GatedAdapter:
        """Settings of the adapter."""
        return served_settings(load_folder(self.get_hf_config().mmattn_adapter)[0])

    @cached_property
    def encoder(self) -> ImageEncoder | None:
        """The encoder of the pictures that the adapter was trained with."""
        config = self.get_hf_config()
        if config.mmattn_encoder is None:
            return None
        (name, pooled), folder = config.mmattn_encoder, Path(config.mmattn_adapter)
        encoder = load_image_encoder(name, "cpu", pooled=pooled)
        check_encoder(encoder, name, folder)
        return encoder

    @property
    def modality(self) -> str:
        """Name of the memory in `multi_modal_data`."""
        return "memory" if self.get_hf_config().mmattn_encoder is None else "image"

    @property
    def slots(self) -> int:
        """Most slots of a memory as the blocks attend to it, without a null slot."""
        return self.get_hf_config().max_source_positions - self.adapter.null_slot

    def rows(self, memory: Tensor) -> int:
        """Return the number of keys of a memory (m, e)."""
        resampler = self.adapter.resampler
        return (len(memory) if resampler is None else resampler.num_latents) + self.adapter.null_slot

    def get_data_parser(self) -> MultiModalDataParser:
        return MemoryParser(self)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {self.modality: 1}

    @property
    def skip_prompt_length_check(self) -> bool:
        return True

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {self.modality: self.get_hf_config().max_source_positions}


class DummyMemory(BaseDummyInputsBuilder[MemoryInfo]):
    """The longest memory, by which vLLM measures what it needs."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> dict[str, Any]:
        memory = torch.zeros(self.info.slots, self.info.adapter.memory_dim)
        return {name: memory for name, count in mm_counts.items() if count}


class MemoryProcessor(EncDecMultiModalProcessor[MemoryInfo]):
    """Gives a request as many placeholders of an encoder as its memory has keys."""

    skip_decoder_start_token = True

    def create_encoder_prompt(self, prompt: list[int], mm_items: MultiModalDataItems) -> list[int]:
        return [0]

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> Mapping[str, MultiModalFieldConfig]:
        return {"memory": MultiModalFieldConfig.batched(self.info.modality)}

    def _get_prompt_updates(
        self, mm_items: MultiModalDataItems, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> Sequence[PromptReplacement]:
        return [
            PromptReplacement(modality=name, target=[0], replacement=[0] * self.info.rows(items.get(0)))
            for name, items in mm_items.items()
            if items
        ]


class PagedAttention(nn.Module):
    """The attention of a block over keys and values in vLLM's pages, in place of a `CrossAttention`."""

    def __init__(self, attention: CrossAttention, prefix: str, cache_config: CacheConfig) -> None:
        super().__init__()
        self.attention, self.prefix, width = attention, prefix, attention.head_dim
        # The host's sliding window does not apply to the memory.
        cache_config = copy.copy(cache_config)
        cache_config.sliding_window = None
        self.paged = PagedCrossAttention(
            attention.num_heads, _padded(width), attention.kv_proj.scale, cache_config,
            num_kv_heads=attention.num_kv_heads, prefix=prefix,
        )  # fmt: skip
        self.padding = _padded(width) - width

    def forward(self, x: Tensor, memory: None, *, head_scale: Tensor | None = None, **_: None) -> Tensor:
        """Attend from x (t, d) to the pages: (t, d)."""
        attention = self.attention
        q = attention.q_proj(x).view(len(x), attention.num_heads, attention.head_dim)
        if attention.q_norm is not None:
            q = norm_heads(attention.q_norm, q)
        # A head of zeros changes no score.
        output = self.paged(F.pad(q, (0, self.padding)).flatten(1), None, None)
        output = output.view(len(x), attention.num_heads, -1)[..., : attention.head_dim]
        if head_scale is not None:
            output = output * head_scale.to(output.dtype)[:, None]
        return attention.out_proj(output.flatten(1))

    def write(self, memories: Sequence[Tensor]) -> None:
        """Write keys and values of new memories (n, e), in the order of the batch, into their pages."""
        metadata = get_forward_context().attn_metadata[self.prefix]
        projected = self.attention.kv_proj.project(torch.cat([*memories])[None])
        keys, values = (
            F.pad(part[0].transpose(0, 1), (0, self.padding)) for part in (projected.keys, projected.values)
        )
        if projected.null:  # each memory begins with it
            numbers = torch.arange(1, len(keys), device=keys.device).split([len(memory) for memory in memories])
            places = torch.cat([F.pad(part, (1, 0)) for part in numbers])
            keys, values = keys[places], values[places]
        keys, values = keys.contiguous(), values.contiguous()
        if len(keys) != len(metadata.slot_mapping):
            raise RuntimeError(f"{len(keys)} keys of memories for {len(metadata.slot_mapping)} slots of vLLM's cache")
        paged = self.paged
        paged.impl.do_kv_cache_update(paged, keys, values, paged.kv_cache, metadata.slot_mapping)


class Adapted(nn.Module):
    """A decoder layer of vLLM, followed by a block. A layer becomes one by its class: its weights keep their names."""

    block: GatedBlock
    has_memory: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and add what the block adds to its hidden states where tokens have a memory."""
        output = super().forward(*args, **kwargs)
        hidden, *residual = output if isinstance(output, tuple) else (output,)
        x = hidden if not residual else hidden + residual[0]
        change = self.block(x, None) - x
        hidden = hidden + torch.where(self.has_memory[: len(x), None], change, 0)
        return (hidden, *residual) if residual else hidden


@MULTIMODAL_REGISTRY.register_processor(MemoryProcessor, info=MemoryInfo, dummy_inputs=DummyMemory)
class AdaptedForCausalLM(nn.Module, SupportsMultiModal):
    """A causal language model of vLLM that attends to memories."""

    host: Any
    adapter: GatedLayers
    has_memory: Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.host = init_vllm_registered_model(vllm_config, prefix=prefix, architectures=config.mmattn_host)
        saved, tensors = load_folder(config.mmattn_adapter)
        settings = served_settings(saved)
        layers = _decoder_layers(self.host, saved["host"], config)
        device = next(self.host.parameters()).device
        sites = [Site(layer, settings.position, str(layer), config.hidden_size, device) for layer in saved["layers"]]
        with set_default_torch_dtype(torch.float32):
            self.adapter = GatedLayers(settings, sites)
        self.adapter.load_state_dict(tensors)
        self.adapter.to(vllm_config.model_config.dtype)  # gates stay in float32
        most = vllm_config.scheduler_config.max_num_batched_tokens
        self.register_buffer("has_memory", torch.zeros(most, dtype=torch.bool), persistent=False)
        self.attentions: list[PagedAttention] = []
        for site in sites:
            block = self.adapter.block(site.layer)
            _use_linears_of_vllm(block)
            name = f"adapter.blocks.{site.layer}.attn"
            self.attentions.append(PagedAttention(block.attention, name, vllm_config.cache_config))
            block.register_module("attention", self.attentions[-1])
            # Before a layer is after the one before it.
            layer = layers[site.layer - (settings.position == "before")]
            layer.__class__ = type(f"Adapted{type(layer).__name__}", (Adapted, type(layer)), {})
            layer.has_memory, layer.block = self.has_memory, block

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        """Return None: a memory has no place in the text of a chat."""
        return None

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: Sequence[Tensor] | None = None,
        prompt_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Write the memories that are new, note which tokens have one, and run the host."""
        context = get_forward_context()
        metadata = context.attn_metadata
        # Memories are written before the compiled graph, which is the same with and without new ones.
        context.skip_compiled = False
        self.has_memory.zero_()
        if metadata is not None:
            of_first = metadata[self.attentions[0].prefix]
            lengths = of_first.query_start_loc.diff()
            has_memory = (of_first.seq_lens > 0).repeat_interleave(lengths)
            if prompt_lengths is not None and self.config.mmattn_visible_from == "last_token":
                last = prompt_lengths[: len(lengths)].to(lengths) - 1
                has_memory &= positions[: len(has_memory)] >= last.repeat_interleave(lengths)
            self.has_memory[: len(has_memory)] = has_memory
            if encoder_outputs:
                for attention in self.attentions:
                    attention.write(encoder_outputs)
        return self.host(input_ids, positions, intermediate_tensors, inputs_embeds)

    def embed_multimodal(self, *, memory: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Read memories (m, e) as every block attends to them: normalised and resampled."""
        return [self.adapter.read(Memory(tokens[None], check_finite=False)).tokens[0] for tokens in memory]

    def embed_input_ids(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Embed the text; a memory has no place in it."""
        return self.host.embed_input_ids(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return the logits of hidden states."""
        return self.host.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the host; the adapter has its weights."""
        adapted = {name for name, _ in self.named_parameters() if ".block." in name or name.startswith("adapter.")}
        return {f"host.{name}" for name in self.host.load_weights(weights)} | adapted


def _use_linears_of_vllm(block: GatedBlock) -> None:
    """Put vLLM's linear layers, with its kernels, in the place of those that run at every step."""
    for name, linear in list(block.named_modules()):
        if not isinstance(linear, nn.Linear) or "kv_proj" in name:
            continue
        layer = ReplicatedLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            return_bias=False,
        )
        with torch.no_grad():
            for mine, saved in zip(layer.parameters(), linear.parameters(), strict=True):
                mine.copy_(saved)
        block.set_submodule(name, layer.to(linear.weight.device))


def _padded(width: int) -> int:
    """Return the width of heads in pages: the next that every kernel has."""
    return next((size for size in (32, 64, 80, 96, 112, 128, 160, 192, 256) if size >= width), width)


def _decoder_layers(host: nn.Module, saved: dict[str, Any], config: Any) -> nn.ModuleList:
    """Return the decoder layers of a host of vLLM that an adapter was saved for."""
    depth, width = config.num_hidden_layers, config.hidden_size
    if (depth, width) != (saved["num_layers"], saved["hidden_size"]):
        raise AttachError(
            f"this adapter was made for {saved['num_layers']} layers of width {saved['hidden_size']}, and the host has "
            f"{depth} of width {width}: serve that host"
        )
    lists = outermost_lists(host, depth)
    if len(lists) != 1:
        raise AttachError(f"vLLM's {type(host).__name__} has {len(lists)} lists of {depth} layers: use mmattn serve")
    return next(iter(lists.values()))
