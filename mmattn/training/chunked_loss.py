"""Cross-entropy of last hidden states in chunks of tokens: logits of a large vocabulary never stand whole.

For z = s tanh(c (W h + b) / s) the logits of a hidden state h (d,), p = softmax(z) and y the next token,

    -log p_y = logsumexp(z) - z_y,    its gradient by h = c Wᵀ ((p - 1_y) (1 - (z / s)²)).

Both are computed at once, chunk by chunk, so that the backward pass multiplies what is cached, d numbers a token, and
computes no logits again. As in Liger (arXiv 2410.10989, section 3.2), with a frozen head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.data.text_batches import IGNORED
from mmattn.errors import check_int
from mmattn.hosts.causal_lm.output_head import OutputHead, last_hidden_states, output_head


def chunked_token_nats(model: nn.Module, kwargs: Mapping[str, Any], labels: Tensor, chunk_size: int) -> Tensor:
    """Cross-entropy -log p (b, l - 1) of each token after those before it, the logits of so many tokens at once."""
    check_int("chunk_size", chunk_size)
    head = output_head(model)
    states = last_hidden_states(model, kwargs)[:, :-1]
    labels = labels[:, 1:].to(states.device)
    learned = labels != IGNORED
    nats: Tensor = ChunkedCrossEntropy.apply(states[learned], labels[learned], head, chunk_size)
    return torch.zeros(labels.shape, device=nats.device).masked_scatter(learned.to(nats.device), nats)


class ChunkedLoss:
    """A language model whose call with labels gives the mean loss alone, as a `Trainer` of transformers asks for it.

    Args:
        model: as `chunked_token_nats` takes it.
        chunk_size: tokens whose logits are computed at once.
    """

    def __init__(self, model: nn.Module, chunk_size: int) -> None:
        self.model, self.chunk_size = model, chunk_size

    def __call__(self, *, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        """The loss."""
        nats = chunked_token_nats(self.model, kwargs, labels, self.chunk_size)
        count = (labels[:, 1:] != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return {"loss": nats.sum() / count}


class ChunkedCrossEntropy(torch.autograd.Function):
    """-log p (t,) of tokens by the hidden states that predict them, with gradients for these alone."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, labels: Tensor, head: OutputHead, chunk_size: int) -> Tensor:
        """The loss of each token, and what the backward pass needs."""
        weight, learns = head.linear.weight, ctx.needs_input_grad[0]
        nats = torch.empty(len(states), device=weight.device)
        gradients = torch.empty_like(states) if learns else None
        for start in range(0, len(states), chunk_size):
            part = slice(start, start + chunk_size)
            logits, target = head.logits(states[part]), labels[part, None].to(weight.device)
            total = logits.logsumexp(-1, keepdim=True)
            nats[part] = (total - logits.gather(1, target))[:, 0]
            if gradients is None:
                continue
            slope = None if head.softcap is None else 1 - (logits / head.softcap).square_()
            # Of the logits, in the memory of the logits.
            logits.sub_(total).exp_().scatter_add_(1, target, torch.full_like(total, -1.0))
            if slope is not None:
                logits.mul_(slope)
            gradients[part] = (logits.to(weight.dtype) @ weight).mul_(head.scale)
        ctx.save_for_backward(gradients)
        return nats

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """The gradient by the hidden states (t, d)."""
        (gradients,) = ctx.saved_tensors
        return (gradient.to(gradients.device)[:, None] * gradients.float()).to(gradients.dtype), None, None, None
