"""Statistics of attention weights: of one layer of an adapter in a call, and of each head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConditionError, ShapeError, check_int
from mmattn.hosts.base import AdaptedModel


@dataclass(frozen=True)
class AttentionFigures:
    """Statistics of the weights of one layer in one call, over the queries and heads that attend to a slot.

    Args:
        entropy: mean entropy of the weights of real slots, in bits, over queries that attend to more than one slot.
        uniform: mean entropy of uniform weights of the same slots, in bits; 0 where no query attends to more than one.
        padding: the largest share of a query's weights on slots that are masked for it.
        null: the mean share of the weights on no slot: that of a null slot.
    """

    entropy: float
    uniform: float
    padding: float
    null: float


def attention_figures(weights: Tensor, allowed: Tensor) -> AttentionFigures:
    """Statistics of attention weights.

    >>> weights = torch.tensor([[[[0.25, 0.25, 0.0], [1.0, 0.0, 0.0]]]])
    >>> attention_figures(weights, torch.tensor([[[[True, True, False]]]]))
    AttentionFigures(entropy=0.5, uniform=1.0, padding=0.0, null=0.25)
    """
    allowed = allowed.expand(weights.shape)
    hidden = weights.masked_fill(allowed, 0).sum(-1)
    attending = allowed.any(-1)
    shares = weights.masked_fill(~allowed, 0)
    total = shares.sum(-1)
    slots = allowed.sum(-1)
    shares = shares / total[..., None].clamp_min(1e-12)
    entropy = torch.special.entr(shares).sum(-1) / math.log(2)
    several = slots > 1
    return AttentionFigures(
        entropy[several].mean().item() if several.any() else 0.0,
        slots[several].float().log2().mean().item() if several.any() else 0.0,
        hidden.max().item() if hidden.numel() else 0.0,
        (1 - total - hidden)[attending].mean().item() if attending.any() else 0.0,
    )


@contextmanager
def figures_by_call(model: AdaptedModel) -> Iterator[dict[tuple[str, int], list[AttentionFigures]]]:
    """Inside the block, the figures of each call by adapter and host layer; weights are not stored."""
    figures: dict[tuple[str, int], list[AttentionFigures]] = {}
    hooks = [
        attention.register_forward_hook(_FiguresHook(figures, place), with_kwargs=True)
        for place, attention in model.attentions().items()
        if place[0] in model.adapters
    ]
    try:
        yield figures
    finally:
        for hook in hooks:
            hook.remove()


class _FiguresHook:
    """A forward hook of one attention module."""

    def __init__(self, figures: dict[tuple[str, int], list[AttentionFigures]], place: tuple[str, int]) -> None:
        self.figures, self.place = figures, place

    def __call__(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        _, weights = attention.forward(*args, **{**kwargs, "return_weights": True})
        memory = args[1]
        mask = memory.mask if isinstance(memory, KeyValue) else kwargs.get("mask")
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=weights.device)
        if mask is not None:
            allowed = allowed & mask[:, None, None].to(weights.device)
        if kwargs.get("attention_mask") is not None:
            allowed = allowed & kwargs["attention_mask"].to(weights.device)
        self.figures.setdefault(self.place, []).append(attention_figures(weights.float(), allowed))


@dataclass(frozen=True, eq=False)
class HeadFigures:
    """Statistics (h,) of the heads of one layer, over the queries that attend to a slot.

    With l queries and m slots, query i is at i / (l - 1) and slot j at j / (m - 1); the distance of a weight from the
    diagonal is the difference of the two.

    Args:
        entropy: of the weights, in bits.
        distance: mean distance of the weights from the diagonal, from 0 to 1.
        diagonal: share of the weights within half a slot of the diagonal.
        null: share of the weights on no slot: that of a null slot.
    """

    entropy: Tensor
    distance: Tensor
    diagonal: Tensor
    null: Tensor

    def __str__(self) -> str:
        lines = ["head  entropy  distance  diagonal    null"]
        figures = torch.stack([self.entropy, self.distance, self.diagonal, self.null], 1).tolist()
        for head, (entropy, distance, diagonal, null) in enumerate(figures):
            lines.append(f"{head:>4}  {entropy:>7.2f}  {distance:>8.2f}  {diagonal:>8.1%}  {null:>6.1%}")
        return "\n".join(lines)


def head_figures(weights: Tensor) -> HeadFigures:
    """Statistics of the heads of one layer; queries whose weights are all 0 are left out.

    Args:
        weights: (b, h, l, m), one call of `record`; for the steps of a generation, concatenated over l.

    Raises:
        ShapeError: not (b, h, l, m).

    >>> print(head_figures(torch.stack([torch.eye(3), torch.full((3, 3), 0.25)])[None]))
    head  entropy  distance  diagonal    null
       0     0.00      0.00    100.0%    0.0%
       1     1.58      0.44     33.3%   25.0%
    """
    if weights.dim() != 4:
        raise ShapeError(f"weights must be (b, h, l, m), got {tuple(weights.shape)}")
    weights = weights.detach().float()
    _, _, l, m = weights.shape
    total = weights.sum(-1)
    attending = total > 0
    shares = weights / total.clamp_min(1e-12)[..., None]
    queries = torch.arange(l, device=weights.device)[:, None] / max(l - 1, 1)
    distance = (torch.arange(m, device=weights.device) / max(m - 1, 1) - queries).abs()
    near = distance <= 0.5 / max(m - 1, 1)

    def mean(values: Tensor) -> Tensor:
        return values.where(attending, 0).sum((0, 2)) / attending.sum((0, 2)).clamp_min(1)

    return HeadFigures(
        mean(torch.special.entr(shares).sum(-1) / math.log(2)),
        mean((shares * distance).sum(-1)),
        mean((shares * near).sum(-1)),
        mean((1 - total).clamp_min(0)),
    )


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
        figures = {**self._gates(), **self._gradients(grad_norm)}
        if self.forward is not None and step % self.attention_steps == 0:
            figures |= self._attention(self.forward)
        return figures

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
        shares = {}
        for (owner, layer), figures in calls.items():
            null = sum(one.null for one in figures) / len(figures)
            shares[f"memory_attention/{_place(owner, layer)}"] = round(1 - null, 6)
            if getattr(self.model.adapter(owner).config, "null_slot", False):
                shares[f"null_attention/{_place(owner, layer)}"] = round(null, 6)
        return shares


def _place(owner: str, layer: Any = None) -> str:
    return ("" if owner == "default" else f"{owner}/") + ("shared" if layer is None else f"layer_{layer}")


def _square(parameter: nn.Parameter) -> float:
    return 0.0 if parameter.grad is None else float(parameter.grad.detach().float().square().sum())
