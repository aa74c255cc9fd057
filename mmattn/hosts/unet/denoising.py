"""One call of a UNet with memories: what its steps share, and the hooks that see to it that memory arrives."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts import calls
from mmattn.hosts.calls import Call, Prepared
from mmattn.hosts.unet.adapter_scale import Strength, at_step, check_aspect
from mmattn.hosts.unet.attention_layers import query_heads

if TYPE_CHECKING:
    from mmattn.hosts.unet.model import AdaptedUNet


@dataclass
class Denoising(Call):
    """What the calls of one block share: memories with a strength each, and the text's keys and values.

    Args:
        guided: the host may be given twice the rows of the memory; the first half then sees none.
        text_mask: (rows, m) bool, the padding of the host's own text.
        padding: the bias by which the host last told of padding in its text, and the mask that it means.
        text: keys and values of the host's own text, where it goes through the core.
    """

    memories: Mapping[str, Prepared]
    strengths: Mapping[str, Strength] = field(default_factory=dict)
    guided: bool = False
    text_mask: Tensor | None = None
    padding: tuple[Tensor, Tensor] | None = None
    text: TensorCache = field(default_factory=TensorCache)


@dataclass
class Step:
    """One forward of a host: the picture's size, and the strength of each adapter at this time.

    Args:
        host: whose forward. outer: the step of another host, inside of which this one runs.
    """

    host: nn.Module
    outer: Step | None
    size: tuple[int, int]
    strengths: dict[str, Any]
    visited: set[int] = field(default_factory=set)


_step: ContextVar[Step | None] = ContextVar("mmattn_step", default=None)


def step_of(host: nn.Module) -> Step | None:
    """The forward of this host that is under way here, or None where a part of it is called by itself."""
    step = _step.get()
    return step if step is not None and step.host is host else None


class BeforeHost:
    """Notes the picture's size and the strengths at this time step."""

    def __init__(self, handle: AdaptedUNet) -> None:
        self.handle = handle

    def __call__(self, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handle = self.handle
        for place in handle._processors:
            attn: Any = host.get_submodule(place)
            if attn.processor is not handle.own[place]:
                raise ConditionError(
                    f"the processor of {place} was replaced after use_core(), so the host's own attention left the "
                    "core: call use_core(False) before load_ip_adapter, set_attn_processor and the like"
                )
        call = handle.denoising()
        if call is None:
            return
        if torch.is_grad_enabled():
            keep_context(host)
        given = dict(zip(("sample", "timestep"), args, strict=False)) | kwargs
        if "sample" not in given or "timestep" not in given:
            return  # the host says itself what it misses
        sample, timestep = given["sample"], given["timestep"]
        rows, size = sample.shape[0], (sample.shape[-2], sample.shape[-1])
        strengths = {}
        for name, prepared in call.memories.items():
            unseen_rows(rows, call, name, prepared)
            strength = call.strengths[name]
            if not isinstance(strength, float):
                strength = at_step(strength, timestep, handle.places, prepared.batch)
                check_aspect(strength, *size)
            strengths[name] = strength
        _step.set(Step(host, _step.get(), size, strengths))


class InContext:
    """A checkpointing function whose second forward, in the backward pass, sees the memory of the first."""

    def __init__(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint

    def __call__(self, module: Any, *args: Any) -> Any:
        context = copy_context()
        return self.checkpoint(lambda *given: context.copy().run(module, *given), *args)


def keep_context(host: nn.Module) -> None:
    """Have every checkpointing block of the host run again in the context it first ran in."""
    for module in host.modules():
        checkpoint: Any = module.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is not None and not isinstance(checkpoint, InContext):
            module.__dict__["_gradient_checkpointing_func"] = InContext(checkpoint)


class AfterHost:
    """Sees that memory reached every layer it was meant for, and forgets the step, also when the host failed."""

    def __init__(self, handle: AdaptedUNet) -> None:
        self.handle = handle

    def __call__(self, host: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        step = step_of(host)
        if step is None:
            return
        _step.set(step.outer)
        if output is None:
            return
        wanted = {
            index
            for name in step.strengths
            if name in self.handle.active and not calls.is_off(self.handle._key, name)
            for index in self.handle._adapter(name).layers
        }
        if lost := wanted - step.visited:
            raise ConditionError(
                f"memory did not reach {[self.handle.places[index] for index in sorted(lost)]}: the host left these "
                "layers out of its forward; name others with DecoupledAdapter(blocks=...)"
            )


class BesidePlace:
    """Adds what the adapters found to the output of one cross-attention layer of the host."""

    def __init__(self, handle: AdaptedUNet, index: int) -> None:
        self.handle, self.index = handle, index

    def __call__(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        step = step_of(self.handle.host)
        if step is not None:
            step.visited.add(self.index)
        if attn.processor is self.handle.own[self.handle.places[self.index]]:
            return None  # it has asked by itself
        call = self.handle.denoising()
        if call is None or not call.memories:
            return None
        x = args[0] if args else kwargs["hidden_states"]
        found = self.handle.added(self.index, query_heads(attn, x, kwargs.get("temb")))
        if found is None:
            return None
        projection = attn.to_out[0]
        if type(projection) is nn.Linear and not projection.weight.is_meta:
            out = F.linear(found, projection.weight)
        else:
            # LoRA may add biases of its own, and offloaded weights have values only inside the layer's forward.
            out = projection(found) - projection(torch.zeros_like(found[:1, :1]))
        out = attn.to_out[1](out)
        if output.dim() == 4:
            out = out.transpose(1, 2).reshape(output.shape)
        return output + out / attn.rescale_output_factor


def unseen_rows(rows: int, call: Denoising, name: str, prepared: Prepared) -> int:
    """How many rows of the sample come before those that see the memory: 0, or half of them under guidance.

    Raises:
        ShapeError: the sample has other rows.
    """
    if rows == prepared.batch:
        return 0
    if call.guided and rows == 2 * prepared.batch:
        return prepared.batch
    if prepared.batch == 1:
        hint = f"; to share one memory between all rows say memory.expand({rows})"
    elif rows == 2 * prepared.batch and not call.guided:
        hint = "; if the first half of them is the unconditional half of guidance, say guided=True"
    else:
        hint = ""
    raise ShapeError(
        f"the sample has {rows} rows and the memory of adapter {name!r} has {prepared.batch}: give one row of memory "
        f"for each row of the sample{hint}"
    )


def is_nothing(strength: Any) -> bool:
    """Whether a strength is the number 0."""
    return isinstance(strength, float) and strength == 0
