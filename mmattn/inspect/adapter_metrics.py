"""Figures of adapters in training: how far gates are open, where gradients are large, what attention is spent on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mmattn.errors import ConditionError, check_int
from mmattn.hosts.base import AdaptedModel
from mmattn.inspect.attention_figures import figures_by_call


class AdapterMetrics:
    """The figures of the adapters of a model in a step of training, for `training.train(measure=…)`.

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
    >>> {name: round(value, 6) for name, value in metrics(step=1, grad_norm=0.0).items() if "grad" not in name}
    {'gate/layer_1': 0.0, 'feed_forward_gate/layer_1': 0.0, 'memory_attention/layer_1': 1.0}
    """

    def __init__(self, model: AdaptedModel, forward: Callable[[], Any] | None = None, attention_steps: int = 1) -> None:
        self.model, self.forward = model, forward
        self.attention_steps = check_int("attention_steps", attention_steps)

    def __call__(self, step: int, grad_norm: float) -> dict[str, float]:
        """The figures of this step.

        Args:
            step: its number.
            grad_norm: the L2 norm of the gradient of all trained parameters as it was computed; what is found in the
                parameters may have been clipped since, and is scaled back to it.
        """
        found = {**self._gates(), **self._gradients(grad_norm)}
        if self.forward is not None and step % self.attention_steps == 0:
            found |= self._attention(self.forward)
        return found

    def _parameters(self) -> Iterator[tuple[str, list[str], nn.Parameter]]:
        """The place of each parameter of an adapter, the rest of its name, and itself."""
        for owner, adapter in self.model.adapters.items():
            for name, parameter in adapter.named_parameters():
                first, *rest = name.split(".")
                yield (_place(owner, rest[0]), rest[1:], parameter) if first == "blocks" else (
                    _place(owner), [first, *rest], parameter,
                )  # fmt: skip

    def _gates(self) -> dict[str, float]:
        return {
            f"{rest[-2]}/{place}": float(parameter.detach().float().tanh().abs().mean())
            for place, rest, parameter in self._parameters()
            if rest[-1] == "gate" and len(rest) > 1
        }

    def _gradients(self, grad_norm: float) -> dict[str, float]:
        whole = sum(_square(parameter) for parameter in self.model.parameters() if parameter.requires_grad)
        scale = grad_norm / whole**0.5 if whole else 0.0
        squares: dict[str, float] = {}
        for place, _, parameter in self._parameters():
            squares[place] = squares.get(place, 0.0) + _square(parameter)
        return {f"gradients/{place}": scale * square**0.5 for place, square in squares.items()}

    def _attention(self, forward: Callable[[], Any]) -> dict[str, float]:
        try:
            with torch.no_grad(), figures_by_call(self.model) as calls:
                forward()
        except ConditionError:  # the host's own attention does not give its weights
            return {}
        found = {}
        for (owner, layer), figures in calls.items():
            null = sum(one.null for one in figures) / len(figures)
            found[f"memory_attention/{_place(owner, layer)}"] = round(1 - null, 6)
            if getattr(self.model.adapter(owner).config, "null_slot", False):
                found[f"null_attention/{_place(owner, layer)}"] = round(null, 6)
        return found


def _place(owner: str, layer: Any = None) -> str:
    return ("" if owner == "default" else f"{owner}/") + ("shared" if layer is None else f"layer_{layer}")


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.detach().float().square().sum())
