"""Gradient checkpointing of a host: a layer that runs again in the backward pass sees the memory it first saw."""

from __future__ import annotations

from contextvars import copy_context

from torch import nn

from mmattn.errors import ConditionError
from mmattn.hosts.context import THREAD, Method, forward_resumed

_ATTRIBUTE = "_gradient_checkpointing_func"


class InContext:
    """A checkpointing function whose second forward, in the backward pass, is part of the forward of the first."""

    def __init__(self, checkpoint: Method) -> None:
        self.checkpoint = checkpoint

    def __call__(self, module: Method, *args: object, **kwargs: object) -> object:
        context, step = copy_context(), getattr(THREAD, "step", None)

        def run(*given: object, **named: object) -> object:
            with forward_resumed(step):
                return context.copy().run(module, *given, **named)

        return self.checkpoint(run, *args, **kwargs)


def keep_context(host: nn.Module) -> None:
    """Have every checkpointing block of the host run again in the context of its first run, with its hooks."""
    for module in host.modules():
        checkpoint: Method | None = module.__dict__.get(_ATTRIBUTE)
        if checkpoint is not None and not isinstance(checkpoint, InContext):
            module.__dict__[_ATTRIBUTE] = InContext(checkpoint)


def forget_context(host: nn.Module) -> None:
    """Undo `keep_context`."""
    for module in host.modules():
        checkpoint = module.__dict__.get(_ATTRIBUTE)
        if isinstance(checkpoint, InContext):
            module.__dict__[_ATTRIBUTE] = checkpoint.checkpoint


def runs_hooks_again(layer: nn.Module) -> bool:
    """Return True if checkpointing wraps a layer's call with its hooks, as in older transformers, not its forward."""
    return any(
        base.__name__ == "GradientCheckpointingLayer" and "__call__" in vars(base) for base in type(layer).__mro__
    )


def refuse_reentrant(host: nn.Module) -> None:
    """Refuse recomputed layers in which the gradients of what was joined with their attention would be lost."""
    for module in host.modules():
        checkpoint: Method | None = module.__dict__.get(_ATTRIBUTE)
        if checkpoint is None or not getattr(module, "gradient_checkpointing", False):
            continue
        inner = checkpoint.checkpoint if isinstance(checkpoint, InContext) else checkpoint
        if getattr(inner, "keywords", {}).get("use_reentrant", True):
            raise ConditionError(
                f"reentrant checkpointing of {type(host).__name__} loses the gradients of joined keys and values: "
                'call activation_checkpointing_enable({"use_reentrant": False})'
            )


def refuse_other_context(layer: nn.Module) -> None:
    """Refuse a layer whose hooks would run a second time where another memory is in force, or lose its gradients."""
    if not getattr(layer, "gradient_checkpointing", False) or not runs_hooks_again(layer):
        return
    checkpoint = layer.__dict__.get(_ATTRIBUTE)
    if not isinstance(checkpoint, InContext):
        raise ConditionError(
            f"{type(layer).__name__} was called without its host or is compiled: checkpointing of this transformers "
            "would run its hooks again: call the host or upgrade transformers"
        )
    if getattr(checkpoint.checkpoint, "keywords", {}).get("use_reentrant", True):
        raise ConditionError(
            "reentrant gradient checkpointing of this transformers loses the gradients of a memory: enable it with "
            '{"use_reentrant": False}, or upgrade transformers'
        )
