"""The gated block: attention over a memory, then a feed-forward, each behind a gate; and the base of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.gated.config import GatedAdapter, GatedLayout, sized
from mmattn.adapters.protocols import Site
from mmattn.adapters.text_state import Keywords, TextState, images_so_far
from mmattn.core.cross_attention import CrossAttention
from mmattn.core.key_values import KeyValue
from mmattn.core.masks import media
from mmattn.errors import ShapeError
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import is_distributed

#: Arguments of `CrossAttention`.
AttentionSettings = dict[str, Any]


class Gate(nn.Module):
    """tanh of learned numbers that start at 0: the adapter starts as exactly nothing.

    Stays in float32 at least when the rest becomes half precision: its first steps are smaller than half can hold.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        # FSDP2 shards by the first dimension, and refuses a parameter without dimensions.
        self.gate = nn.Parameter(torch.zeros(shape or (1,)))
        # What was computed without gradients, and of what: the weight, its storage, its address and its edits.
        self._computed: tuple[Tensor, Tensor, Tensor, int, int] | None = None

    def forward(self) -> Tensor:
        """tanh of the numbers, in their shape; without gradients it is computed once for each version of the weight."""
        gate, computed = self.gate, self._computed
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return gate.tanh().view(self.shape)
        if computed is not None:
            value, of, _, address, version = computed
            if of is gate and version == gate._version and address == gate.data_ptr():
                return value
        value = gate.tanh().view(self.shape)
        if not is_distributed():
            self._computed = value, gate, gate.detach(), gate.data_ptr(), gate._version
        return value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.element_size() >= 4 else moved.to(tensor.dtype).copy_(tensor)

        return super()._apply(keep_precision, recurse)


class Calibration(nn.Module):
    """Hidden states (…, d) without the mean of each channel and divided by its spread.

    Deep in a language model a few channels are a hundred times wider than the others (arXiv 2402.17762), and most of
    them is the same for every text: a norm in front of a block leaves little of what differs between texts.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("spread", torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Standardise x (…, d)."""
        return (x - self.mean) / self.spread

    def measure(self, states: Tensor) -> None:
        """Measure hidden states (n, d); a spread is a hundredth of their size at least, or it would be rounding."""
        self.mean.copy_(states.mean(0))
        self.spread.copy_(states.std(0).clamp(min=0.01 * float(states.square().mean().sqrt()) or 1.0))


class GatedBlock(nn.Module):
    """Gated cross-attention and feed-forward at one host layer."""

    def __init__(self, config: Any, host_dim: int, attention: AttentionSettings) -> None:
        super().__init__()
        layout, heads = config.layout, config.num_heads
        assert heads is not None, "settings are sized for the host"
        self.calibration = Calibration(host_dim) if layout.calibrated else None
        self.norm = layout.make_norm(host_dim)
        self.attention = CrossAttention(
            host_dim,
            config.memory_dim,
            heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            null_slot=config.null_slot,
            length_norm=config.length_norm,
            dropout=config.dropout,
            norm_eps=1e-6 if layout.norm_eps is None else layout.norm_eps,
            **attention,
        )
        self.per_head = config.gate == "head"
        shape = {"scalar": (), "head": (heads,), "channel": (host_dim,)}[config.gate]
        self.gate = Gate(*shape)
        hidden = int(config.feed_forward * host_dim)
        self.feed_forward = FeedForward(layout, host_dim, hidden) if hidden else None
        self.feed_forward_gate = Gate(*(shape if config.gate == "channel" else ())) if hidden else None

    def forward(
        self,
        x: Tensor,
        memory: KeyValue,
        *,
        attention_mask: Tensor | None = None,
        query_positions: Tensor | None = None,
        has_memory: Tensor | None = None,
        adapter_scale: float = 1.0,
    ) -> Tensor:
        """x + tanh(α) · attend(norm(x), M), then the same with the feed-forward; in the dtype of x."""
        norm = self.norm
        wide = x if x.dtype is norm.weight.dtype else x.to(norm.weight.dtype)
        gate, calibration = self.gate(), self.calibration
        attended = self.attention(
            norm(wide if calibration is None else calibration(wide)),
            memory,
            attention_mask=attention_mask,
            query_positions=query_positions,
            head_scale=gate if self.per_head else None,
        )
        out = wide + attended if self.per_head else torch.addcmul(wide, gate, attended)
        if self.feed_forward is not None and self.feed_forward_gate is not None:
            read = out if calibration is None else calibration(out)
            out = torch.addcmul(out, self.feed_forward_gate(), self.feed_forward(read))
        if adapter_scale != 1.0:
            out = wide + adapter_scale * (out - wide)
        if out.dtype is not x.dtype:
            out = out.to(x.dtype)
        return out if has_memory is None else torch.where(has_memory, out, x)


class FeedForward(nn.Module):
    """norm, up, GELU, down; or for SwiGLU swish(x W₁) · (x W₂) between norm and down (arXiv 2002.05202, equation 6)."""

    def __init__(self, layout: GatedLayout, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = layout.make_norm(dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.swish = nn.Linear(dim, hidden, bias=False) if layout.activation == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        """x (…, d) to (…, d)."""
        dtype = self.norm.weight.dtype
        x = self.norm(x if x.dtype is dtype else x.to(dtype))
        return self.down(F.gelu(self.up(x)) if self.swish is None else F.silu(self.swish(x)) * self.up(x))


class BlockLayers(AdapterLayers):
    """Gated blocks at some layers of one host, and how the memory is read for them."""

    config: Any  # settings with the fields that gated blocks have
    separable = True

    def __init__(self, config: Any, sites: Sequence[Site]) -> None:
        config = sized(config, sites[0].width)
        super().__init__(config, sites)
        self.score_bias = getattr(config, "score_bias", False)
        # A null slot weighs as much as one of them, a length norm counts them.
        counts = config.null_slot or config.length_norm is not None
        self.traits = replace(self.traits, duplicates_matter=counts)
        self._add_reader(config.layout.memory_norm, getattr(config, "resampler", None))
        self.blocks = nn.ModuleDict(
            {str(site.layer): GatedBlock(config, site.width, self.attention_settings()) for site in self.sites}
        )

    def attention_settings(self) -> AttentionSettings:
        """Return further arguments of the cross-attention of the blocks."""
        config = self.config
        return {"score_bias": config.score_bias, "score_mean": config.score_mean, "score_std": config.score_std}

    def block(self, layer: int) -> GatedBlock:
        return cast(GatedBlock, self.blocks[str(layer)])

    def calibrate(self, states: Mapping[int, Tensor] | None = None) -> None:
        """Standardise what the blocks read by the mean and spread of hidden states (n, d) of each layer, if given."""
        for site in self.sites:
            block = self.block(site.layer)
            block.calibration = Calibration(site.width).to(block.norm.weight)
            if states is not None:
                block.calibration.measure(states[site.layer])
        self.config = replace(self.config, layout=replace(self.config.layout, calibrated=True))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        if not self.config.layout.calibrated and f"{prefix}blocks.{self.layers[0]}.calibration.mean" in state_dict:
            self.calibrate()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attention(self, layer: int) -> CrossAttention:
        return self.block(layer).attention

    def slot_norm(self) -> nn.LayerNorm | None:
        """Return the norm of the memory, which is all that `read` does to a slot if nothing is resampled."""
        return self.memory_norm if self.resampler is None else super().slot_norm()


class GatedLayers(BlockLayers):
    """The trainable part of one gated adapter on one host."""

    config: GatedAdapter

    def __init__(self, config: GatedAdapter, sites: Sequence[Site]) -> None:
        super().__init__(config, sites)
        self.follows_text = config.visible_segments != "all"
        self.changes_all = config.layout.feed_forward_all

    def check_memory(self, memory: Memory) -> None:
        super().check_memory(memory)
        visible = self.config.visible_segments
        if visible != "all" and memory.segments is None:
            images = "latest image" if visible == "latest" else "previous images"
            raise ShapeError(f"tokens see the {images} with adapter {self.name!r}, and the memory has no segments")

    def why_whole(self) -> str | None:
        return super().why_whole() if self.config.visible_segments == "all" else "its tokens see some segments only"

    def visible_slots(self, text: TextState, memory: Memory) -> Tensor | None:
        if not self.follows_text:
            return None
        images = text.images_begun(self.config.media_token).to(memory.device)
        assert memory.segments is not None
        segments = memory.segments.repeat_interleave(text.rows // max(memory.batch, 1), 0)
        return media(images, segments, self.config.visible_segments).tensor

    def first_tokens(self, memory: Memory, batch: Keywords) -> Tensor | None:
        arrived = super().first_tokens(memory, batch)
        if self.config.visible_segments == "all":
            return arrived
        images, ids = batch.get("images"), batch.get("input_ids")
        if images is None:
            assert ids is not None and self.config.media_token is not None
            images = images_so_far(ids, self.config.media_token)
        begun = first_reaching(images, memory)
        return begun if arrived is None else torch.maximum(begun, arrived)


def first_reaching(counts: Tensor, memory: Memory) -> Tensor:
    """Return the first token (b, m) at which the count (b, l) of what has begun exceeds the segment of each slot."""
    assert memory.segments is not None
    segments = memory.segments.cpu()
    waiting = counts.cpu()[:, None] <= segments[..., None]
    return waiting.sum(2).masked_fill(segments < 0, counts.shape[1])
