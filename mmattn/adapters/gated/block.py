"""The gated cross-attention block: attention over a memory and a feed-forward, each with a gate that starts at 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.cross_attention import CrossAttention
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import check_bool, check_choice, check_float

GATES = ("scalar", "head", "channel")
NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "swiglu")


@dataclass(frozen=True)
class BlockLayout:
    """Layout of the blocks of published models where it differs from the default.

    Args:
        norm: "layer" or "rms", of what goes into the attention and the feed-forward.
        norm_eps: ε of these norms and of qk_norm; what torch and `CrossAttention` have by default.
        memory_norm: normalise the memory, once for all layers; None is where it is 12 wide or more: of few numbers a
            norm leaves little more than signs.
        activation: "gelu", or "swiglu", which has a third matrix (arXiv 2002.05202).
    """

    norm: str = "layer"
    norm_eps: float | None = None
    memory_norm: bool | None = None
    activation: str = "gelu"

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.norm_eps is not None:
            check_float("norm_eps", self.norm_eps, at_least=1e-12, below=1)
        if self.memory_norm is not None:
            check_bool("memory_norm", self.memory_norm)

    def make_norm(self, dim: int) -> nn.LayerNorm | nn.RMSNorm:
        """The norm in front of an attention or a feed-forward."""
        kind = nn.RMSNorm if self.norm == "rms" else nn.LayerNorm
        return kind(dim, eps=1e-5 if self.norm_eps is None else self.norm_eps)


class Gate(nn.Module):
    """tanh of learned numbers that start at 0: the adapter starts as exactly nothing.

    Stays in float32 at least when the rest becomes half precision: its first steps are smaller than half can hold.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        """tanh of the numbers, in their shape."""
        return self.gate.tanh()

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            return moved if moved.element_size() >= 4 else moved.to(tensor.dtype).copy_(tensor)

        return super()._apply(keep_precision, recurse)


class GatedBlock(nn.Module):
    """Gated cross-attention and feed-forward at one host layer."""

    def __init__(self, config: Any, host_dim: int, attention: dict[str, Any]) -> None:
        super().__init__()
        layout: BlockLayout = config.layout
        self.norm = layout.make_norm(host_dim)
        self.attention = CrossAttention(
            host_dim,
            config.memory_dim,
            config.num_heads,
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
        shape = {"scalar": (), "head": (config.num_heads,), "channel": (host_dim,)}[config.gate]
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
        seen: Tensor | None = None,
        adapter_scale: float = 1.0,
    ) -> Tensor:
        """x + tanh(α) · attend(norm(x), M), then the same with the feed-forward; in the dtype of x."""
        norm = self.norm
        wide = x if x.dtype is norm.weight.dtype else x.to(norm.weight.dtype)
        gate = self.gate()
        attended = self.attention(
            norm(wide),
            memory,
            attention_mask=attention_mask,
            query_positions=query_positions,
            head_scale=gate if self.per_head else None,
        )
        out = wide + attended if self.per_head else torch.addcmul(wide, gate, attended)
        if self.feed_forward is not None and self.feed_forward_gate is not None:
            out = torch.addcmul(out, self.feed_forward_gate(), self.feed_forward(out))
        if adapter_scale != 1.0:
            out = wide + adapter_scale * (out - wide)
        if out.dtype is not x.dtype:
            out = out.to(x.dtype)
        return out if seen is None else torch.where(seen, out, x)


class FeedForward(nn.Module):
    """norm, up, GELU, down; or for SwiGLU swish(x W₁) · (x W₂) between norm and down (arXiv 2002.05202, equation 6)."""

    def __init__(self, layout: BlockLayout, dim: int, hidden: int) -> None:
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
