"""`CrossAttention` and `SelfAttention`: projections around the core.

With d host width, e memory width and h heads of width k (arXiv 1706.03762, section 3.2.2):
Q = x Wq, K = M Wk, V = M Wv, out = attend(Q, K, V) Wo.

How the keys and values are laid out is chosen in `projection.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.attention import BACKENDS, attend_checked, combine_masks, visible_rows, visible_slots
from mmattn.cache import KeyValue
from mmattn.errors import ShapeError, check_choice, check_float, check_int
from mmattn.masks import Mask, causal as causal_mask
from mmattn.positions import Rotary
from mmattn.projection import MemoryProjection
from mmattn.weights import FromWeights


class CrossAttention(FromWeights, MemoryProjection):
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

    def _look_plainly(self, x: Tensor, memory: Tensor) -> Tensor:
        """The common case, nothing special asked: as few steps as the operations themselves."""
        memory = self._cast(memory)
        q, k, v = self.q_proj(self._cast(x)), self.k_proj(memory), self.v_proj(memory)
        out = self._attend(self._heads(q), self._heads(k), self._heads(v), None, None, False)
        assert isinstance(out, Tensor)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if out.dtype is x.dtype else out.to(x.dtype)

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
