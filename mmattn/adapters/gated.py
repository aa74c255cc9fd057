"""Flamingo's gated cross-attention (arXiv 2204.14198, section 3.1.2 and figure 4).

With x (b, l, d) the output of a host layer, M (b, m, e) the memory and α, β gates that start at 0:

    y = x + tanh(α) · attend(norm(x), M)
    z = y + tanh(β) · feed_forward(norm(y))

Departures from the paper: the block follows a host layer instead of preceding the next one (the same place in the
stack; `place` has it the other way); a gate may be one number, one per head or one per channel; the memory is
normalised once for all layers; a token that may look at nothing passes through bit for bit, feed-forward included.
Norms, place and feed-forward can be those of the models that followed: see `published.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.resampler import Resampler
from mmattn.core.kv import KeyValue
from mmattn.core.layers import CrossAttention
from mmattn.errors import ConfigError, ShapeError, check_choice, check_float, check_int
from mmattn.memory import Memory

GATES = ("scalar", "head", "channel")
LOOKS = ("all", "previous", "latest")
PLACES = ("behind", "before")
NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "swiglu")


@dataclass(frozen=True)
class BlockSettings:
    """Settings of gated blocks behind the layers of a language model, whatever part of the memory they look at.

    Args:
        memory_dim: e, width of the memory.
        every: put a block after every n-th host layer (layers n-1, 2n-1, …); 4 where `layers` is not given either.
        layers: or the explicit list of host layers, counted from 0.
        num_heads, head_dim, num_kv_heads: of the cross-attention.
        feed_forward: hidden width of the gated feed-forward as a multiple of d (4 in the paper; 1 keeps decoding fast);
            0 leaves it out.
        gate: "scalar", "head" or "channel": how many numbers the attention gate has.
        qk_norm, null_slot, length_norm, score_bias, dropout: as in `CrossAttention`.
        resampler: turn the memory into few latents first.
        place: the block is "behind" its host layer, or "before" it.
        norm: "layer" or "rms", of what goes into the attention and the feed-forward. norm_eps: of these norms and of
            qk_norm; what torch and `CrossAttention` have by default.
        memory_norm: normalise the memory, once for all layers.
        activation: "gelu", or "swiglu", which has a third matrix (arXiv 2002.05202).
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    num_heads: int = 8
    head_dim: int = 64
    num_kv_heads: int | None = None
    feed_forward: float = 1.0
    gate: str = "scalar"
    qk_norm: bool = False
    null_slot: bool = False
    length_norm: float | None = None
    score_bias: bool = False
    dropout: float = 0.0
    resampler: Resampler | None = None
    place: str = "behind"
    norm: str = "layer"
    norm_eps: float | None = None
    memory_norm: bool = True
    activation: str = "gelu"

    def __post_init__(self) -> None:
        check_int("memory_dim", self.memory_dim, at_most=65536)
        if self.every is not None and self.layers is not None:
            raise ConfigError(f"give every or layers, not both; got every={self.every} and layers={self.layers}")
        if self.every is not None:
            check_int("every", self.every, at_most=1024)
        if self.layers is not None:
            if not isinstance(self.layers, Sequence) or isinstance(self.layers, str) or not self.layers:
                raise ConfigError(f"layers must be a list of host layers counted from 0, got {self.layers!r}")
            picked = tuple(check_int("layers", layer, at_least=0, at_most=4095) for layer in self.layers)
            if len(set(picked)) != len(picked):
                raise ConfigError(f"layers must differ from each other, got {list(picked)}")
            object.__setattr__(self, "layers", tuple(sorted(picked)))
        heads = check_int("num_heads", self.num_heads, at_most=1024)
        check_int("head_dim", self.head_dim, at_most=1024)
        if self.num_kv_heads is not None and heads % check_int("num_kv_heads", self.num_kv_heads, at_most=1024):
            raise ConfigError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {heads}")
        check_float("feed_forward", self.feed_forward, at_least=0, below=64.1)
        check_choice("gate", self.gate, GATES)
        check_choice("place", self.place, PLACES)
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.norm_eps is not None:
            check_float("norm_eps", self.norm_eps, at_least=1e-12, below=1)
        for name in ("qk_norm", "null_slot", "score_bias", "memory_norm"):
            _check_bool(name, getattr(self, name))
        if self.length_norm is not None:
            check_float("length_norm", self.length_norm, at_least=1)
        check_float("dropout", self.dropout, at_least=0, below=1)
        if isinstance(self.resampler, dict):
            try:
                object.__setattr__(self, "resampler", Resampler(**self.resampler))
            except TypeError as error:
                raise ConfigError(f"resampler: {error}") from error
        if self.resampler is not None and not isinstance(self.resampler, Resampler):
            raise ConfigError(f"resampler must be a Resampler, got {self.resampler!r}")
        if self.resampler is not None and self.score_bias:
            raise ConfigError("score_bias needs the scores of the slots, which a resampler mixes: choose one of them")

    def more_of_attention(self) -> dict[str, Any]:
        """What else the cross-attention of the blocks is made with, where a kind of adapter has more."""
        return {}


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}")


@dataclass(frozen=True)
class GatedAdapter(BlockSettings):
    """Settings of gated cross-attention for a language model.

    Args:
        look: "all" slots, or those of the "latest" image that began at or before the token, or of all "previous" ones
            (needs `media_token` or `images` at the call, and segments in the memory).
        media_token: id of the token that stands for an image in the text.
        feed_forward_all: the feed-forward also acts on tokens that may look at nothing, as in OpenFlamingo and Idefics;
            by default they pass through bit for bit.

    The others are those of `BlockSettings`: memory_dim, every, layers, num_heads, head_dim, num_kv_heads, feed_forward,
    gate, qk_norm, null_slot, length_norm, score_bias, dropout, resampler, place, norm, norm_eps, memory_norm,
    activation.

    >>> GatedAdapter(memory_dim=24, layers=[1, 3]).layers
    (1, 3)
    """

    look: str = "all"
    media_token: int | None = None
    feed_forward_all: bool = False

    kind = "gated"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("look", self.look, LOOKS)
        _check_bool("feed_forward_all", self.feed_forward_all)
        if self.media_token is not None:
            check_int("media_token", self.media_token, at_least=0)

    def build(self, host_dim: int, layers: Sequence[int]) -> GatedLayers:
        """Make the trainable part for a host of width `host_dim` at `layers`."""
        return GatedLayers(self, host_dim, layers)


class Gate(nn.Module):
    """tanh of learned numbers that start at 0: the adapter starts as exactly nothing.

    Kept in float32 at least when the rest becomes half precision: its first steps are smaller than half can hold.
    """

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(shape))

    def forward(self) -> Tensor:
        """tanh of the gate, in the shape it was made with."""
        return self.gate.tanh()

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved: Tensor = fn(tensor)
            return moved if moved.element_size() >= 4 else moved.to(tensor.dtype).copy_(tensor)

        return super()._apply(keep_precision, recurse)


class GatedBlock(nn.Module):
    """The gated cross-attention and feed-forward at one host layer."""

    def __init__(self, config: BlockSettings, host_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.norm = make_norm(config, host_dim)
        self.attention = CrossAttention(
            host_dim,
            memory_dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            null_slot=config.null_slot,
            length_norm=config.length_norm,
            score_bias=config.score_bias,
            dropout=config.dropout,
            norm_eps=1e-6 if config.norm_eps is None else config.norm_eps,
            **config.more_of_attention(),
        )
        self.per_head = config.gate == "head"
        shape = {"scalar": (), "head": (config.num_heads,), "channel": (host_dim,)}[config.gate]
        self.gate = Gate(*shape)
        hidden = int(config.feed_forward * host_dim)
        self.feed_forward = FeedForward(config, host_dim, hidden) if hidden else None
        self.feed_forward_gate = Gate(*(shape if config.gate == "channel" else ())) if hidden else None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeyValue,
        *,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        attention_mask: Tensor | None = None,
        query_positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        seen: Tensor | None = None,
        strength: float = 1.0,
    ) -> Tensor:
        """What the host's hidden states x (b, l, d) become, in their dtype.

        Args:
            memory: (b, m, e) with its mask, scores and positions, or projected. seen: (b, l or 1, 1) bool, which tokens
                may look at anything; None where all may. strength: multiplies what is added.
        """
        wide = x.to(self.norm.weight.dtype)
        gate = self.gate()
        found = self.attention(
            self.norm(wide),
            memory,
            mask=mask,
            scores=scores,
            attention_mask=attention_mask,
            query_positions=query_positions,
            memory_positions=memory_positions,
            head_scale=gate if self.per_head else None,
        )
        out = wide + found if self.per_head else torch.addcmul(wide, gate, found)
        if self.feed_forward is not None and self.feed_forward_gate is not None:
            out = torch.addcmul(out, self.feed_forward_gate(), self.feed_forward(out))
        if strength != 1.0:
            out = wide + strength * (out - wide)
        out = out.to(x.dtype)
        return out if seen is None else torch.where(seen, out, x)


class FeedForward(nn.Module):
    """norm, up, GELU, down; or for SwiGLU swish(x W₁) · (x W₂) between norm and down (arXiv 2002.05202, equation 6)."""

    def __init__(self, config: BlockSettings, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = make_norm(config, dim)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.swish = nn.Linear(dim, hidden, bias=False) if config.activation == "swiglu" else None

    def forward(self, x: Tensor) -> Tensor:
        """x (…, d) to (…, d)."""
        x = self.norm(x.to(self.norm.weight.dtype))
        return self.down(F.gelu(self.up(x)) if self.swish is None else F.silu(self.swish(x)) * self.up(x))


def make_norm(config: BlockSettings, dim: int) -> nn.LayerNorm | nn.RMSNorm:
    """The norm in front of an attention or a feed-forward."""
    kind = nn.RMSNorm if config.norm == "rms" else nn.LayerNorm
    return kind(dim, eps=1e-5 if config.norm_eps is None else config.norm_eps)


class BlockLayers(AdapterLayers):
    """Gated blocks at some layers of one host, and how the memory is read for them.

    Args:
        config: the settings. host_dim: d. layers: the host layers that get a block.
    """

    def __init__(self, config: BlockSettings, host_dim: int, layers: Sequence[int]) -> None:
        super().__init__(config, host_dim, layers)
        self.score_bias = config.score_bias
        self.memory_norm = nn.LayerNorm(config.memory_dim) if config.memory_norm else None
        self._add_resampler(config.resampler)
        self.blocks = nn.ModuleDict(
            {name: GatedBlock(config, host_dim, config.memory_dim) for name in self.names.values()}
        )

    @property
    def weight(self) -> Tensor:
        """A weight of the memory's norm, or of the first block where there is none."""
        return self.block(self.layers[0]).norm.weight if self.memory_norm is None else self.memory_norm.weight

    def block(self, layer: int) -> GatedBlock:
        """The block at host layer `layer`."""
        block = self.blocks[self.names[layer]]
        assert isinstance(block, GatedBlock)
        return block

    def attention(self, layer: int) -> CrossAttention:
        """The cross-attention of the block at host layer `layer`."""
        return self.block(layer).attention

    def check_memory(self, name: str, memory: Memory) -> None:
        """Refuse a memory that this adapter, attached as `name`, cannot read.

        Raises:
            ShapeError: another width, or scores are missing.
        """
        super().check_memory(name, memory)
        if self.config.score_bias and memory.scores is None:
            raise ShapeError(f"adapter {name!r} was made with score_bias=True and the memory has no scores")

    def read(self, memory: Memory) -> Memory:
        """The memory as every block sees it: normalised and resampled where the adapter has it so."""
        made = self._taken_in(memory)
        if self.memory_norm is not None:
            made = made.replace(self.memory_norm(made.tokens))
        return made if self.resampler is None else self.resampler(made)


class GatedLayers(BlockLayers):
    """The trainable part of one gated adapter on one host."""

    def check_memory(self, name: str, memory: Memory) -> None:
        """Refuse a memory that this adapter, attached as `name`, cannot read.

        Raises:
            ShapeError: another width, or scores or segments are missing.
        """
        super().check_memory(name, memory)
        if self.config.look != "all" and memory.segments is None:
            images = "latest image" if self.config.look == "latest" else "previous images"
            raise ShapeError(f"adapter {name!r} looks at the {images} and the memory has no segments")
