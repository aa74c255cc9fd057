"""The gated block: attention over a memory, then a feed-forward, each behind a gate; and the base of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import Host, Site
from mmattn.adapters.resampler import Resampler, settle_resampler
from mmattn.adapters.settings import (
    LayeredAdapter,
    default_heads,
    default_norm,
    random_memory,
    settle,
    settle_nested,
)
from mmattn.core.cross_attention import CrossAttention, check_score_settings
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConfigError, check_bool, check_choice, check_float, check_int
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import is_distributed

#: Arguments of `CrossAttention`.
AttentionSettings = dict[str, Any]
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
        calibrated: the blocks have the mean and spread of the host's hidden states; set by `AdaptedModel.calibrate`.
    """

    norm: str = "layer"
    norm_eps: float | None = None
    memory_norm: bool | None = None
    activation: str = "gelu"
    calibrated: bool = False

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.norm_eps is not None:
            check_float("norm_eps", self.norm_eps, at_least=1e-12, below=1)
        if self.memory_norm is not None:
            check_bool("memory_norm", self.memory_norm)
        check_bool("calibrated", self.calibrated)

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

    def __init__(self, config: BlockAdapter, host_dim: int, attention: AttentionSettings) -> None:
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
        seen: Tensor | None = None,
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


POSITIONS = ("after", "before")


@dataclass(frozen=True)
class BlockAdapter(LayeredAdapter):
    """Settings of gated blocks at the layers of a language model.

    Args:
        memory_dim: e, width of the memory.
        every: a block at every n-th host layer (layers n-1, 2n-1, …); 4 where `layers` is not given
            either, or the depth of a host with fewer.
        layers: or the explicit list of host layers, counted from 0.
        num_heads: h of the cross-attention; None is 8, and fewer beside a narrow host, see `default_heads`.
        head_dim: k of the cross-attention; None is 64, and less beside a narrow host.
        num_kv_heads: g of the cross-attention, h by default.
        feed_forward: hidden width of the gated feed-forward as a multiple of d (4 in the paper; 1 keeps decoding fast);
            0 leaves it out.
        gate: "scalar", "head" or "channel": how many numbers the attention gate has.
        qk_norm: as in `CrossAttention`.
        null_slot: as in `CrossAttention`.
        length_norm: as in `CrossAttention`.
        dropout: as in `CrossAttention`.
        position: the block acts "after" its host layer, or "before" it.
        layout: norms and activation as in published models.
    """

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
    layout: BlockLayout = field(default_factory=BlockLayout)

    positions: ClassVar[tuple[str, ...]] = POSITIONS

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "head_dim", "num_kv_heads"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_most=1024)
        if self.num_kv_heads is not None and self.num_heads is not None and self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}")
        check_float("feed_forward", self.feed_forward, at_least=0, below=64.1)
        check_choice("gate", self.gate, GATES)
        check_choice("position", self.position, POSITIONS)
        check_bool("qk_norm", self.qk_norm)
        check_bool("null_slot", self.null_slot)
        if self.length_norm is not None:
            check_float("length_norm", self.length_norm, at_least=1)
        check_float("dropout", self.dropout, at_least=0, below=1)
        settle_nested(self, "layout", BlockLayout)
        norm = default_norm(self.layout.memory_norm, self.memory_dim)
        settle(self, layout=replace(self.layout, memory_norm=norm))

    def offered(self, host: Host) -> list[Site]:
        """Return the sites of this position; of a host with an encoder and a decoder those of the decoder."""
        return [site for site in host.sites(self.position) if site.part != "encoder"]

    def sized(self, host_dim: int) -> BlockAdapter:
        """Return these settings with the numbers of heads that they have on a host of width d."""
        heads, width = default_heads(host_dim, self.memory_dim, self.num_heads, self.head_dim)
        return replace(self, num_heads=heads, head_dim=width)

    def attention_settings(self) -> AttentionSettings:
        """Return further arguments of the cross-attention of the blocks."""
        return {}


@dataclass(frozen=True)
class SlotAdapter(BlockAdapter):
    """Settings of gated blocks over a memory whose slots may be resampled, or have scores.

    Args:
        score_bias: as in `CrossAttention`; the memory must have scores.
        score_mean: as in `CrossAttention`.
        score_std: as in `CrossAttention`.
        resampler: turn the memory into few latents first.

    The others are those of `BlockAdapter`.
    """

    score_bias: bool = False
    score_mean: float = 0.0
    score_std: float = 1.0
    resampler: Resampler | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bool("score_bias", self.score_bias)
        check_score_settings(self.score_bias, self.score_mean, self.score_std)
        settle_resampler(self)
        if self.resampler is not None and self.score_bias:
            raise ConfigError("score_bias needs the scores of the slots, which a resampler mixes: choose one of them")

    def attention_settings(self) -> AttentionSettings:
        """Return the settings of scores."""
        return {"score_bias": self.score_bias, "score_mean": self.score_mean, "score_std": self.score_std}

    def example_memory(self, generator: torch.Generator, rows: int = 3) -> Memory:
        """Return a random memory (rows, 5, e), some slots masked, with scores where they are read."""
        return random_memory(generator, rows, self.memory_dim, scores=self.score_bias)


class BlockLayers(AdapterLayers):
    """Gated blocks at some layers of one host, and how the memory is read for them."""

    config: BlockAdapter
    separable = True

    def __init__(self, config: BlockAdapter, sites: Sequence[Site]) -> None:
        config = config.sized(sites[0].width)
        super().__init__(config, sites)
        self.score_bias = getattr(config, "score_bias", False)
        # A null slot weighs as much as one of them, a length norm counts them.
        self.counts_slots = config.null_slot or config.length_norm is not None
        self._add_reader(config.layout.memory_norm, getattr(config, "resampler", None))
        self.blocks = nn.ModuleDict(
            {str(site.layer): GatedBlock(config, site.width, config.attention_settings()) for site in self.sites}
        )

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
