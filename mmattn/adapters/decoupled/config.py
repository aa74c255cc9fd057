"""Settings of decoupled cross-attention, beside the text or the picture of a diffusion model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import default_norm, random_memory, settle
from mmattn.errors import AttachError, ConfigError, check_bool, check_choice, check_int
from mmattn.memory import Memory

STARTS = ("nothing", "host")
ADDED_TO = ("attention", "block")


@dataclass(frozen=True)
class DecoupledLayout:
    """Layout of published adapters, such as those for Flux, where it differs from the default.

    Args:
        slot_dim: width of the slots that `tokens` projects to; the width of the host's text by default.
        bias: keys and values have a bias.
        added_to: "attention", through its output projection, or "block": what the queries find is added as it is to
            the hidden states that the transformer block hands on.
    """

    slot_dim: int | None = None
    bias: bool = False
    added_to: str = "attention"

    def __post_init__(self) -> None:
        if self.slot_dim is not None:
            check_int("slot_dim", self.slot_dim, at_most=65536)
        check_bool("bias", self.bias)
        check_choice("added_to", self.added_to, ADDED_TO)


@dataclass(frozen=True)
class DecoupledAdapter:
    """Settings of decoupled cross-attention for a diffusion model: a UNet or a transformer.

    Args:
        memory_dim: e, width of the memory.
        blocks: beginnings of the names of the attention layers that get the adapter ("up", "down_blocks.2",
            "transformer_blocks.3", ...); None is all, but for those that hold text and picture in one stream where the
            host has others (Flux's `single_transformer_blocks`).
        tokens: turn each vector of the memory into this many slots of the host's text width (IP-Adapter's image
            projection: 4); None reads the vectors as they are, normalised.
        start: "nothing", or "host": as a copy of the host's own K and V projections, as IP-Adapter starts.
        resampler: turn the memory into few latents first.
        layout: as in published adapters.
        memory_norm: normalise what the blocks read; None is where it comes from `tokens`, or is 12 wide or more: of few
            numbers a norm leaves little more than signs.

    >>> DecoupledAdapter(memory_dim=24, tokens=4).tokens
    4
    """

    memory_dim: int
    blocks: tuple[str, ...] | None = None
    tokens: int | None = None
    start: str = "nothing"
    resampler: Resampler | None = None
    layout: DecoupledLayout = field(default_factory=DecoupledLayout)
    memory_norm: bool | None = None

    kind: ClassVar[str] = "decoupled"
    positions: ClassVar[tuple[str, ...]] = ("inside",)
    example_call: ClassVar[str] = "model(sample, timestep, text, memory=memory)"

    def __post_init__(self) -> None:
        settle_blocks(self)
        if self.tokens is not None:
            check_int("tokens", self.tokens, at_most=1024)
        check_choice("start", self.start, STARTS)
        settle_resampler(self)
        norm = True if self.memory_norm is None and self.tokens is not None else self.memory_norm
        settle(self, memory_norm=default_norm(norm, self.memory_dim))
        if not isinstance(self.layout, DecoupledLayout):
            raise ConfigError(f"layout must be a DecoupledLayout, got {self.layout!r}")
        if self.layout.slot_dim is not None and self.tokens is None:
            raise ConfigError("layout.slot_dim is the width of the slots of tokens=, which is not given")

    def sites(self, host: Host) -> list[Site]:
        """Return the attention layers that `blocks` names."""
        return sites_of_blocks(host, self.blocks)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)


@dataclass(frozen=True)
class TimedResampler:
    """Settings of a resampler that follows the time step.

    Args:
        num_latents: n, slots of the output.
        depth: number of layers.
        width: d of the latents.
        num_heads: h of its attention.
        head_dim: k of its attention.
        feed_forward: hidden width of its feed-forward as a multiple of d.
        frequencies: sines and cosines of the time step.

    Raises:
        ConfigError: a setting outside what is allowed.
    """

    num_latents: int = 64
    depth: int = 4
    width: int = 1280
    num_heads: int = 20
    head_dim: int = 64
    feed_forward: int = 4
    frequencies: int = 320

    def __post_init__(self) -> None:
        limits = {"num_latents": 65536, "depth": 64, "width": 65536, "num_heads": 1024, "head_dim": 1024}
        for name, at_most in (limits | {"feed_forward": 64, "frequencies": 65536}).items():
            check_int(name, getattr(self, name), at_most=at_most)
        if self.frequencies % 2:
            raise ConfigError(f"frequencies must be even, a sine and a cosine of each; got {self.frequencies}")


@dataclass(frozen=True)
class JointDecoupledAdapter:
    """Settings of decoupled attention over picture and memory for a diffusion transformer.

    Args:
        memory_dim: e, width of the memory.
        blocks: beginnings of the names of the attention layers that get the adapter ("transformer_blocks.3", ...); None
            is all, but for those that hold text and picture in one stream where the host has others.
        resampler: what turns the memory into latents under the time step.

    >>> JointDecoupledAdapter(memory_dim=24).resampler.num_latents
    64
    """

    memory_dim: int
    blocks: tuple[str, ...] | None = None
    resampler: TimedResampler = field(default_factory=TimedResampler)

    kind: ClassVar[str] = "joint_decoupled"
    positions: ClassVar[tuple[str, ...]] = ("inside",)
    example_call: ClassVar[str] = "model(hidden_states=sample, timestep=timestep, …, memory=memory)"

    def __post_init__(self) -> None:
        settle_blocks(self)
        if not isinstance(self.resampler, TimedResampler):
            raise ConfigError(f"resampler must be a TimedResampler, got {self.resampler!r}")

    def sites(self, host: Host) -> list[Site]:
        """Return the attention layers that `blocks` names."""
        return sites_of_blocks(host, self.blocks)

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked."""
        return random_memory(generator, rows, self.memory_dim)


def settle_blocks(config: Any) -> None:
    """Check the fields `memory_dim` and `blocks` of settings."""
    check_int("memory_dim", config.memory_dim, at_most=65536)
    blocks = config.blocks
    if blocks is None:
        return
    if isinstance(blocks, str) or not blocks or not all(isinstance(name, str) for name in blocks):
        raise ConfigError(f"blocks must be a list of beginnings of block names, got {blocks!r}")
    settle(config, blocks=tuple(blocks))


def sites_of_blocks(host: Host, blocks: tuple[str, ...] | None) -> list[Site]:
    """Return the attention layers whose names begin as `blocks` say; None for all but single streams."""
    offered = host.sites("inside")
    if blocks is None:
        return [site for site in offered if site.part != "stream"]
    names = [site.module for site in offered]
    for prefix in blocks:
        if not any(name.startswith(prefix) for name in names):
            raise AttachError(f"blocks names {prefix!r}, and no attention layer begins so; there are: {names}")
    return [site for site in offered if site.module.startswith(blocks)]
