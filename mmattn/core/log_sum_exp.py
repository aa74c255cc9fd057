"""Attention in parts: a fused kernel that returns the log-sum-exp of the scores, and the merge of parts by it.

With s the scores of a query over the slots of a part, o = softmax(s) v and L = log Σ exp s: over all parts together
the output is Σ exp(Lᵢ − log Σ exp Lⱼ) oᵢ (FlashAttention, arXiv 2205.14135, section 3.1; shared prefixes, Hydragen,
arXiv 2402.05099, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def merge(outputs: Sequence[Tensor], totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the attention over all parts together: (b, h, l, v), and its log-sum-exp (b, h, l, 1).

    >>> output, total = merge([torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)], [torch.zeros(1, 1, 1, 1)] * 2)
    >>> output.flatten().tolist(), round(total.exp().item(), 3)
    ([0.5, 0.5], 2.0)
    """
    stacked = torch.stack(list(totals))
    # As far down as it goes, instead of infinitely: its gradients stay finite.
    total = stacked.clamp(min=torch.finfo(stacked.dtype).min).logsumexp(0)
    shares = (stacked - total).exp()
    merged = sum((share * one for share, one in zip(shares, outputs, strict=True)), torch.zeros_like(shares[0]))
    return merged.to(outputs[0].dtype), total.masked_fill((stacked == float("-inf")).all(0), float("-inf"))


class FusedAttention(torch.autograd.Function):
    """torch's fused attention on the CPU with its log-sum-exp, both of them differentiable."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """Return output (b, h, l, k) and log-sum-exp (b, h, l, 1); `bias`, broadcastable to (b, h, l, m), is added."""
        output, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(q, k, v, bias, output, total)
        ctx.scale = scale
        return output, total[..., None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dS = P (dP − Σ dO O + dL), where torch's own kernel knows no dL.

        It computes Σ dO O by itself: a further column, where dO is 1, O is −dL and all else is 0, adds dL.
        """
        q, k, v, bias, output, total = ctx.saved_tensors
        grad, grad_of_total = grads
        zero = torch.zeros((), dtype=q.dtype, device=q.device)

        def with_column(tensor: Tensor, column: Tensor) -> Tensor:
            return torch.cat([tensor, column.expand(*tensor.shape[:-1], 1).to(tensor.dtype)], -1)

        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            with_column(grad, zero + 1),
            *(with_column(tensor, zero) for tensor in (q, k, v)),
            with_column(output, -grad_of_total),
            total,
            0.0,
            False,
            attn_mask=bias,
            scale=ctx.scale,
        )
        return *(one[..., :-1] for one in gradients), None, None
