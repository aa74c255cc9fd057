"""Which rows of a host's call see the memory while a pipeline of diffusers computes classifier-free guidance.

The pass without memory must be the unconditional one. What tells which that is, the surest first:

1. the null class of hosts of classes, and the `negative_prompt_embeds` that the caller declares: rows are compared with
   them;
2. the names of predictions that pipelines and guiders of diffusers give to `cache_context`;
3. perturbed-attention guidance, whose processors stand in the host;
4. the order that every pipeline of diffusers keeps to (tests/hosts/diffusion/test_guided_calls.py reads it there):
   of one batch the unconditional rows come first, but for the hosts in `CONDITIONAL_FIRST`; of several calls at one
   time step the conditional one comes first, and those with another text are unconditional.

Where none of these tells, the call is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError, ShapeError

#: Hosts whose pipelines put the conditional rows of a batch first.
CONDITIONAL_FIRST = ("AceStepTransformer1DModel", "DiTTransformer2DModel")
#: Names of `cache_context` that say of what a call is the prediction, and whether that is conditional. Others do not:
#: "cond_uncond" is a batch of both, "uncond_stg" of LTX-2 has the positive prompt.
NAMED = {"cond": True, "pred_cond": True, "uncond": False, "pred_uncond": False}
#: Arguments in which hosts are given their text; the first that is there counts.
TEXTS = ("encoder_hidden_states", "class_labels", "text_bth")
#: Beginnings of arguments that follow the prompt: they do not tell one run of a pipeline from another.
_OF_PROMPT = ("encoder_", "pooled_", "attention_mask", "text_", "prompt_", *TEXTS)
#: By how many of its last numbers a sample is known to hold the noise of another: films may begin with given frames.
_LAST = 4

_SAME_TEXT = (
    "the host was called twice with the same text at one time step, and nothing tells which call is unconditional: "
    "give another negative prompt, or open a block for each picture"
)


@dataclass
class _Step:
    """The calls of a host at one time step of a pipeline.

    Args:
        sources: the memories of the block, which tell it from another.
        given: the arguments of the first call.
        calls: the arguments of each call, and whether it is conditional.
    """

    sources: Any
    given: Mapping[str, Any]
    calls: list[tuple[Mapping[str, Any], bool]] = field(default_factory=list)


# The step at which pipelines are in this context, by host; the calls of another thread are in another context.
_STEPS: ContextVar[Mapping[nn.Module, _Step] | None] = ContextVar("mmattn_guidance_steps", default=None)


def forget_step(host: nn.Module) -> None:
    """Drop the arguments that were kept of the calls of a host."""
    steps = _STEPS.get() or {}
    if host in steps:
        _STEPS.set({other: step for other, step in steps.items() if other is not host})


def parts_of(name: str, rows: int, memory_rows: int | None, guided: bool, half: str = "") -> int:
    """Return how many parts of as many rows as the memory a sample has: 1, or 2 or 3 under guidance.

    Args:
        name: of the adapter.
        rows: of the sample.
        memory_rows: of the memory; None fits any sample.
        guided: the sample may have several parts.
        half: the name that the pipeline gave to `cache_context`, "" where it gave none.

    Raises:
        ShapeError: the sample has other rows.
    """
    if memory_rows is None or rows == memory_rows:
        return 1
    if guided and half not in NAMED and rows in (2 * memory_rows, 3 * memory_rows):
        return rows // memory_rows
    raise ShapeError(
        f"the sample has {rows} rows and the memory of adapter {name!r} has {memory_rows}: give one row of memory for "
        f"each picture{_advice(rows, memory_rows, guided, half)}"
    )


def _advice(rows: int, memory_rows: int, guided: bool, half: str) -> str:
    """What to say instead; `expand` to all rows of a guided batch would show the memory to the unconditional ones."""
    pictures = rows // 2
    may_be_doubled = half not in NAMED and rows % 2 == 0
    if may_be_doubled and memory_rows == pictures:
        return "; if a pipeline computes guidance over them, say condition(memory, guided=True)"
    if memory_rows != 1 or rows < 2:
        return ""
    doubled = f"memory.expand({pictures}) with guided=True where guidance doubles {pictures} pictures"
    alone = f"memory.expand({rows}) for {rows} pictures"
    if not may_be_doubled:
        return f"; say {alone}"
    return f"; say {doubled}" if guided else f"; say {alone}, or {doubled}"


def conditional_parts(
    host: nn.Module, call: Any, given: Mapping[str, Any], picture: str, count: int, half: str
) -> tuple[bool, ...]:
    """Return for each part of the rows of a sample whether it is conditional, so that it sees the memory.

    Args:
        host: the diffusion model.
        call: the guided call.
        given: the arguments of the host by name.
        picture: name of the argument that is the sample.
        count: how many parts.
        half: the name that the pipeline gave to `cache_context`, "" where it gave none.

    Raises:
        ConditionError: nothing tells.
    """
    if call.parts:
        return call.parts if count == len(call.parts) else (True,) * count
    known = _by_null_class(host, given, picture, count)
    if count > 1:
        forget_step(host)
        return known or _by_text(host, call, given, picture, count) or parts_in_order(host, count)
    step = _step_of(host, call, given, picture)
    if known:
        conditional = known[0]
    elif half in NAMED:
        conditional = NAMED[half]
    elif declared := _by_text(host, call, given, picture, count):
        conditional = declared[0]
        _refuse_the_same_twice(step, given, picture, conditional)
    else:
        conditional = _in_turn(host, step, given, picture)
    step.calls.append((given, conditional))
    return (conditional,)


def parts_in_order(host: nn.Module, count: int) -> tuple[bool, ...]:
    """Return which parts of a batch are conditional by the order in which pipelines of diffusers put them.

    Args:
        host: the diffusion model.
        count: how many parts, 2 or 3.

    Raises:
        ConditionError: pipelines put three parts in several orders.
    """
    name = type(_inner(host)).__name__
    processors = _processors(host)
    if count == 2:
        if _is_perturbed_alone(processors):
            return True, True
        return (True, False) if name in CONDITIONAL_FIRST else (False, True)
    if any(one.startswith("PAGCFG") for one in processors):
        return False, True, True
    raise ConditionError(
        f"{name} is given {count} parts of rows, and nothing tells which are unconditional: say "
        "condition(memory, negative_prompt_embeds=...)"
    )


def _processors(host: nn.Module) -> set[str]:
    return {type(one).__name__ for one in getattr(host, "attn_processors", {}).values()}


def _is_perturbed_alone(processors: set[str]) -> bool:
    """Whether a pipeline computes perturbed-attention guidance without a negative prompt."""
    return any(one.startswith("PAG") and not one.startswith("PAGCFG") for one in processors)


def _by_null_class(host: nn.Module, given: Mapping[str, Any], picture: str, count: int) -> tuple[bool, ...] | None:
    """Which parts are conditional where the host is given classes, of which the last is none; None where it is not."""
    classes, labels = getattr(getattr(host, "config", None), "num_embeds_ada_norm", None), given.get("class_labels")
    if not classes or not isinstance(labels, Tensor):
        return None
    parts = _uniform_parts([bool(one) for one in labels == classes], given[picture].shape[0], count)
    if parts is None or (count > 1 and all(parts)):
        raise ConditionError(
            f"{count} part{'s' * (count > 1)} of rows must have the null class {classes} in every row or in none, and "
            f"class_labels are {labels.tolist()}: give one row of memory for each picture"
        )
    return parts


def _by_text(host: nn.Module, call: Any, given: Mapping[str, Any], picture: str, count: int) -> tuple[bool, ...] | None:
    """Which parts are conditional by the declared embeddings; None where none are, or every row has them."""
    negative = call.negative_prompt_embeds
    if negative is None:
        return None
    text, rows = given.get(_text_name(given) or ""), given[picture].shape[0]
    matches = [] if text is None else [_is_one_of(row, negative) for row in text]
    parts = _uniform_parts(matches, rows, count)
    if count > 1 and parts is not None and len(set(parts)) == 1:
        if not parts[0] or _is_perturbed_alone(_processors(host)):
            return None
        parts = None
    if parts is None:
        raise ConditionError(
            f"{sum(matches)} of {rows} rows that {type(_inner(host)).__name__} is given have negative_prompt_embeds as "
            f"their text, which is not one of {count} equal parts: give the embeddings as the host is given them"
        )
    return parts


def _uniform_parts(unconditional: list[bool], rows: int, count: int) -> tuple[bool, ...] | None:
    """Whether each part of the rows is conditional; None where a part is both."""
    size = rows // count
    parts = [set(unconditional[at : at + size]) for at in range(0, rows, size)]
    if len(unconditional) != rows or any(len(part) != 1 for part in parts):
        return None
    return tuple(part == {False} for part in parts)


def _refuse_the_same_twice(step: _Step, given: Mapping[str, Any], picture: str, conditional: bool) -> None:
    name = _text_name(given)
    if not conditional and any(
        _same(_text(other, name, picture), _text(given, name, picture)) for other, _ in step.calls
    ):
        raise ConditionError(_SAME_TEXT)


def _in_turn(host: nn.Module, step: _Step, given: Mapping[str, Any], picture: str) -> bool:
    """Whether a call that has no name is conditional: the first at a time step is, those with another text are not.

    Raises:
        ConditionError: three texts, the same call twice, or a host whose pipelines never call it for one half.
    """
    name, known = _text_name(given), {conditional for _, conditional in step.calls}
    for other, conditional in step.calls:
        if not _same(_text(other, name, picture), _text(given, name, picture)):
            continue
        if not conditional or any(not _same(other.get(each), value) for each, value in given.items()):
            return conditional
        raise ConditionError(_SAME_TEXT)
    if not known:
        return True
    if known == {True} and picture == "hidden_states" and type(_inner(host)).__name__ not in CONDITIONAL_FIRST:
        return False
    if known == {False}:
        return True
    raise ConditionError(
        "the host was called with several texts at one time step, and nothing tells which is unconditional: say "
        "condition(memory, negative_prompt_embeds=...)"
    )


def _step_of(host: nn.Module, call: Any, given: Mapping[str, Any], picture: str) -> _Step:
    """The step that this call belongs to, a new one where it begins one."""
    steps = _STEPS.get() or {}
    step = steps.get(host)
    if step is not None and step.sources is call.sources and _continues(step.given, given, picture):
        return step
    step = _Step(call.sources, given)
    _STEPS.set({**steps, host: step})
    return step


def _continues(before: Mapping[str, Any], given: Mapping[str, Any], picture: str) -> bool:
    """Whether two calls are of one time step of one run: the same time and noise, and an object that a run makes once.

    Another run may have the same time and noise, and be given the same embeddings.
    """
    time, sample, earlier = given.get("timestep"), given[picture], before[picture]
    if not _same(before.get("timestep"), time) or earlier.shape != sample.shape:
        return False
    if sample is not earlier and not torch.equal(*(one.flatten(1)[:, -_LAST:] for one in (sample, earlier))):
        return False
    telling = [
        name
        for name, value in given.items()
        if isinstance(value, (Tensor, list, tuple)) and name != picture and not name.startswith(_OF_PROMPT)
    ]
    return any(given[name] is before.get(name) for name in telling) if telling else sample is earlier


def _text_name(given: Mapping[str, Any]) -> str | None:
    return next((name for name in TEXTS if given.get(name) is not None), None)


def _text(given: Mapping[str, Any], name: str | None, picture: str) -> Any:
    """The text of a call; everything but the sample and its time where no argument is known as one."""
    if name is not None:
        return given.get(name)
    return [value for each, value in sorted(given.items()) if each not in (picture, "timestep")]


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other)


def _is_one_of(row: Tensor, embeds: Tensor) -> bool:
    """Whether a row (m, e) of a text is one of embeddings (b, n, e), the longer one padded with zeros."""
    shorter = min(len(row), embeds.shape[1])
    if row.dim() != embeds.dim() - 1 or row.shape[1:] != embeds.shape[2:] or row[shorter:].any():
        return False
    alike = (embeds[:, :shorter].to(row) == row[:shorter]).flatten(1).all(1)
    return bool((alike & ~embeds[:, shorter:].flatten(1).any(1)).any())


def _inner(host: nn.Module) -> nn.Module:
    get_base: Any = getattr(host, "get_base_model", None)
    inner: nn.Module = host if get_base is None else get_base()
    return inner
