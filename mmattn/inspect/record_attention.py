"""`record`: the attention weights of every adapter, call by call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Attends(Protocol):
    """A model with named attention layers: a host with its adapters, an `EncoderDecoder`."""

    def attentions(self) -> Mapping[tuple[str, int], nn.Module]:
        """The attention modules by adapter (or "source") and layer."""


class RecordedWeights(dict[tuple[str, int], list[Tensor]]):
    """Attention weights: from (adapter, host layer) to a list with the weights (b, h, l, m) of each call.

    The attention of the host over its own text has the key ("text", number of the attention layer), where it is
    computed by the core.
    """

    def mean(self) -> list[Tensor]:
        """For each call (b, l, m): the mean over layers and heads."""
        calls = zip(*self.values(), strict=True)
        return [torch.stack([weights.mean(1) for weights in call]).mean(0) for call in calls]


_blocks: ContextVar[tuple[object, ...]] = ContextVar("mmattn_record", default=())


@contextmanager
def record(model: Attends) -> Iterator[RecordedWeights]:
    """Record the attention weights of each call of a model inside the block; its outputs do not change by a bit.

    The weights are computed a second time beside the output, without gradients, and moved to the CPU. Calls by other
    threads are not recorded.

    Args:
        model: an adapted model, or an `EncoderDecoder`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> from mmattn.inspect import record
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> with record(model) as weights:
    ...     _ = model(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24))
    >>> {layer: [call.shape for call in calls] for layer, calls in weights.items()}
    {('default', 1): [torch.Size([1, 3, 3, 11])], ('default', 3): [torch.Size([1, 3, 3, 11])]}
    """
    weights, hooks, block = RecordedWeights(), [], object()
    for (name, layer), attention in model.attentions().items():
        hooks.append(attention.register_forward_hook(_Recorder(weights, (name, layer), block), with_kwargs=True))
    token = _blocks.set((*_blocks.get(), block))
    try:
        yield weights
    finally:
        _blocks.reset(token)
        for hook in hooks:
            hook.remove()


class _Recorder:
    """A forward hook of one attention module."""

    def __init__(self, weights: RecordedWeights, key: tuple[str, int], block: object) -> None:
        self.weights, self.key, self.block = weights, key, block

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        # torch registers a hook in two steps: a call by another thread in between may come without kwargs.
        if self.block not in _blocks.get():
            return
        kwargs: dict[str, Any] = rest[0]
        # A dropout of its own must not change the random numbers of the model.
        with torch.no_grad(), torch.random.fork_rng():
            _, weights = attention.forward(*args, **{**kwargs, "return_weights": True})
        self.weights.setdefault(self.key, []).append(weights.cpu())
