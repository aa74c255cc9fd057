"""Transformer layers: self-attention, cross-attention to a memory, feed-forward (arXiv 1706.03762, section 3.1).

With the norm before each part (arXiv 2002.04745), x = x + part(norm(x)); after it, as published, x = norm(x + part(x)).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mmattn.core.cross_attention import CrossAttention, SelfAttention
from mmattn.core.kv_cache import KeyValue
from mmattn.core.masks import Mask
from mmattn.core.positions import Rotary
from mmattn.errors import ConfigError, ShapeError, check_choice, check_float, check_int

NORMS = ("pre", "post")


class TransformerBlock(nn.Module):
    """A layer of an encoder or a decoder over x (b, l, d).

    Args:
        dim: d.
        num_heads: h, dividing d.
        memory_dim: e; the block also attends to a memory of this width, between the two other parts.
        causal: a token sees earlier ones only.
        feed_forward: hidden width of the feed-forward part, as a multiple of d.
        norm: "pre", before each part, or "post", after it.
        rotary: rotary positions for the self-attention.
        dropout: of what each part adds, in training.

    >>> import torch
    >>> block = TransformerBlock(32, num_heads=4, memory_dim=24, causal=True)
    >>> block(torch.randn(2, 5, 32), torch.randn(2, 7, 24)).shape
    torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        memory_dim: int | None = None,
        causal: bool = False,
        feed_forward: float = 4.0,
        norm: str = "pre",
        rotary: Rotary | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        hidden = int(check_float("feed_forward", feed_forward) * check_int("dim", dim))
        if hidden < 1:
            raise ConfigError(f"feed_forward must leave a hidden width of at least 1, got {feed_forward} × {dim}")
        self.norm_place = check_choice("norm", norm, NORMS)
        self.self_attention = SelfAttention(dim, num_heads, causal=causal, rotary=rotary)
        self.self_norm = nn.LayerNorm(dim)
        self.cross_attention = None if memory_dim is None else CrossAttention(dim, memory_dim, num_heads)
        self.cross_norm = None if memory_dim is None else nn.LayerNorm(dim)
        self.feed_forward = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.feed_forward_norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(check_float("dropout", dropout, at_least=0, below=1))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | KeyValue | None = None,
        *,
        mask: Tensor | None = None,
        attention_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | None = None,
        positions: Tensor | None = None,
        bias: Tensor | None = None,
        cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """The block's output, (b, l, d).

        Args:
            x: (b, l, d).
            memory: (b, m, e), or what `cross_attention.project` gives for it; its rows may be a divisor of b (beams).
            mask: of the self-attention, as there.
            attention_mask: of the self-attention, as there.
            memory_mask: (b, m) bool, the padding of `memory`.
            positions: of the self-attention, as there.
            bias: of the self-attention, as there.
            cache: of the self-attention, as there.

        Raises:
            ShapeError: sizes that do not fit, or a memory where the block has no use for one or lacks it.
        """
        if (memory is None) != (self.cross_attention is None):
            raise ShapeError(
                "this block has a memory_dim, so it needs a memory"
                if memory is None
                else "this block has no memory_dim, so it cannot read a memory"
            )
        text = {"mask": mask, "attention_mask": attention_mask, "positions": positions, "bias": bias, "cache": cache}
        x = self._added(x, self.self_norm, self.self_attention, **text)
        if self.cross_attention is not None:
            x = self._added(x, self.cross_norm, self.cross_attention, memory=memory, mask=memory_mask)
        return self._added(x, self.feed_forward_norm, self.feed_forward)

    def _added(self, x: Tensor, norm: nn.Module | None, part: nn.Module, **options: object) -> Tensor:
        assert norm is not None
        if self.norm_place == "pre":
            return x + self.dropout(part(norm(x), **options))
        return norm(x + self.dropout(part(x, **options)))
