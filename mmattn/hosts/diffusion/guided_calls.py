"""Find the unconditional rows and calls while a pipeline of diffusers computes classifier-free guidance.

They see no memory. They are known, the surest sign first, by

1. the null class of hosts of classes, and the `negative_prompt_embeds` that the caller declares;
2. the names of predictions that pipelines and guiders of diffusers give to `cache_context`;
3. the processors of perturbed-attention guidance in the host;
4. the order of every pipeline of diffusers, as tests/hosts/diffusion/test_guided_calls.py reads it there: of one batch
   the unconditional rows come first, but for the hosts in `CONDITIONAL_FIRST`; of several calls at one timestep the
   conditional one comes first, and those with another text are unconditional.

Otherwise the call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.context import Keywords
from mmattn.hosts.diffusion.call import DenoisingCall, equal
from mmattn.hosts.interop.peft import inner_host

#: Hosts whose pipelines put the conditional rows of a batch first.
CONDITIONAL_FIRST = ("AceStepTransformer1DModel", "DiTTransformer2DModel")
#: Names of `cache_context` for one prediction, True if it is conditional. Others do not say: "cond_uncond" is a batch
#: of both, "uncond_stg" of LTX-2 has the positive prompt.
NAMED = {"cond": True, "pred_cond": True, "uncond": False, "pred_uncond": False}
#: Arguments with the text of a host, the first that is there.
TEXTS = ("encoder_hidden_states", "class_labels", "text_bth")
#: Beginnings of arguments that follow the prompt, and so differ within a run.
_OF_PROMPT = ("encoder_", "pooled_", "attention_mask", "text_", "prompt_", *TEXTS)
#: Numbers at the end of a sample by which its noise is recognised: films may begin with given frames.
_LAST = 4
_DECLARE = "say condition(memory, negative_prompt_embeds=...)"


@dataclass(frozen=True)
class HostCall:
    """One call of a host inside a guided block."""

    host: nn.Module  # the diffusion model
    kwargs: Keywords  # its arguments by name
    picture: str  # name of the argument that is the sample

    @property
    def name(self) -> str:
        """Return the class of the host."""
        return _class_of(self.host)

    @property
    def sample(self) -> Tensor:
        """Return the sample (rows, …)."""
        sample: Tensor = self.kwargs[self.picture]
        return sample

    @property
    def named_text(self) -> object:
        """Return the text, or None if no argument is known as one."""
        return next((self.kwargs[name] for name in TEXTS if self.kwargs.get(name) is not None), None)

    @property
    def text(self) -> object:
        """Return the text; without a known argument for it everything but the sample and its timestep."""
        if self.named_text is not None:
            return self.named_text
        return [value for each, value in sorted(self.kwargs.items()) if each not in (self.picture, "timestep")]

    def is_same(self, other: HostCall) -> bool:
        """Return whether all arguments are equal."""
        return all(equal(other.kwargs.get(name), value) for name, value in self.kwargs.items())

    def continues(self, before: HostCall) -> bool:
        """Return whether two calls are of one timestep of one run: equal time and noise, and a shared object.

        Another run may have the same time and noise, and equal embeddings.
        """
        sample, earlier = self.sample, before.sample
        if not equal(before.kwargs.get("timestep"), self.kwargs.get("timestep")) or earlier.shape != sample.shape:
            return False
        if sample is not earlier and not torch.equal(*(one.flatten(1)[:, -_LAST:] for one in (sample, earlier))):
            return False
        of_run = [
            value is before.kwargs.get(name)
            for name, value in self.kwargs.items()
            if isinstance(value, (Tensor, list, tuple)) and name != self.picture and not name.startswith(_OF_PROMPT)
        ]
        return any(of_run) if of_run else sample is earlier


@dataclass
class _Step:
    """The calls of a host at one timestep of a pipeline."""

    sources: object  # the memories of the block
    first: HostCall
    calls: list[tuple[HostCall, bool]] = field(default_factory=list)  # each call, and whether it is conditional


#: The timestep of pipelines in this context, by host; calls of another thread are in another context.
_STEPS: ContextVar[Mapping[nn.Module, _Step] | None] = ContextVar("mmattn_guidance_steps", default=None)


def forget_step(host: nn.Module) -> None:
    """Drop the noted calls of a host."""
    steps = _STEPS.get() or {}
    if host in steps:
        _STEPS.set({other: step for other, step in steps.items() if other is not host})


def parts_of(name: str, rows: int, memory_rows: int | None, guided: bool, prediction: str = "") -> int:
    """Return the number of parts of a sample with as many rows as the memory: 1, or 2 or 3 under guidance."""
    if memory_rows is None or rows == memory_rows:
        return 1
    if guided and prediction not in NAMED and rows in (2 * memory_rows, 3 * memory_rows):
        return rows // memory_rows
    raise ShapeError(
        f"the sample has {rows} rows and the memory of adapter {name!r} has {memory_rows}: give one row of memory for "
        "each picture; where a pipeline computes guidance over them, say condition(memory, guided=True)"
    )


def conditional_parts(
    host: nn.Module, call: DenoisingCall, kwargs: Keywords | None, picture: str, count: int, prediction: str
) -> tuple[bool, ...]:
    """Return which of the `count` equal parts of a sample's rows are conditional, and so see the memory."""
    if not call.guided or call.parts:
        return call.parts if count == len(call.parts) else (True,) * count
    if kwargs is None:
        return _parts_of_layer(host, call, picture, count, prediction)
    this = HostCall(host, kwargs, picture)
    by_class = _by_null_class(this, count)
    if count > 1:
        forget_step(host)
        return by_class or _by_text(this, call.negative_prompt_embeds, count) or _parts_in_order(host, count)
    step = _step_of(this, call.sources)
    if by_class:
        (conditional,) = by_class
    elif prediction in NAMED:
        conditional = NAMED[prediction]
    elif declared := _by_text(this, call.negative_prompt_embeds, count):
        (conditional,) = declared
        if not conditional and any(equal(other.text, this.text) for other, _ in step.calls):
            raise _same_twice()
    else:
        conditional = _in_turn(this, step)
    step.calls.append((this, conditional))
    return (conditional,)


def _parts_of_layer(
    host: nn.Module, call: DenoisingCall, picture: str, count: int, prediction: str
) -> tuple[bool, ...]:
    """Return which parts are conditional where a layer is called without the host, whose arguments are not known."""
    unknown = count == 1 and prediction not in NAMED and picture == "hidden_states"
    if call.negative_prompt_embeds is not None or unknown:
        raise ConditionError(
            "a compiled host, or a part of one, cannot see which half of guidance it computes: name it by "
            "host.cache_context('cond') and ('uncond')"
        )
    return _parts_in_order(host, count) if count > 1 else (NAMED.get(prediction, True),)


def _parts_in_order(host: nn.Module, count: int) -> tuple[bool, ...]:
    """Return which of 2 or 3 parts of a batch are conditional, by the order of pipelines of diffusers."""
    name = _class_of(host)
    if count == 2:
        if _is_perturbed_alone(host):
            return True, True
        return (True, False) if name in CONDITIONAL_FIRST else (False, True)
    if any(one.startswith("PAGCFG") for one in _processors(host)):
        return False, True, True
    raise ConditionError(f"{name} is called with {count} parts of rows in an unknown order: {_DECLARE}")


def _class_of(host: nn.Module) -> str:
    return type(inner_host(host)).__name__


def _processors(host: nn.Module) -> set[str]:
    return {type(one).__name__ for one in getattr(host, "attn_processors", {}).values()}


def _is_perturbed_alone(host: nn.Module) -> bool:
    """Return whether a pipeline computes perturbed-attention guidance without a negative prompt."""
    return any(one.startswith("PAG") and not one.startswith("PAGCFG") for one in _processors(host))


def _by_null_class(call: HostCall, count: int) -> tuple[bool, ...] | None:
    """Return which parts are conditional by their classes, the last of which is the null class."""
    classes = getattr(getattr(call.host, "config", None), "num_embeds_ada_norm", None)
    labels = call.kwargs.get("class_labels")
    if not classes or not isinstance(labels, Tensor):
        return None
    parts = _uniform_parts([bool(one) for one in labels == classes], call.sample.shape[0], count)
    if parts is None or (count > 1 and all(parts)):
        raise ConditionError(
            f"each of {count} parts of rows must have the null class {classes} in all rows or none, got class_labels "
            f"{labels.tolist()}: give one row of memory for each picture"
        )
    return parts


def _by_text(call: HostCall, negative: Tensor | None, count: int) -> tuple[bool, ...] | None:
    """Return which parts are conditional by the declared embeddings; None without any, or if every row has them."""
    if negative is None:
        return None
    text, rows = call.named_text, call.sample.shape[0]
    matches = [_is_one_of(row, negative) for row in text] if isinstance(text, Tensor) else []
    parts = _uniform_parts(matches, rows, count)
    if count > 1 and parts is not None and len(set(parts)) == 1:
        if not parts[0] or _is_perturbed_alone(call.host):
            return None
        parts = None
    if parts is None:
        raise ConditionError(
            f"{sum(matches)} of {rows} rows of {call.name} have negative_prompt_embeds as their text, which is not one "
            f"of {count} equal parts: give the embeddings that the host is called with"
        )
    return parts


def _uniform_parts(unconditional: list[bool], rows: int, count: int) -> tuple[bool, ...] | None:
    """Return which parts of the rows are conditional; None if a part is both."""
    size = rows // count
    parts = [set(unconditional[at : at + size]) for at in range(0, rows, size)]
    if len(unconditional) != rows or any(len(part) != 1 for part in parts):
        return None
    return tuple(part == {False} for part in parts)


def _in_turn(call: HostCall, step: _Step) -> bool:
    """Return whether an unnamed call is conditional: the first at a timestep is, those with another text are not."""
    for other, conditional in step.calls:
        if equal(other.text, call.text):
            if conditional and call.is_same(other):
                raise _same_twice()
            return conditional
    earlier = {conditional for _, conditional in step.calls}
    if not earlier or earlier == {False}:
        return True
    if earlier == {True} and call.picture == "hidden_states" and call.name not in CONDITIONAL_FIRST:
        return False
    raise ConditionError(f"the host was called with several texts at one timestep, in an unknown order: {_DECLARE}")


def _same_twice() -> ConditionError:
    return ConditionError(
        "the host was called twice with the same text at one timestep, so the unconditional call is unknown: give "
        "another negative prompt, or open a block for each picture"
    )


def _step_of(call: HostCall, sources: object) -> _Step:
    """Return the timestep of this call, a new one if it begins one."""
    steps = _STEPS.get() or {}
    step = steps.get(call.host)
    if step is None or step.sources is not sources or not call.continues(step.first):
        step = _Step(sources, call)
        _STEPS.set({**steps, call.host: step})
    return step


def _is_one_of(row: Tensor, embeds: Tensor) -> bool:
    """Return whether a text (m, e) is one of embeddings (b, n, e), the longer one padded with zeros."""
    shorter = min(len(row), embeds.shape[1])
    if row.dim() != embeds.dim() - 1 or row.shape[1:] != embeds.shape[2:] or row[shorter:].any():
        return False
    alike = (embeds[:, :shorter].to(row) == row[:shorter]).flatten(1).all(1)
    return bool((alike & ~embeds[:, shorter:].flatten(1).any(1)).any())
