"""`CrossAttention` and `SelfAttention`: projections around the core, and the choice of the cheapest way to the result.

With d host width, e memory width and h heads of width k (arXiv 1706.03762, section 3.2.2):
Q = x Wq, K = M Wk, V = M Wv, out = attend(Q, K, V) Wo.

Three ways give the same numbers to rounding. *Padded* projects every slot. *Packed* projects and attends to real slots
only. *Absorbed* projects no slot at all: q (M Wk)ᵀ = (q Wkᵀ) Mᵀ and w (M Wv) = (w M) Wv, cheaper while there are few
queries. They are chosen by size; `project` keeps keys and values where many queries follow one another.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.attention import BACKENDS, attend_checked, combine_masks, may_read, visible_rows, visible_slots
from mmattn.cache import KeyValue, pack, real_slots_first
from mmattn.errors import ConfigError, ShapeError, check_bool_mask, check_choice, check_float, check_int
from mmattn.masks import Mask, causal as causal_mask
from mmattn.positions import Rotary
from mmattn.weights import FromWeights

# Packing costs a kernel launch per row: it pays once it saves about this many multiplications per row.
_PACK_SAVES = 2_000_000
# The absorbed form pays up to this share of the multiplications of projecting; processors with fast half-precision
# matrix products project so quickly that only a few queries are worth it.
_ABSORB_MARGIN = 0.5
_ABSORB_MARGIN_HALF = 0.2


class CrossAttention(FromWeights, nn.Module):
    """Multi-head cross-attention from x (b, l, d) to a memory (b, m, e).

    Args:
        query_dim: d. memory_dim: e, d by default. value_dim: width of `values` where they differ from the memory.
        num_heads: h. num_kv_heads: g, dividing h; g = 1 is multi-query. head_dim: k, d / h by default.
        bias: biases on the q, k, v projections. out_bias: on the output projection, as `bias` by default.
        qk_norm: RMSNorm on each head's queries and keys (arXiv 2010.04245 with a learned scale per channel).
        rotary: rotary positions for queries and keys, at `query_positions` and `memory_positions`.
        null_slot: a learned slot that every query may look at ("nothing here answers"); it does not rescue a query
            that sees no real slot.
        length_norm: C; adds log C − log M to the scores of the M real slots a query sees, so that the null slot keeps
            its weight when the memory grows (arXiv 2410.10450); without a null slot it changes nothing.
        score_bias: adds a learned temperature times `scores` to the attention scores.
        dropout: of the weights, in training. scale: of the scores, 1/√k by default. backend: as in `attend`.

    A memory of another dtype is cast to that of the weights, and the result to that of x. A row that sees nothing gives
    exactly 0, output bias included.

    >>> layer = CrossAttention(32, memory_dim=24, num_heads=4)
    >>> layer(torch.randn(2, 5, 32), torch.randn(2, 7, 24)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        query_dim: int,
        memory_dim: int | None = None,
        num_heads: int = 8,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        rotary: Rotary | None = None,
        null_slot: bool = False,
        length_norm: float | None = None,
        score_bias: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d, h = check_int("query_dim", query_dim), check_int("num_heads", num_heads)
        g = check_int("num_kv_heads", h if num_kv_heads is None else num_kv_heads)
        e = check_int("memory_dim", d if memory_dim is None else memory_dim)
        if head_dim is None and d % h:
            raise ShapeError(f"num_heads must divide query_dim, got {h} and {d}; or give head_dim")
        if h % g:
            raise ShapeError(f"num_kv_heads must divide num_heads, got {g} and {h}")
        self.head_dim = k = check_int("head_dim", d // h if head_dim is None else head_dim)
        self.query_dim, self.memory_dim, self.num_heads, self.num_kv_heads = d, e, h, g
        self.value_dim = e if value_dim is None else check_int("value_dim", value_dim)
        self.dropout = check_float("dropout", dropout, at_least=0, below=1)
        self.length_norm = None if length_norm is None else check_float("length_norm", length_norm, at_least=1)
        self.scale = 1 / math.sqrt(k) if scale is None else check_float("scale", scale)
        self.backend = None if backend is None else check_choice("backend", backend, BACKENDS)
        if rotary is not None and rotary.head_dim != k:
            raise ShapeError(f"rotary must be made for head_dim {k}, got one for {rotary.head_dim}")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(d, h * k, bias, **made)
        self.k_proj = nn.Linear(e, g * k, bias, **made)
        self.v_proj = nn.Linear(self.value_dim, g * k, bias, **made)
        self.out_proj = nn.Linear(h * k, d, bias if out_bias is None else out_bias, **made)
        self.q_norm = nn.RMSNorm(k, eps=1e-6, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(k, eps=1e-6, **made) if qk_norm else None
        self.rotary = rotary
        self.score_scale = nn.Parameter(torch.ones((), **made)) if score_bias else None
        self.null_key = nn.Parameter(torch.randn(g, k, **made) * 0.02) if null_slot else None
        self.null_value = nn.Parameter(torch.zeros(g, k, **made)) if null_slot else None
        self._plain = not (qk_norm or null_slot or score_bias or length_norm) and rotary is None

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeyValue,
        *,
        values: Tensor | None = None,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        scores: Tensor | None = None,
        causal: bool = False,
        query_positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        head_scale: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to the memory.

        Args:
            x: (b, l, d). memory: (b, m, e), or what `project` made of it; its rows may be a divisor of those of x
                (beams): row i of x then reads row i // multiple.
            values: (b, m, value_dim) where they are not the memory itself.
            mask: (b, m) bool. attention_mask: (l, m), (b, l, m) or (b, h, l, m) bool. scores: (b, m), with score_bias.
            query_positions, memory_positions: for `rotary`; counted from 0 by default.
            head_scale: (h,), multiplies what each head found.
            return_weights: also return (b, h, l, m); with a null slot they sum to 1 minus its share.

        Raises:
            ShapeError, MaskError: what was given does not fit.
        """
        if x.dim() != 3 or x.shape[2] != self.query_dim:
            raise ShapeError(f"x must be (b, l, {self.query_dim}), got {tuple(x.shape)}")
        rows, l = x.shape[:2]
        if not isinstance(memory, KeyValue):
            mask = self._check_memory(memory, values, mask, x.device)
            memory_rows, m = memory.shape[:2]
            special = causal or return_weights or m == 0 or rows != memory_rows or not self._plain
            special = special or not (mask is attention_mask is values is scores is head_scale is None)
            if not (special or self._absorbing_pays(l, memory, None)):
                return self._look_plainly(x, memory)
        elif mask is not None or scores is not None or values is not None or memory_positions is not None:
            raise ShapeError("a projected memory holds its mask, scores, values and positions: give them to project")
        else:
            mask, memory_rows, m = memory.mask, memory.batch, memory.slots
        if rows != memory_rows and (memory_rows == 0 or rows % memory_rows):
            raise ShapeError(
                f"rows of x must be those of the memory or a multiple of them (beams), got {rows} and {memory_rows}"
            )
        if causal:
            rule = causal_mask(l, m, offset=m - l, device=x.device)
            attention_mask = rule if attention_mask is None else rule & attention_mask
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
        out = self._look(x, kept, allowed, attention_mask is not None, query_positions, return_weights)
        out, weights = out if isinstance(out, tuple) else (out, None)
        if head_scale is not None:
            out = out * head_scale.to(out.dtype)[:, None, None]
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        seen = None if self.out_proj.bias is None else visible_rows(allowed, rows, m, device=x.device)
        if seen is not None:
            out = out.masked_fill(~seen, 0)
        out = out if out.dtype is x.dtype else out.to(x.dtype)
        return (out, weights) if weights is not None else out

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

    @property
    def absorbable(self) -> bool:
        """Whether keys are a plain matrix times the memory, so that it may be applied to the query instead."""
        plain = type(self.k_proj) is nn.Linear and type(self.v_proj) is nn.Linear
        return plain and self.k_norm is None and self.rotary is None and self.null_key is None

    def _look_plainly(self, x: Tensor, memory: Tensor) -> Tensor:
        """The common case, nothing special asked: as few steps as the operations themselves."""
        memory = self._cast(memory)
        q, k, v = self.q_proj(self._cast(x)), self.k_proj(memory), self.v_proj(memory)
        out = self._attend(self._heads(q), self._heads(k), self._heads(v), None, None, False)
        assert isinstance(out, Tensor)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if out.dtype is x.dtype else out.to(x.dtype)

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
        margin = _ABSORB_MARGIN if memory.element_size() >= 4 else _ABSORB_MARGIN_HALF
        return queries * h * ((e - k) * m + k * e) < margin * m * e * g * k

    def _look(
        self,
        x: Tensor,
        kept: KeyValue,
        allowed: Tensor | None,
        per_query: bool,
        positions: Tensor | None,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of x (rows, l, d) over kept keys and values: (rows, h, l, k), and the weights where asked.

        Args:
            allowed: all rules together. per_query: they say more than the padding of `kept` does.
        """
        rows, l = x.shape[:2]
        q = self._heads(self.q_proj(self._cast(x)))
        if self.q_norm is not None:
            q = self._norm(self.q_norm, q)
        if self.rotary is not None:
            q = self.rotary(q, torch.arange(l, device=x.device) if positions is None else positions)
        g, n = self.num_kv_heads, self.num_heads // self.num_kv_heads
        if kept.absorbed:
            q = self._per_head(q, self.k_proj.weight.view(g, self.head_dim, -1))
        seen = None
        if kept.null or kept.absorbed:
            seen = visible_rows(allowed, rows, kept.slots, per_head=True, device=x.device)
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
        if weights is not None:
            return out, weights[..., 1:] if kept.null else weights
        return out

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
        for row, (keys, values, bias) in enumerate(kept.rows()):
            own = slice(row * step, (row + 1) * step)
            rule = None if allowed is None else allowed[own][..., kept.mask[row]]
            out = self._attend(q[own], keys, values, rule, bias, return_weights)
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
        wanted = self.q_proj.weight.dtype
        if tensor.dtype is wanted or torch.is_autocast_enabled(tensor.device.type):
            return tensor
        return tensor.to(wanted)


class SelfAttention(CrossAttention):
    """The same core looking at its own tokens: memory = x.

    >>> SelfAttention(32, num_heads=4)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(self, dim: int, num_heads: int = 8, *, causal: bool = True, **settings: Any) -> None:
        super().__init__(dim, None, num_heads, **settings)
        self.causal = causal

    @classmethod
    def _made(cls, **settings: Any) -> SelfAttention:
        widths = [settings.pop(name) for name in ("query_dim", "memory_dim", "value_dim")]
        if len(set(widths)) != 1:
            raise ShapeError(f"self-attention has one width for q, k and v, got {widths}: use CrossAttention")
        return cls(widths[0], **settings)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x (b, l, d) to x, to earlier tokens only if causal; `mask` (b, l) is the padding."""
        return super().forward(
            x,
            x,
            mask=mask,
            attention_mask=attention_mask,
            causal=self.causal,
            query_positions=positions,
            memory_positions=positions,
            return_weights=return_weights,
        )
