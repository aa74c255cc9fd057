"""`CrossAttention` and `SelfAttention`: projections around the core.

With d host width, e memory width and h heads of width k (arXiv 1706.03762, section 3.2.2):
Q = x Wq, K = M Wk, V = M Wv, out = attend(Q, K, V) Wo.

How the keys and values are laid out is chosen in `heads.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.attention import BACKENDS, attend, combine_masks, visible_rows
from mmattn.core.import_weights import FromWeights
from mmattn.core.kv import KeyValue
from mmattn.core.masks import Mask, causal as causal_mask
from mmattn.core.positions import Rotary
from mmattn.core.projection import MemoryHeads
from mmattn.errors import ConfigError, ShapeError, check_choice, check_float, check_int


class CrossAttention(FromWeights, MemoryHeads, nn.Module):
    """Multi-head cross-attention from x (b, l, d) to a memory (b, m, e).

    Args:
        query_dim: d. memory_dim: e, d by default. value_dim: width of `values` where they differ from the memory.
        num_heads: h. num_kv_heads: g, dividing h; g = 1 is multi-query. head_dim: k, d / h by default.
        bias: biases on the q, k, v projections. out_bias: on the output projection, as `bias` by default.
        qk_norm: RMSNorm on each head's queries and keys (arXiv 2010.04245 with a learned scale per channel).
            norm_eps: its ε.
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
        norm_eps: float = 1e-6,
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
        check_float("norm_eps", norm_eps, at_least=0)
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
        self.q_norm = nn.RMSNorm(k, eps=norm_eps, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(k, eps=norm_eps, **made) if qk_norm else None
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
        if isinstance(memory, KeyValue):
            m = memory.slots
        else:
            mask = self._check_memory(memory, values, mask, x.device)
            m = memory.shape[1]
            special = causal or return_weights or m == 0 or rows != memory.shape[0] or not self._plain
            special = special or not (mask is attention_mask is values is scores is head_scale is None)
            if not (special or self._absorbing_pays(l, memory, None)):
                return self._look_plainly(x, memory)
        if causal:
            rule = causal_mask(l, m, offset=m - l, device=x.device)
            attention_mask = rule if attention_mask is None else rule & attention_mask
        q = self._heads(self.q_proj(self._cast(x)))
        if self.q_norm is not None:
            q = self._norm(self.q_norm, q)
        if self.rotary is not None:
            q = self.rotary(q, torch.arange(l, device=x.device) if query_positions is None else query_positions)
        out, weights, allowed = self.look_at(
            q,
            memory,
            values=values,
            mask=mask,
            attention_mask=attention_mask,
            scores=scores,
            memory_positions=memory_positions,
            return_weights=return_weights,
        )
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
        bias: Tensor | None = None,
        cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x (b, l, d) to x, to earlier tokens only if causal.

        Args:
            mask: (b, m) bool, the padding; m is l and what the cache holds. attention_mask: as in `attend`.
            positions: (l,) or (b, l), for `rotary`; counted from 0 by default.
            bias: broadcastable to (b, h, l, m), added to the scores (`positions.alibi`).
            cache: takes the keys and values (b, g, l, k) of x and gives those of the whole text so far:
                `partial(cache.append, layer)` of a `GrowingCache` or `PagedCache`.

        Raises:
            ConfigError: a cache or bias and a null slot or `score_bias`; a cache and `rotary` without positions.
        """
        if cache is not None or bias is not None:
            return self._look_back(x, mask, attention_mask, positions, bias, cache, return_weights)
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

    def _look_back(
        self,
        x: Tensor,
        mask: Tensor | None,
        attention_mask: Tensor | Mask | None,
        positions: Tensor | None,
        bias: Tensor | None,
        cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
        return_weights: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The same attention where keys are kept from call to call, or scores have a bias for each pair of tokens."""
        if x.dim() != 3 or x.shape[2] != self.query_dim:
            raise ShapeError(f"x must be (b, l, {self.query_dim}), got {tuple(x.shape)}")
        if self.null_key is not None or self.score_scale is not None:
            raise ConfigError(
                "self-attention with a null slot or score_bias takes no cache and no bias: make it without"
            )
        if cache is not None and self.rotary is not None and positions is None:
            raise ConfigError("a cached text does not start at 0: give the positions of x, which rotary turns by")
        rows, l = x.shape[:2]
        inner = self._cast(x)
        positions = torch.arange(l, device=x.device) if positions is None else positions
        q = self._heads(self.q_proj(inner))
        q = q if self.q_norm is None else self._norm(self.q_norm, q)
        q = q if self.rotary is None else self.rotary(q, positions)
        keys, values = self._slots(inner, None, positions)
        if cache is not None:
            keys, values = cache(keys, values)
        m = keys.shape[2]
        # A single query is the last token, which sees all there is.
        if self.causal and l > 1:
            rule = causal_mask(l, m, offset=m - l, device=x.device)
            attention_mask = rule if attention_mask is None else rule & attention_mask
        allowed = combine_masks(mask, attention_mask, (rows, rows, self.num_heads, l, m))
        found = attend(
            q,
            keys,
            values,
            attention_mask=None if allowed is None else Mask(allowed),
            bias=bias,
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
            backend=self.backend,
            return_weights=return_weights,
        )
        found, weights = found if isinstance(found, tuple) else (found, None)
        out = self.out_proj(found.transpose(1, 2).flatten(2))
        seen = None if self.out_proj.bias is None else visible_rows(allowed, rows, m)
        out = out if seen is None else out.masked_fill(~seen, 0)
        out = out if out.dtype is x.dtype else out.to(x.dtype)
        return out if weights is None else (out, weights)


class PlainHeads(MemoryHeads, nn.Module):
    """Heads with keys and values that are plain matrices times the memory, for queries that someone else makes."""

    k_norm = rotary = null_key = null_value = score_scale = length_norm = backend = None
    dropout = 0.0

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, memory_dim: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.memory_dim = self.value_dim = memory_dim
        self.scale = 1 / math.sqrt(head_dim)

    def forward(
        self, q: Tensor, memory: Tensor | KeyValue, *, mask: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What queries (b, h, l, k) find: (b, h, l, k) in their dtype, exactly 0 where a row sees nothing."""
        found, weights, _ = self.look_at(self._cast(q), memory, mask=mask, return_weights=return_weights)
        found = found.to(q.dtype)
        return found if weights is None else (found, weights)
