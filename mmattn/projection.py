"""The memory's side of `CrossAttention`: which layout its keys and values take, and how they are made.

Three ways give the same numbers to rounding. *Padded* projects every slot. *Packed* projects and attends to real slots
only. *Absorbed* projects no slot at all: q (M Wk)ᵀ = (q Wkᵀ) Mᵀ and w (M Wv) = (w M) Wv, cheaper while there are few
queries. They are chosen by size; `project` keeps keys and values where many queries follow one another.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.attention import may_read
from mmattn.cache import KeyValue, pack, real_slots_first
from mmattn.errors import ConfigError, ShapeError, check_bool_mask
from mmattn.positions import Rotary

# Packing costs a kernel launch per row: it pays once it saves about this many multiplications per row.
_PACK_SAVES = 2_000_000
# The absorbed form pays up to this share of the multiplications of projecting; processors with fast half-precision
# matrix products project so quickly that only a few queries are worth it, and only over that many slots.
_ABSORB_MARGIN = 0.5
_ABSORB_MARGIN_HALF = 0.2
_ABSORB_LEAST_HALF = 512


class MemoryProjection(nn.Module):
    """From a memory (b, m, e) to keys and values; the weights are made by `CrossAttention`."""

    memory_dim: int
    value_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    k_norm: nn.RMSNorm | None
    rotary: Rotary | None
    null_key: nn.Parameter | None
    null_value: nn.Parameter | None
    score_scale: nn.Parameter | None

    def project(
        self,
        memory: Tensor,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        scores: Tensor | None = None,
        memory_positions: Tensor | None = None,
        absorb: bool = False,
    ) -> KeyValue:
        """Make keys and values of a memory (b, m, e) once, to be given to `forward` instead of it.

        Args:
            absorb: keep the memory itself instead, shared between layers, and project queries and results; less to
                read once K and V of all layers are larger than the memory.

        Raises:
            ConfigError: `absorb` where keys are normalised, rotated, joined by a null slot, or values are given.
        """
        mask = self._check_memory(memory, values, mask, None)
        if absorb and not (self.absorbable and values is None):
            raise ConfigError("keys normalised, rotated, or with a null slot or values of their own cannot be absorbed")
        queries = 0 if absorb else None
        kept = self._prepare(memory, values, mask, scores, memory_positions, queries, packable=True)
        if kept.absorbed:
            return kept
        return replace(kept, keys=kept.keys.contiguous(), values=kept.values.contiguous())

    def projecting_parameters(self) -> list[Tensor]:
        """The weights that `project` uses."""
        own = [self.null_key, self.null_value, self.score_scale]
        found: list[Tensor] = [weight for weight in own if weight is not None]
        for layer in (self.k_proj, self.v_proj, self.k_norm):
            if type(layer) is nn.Linear and layer.bias is None:
                found.append(layer.weight)
            elif layer is not None:
                found += layer.parameters()
        return found

    @property
    def absorbable(self) -> bool:
        """Whether keys are a plain matrix times the memory, so that it may be applied to the query instead."""
        plain = type(self.k_proj) is nn.Linear and type(self.v_proj) is nn.Linear
        return plain and self.k_norm is None and self.rotary is None and self.null_key is None

    def _check_memory(
        self, memory: Tensor, values: Tensor | None, mask: Tensor | None, device: torch.device | None
    ) -> Tensor | None:
        if not isinstance(memory, Tensor) or memory.dim() != 3 or memory.shape[2] != self.memory_dim:
            given = tuple(memory.shape) if isinstance(memory, Tensor) else type(memory).__name__
            raise ShapeError(f"memory must be a tensor (b, m, {self.memory_dim}), got {given}")
        if device is not None and memory.device != device:
            raise ShapeError(f"x is on {device} and memory on {memory.device}: move one with .to()")
        wanted = (*memory.shape[:2], self.value_dim)
        if tuple((memory if values is None else values).shape) != wanted:
            offered = "none" if values is None else f"{tuple(values.shape)}"
            raise ShapeError(f"values must be (b, m, {self.value_dim}) = {wanted}, got {offered}")
        if mask is None:
            return None
        if check_bool_mask("mask", mask).shape != memory.shape[:2]:
            raise ShapeError(
                f"mask must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(mask.shape)}; a mask over queries (l, m) "
                "is called attention_mask"
            )
        return None if may_read(mask) and bool(mask.all()) else mask

    def _prepare(
        self,
        memory: Tensor,
        values: Tensor | None,
        mask: Tensor | None,
        scores: Tensor | None,
        memory_positions: Tensor | None,
        queries: int | None,
        packable: bool,
    ) -> KeyValue:
        """Choose a layout for a memory that `queries` queries per row will look at (None: very many)."""
        memory, values = self._cast(memory), None if values is None else self._cast(values)
        if memory_positions is None and self.rotary is not None:
            memory_positions = torch.arange(memory.shape[1], device=memory.device)
        bias = self._score_bias(scores, mask, memory)
        lengths = self._packed_lengths(mask) if packable else None
        absorb = values is None and self.absorbable and queries is not None
        absorb = absorb and self._absorbing_pays(queries or 0, memory, lengths)
        if mask is not None and lengths is not None:
            first = real_slots_first(mask, lengths)
            if absorb and first:
                # Each row is read up to its length, where it lies.
                raw = memory[:, None]
                return KeyValue(raw, raw, mask, bias, lengths, absorbed=True)
            if memory_positions is not None and self.rotary is not None:
                width = () if self.rotary.axes == 1 else (self.rotary.axes,)
                memory_positions = pack(memory_positions.expand(*mask.shape, *width), mask, lengths, first)
            memory = pack(memory, mask, lengths, first)
            values = None if values is None else pack(values, mask, lengths, first)
            bias = None if bias is None else pack(bias, mask, lengths, first)
        elif mask is not None:
            memory = memory.masked_fill(~mask[..., None], 0)
            values = None if values is None else values.masked_fill(~mask[..., None], 0)
        if absorb:
            raw = memory[:, None]
            return KeyValue(raw, raw, mask, bias, lengths, absorbed=True)
        keys = self._heads(self.k_proj(memory))
        made = self._heads(self.v_proj(memory if values is None else values))
        if self.k_norm is not None:
            keys = self._norm(self.k_norm, keys)
        if self.rotary is not None:
            keys = self.rotary(keys, memory_positions)
        if self.null_key is None or self.null_value is None:
            return KeyValue(keys, made, mask, bias, lengths)
        b = keys.shape[0]
        keys = torch.cat([self.null_key[None, :, None].to(keys.dtype).expand(b, -1, -1, -1), keys], 2)
        made = torch.cat([self.null_value[None, :, None].to(made.dtype).expand(b, -1, -1, -1), made], 2)
        return KeyValue(keys, made, mask, None if bias is None else F.pad(bias, (1, 0)), null=True)

    def _packed_lengths(self, mask: Tensor | None) -> tuple[int, ...] | None:
        """Number of real slots of each row where leaving the others out pays, else None."""
        if mask is None or self.null_key is not None or not may_read(mask):
            return None
        lengths = tuple(mask.sum(1).tolist())
        saved = (mask.numel() - sum(lengths)) * 2 * self.memory_dim * self.num_kv_heads * self.head_dim
        return lengths if saved > _PACK_SAVES * len(lengths) else None

    def _absorbing_pays(self, queries: int, memory: Tensor, lengths: tuple[int, ...] | None) -> bool:
        """Compare multiplications: K and V of every slot against wider queries, scores and results."""
        h, g, k, e = self.num_heads, self.num_kv_heads, self.head_dim, self.memory_dim
        m = memory.shape[1] if lengths is None else sum(lengths) / max(len(lengths), 1)
        margin = _ABSORB_MARGIN
        if memory.element_size() < 4:
            margin = _ABSORB_MARGIN_HALF if len(memory) * m >= _ABSORB_LEAST_HALF else 0
        return queries * h * ((e - k) * m + k * e) < margin * m * e * g * k

    def _score_bias(self, scores: Tensor | None, mask: Tensor | None, memory: Tensor) -> Tensor | None:
        """What the retriever's opinion adds to the scores of each slot, (b, m)."""
        if (scores is None) != (self.score_scale is None):
            raise ConfigError(
                "this layer was made without score_bias, so it takes no scores"
                if self.score_scale is None
                else "this layer was made with score_bias=True: give it scores (b, m)"
            )
        if scores is None or self.score_scale is None:
            return None
        if scores.shape != memory.shape[:2]:
            raise ShapeError(f"scores must be (b, m) = {tuple(memory.shape[:2])}, got {tuple(scores.shape)}")
        clean = scores if mask is None else scores.masked_fill(~mask, 0)
        return self.score_scale * clean.to(self.score_scale.dtype)

    def _heads(self, projected: Tensor) -> Tensor:
        """(b, m, g·k) to (b, g, m, k), a view."""
        rows, length, width = projected.shape
        return projected.view(rows, length, width // self.head_dim, self.head_dim).transpose(1, 2)

    def _norm(self, norm: nn.RMSNorm, heads: Tensor) -> Tensor:
        # Autocast does not know RMSNorm, which warns of weights of another dtype.
        return norm(heads.to(norm.weight.dtype)).to(heads.dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        wanted = self.q_proj.weight.dtype
        if tensor.dtype is wanted or torch.is_autocast_enabled(tensor.device.type):
            return tensor
        return tensor.to(wanted)
