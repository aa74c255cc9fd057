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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mmattn.adapters.gated.block import BlockLayers, BlockLayout, SlotAdapter
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.settings import random_memory, register_adapter, settle_nested
from mmattn.adapters.text_state import Keywords, TextState, images_so_far
from mmattn.core.masks import VISIBLE_SEGMENTS, media
from mmattn.errors import AttachError, ShapeError, check_bool, check_choice, check_int
from mmattn.memory import Memory

PARTS = ("decoder", "encoder")


@dataclass(frozen=True)
class GatedLayout(BlockLayout):
    """Layout of published gated blocks where it differs from the default.

    Args:
        feed_forward_all: the feed-forward also acts on tokens that may attend to nothing, as in OpenFlamingo and
            Idefics; by default they pass through bit for bit.

    The others are those of `BlockLayout`.
    """

    feed_forward_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("feed_forward_all", self.feed_forward_all)


@register_adapter
@dataclass(frozen=True)
class GatedAdapter(SlotAdapter):
    """Settings of gated cross-attention for a language model, or another model of transformers.

    Args:
        where: of a host with an encoder and a decoder, whose layers `layers` and `every` count: "decoder", which is
            None, or "encoder"; for both attach two adapters.
        visible_segments: a token sees "all" slots, or those of the "latest" image that began at or before it, or of all
            "previous" ones (needs `media_token` or `images` at the call, and segments in the memory).
        media_token: id of the token that stands for an image in the text.
        layout: norms, activation and feed-forward as in published models.

    The others are those of `SlotAdapter`: memory_dim, every, layers, num_heads, head_dim, num_kv_heads, feed_forward,
    gate, qk_norm, null_slot, length_norm, dropout, position, score_bias, resampler.

    >>> GatedAdapter(memory_dim=24, layers=[1, 3]).layers
    (1, 3)
    """

    layout: GatedLayout = field(default_factory=GatedLayout)
    visible_segments: str = "all"
    media_token: int | None = None
    where: str | None = None

    kind: ClassVar[str] = "gated"
    example_call: ClassVar[str] = "model.generate(input_ids, memory=memory)"

    def __post_init__(self) -> None:
        settle_nested(self, "layout", GatedLayout)
        super().__post_init__()
        check_choice("visible_segments", self.visible_segments, VISIBLE_SEGMENTS)
        if self.media_token is not None:
            check_int("media_token", self.media_token, at_least=0)
        if self.where is not None:
            check_choice("where", self.where, PARTS)

    def offered(self, host: Host) -> list[Site]:
        """Return the sites of the part that `where` names."""
        if self.where is None:
            return super().offered(host)
        sites = [site for site in host.sites(self.position) if site.part == self.where]
        if not sites:
            raise AttachError(f"where={self.where!r} needs a host with an encoder and a decoder: leave it out")
        return sites

    def build(self, sites: Sequence[Site]) -> GatedLayers:
        """Return the trainable part for these sites."""
        return GatedLayers(self, sites)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory, of two images where tokens see some of them only."""
        parts = 1 if self.visible_segments == "all" else 2
        return random_memory(generator, rows, self.memory_dim, parts, self.score_bias)


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
