"""The decoder layers of a host: which of them an adapter asks for, the hooks on them, and whether they reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.gated import BlockSettings
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts import calls
from mmattn.hosts.calls import Call

if TYPE_CHECKING:
    from mmattn.hosts.causal_lm.model import AdaptedCausalLM


class AfterLayer:
    """Hands the hidden states behind one decoder layer to the adapters."""

    def __init__(self, handle: AdaptedCausalLM, index: int) -> None:
        self.handle, self.index = handle, index

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        refuse_hooks_again(layer)
        if isinstance(output, Tensor):
            return self.handle.adapt(self.index, output, "behind")
        return (self.handle.adapt(self.index, output[0], "behind"), *output[1:])


class BeforeLayer:
    """Hands the hidden states before one decoder layer to the adapters."""

    def __init__(self, handle: AdaptedCausalLM, index: int) -> None:
        self.handle, self.index = handle, index

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_hooks_again(layer)
        if args:
            return (self.handle.adapt(self.index, args[0], "before"), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.handle.adapt(self.index, kwargs["hidden_states"], "before")}


def listen(model: AdaptedCausalLM, index: int, place: str) -> Any:
    """Hook adapters to a decoder layer.

    First among its hooks: those that record hidden states must see what the adapters added.
    """
    if place == "before":
        hook = BeforeLayer(model, index)
        return model.layers[index].register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return model.layers[index].register_forward_hook(AfterLayer(model, index), prepend=True)


def refuse_hooks_again(layer: nn.Module) -> None:
    """Checkpointing must wrap the forward of a layer, not its call, hooks included, as in transformers 5.0.

    Raises:
        ConditionError: it wraps the call.
    """
    if not (layer.training and getattr(layer, "gradient_checkpointing", False)):
        return
    if any(base.__name__ == "GradientCheckpointingLayer" and "__call__" in vars(base) for base in type(layer).__mro__):
        raise ConditionError(
            "gradient checkpointing of this transformers runs hooks a second time in the backward pass, when the "
            "memory may be another: upgrade transformers, or call gradient_checkpointing_disable()"
        )


def pick_layers(adapter: BlockSettings, depth: int) -> list[int]:
    """The host layers an adapter asks for.

    Raises:
        AttachError: the host is not that deep.
    """
    if adapter.layers is not None:
        if adapter.layers[-1] >= depth:
            raise AttachError(f"layers {list(adapter.layers)} were asked for and the host has layers 0 to {depth - 1}")
        return list(adapter.layers)
    every = 4 if adapter.every is None else adapter.every
    if every > depth:
        raise AttachError(f"every={every} was asked for and the host has only {depth} layers: choose at most {depth}")
    return list(range(every - 1, depth, every))


@torch.no_grad()
def probe(model: AdaptedCausalLM, picked: Sequence[int], place: str) -> None:
    """Prove that what is written behind (or before) each picked layer changes the host's answer.

    One forward of two tokens; row r is disturbed at the r-th picked layer only, row 0 nowhere.

    Raises:
        ConditionError: a layer whose output does not matter. ShapeError: hidden states of another width.
    """
    host = model.host
    modes = [(module, module.training) for module in host.modules()]
    hooks = [listen(model, index, place) for index in picked]
    rows = {(place, index): row + 1 for row, index in enumerate(picked)}
    ids = torch.ones(len(picked) + 1, 2, dtype=torch.long, device=device_of(embeddings_of(host)))
    try:
        for module, _ in modes:
            module.training = False
        with calls.entered(model._key, Call({}, probe=rows)):
            logits = host(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    finally:
        for module, mode in modes:
            module.training = mode
        for hook in hooks:
            hook.remove()
    blind = [index for (_, index), row in rows.items() if torch.equal(logits[row], logits[0])]
    if blind:
        raise ConditionError(
            f"what is written {place} layers {blind} does not reach the answer of {type(host).__name__}: memory would "
            "be lost there; name the list of decoder layers with path=, or choose other layers"
        )


def embeddings_of(host: nn.Module) -> nn.Module:
    """The embeddings of a host's tokens, the host itself where it does not say."""
    get_embeddings: Any = getattr(host, "get_input_embeddings", None)
    embeddings: nn.Module = host if get_embeddings is None else get_embeddings()
    return embeddings


def maker_of(model: AdaptedCausalLM, index: int, place: str) -> nn.Module:
    """The part of the host that makes the hidden states behind or before layer `index`."""
    before = index - 1 if place == "before" else index
    return embeddings_of(model.host) if before < 0 else model.layers[before]


def device_of(module: nn.Module) -> torch.device:
    """The device of a module's first weight, the CPU where it has none or is offloaded."""
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device
