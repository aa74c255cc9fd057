"""Keys and values of a memory by head, in the cheapest layout, and the attention of query heads over them.

Three ways give the same numbers to rounding. *Padded* projects every slot. *Packed* projects and attends to real slots
only. *Absorbed* projects no slot at all: q (M Wk)ᵀ = (q Wkᵀ) Mᵀ and w (M Wv) = (w M) Wv, cheaper while there are few
queries. They are chosen by size; `project` keeps keys and values where many queries follow one another.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.attention import attend_checked, combine_masks, may_read, visible_rows, visible_slots
from mmattn.core.kv import KeyValue, pack, real_slots_first
from mmattn.core.masks import Mask
from mmattn.core.positions import Rotary
from mmattn.errors import ConfigError, ShapeError, check_bool_mask

# Packing costs a kernel launch per row: it pays once it saves about this many multiplications per row.
_PACK_SAVES = 2_000_000
# The absorbed form pays up to this share of the multiplications of projecting; processors with fast half-precision
# matrix products project so quickly that only a few queries are worth it, and only over that many slots.
_ABSORB_MARGIN = 0.5
_ABSORB_MARGIN_HALF = 0.2
_ABSORB_LEAST_HALF = 512

# torch 2.6 cannot tell exporting from compiling.
_exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


class MemoryHeads:
    """What every layer that reads a memory shares; the weights are made by the class that mixes this in."""

    memory_dim: int
    value_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    k_proj: nn.Linear
    v_proj: nn.Linear
    scale: float
    k_norm: nn.RMSNorm | None
    rotary: Rotary | None
    null_key: nn.Parameter | None
    null_value: nn.Parameter | None
    score_scale: nn.Parameter | None
    length_norm: float | None
    dropout: float
    backend: str | None
    training: bool

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

    def look_at(
        self,
        q: Tensor,
        memory: Tensor | KeyValue,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        scores: Tensor | None = None,
        memory_positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What queries (rows, h, l, k) find in a memory (b, m, e), or in what `project` made of it.

        Returns:
            (rows, h, l, k), with 0 where nothing may be seen; the weights (rows, h, l, m) where asked; and all rules
            together, broadcastable to (rows, h, l, m), None where everything may be seen.

        Raises:
            ShapeError, MaskError: what was given does not fit.
        """
        rows, _, l, _ = q.shape
        if isinstance(memory, KeyValue):
            if any(given is not None for given in (mask, scores, values, memory_positions)):
                raise ShapeError(
                    "a projected memory holds its mask, scores, values and positions: give them to project"
                )
            mask, memory_rows, m = memory.mask, memory.batch, memory.slots
        else:
            mask = self._check_memory(memory, values, mask, q.device)
            memory_rows, m = memory.shape[:2]
        if rows != memory_rows and (memory_rows == 0 or rows % memory_rows):
            raise ShapeError(
                f"rows of x must be those of the memory or a multiple of them (beams), got {rows} and {memory_rows}"
            )
        allowed = None
        if mask is not None or attention_mask is not None:
            allowed = combine_masks(mask, attention_mask, (rows, memory_rows, self.num_heads, l, m))
        if isinstance(memory, KeyValue):
            kept = memory
        else:
            queries = rows * l // max(memory_rows, 1)
            if attention_mask is not None and allowed is not None:
                mask = visible_slots(allowed, memory_rows, m)
            packable = attention_mask is None and not return_weights
            kept = self._prepare(memory, values, mask, scores, memory_positions, queries, packable)
        return *self._look(q, kept, allowed, attention_mask is not None, return_weights), allowed

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
        bias = self._score_bias(scores, mask, memory.shape[:2])
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
        keys, made = self._slots(memory, values, memory_positions)
        return self._joined(keys, made, mask, bias, lengths)

    def _slots(
        self, memory: Tensor, values: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values (b, g, m, k) of the slots of a memory (b, m, e), null slot apart."""
        keys = self._heads(self.k_proj(memory))
        if self.k_norm is not None:
            keys = self._norm(self.k_norm, keys)
        if self.rotary is not None:
            keys = self.rotary(keys, positions)
        return keys, self._heads(self.v_proj(memory if values is None else values))

    def _joined(
        self, keys: Tensor, values: Tensor, mask: Tensor | None, bias: Tensor | None, lengths: tuple[int, ...] | None
    ) -> KeyValue:
        """Keys and values with the null slot in front, where there is one."""
        if self.null_key is None or self.null_value is None:
            return KeyValue(keys, values, mask, bias, lengths)
        b = keys.shape[0]
        keys = torch.cat([self.null_key[None, :, None].to(keys.dtype).expand(b, -1, -1, -1), keys], 2)
        values = torch.cat([self.null_value[None, :, None].to(values.dtype).expand(b, -1, -1, -1), values], 2)
        return KeyValue(keys, values, mask, None if bias is None else F.pad(bias, (1, 0)), null=True)

    def _packed_lengths(self, mask: Tensor | None) -> tuple[int, ...] | None:
        """Number of real slots of each row where leaving the others out pays, else None."""
        if mask is None or self.null_key is not None or not may_read(mask):
            return None
        lengths = tuple(mask.sum(1).tolist())
        saved = (mask.numel() - sum(lengths)) * 2 * self.memory_dim * self.num_kv_heads * self.head_dim
        return lengths if saved > _PACK_SAVES * len(lengths) else None

    def _absorbing_pays(self, queries: int, memory: Tensor, lengths: tuple[int, ...] | None) -> bool:
        """Compare multiplications: K and V of every slot against wider queries, scores and results."""
        if _exporting():
            return False  # the program would hold only for lengths of the same answer
        h, g, k, e = self.num_heads, self.num_kv_heads, self.head_dim, self.memory_dim
        m = memory.shape[1] if lengths is None else sum(lengths) / max(len(lengths), 1)
        margin = _ABSORB_MARGIN
        if memory.element_size() < 4:
            margin = _ABSORB_MARGIN_HALF if len(memory) * m >= _ABSORB_LEAST_HALF else 0
        return queries * h * ((e - k) * m + k * e) < margin * m * e * g * k

    def _look(
        self, q: Tensor, kept: KeyValue, allowed: Tensor | None, per_query: bool, return_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of q (rows, h, l, k) over kept keys and values: (rows, h, l, k), and the weights where asked.

        Args:
            allowed: all rules together. per_query: they say more than the padding of `kept` does.
        """
        rows = q.shape[0]
        g, n = self.num_kv_heads, self.num_heads // self.num_kv_heads
        if kept.absorbed:
            q = self._per_head(q, self.k_proj.weight.view(g, self.head_dim, -1))
        seen = None
        if kept.null or kept.absorbed:
            seen = visible_rows(allowed, rows, kept.slots, per_head=True, device=q.device)
        if kept.lengths is None:
            bias = None if kept.bias is None else kept.bias[:, None, None]
            if kept.null:
                bias = self._normalised(bias, allowed, kept)
                allowed = None if allowed is None else F.pad(allowed, (1, 0), value=True)
            out = self._attend(q, kept.keys, kept.values, allowed, bias, return_weights)
        else:
            out = self._attend_rows(q, kept, allowed if per_query else None, return_weights)
        out, weights = out if isinstance(out, tuple) else (out, None)
        if kept.absorbed:
            out = self._per_head(out, self.v_proj.weight.view(g, self.head_dim, -1).transpose(1, 2))
            if self.v_proj.bias is not None:
                out = out + self.v_proj.bias.view(g, 1, -1).repeat_interleave(n, 0)
        if seen is not None:
            out = out.masked_fill(~seen, 0)
            weights = None if weights is None else weights.masked_fill(~seen, 0)
        if weights is not None and kept.null:
            weights = weights[..., 1:]
        return out, weights

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        allowed: Tensor | None,
        bias: Tensor | None,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        dropout = self.dropout if self.training else 0.0
        return attend_checked(q, k, v, allowed, bias, False, self.scale, dropout, self.backend, return_weights)

    def _attend_rows(
        self, q: Tensor, kept: KeyValue, allowed: Tensor | None, return_weights: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Each row over its own real slots; nothing is computed on padding."""
        assert kept.mask is not None
        rows = q.shape[0]
        if allowed is not None:
            allowed = allowed.repeat_interleave(rows // allowed.shape[0], 0)
        parts, weights = [], []
        step = rows // kept.batch
        for row, (own, (keys, values, bias)) in enumerate(zip(q.split(step), kept.rows(), strict=True)):
            rule = None if allowed is None else allowed[row * step : (row + 1) * step][..., kept.mask[row]]
            out = self._attend(own, keys, values, rule, bias, return_weights)
            if isinstance(out, tuple):
                out, real = out
                full = real.new_zeros(*real.shape[:3], kept.slots)
                full[..., kept.mask[row]] = real
                weights.append(full)
            parts.append(out)
        return (torch.cat(parts), torch.cat(weights)) if weights else torch.cat(parts)

    def _per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (b, h, l, i) times the weight (g, i, o) of each head: (b, h, l, o), reading a weight once for all rows."""
        b, h, l, _ = x.shape
        g, i, o = weight.shape
        n = h // g * l
        grouped = x.reshape(b, g, n, i).transpose(0, 1).reshape(g, b * n, i)
        return (grouped @ weight).view(g, b, n, o).transpose(0, 1).reshape(b, h, l, o)

    def _score_bias(self, scores: Tensor | None, mask: Tensor | None, shape: torch.Size) -> Tensor | None:
        """What the retriever's opinion adds to the scores of each slot, (b, m)."""
        if (scores is None) != (self.score_scale is None):
            raise ConfigError(
                "this layer was made without score_bias, so it takes no scores"
                if self.score_scale is None
                else "this layer was made with score_bias=True: give it scores (b, m)"
            )
        if scores is None or self.score_scale is None:
            return None
        if scores.shape != shape:
            raise ShapeError(f"scores must be (b, m) = {tuple(shape)}, got {tuple(scores.shape)}")
        clean = scores if mask is None else scores.masked_fill(~mask, 0)
        return self.score_scale * clean.to(self.score_scale.dtype)

    def _normalised(self, bias: Tensor | None, allowed: Tensor | None, kept: KeyValue) -> Tensor | None:
        """`bias` (b, 1, 1, 1 + m) with log C − log M on the M slots each query sees, and nothing on the null slot."""
        if self.length_norm is None:
            return bias
        if allowed is None:
            allowed = torch.ones(1, 1, 1, kept.slots, dtype=torch.bool, device=kept.keys.device)
        seen = allowed.expand(*allowed.shape[:3], kept.slots).sum(-1, keepdim=True).clamp(min=1)
        size = math.log(self.length_norm) - seen.to(kept.keys.dtype).log()
        size = F.pad(size.expand(*size.shape[:3], kept.slots), (1, 0))
        if bias is None:
            return size
        return size + (bias if size.shape[0] == 1 else bias.repeat_interleave(size.shape[0] // bias.shape[0], 0))

    def _heads(self, projected: Tensor) -> Tensor:
        """(b, m, g·k) to (b, g, m, k), a view."""
        rows, length, width = projected.shape
        return projected.view(rows, length, width // self.head_dim, self.head_dim).transpose(1, 2)

    def _norm(self, norm: nn.RMSNorm, heads: Tensor) -> Tensor:
        # Autocast does not know RMSNorm, which warns of weights of another dtype.
        return norm(heads.to(norm.weight.dtype)).to(heads.dtype)

    def _cast(self, tensor: Tensor) -> Tensor:
        wanted = self.k_proj.weight.dtype
        if tensor.dtype is wanted or torch.is_autocast_enabled(tensor.device.type):
            return tensor
        return tensor.to(wanted)
