"""The hooks through which adapters act: at the layers of a host, and around its whole forward."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError
from mmattn.hosts.attention_hooks import hook_attention
from mmattn.hosts.context import (
    FORWARD,
    Arguments,
    ForwardStep,
    HookedModel,
    Keywords,
    LayerOutput,
    Positional,
    step_of,
)
from mmattn.hosts.keywords import Signature, signature_of
from mmattn.hosts.ownership import Handle
from mmattn.hosts.probe import change_streams
from mmattn.hosts.recomputation import keep_context, refuse_other_context


class CrossAttentionHook:
    """Hands the hidden states before or after one layer of a host to the adapters."""

    position = ""

    def __init__(self, model: HookedModel, layer: int) -> None:
        self.model, self.layer = model, layer
        self.site = layer, self.position
        self.apart, self.stream_axis = model.is_apart(layer), model.stream_axis

    def adapt_streams(self, x: Tensor) -> Tensor:
        """Apply the adapters to hidden states x, (b, l, d) or several streams of them."""
        return self.adapt(x) if self.stream_axis is None else change_streams(x, self.stream_axis, self.adapt)

    def adapt(self, x: Tensor) -> Tensor:
        """Apply the adapters to hidden states x (b, l, d)."""
        step = FORWARD.get()
        if step is not None and step.model is not self.model:
            step = step_of(self.model)
        if step is not None:
            step.visited.add(self.layer)
        if step is None or self.apart:
            actions = self.model.actions_of_part(x, self.site)
        else:
            actions = step.actions.get(self.site, ())
        for view, block, adapter_scale in actions:
            x = view.apply(x, block, self.layer, adapter_scale)
        return x


class AfterLayer(CrossAttentionHook):
    """A forward hook: what comes out of a layer."""

    position = "after"

    def __call__(self, layer: nn.Module, args: Positional, output: LayerOutput) -> LayerOutput:
        if layer.training:
            refuse_other_context(layer)
        if isinstance(output, Tensor):
            return self.adapt_streams(output)
        return (self.adapt_streams(output[0]), *output[1:])


class BeforeLayer(CrossAttentionHook):
    """A forward pre-hook: what goes into a layer."""

    position = "before"

    def __call__(self, layer: nn.Module, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments]:
        if layer.training:
            refuse_other_context(layer)
        if args:
            return (self.adapt_streams(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self.adapt_streams(kwargs["hidden_states"])}


def hook_layer(model: HookedModel, module: nn.Module, layer: int, position: str) -> Handle:
    """Hook adapters to a layer; first among its hooks, since those that record must see what the adapters added."""
    if position == "joined":
        return hook_attention(model, module, layer)
    if position == "before":
        return module.register_forward_pre_hook(BeforeLayer(model, layer), prepend=True, with_kwargs=True)
    return module.register_forward_hook(AfterLayer(model, layer), prepend=True)


class BeforeHost:
    """A forward pre-hook of a host: asks the memories of the current call what this forward attends to."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self._signatures: dict[type, Signature] = {}

    def __call__(self, host: nn.Module, args: Positional, kwargs: Arguments) -> tuple[Positional, Arguments] | None:
        model, outer = self.model, FORWARD.get()
        if outer is not None and outer.model is model and outer.module is not host:
            outer.nested += 1  # peft calls the model that it has wrapped
            return None
        compiling = torch.compiler.is_compiling()
        if "memory" in kwargs or "adapter_scale" in kwargs:
            refuse_misplaced(host, kwargs)
        if host.training and torch.is_grad_enabled() and not compiling:
            keep_context(host)
        call, disabled = model.call_of_forward(host, kwargs)
        if call is None:
            if outer is not None:
                FORWARD.set(ForwardStep(model, host, outer, {}))
            return None
        if compiling and not any(source.follows_text for source in call.sources.values()):
            return None  # a compiler cannot follow the variable, and the layers can do without
        places, by_name = arguments_by_name(self._signature(host), args, kwargs)
        step = model.forward_step(call, disabled, host, places, by_name)
        step.outer, step.call = outer, call
        FORWARD.set(step)
        return None if step.inputs is None else (places, step.inputs)

    def _signature(self, host: nn.Module) -> Signature:
        signature = self._signatures.get(type(host))
        if signature is None:
            signature = self._signatures[type(host)] = signature_of(host)
        return signature


def arguments_by_name(signature: Signature, args: Positional, kwargs: Keywords) -> tuple[Positional, Arguments]:
    """Return the arguments of a call under the names of the host's forward.

    Those given by their place get their names, and those under a deprecated name, which decorators of transformers
    still take, the name of today. Where the forward names no places they stay without names.
    """
    by_name = dict(kwargs)
    if args:
        names = signature.places[: len(args)]
        if len(args) > len(names) or not by_name.keys().isdisjoint(names):
            return args, by_name  # the host says itself what it does not take
        by_name = dict(zip(names, args, strict=True)) | by_name
    for old, new in signature.renamed.items():
        if old in by_name:
            value = by_name.pop(old)
            by_name.setdefault(new, value)
    return (), by_name


def refuse_misplaced(host: nn.Module, kwargs: Arguments) -> None:
    """Refuse arguments of the adapted model that a host which takes any keyword would drop in silence."""
    for name in ("memory", "adapter_scale"):
        if name in kwargs and name not in inspect.signature(type(host).forward).parameters:
            raise ConditionError(
                f"{name}= was given to the host, {type(host).__name__}, which does not read it: give it to what attach "
                "returned, or call the host inside its condition(memory)"
            )


class AfterHost:
    """Sees that memory reached every layer it was meant for, and ends the forward, also when the host failed."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model

    def __call__(self, host: nn.Module, args: Positional, output: object) -> None:
        step = FORWARD.get()
        if step is None or step.model is not self.model:
            return
        if step.nested and step.module is not host:
            step.nested -= 1
            return
        FORWARD.set(step.outer)
        if output is None or not step.actions:
            return
        for layer, _ in step.actions:
            if layer not in step.visited:
                if lost := self.model.lost_layers(step):
                    self.model.check_reached(lost)
                break
        self.model.check_answer(step, output)
