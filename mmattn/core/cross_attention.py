"""`CrossAttention` and `SelfAttention`: projections around the core.

With d host width, e memory width and h heads of width k (arXiv 1706.03762, section 3.2.2):
Q = x Wq, K = M Wk, V = M Wv, out = attend(Q, K, V) Wo. `KeyValueProjection` computes K and V and attends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.attention import BACKENDS, attend
from mmattn.core.attention_inputs import combine_masks, join_causal, visible_rows, zero_hidden
from mmattn.core.key_values import KeyValue
from mmattn.core.masks import Mask
from mmattn.core.positions import Rotary
from mmattn.core.projection import AttendableMemory, Attended, KeyValueProjection, Slots, norm_heads
from mmattn.errors import ConfigError, ShapeError, check_choice, check_float, check_int


class CrossAttention(nn.Module):
    """Multi-head cross-attention from x (b, l, d) to a memory (b, m, e).

    Args:
        query_dim: d.
        memory_dim: e, d by default.
        num_heads: h.
        num_kv_heads: g, dividing h; g = 1 is multi-query.
        head_dim: k, d / h by default.
        bias: biases on the q, k, v projections.
        out_bias: bias on the output projection; the value of `bias` by default.
        qk_norm: RMSNorm on each head's queries and keys (arXiv 2010.04245 with a learned scale per channel).
        rotary: rotary positions for queries and keys, at `query_positions` and `memory_positions`.
        null_slot: add a learned slot that every query may attend to ("nothing here answers"). A query without a real
            slot does not see it.
        length_norm: C; adds log C − log M to the scores of the M real slots that a query sees, so that the null slot
            keeps its weight when the memory grows (arXiv 2410.10450). It has no effect without a null slot.
        score_bias: adds a learned temperature times the standardised `scores`, (score - score_mean) / score_std, to the
            attention scores.
        score_mean: with `score_bias`, the score that adds nothing.
        score_std: with `score_bias`, the distance from `score_mean` at which a score adds one temperature.
        dropout: probability of dropping a weight, in training.
        norm_eps: ε of `qk_norm`.
        scale: factor of the scores, 1/√k by default.
        backend: as in `attend`.
        device: device of the weights.
        dtype: dtype of the weights.

    The memory is cast to the dtype of the weights, and the output to the dtype of x. The output of a query that sees no
    slot is exactly 0, without the output bias.

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
        bias: bool = False,
        out_bias: bool | None = None,
        qk_norm: bool = False,
        rotary: Rotary | None = None,
        null_slot: bool = False,
        length_norm: float | None = None,
        score_bias: bool = False,
        score_mean: float = 0.0,
        score_std: float = 1.0,
        dropout: float = 0.0,
        norm_eps: float = 1e-6,
        scale: float | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d, h, g, k, e = _sizes(query_dim, num_heads, num_kv_heads, head_dim, memory_dim)
        if rotary is not None and rotary.head_dim != k:
            raise ShapeError(f"rotary must be built for head_dim {k}, got one for {rotary.head_dim}")
        _check_settings(norm_eps, dropout, length_norm, scale, backend)
        check_score_settings(score_bias, score_mean, score_std)
        self.query_dim, self.num_heads, self.num_kv_heads, self.head_dim = d, h, g, k
        self.memory_dim = e
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        # In this order, so that a seed gives the weights that it always gave.
        self.q_proj = nn.Linear(d, h * k, bias, **like)
        k_proj, v_proj = (nn.Linear(e, g * k, bias, **like) for _ in range(2))
        out_proj = nn.Linear(h * k, d, bias if out_bias is None else out_bias, **like)
        self.kv_proj = KeyValueProjection(
            k_proj,
            v_proj,
            num_heads=h,
            num_kv_heads=g,
            head_dim=k,
            memory_dim=e,
            k_norm=nn.RMSNorm(k, eps=norm_eps, **like) if qk_norm else None,
            rotary=rotary,
            null_slot=null_slot,
            length_norm=length_norm,
            score_bias=score_bias,
            score_mean=score_mean,
            score_std=score_std,
            dropout=dropout,
            scale=scale,
            backend=backend,
            needs_visible=bias or out_proj.bias is not None,
        )
        self.out_proj = out_proj
        self.q_norm = nn.RMSNorm(k, eps=norm_eps, **like) if qk_norm else None

    def project(self, memory: Tensor, **settings: Any) -> KeyValue:
        """Compute keys and values of a memory once; pass them to `forward` in its place.

        Args:
            memory: (b, m, e).
            settings: `mask`, `scores`, `memory_positions` and others of `KeyValueProjection.project`.

        >>> layer, memory = CrossAttention(32, memory_dim=24, num_heads=4), torch.randn(2, 7, 24)
        >>> layer(torch.randn(2, 5, 32), layer.project(memory)).shape
        torch.Size([2, 5, 32])
        """
        return self.kv_proj.project(memory, **settings)

    def forward(
        self,
        x: Tensor,
        memory: Attended,
        *,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        scores: Tensor | None = None,
        causal: bool = False,
        query_positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        head_scale: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from x to the memory: (b, l, d), in the dtype of x.

        Args:
            x: (b, l, d).
            memory: (b, m, e), or the output of `project`. x may have a multiple of its rows (beams): row i of x then
                reads row i // multiple.
            mask: (b, m) bool, the padding.
            attention_mask: (l, m), (b, l, m) or (b, h, l, m) bool.
            scores: (b, m), with `score_bias`; a slot of score -inf is hidden.
            causal: query i may attend to slots up to i + m - l.
            query_positions: (l,) or (b, l), for `rotary`; counted from 0 by default.
            memory_positions: (m,) or (b, m), likewise.
            head_scale: (h,), multiplies the output of each head.
            return_weights: also return (b, h, l, m); with a null slot they sum to 1 minus its share.

        Raises:
            ConfigError: `scores` without `score_bias`, or `score_bias` without `scores`.
            MaskError: a mask that is not bool.
            ShapeError: sizes or devices that do not fit.
        """
        slots: Attended | Slots
        if isinstance(memory, (KeyValue, AttendableMemory)):
            if not (mask is scores is memory_positions is None):
                raise ShapeError("a projected memory holds its mask, scores and positions: give them to project")
            slots = memory
        else:
            slots = Slots(memory, mask, scores, memory_positions)
        result = self.kv_proj.attend(
            self._queries(x, query_positions),
            slots,
            attention_mask=attention_mask,
            causal=causal,
            return_weights=return_weights,
        )
        output = result.output
        if head_scale is not None:
            output = output * head_scale.to(output.dtype)[:, None, None]
        output = self._output(output, result.visible, x.dtype)
        return output if result.weights is None else (output, result.weights)

    def _queries(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """Compute the queries (b, h, l, k) of x (b, l, d)."""
        if x.dim() != 3 or x.shape[2] != self.query_dim:
            raise ShapeError(f"x must be (b, l, {self.query_dim}), got {tuple(x.shape)}")
        rotary = self.kv_proj.rotary
        if x.dtype is not self.q_proj.weight.dtype:
            x = self.kv_proj.cast(x)
        q = self.q_proj(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
        if self.q_norm is not None:
            q = norm_heads(self.q_norm, q)
        if rotary is not None:
            q = rotary(q, torch.arange(x.shape[1], device=x.device) if positions is None else positions)
        return q

    def _output(self, output: Tensor, visible: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Project the output of the heads (b, h, l, k) to (b, l, d); 0 where no head may attend to anything."""
        output = self.out_proj(output.transpose(1, 2).flatten(2))
        if visible is not None and self.kv_proj.needs_visible:
            output = zero_hidden(output, visible[:, 0] if visible.shape[1] == 1 else visible.any(1))
        return output if output.dtype is dtype else output.to(dtype)


class SelfAttention(CrossAttention):
    """Multi-head self-attention over x (b, l, d): cross-attention with x as its memory.

    Args:
        dim: d.
        num_heads: h.
        causal: each token sees only itself and earlier tokens.
        settings: further arguments of `CrossAttention`.

    >>> SelfAttention(32, num_heads=4)(torch.randn(2, 5, 32)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(self, dim: int, num_heads: int = 8, *, causal: bool = True, **settings: Any) -> None:
        super().__init__(dim, None, num_heads, **settings)
        self.causal = causal

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
        """Attend from x to x, to earlier tokens only if causal: (b, l, d).

        Args:
            x: (b, l, d).
            mask: (b, m) bool, the padding; m is l plus the length of the cache.
            attention_mask: as in `attend`.
            positions: (l,) or (b, l), for `rotary`; counted from 0 by default.
            bias: broadcastable to (b, h, l, m), added to the scores (`positions.alibi`).
            cache: a function from the keys and values (b, g, l, k) of x to those of the whole text so far, such as
                `partial(cache.update, layer_idx=layer)` of a transformers `DynamicCache`.
            return_weights: also return the weights (b, h, l, m).

        Raises:
            ConfigError: a cache or bias with a null slot or `score_bias`; a cache and `rotary` without positions.
            MaskError: a mask that is not bool.
            ShapeError: sizes that do not fit.
        """
        if cache is None and bias is None:
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
        self._check_text(cached=cache is not None, positions=positions)
        kv_proj, (rows, l, _) = self.kv_proj, x.shape
        if positions is None:
            positions = torch.arange(l, device=x.device)
        q = self._queries(x, positions)
        keys, values = kv_proj.keys_and_values(kv_proj.cast(x), positions)
        if cache is not None:
            keys, values = cache(keys, values)
        m = keys.shape[2]
        # A single query is the last token, which sees all there is.
        if self.causal and l > 1:
            attention_mask = join_causal(attention_mask, l, m, x.device)
        allowed = combine_masks(mask, attention_mask, (rows, rows, self.num_heads, l, m))
        attended = attend(
            q,
            keys,
            values,
            attention_mask=None if allowed is None else Mask(allowed),
            bias=bias,
            scale=kv_proj.scale,
            dropout=kv_proj.options().dropout,
            backend=kv_proj.backend,
            return_weights=return_weights,
        )
        output, weights = attended if isinstance(attended, tuple) else (attended, None)
        output = self._output(output, visible_rows(allowed, rows, m, per_head=True, device=x.device), x.dtype)
        return output if weights is None else (output, weights)

    def _check_text(self, cached: bool, positions: Tensor | None) -> None:
        if self.kv_proj.null_key is not None or self.kv_proj.score_scale is not None:
            raise ConfigError(
                "self-attention with a null slot or score_bias takes no cache and no bias: build it without"
            )
        if cached and self.kv_proj.rotary is not None and positions is None:
            raise ConfigError("a cached text does not start at 0: give the positions of x, which rotary turns by")


def _sizes(
    query_dim: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None, memory_dim: int | None
) -> tuple[int, int, int, int, int]:
    """Return d, h, g, k and e, checked and with defaults."""
    d, h = check_int("query_dim", query_dim), check_int("num_heads", num_heads)
    g = check_int("num_kv_heads", h if num_kv_heads is None else num_kv_heads)
    e = check_int("memory_dim", d if memory_dim is None else memory_dim)
    if head_dim is None and d % h:
        raise ShapeError(f"num_heads must divide query_dim, got {h} and {d}; or give head_dim")
    if h % g:
        raise ShapeError(f"num_kv_heads must divide num_heads, got {g} and {h}")
    return d, h, g, check_int("head_dim", d // h if head_dim is None else head_dim), e


def _check_settings(
    norm_eps: float, dropout: float, length_norm: float | None, scale: float | None, backend: str | None
) -> None:
    check_float("norm_eps", norm_eps, at_least=0)
    check_float("dropout", dropout, at_least=0, below=1)
    if length_norm is not None:
        check_float("length_norm", length_norm, at_least=1)
    if scale is not None:
        check_float("scale", scale)
    if backend is not None:
        check_choice("backend", backend, BACKENDS)


def check_score_settings(score_bias: bool, score_mean: float, score_std: float) -> None:
    """Refuse a mean or deviation of scores that is not finite, not positive, or without `score_bias`."""
    check_float("score_mean", score_mean)
    if check_float("score_std", score_std) <= 0:
        raise ConfigError(f"score_std must be above 0, got {score_std}")
    if not score_bias and (score_mean, score_std) != (0.0, 1.0):
        raise ConfigError(
            f"score_mean={score_mean} and score_std={score_std} are for the scores that score_bias=True reads: give "
            "score_bias=True, or leave them out"
        )
