"""Who looked at what: the attention weights of every adapter's block, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Attends(Protocol):
    """A model that names what attends in it: a host with its adapters, an `EncoderDecoder`."""

    def attentions(self) -> Mapping[tuple[str, int], nn.Module]:
        """By adapter (or "source") and layer."""


class Weights(dict[tuple[str, int], list[Tensor]]):
    """What `record` gathers: (adapter, host layer) to a list with the weights (b, h, l, m) of each call.

    The host's own text stands under ("text", number of the attention layer), where it goes through the core.
    """

    def mean(self) -> list[Tensor]:
        """For each call (b, l, m): the mean over blocks and heads."""
        calls = zip(*self.values(), strict=True)
        return [torch.stack([weights.mean(1) for weights in call]).mean(0) for call in calls]


_blocks: ContextVar[tuple[object, ...]] = ContextVar("mmattn_record", default=())


@contextmanager
def record(model: Attends) -> Iterator[Weights]:
    """Inside the block, keep the attention weights of each call of the model; results stay bit for bit what they are.

    The weights are computed a second time beside the ordinary way, without gradients, and kept on the CPU. What other
    threads ask the model meanwhile is theirs, and not kept.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> with record(model) as weights:
    ...     _ = model(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24))
    >>> {place: [call.shape for call in calls] for place, calls in weights.items()}
    {('default', 1): [torch.Size([1, 3, 3, 11])], ('default', 3): [torch.Size([1, 3, 3, 11])]}
    """
    weights, hooks, block = Weights(), [], object()
    for (name, layer), attention in model.attentions().items():
        hooks.append(attention.register_forward_hook(_Listener(weights, (name, layer), block), with_kwargs=True))
    token = _blocks.set((*_blocks.get(), block))
    try:
        yield weights
    finally:
        _blocks.reset(token)
        for hook in hooks:
            hook.remove()


class _Listener:
    def __init__(self, weights: Weights, place: tuple[str, int], block: object) -> None:
        self.weights, self.place, self.block = weights, place, block

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # Another thread's call may meet a hook that torch has not yet been told, or been told no more, takes kwargs.
        if self.block not in _blocks.get():
            return
        kwargs: dict[str, Any] = rest[0]
        # A dropout of its own must not move the random numbers of the model.
        with torch.no_grad(), torch.random.fork_rng():
            _, seen = attention.forward(*args, **{**kwargs, "return_weights": True})
        self.weights.setdefault(self.place, []).append(seen.cpu())
