"""Flamingo's gated cross-attention (arXiv 2204.14198, section 3.1.2 and figure 4).

With x (b, l, d) the output of a host layer, M (b, m, e) the memory and α, β gates that start at 0:

    y = x + tanh(α) · attend(norm(x), M)
    z = y + tanh(β) · feed_forward(norm(y))

Departures from the paper: the block comes after a host layer instead of before the next one (the same point of the
stack; `position="before"` has it the other way); a gate may be one number, one per head or one per channel; the memory
is normalised once for all layers; a token that may attend to nothing passes through bit for bit, feed-forward included.
Norms, position and feed-forward can be those of the models that followed: see `published.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import (
    AdapterConfig,
    chosen_sites,
    default_heads,
    default_norm,
    random_memory,
    settle,
    settle_layers,
    settle_nested,
)
from mmattn.core.cross_attention import check_score_settings
from mmattn.core.masks import VISIBLE_SEGMENTS
from mmattn.errors import AttachError, ConfigError, check_bool, check_choice, check_float, check_int
from mmattn.memory import Memory

GATES = ("scalar", "head", "channel")
NORMS = ("layer", "rms")
ACTIVATIONS = ("gelu", "swiglu")
POSITIONS = ("after", "before")
PARTS = ("decoder", "encoder")


@dataclass(frozen=True)
class GatedLayout:
    """Layout of gated blocks, for the differences of published models from the default.

    Args:
        norm: "layer" or "rms", the norm before the attention and the feed-forward.
        norm_eps: ε of these norms and of qk_norm; by default that of torch and `CrossAttention`.
        memory_norm: normalise the memory, once for all layers. By default from a width of 12 on: a norm leaves little
            more than signs of a narrower vector.
        activation: "gelu", or "swiglu" with a third matrix (arXiv 2002.05202).
        calibrated: the blocks have the mean and spread of the host's hidden states; set by `AdaptedModel.calibrate`.
        feed_forward_all: apply the feed-forward also to tokens without a visible slot, as in OpenFlamingo and Idefics;
            by default they pass through bit for bit. For gated adapters only.
    """

    norm: str = "layer"
    norm_eps: float | None = None
    memory_norm: bool | None = None
    activation: str = "gelu"
    calibrated: bool = False
    feed_forward_all: bool = False

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.norm_eps is not None:
            check_float("norm_eps", self.norm_eps, at_least=1e-12, below=1)
        if self.memory_norm is not None:
            check_bool("memory_norm", self.memory_norm)
        check_bool("calibrated", self.calibrated)
        check_bool("feed_forward_all", self.feed_forward_all)

    def make_norm(self, dim: int) -> nn.LayerNorm | nn.RMSNorm:
        """Make the norm in front of an attention or a feed-forward."""
        kind = nn.RMSNorm if self.norm == "rms" else nn.LayerNorm
        return kind(dim, eps=1e-5 if self.norm_eps is None else self.norm_eps)


@dataclass(frozen=True)
class GatedAdapter(AdapterConfig):
    """Settings of gated cross-attention for a language model or any other model of transformers.

    Args:
        memory_dim: e, width of the memory.
        every: add a block at every n-th host layer (layers n-1, 2n-1, …). Without `layers` it defaults to 4, or to the
            depth of a smaller host.
        layers: the host layers with a block, counted from 0, instead of `every`.
        num_heads: h of the cross-attention; 8 by default, fewer for a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; 64 by default, less for a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of the gated feed-forward as a multiple of d (4 in the paper; 1 decodes faster); 0
            for none.
        gate: "scalar", "head" or "channel": one gate value for the block, each head or each channel.
        qk_norm: normalise queries and keys, as in `CrossAttention`.
        null_slot: add a learned slot to the memory, as in `CrossAttention`.
        length_norm: C of arXiv 2410.10450, as in `CrossAttention`.
        dropout: probability of dropping an attention weight, in training.
        position: run the block "after" its host layer, or "before" it.
        layout: norms, activation and feed-forward as in published models.
        score_bias: add the memory's `scores`, which are then required, to the attention scores.
        score_mean: with `score_bias`, the score that adds nothing.
        score_std: with `score_bias`, the distance from `score_mean` at which a score adds one learned temperature.
        resampler: first reduce the memory to a few latents.
        visible_segments: which slots a token sees: "all", those of the "latest" image up to the token, or those of all
            "previous" images. The last two need `media_token`, or `images` at the call, and a memory with segments.
        media_token: id of the token that stands for an image in the text.
        where: for a host with an encoder and a decoder, the part with the blocks: "decoder" (the default) or "encoder".
            For both, attach two adapters.

    >>> GatedAdapter(memory_dim=24, layers=[1, 3]).layers
    (1, 3)
    """

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    num_heads: int | None = None
    head_dim: int | None = None
    num_kv_heads: int | None = None
    feed_forward: float = 1.0
    gate: str = "scalar"
    qk_norm: bool = False
    null_slot: bool = False
    length_norm: float | None = None
    dropout: float = 0.0
    position: str = "after"
    layout: GatedLayout = field(default_factory=GatedLayout)
    score_bias: bool = False
    score_mean: float = 0.0
    score_std: float = 1.0
    resampler: Resampler | None = None
    visible_segments: str = "all"
    media_token: int | None = None
    where: str | None = None

    kind: ClassVar[str] = "gated"
    positions: ClassVar[tuple[str, ...]] = POSITIONS
    example_call: ClassVar[str] = "model.generate(input_ids, memory=memory)"

    def __post_init__(self) -> None:
        settle_block(self, may_feed_all=True)
        settle_scores(self)
        check_choice("visible_segments", self.visible_segments, VISIBLE_SEGMENTS)
        if self.media_token is not None:
            check_int("media_token", self.media_token, at_least=0)
        if self.where is not None:
            check_choice("where", self.where, PARTS)

    def sites(self, host: Host) -> list[Site]:
        """Return the chosen sites of the part that `where` names."""
        if self.where is None:
            return super().sites(host)
        part = [site for site in host.sites(self.position) if site.part == self.where]
        if not part:
            raise AttachError(f"where={self.where!r} needs a host with an encoder and a decoder: leave it out")
        return chosen_sites(self, part)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory, of two images where tokens see some of them only."""
        parts = 1 if self.visible_segments == "all" else 2
        return random_memory(generator, rows, self.memory_dim, parts, self.score_bias)


def settle_block(config: Any, may_feed_all: bool = False) -> None:
    """Check the settings of gated blocks, and fill in those that depend on others."""
    settle_layers(config)
    for name in ("num_heads", "head_dim", "num_kv_heads"):
        if getattr(config, name) is not None:
            check_int(name, getattr(config, name), at_most=1024)
    if config.num_kv_heads is not None and config.num_heads is not None and config.num_heads % config.num_kv_heads:
        raise ConfigError(f"num_kv_heads must divide num_heads, got {config.num_kv_heads} and {config.num_heads}")
    check_float("feed_forward", config.feed_forward, at_least=0, below=64.1)
    check_choice("gate", config.gate, GATES)
    check_choice("position", config.position, POSITIONS)
    check_bool("qk_norm", config.qk_norm)
    check_bool("null_slot", config.null_slot)
    if config.length_norm is not None:
        check_float("length_norm", config.length_norm, at_least=1)
    check_float("dropout", config.dropout, at_least=0, below=1)
    settle_nested(config, "layout", GatedLayout)
    if config.layout.feed_forward_all and not may_feed_all:
        raise ConfigError(f"feed_forward_all is not for adapters of kind {config.kind!r}: leave it out")
    norm = default_norm(config.layout.memory_norm, config.memory_dim)
    settle(config, layout=replace(config.layout, memory_norm=norm))


def settle_scores(config: Any) -> None:
    """Check the settings of scores and of the resampler, which mixes the slots that scores belong to."""
    check_bool("score_bias", config.score_bias)
    check_score_settings(config.score_bias, config.score_mean, config.score_std)
    settle_resampler(config)
    if config.resampler is not None and config.score_bias:
        raise ConfigError("score_bias needs the scores of the slots, which a resampler mixes: choose one of them")


def sized(config: Any, host_dim: int) -> Any:
    """Return the settings of gated blocks with the numbers of heads that they have on a host of width d."""
    heads, width = default_heads(host_dim, config.memory_dim, config.num_heads, config.head_dim)
    return replace(config, num_heads=heads, head_dim=width)
