"""Attention weights: recorded call by call, and as metrics of a training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError, check_int
from mmattn.hosts.context import Arguments, Positional
from mmattn.hosts.model import AdaptedModel


class Attends(Protocol):
    """A model with named attention layers: a host with its adapters, an `EncoderDecoder`."""

    def attentions(self) -> Mapping[tuple[str, int], nn.Module]:
        """Return the attention modules by adapter (or "source") and layer."""


class RecordedWeights(dict[tuple[str, int], list[Tensor]]):
    """Attention weights: from (adapter, host layer) to a list with the weights (b, h, l, m) of each call.

    The attention of the host over its own text has the key ("text", number of the attention layer), where it is
    computed by the core.
    """

    def mean(self) -> list[Tensor]:
        """Return for each call (b, l, m) the mean over layers and heads."""
        calls = zip(*self.values(), strict=True)
        return [torch.stack([weights.mean(1) for weights in call]).mean(0) for call in calls]


_blocks: ContextVar[tuple[object, ...]] = ContextVar("mmattn_record", default=())


@contextlib.contextmanager
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
    weights, block = RecordedWeights(), object()
    with contextlib.ExitStack() as hooks:
        for key, attention in model.attentions().items():
            hooks.enter_context(attention.register_forward_hook(_Recorder(weights, key, block), with_kwargs=True))
        hooks.callback(_blocks.reset, _blocks.set((*_blocks.get(), block)))
        yield weights


class _Recorder:
    """A forward hook of one attention module."""

    def __init__(self, weights: RecordedWeights, key: tuple[str, int], block: object) -> None:
        self.weights, self.key, self.block = weights, key, block

    def __call__(self, attention: nn.Module, args: Positional, kwargs: Arguments, *output: object) -> None:
        # torch registers a hook in two steps: a call by another thread in between may come without kwargs.
        if self.block not in _blocks.get():
            return
        # A dropout of its own must not change the random numbers of the model.
        with torch.no_grad(), torch.random.fork_rng():
            _, weights = attention.forward(*args, **{**kwargs, "return_weights": True})
        self.weights.setdefault(self.key, []).append(weights.cpu())


class AdapterMetrics:
    """Metrics of the adapters of a model in a step of training, for `RunFolder.train(measure=…)`.

    Each is named by what it is and the layer of the host: "gate/layer_3" and "feed_forward_gate/layer_3", the mean of
    |tanh α|; "gradients/layer_3", the L2 norm of the gradient of the parameters there, and "gradients/shared" of those
    that belong to no layer; "memory_attention/layer_3", the mean share of the attention on the memory, and
    "null_attention/layer_3" on a null slot. Of an adapter that is not called "default" they are "gate/NAME/layer_3".

    Args:
        model: the adapted model.
        forward: calls the model on a few rows with their memories, where the attention is measured; None for no figures
            of attention, which a host whose attention does not give its weights has none of either.
        attention_steps: steps between two measurements of the attention, each of which costs what `forward` does.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import mmattn
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    ...                                   num_attention_heads=4))
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2, num_heads=3))
    >>> metrics = AdapterMetrics(model, lambda: model(torch.tensor([[5, 6, 7]]), memory=torch.randn(1, 11, 24)))
    >>> {name: round(value, 6) for name, value in metrics(step=1).items() if "grad" not in name}
    {'gate/layer_1': 0.0, 'feed_forward_gate/layer_1': 0.0, 'memory_attention/layer_1': 1.0}
    """

    def __init__(
        self, model: AdaptedModel, forward: Callable[[], object] | None = None, attention_steps: int = 1
    ) -> None:
        self.model, self.forward = model, forward
        self.attention_steps = check_int("attention_steps", attention_steps)

    def __call__(self, step: int) -> dict[str, float]:
        """Return the figures of this step; gradients are those that the optimizer is given.

        Args:
            step: its number.
        """
        figures = {**self._gates(), **self._gradients()}
        if self.forward is not None and step % self.attention_steps == 0:
            figures |= self._attention(self.forward)
        return figures

    def _parameters(self) -> Iterator[tuple[str, list[str], nn.Parameter]]:
        """Yield the place of each parameter of an adapter, the rest of its name, and itself."""
        for owner, adapter in self.model.adapters.items():
            for name, parameter in adapter.named_parameters():
                first, *rest = name.split(".")
                if first == "blocks":
                    yield _place(owner, rest[0]), rest[1:], parameter
                else:
                    yield _place(owner), [first, *rest], parameter

    def _gates(self) -> dict[str, float]:
        return {
            f"{rest[-2]}/{place}": float(parameter.detach().float().tanh().abs().mean())
            for place, rest, parameter in self._parameters()
            if rest[-1] == "gate" and len(rest) > 1
        }

    def _gradients(self) -> dict[str, float]:
        squares: dict[str, float] = {}
        for place, _, parameter in self._parameters():
            squares[place] = squares.get(place, 0.0) + _square(parameter)
        return {f"gradients/{place}": square**0.5 for place, square in squares.items()}

    def _attention(self, forward: Callable[[], object]) -> dict[str, float]:
        try:
            with torch.no_grad(), record(self.model) as weights:
                forward()
        except ConditionError:  # the host's own attention does not give its weights
            return {}
        shares = {}
        for (owner, layer), calls in weights.items():
            if owner not in self.model.adapters:
                continue
            null = sum(_null_share(one) for one in calls) / len(calls)
            shares[f"memory_attention/{_place(owner, layer)}"] = round(1 - null, 6)
            if getattr(self.model.adapter(owner).config, "null_slot", False):
                shares[f"null_attention/{_place(owner, layer)}"] = round(null, 6)
        return shares


def _null_share(weights: Tensor) -> float:
    """Return the mean share of weights (b, h, l, m) on no slot, over the queries that attend to a slot."""
    total = weights.float().sum(-1)
    attending = total > 0
    return float((1 - total)[attending].mean()) if attending.any() else 0.0


def _place(owner: str, layer: str | int | None = None) -> str:
    return ("" if owner == "default" else f"{owner}/") + ("shared" if layer is None else f"layer_{layer}")


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.detach().float().square().sum())
