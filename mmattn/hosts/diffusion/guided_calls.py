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

import asyncio
from threading import current_thread

from torch import Tensor, nn

from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.context import Keywords
from mmattn.hosts.diffusion.call import Calls, DenoisingCall, HostCall, equal
from mmattn.hosts.peft import inner_host

#: Hosts whose pipelines put the conditional rows of a batch first.
CONDITIONAL_FIRST = ("AceStepTransformer1DModel", "DiTTransformer2DModel")
#: Names of `cache_context` for one prediction, True if it is conditional. Others do not say: "cond_uncond" is a batch
#: of both, "uncond_stg" of LTX-2 has the positive prompt.
NAMED = {"cond": True, "pred_cond": True, "uncond": False, "pred_uncond": False}
_DECLARE = "say condition(memory, negative_prompt_embeds=...)"


def parts_of(name: str, rows: int, memory_rows: int | None, guided: bool, prediction: str = "") -> int:
    """Return the number of parts of a sample with as many rows as the memory: 1, or 2 or 3 under guidance."""
    if memory_rows is None or rows == memory_rows:
        return 1
    if guided and prediction not in NAMED and rows in (2 * memory_rows, 3 * memory_rows):
        return rows // memory_rows
    if guided:
        hint = f"give as many rows of memory as pictures, a half or a third of {rows}"
    else:
        hint = "give a row of memory for each picture; inside a pipeline with guidance, condition(memory, guided=True)"
    raise ShapeError(f"the sample has {rows} rows and the memory of adapter {name!r} has {memory_rows}: {hint}")


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
        call.timesteps.pop(_thread_or_task(), None)
        return by_class or _by_text(this, call.negative_prompt_embeds, count) or _parts_in_order(host, count)
    before = _calls_before(this, call)
    if by_class:
        (conditional,) = by_class
    elif prediction in NAMED:
        conditional = NAMED[prediction]
    elif declared := _by_text(this, call.negative_prompt_embeds, count):
        (conditional,) = declared
        if not conditional and any(equal(other.text, this.text) for other, _ in before):
            raise _same_twice()
    else:
        conditional = _in_turn(this, before)
    before.append((this, conditional))
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
    if any(name.startswith("PAGCFG") for name in _processors(host)):
        return False, True, True
    raise ConditionError(f"{name} is called with {count} parts of rows in an unknown order: {_DECLARE}")


def _class_of(host: nn.Module) -> str:
    return type(inner_host(host)).__name__


def _processors(host: nn.Module) -> set[str]:
    return {type(processor).__name__ for processor in getattr(host, "attn_processors", {}).values()}


def _is_perturbed_alone(host: nn.Module) -> bool:
    """Return whether a pipeline computes perturbed-attention guidance without a negative prompt."""
    return any(name.startswith("PAG") and not name.startswith("PAGCFG") for name in _processors(host))


def _by_null_class(call: HostCall, count: int) -> tuple[bool, ...] | None:
    """Return which parts are conditional by their classes; the last class is the null class."""
    classes = getattr(getattr(call.host, "config", None), "num_embeds_ada_norm", None)
    labels = call.kwargs.get("class_labels")
    if not classes or not isinstance(labels, Tensor):
        return None
    parts = _uniform_parts([bool(is_null) for is_null in labels == classes], call.sample.shape[0], count)
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
            f"{sum(matches)} of {rows} rows have negative_prompt_embeds as their text, not one of {count} equal parts: "
            "give the embeddings that the host is called with"
        )
    return parts


def _uniform_parts(unconditional: list[bool], rows: int, count: int) -> tuple[bool, ...] | None:
    """Return which parts of the rows are conditional; None if a part is both."""
    size = rows // count
    parts = [set(unconditional[at : at + size]) for at in range(0, rows, size)]
    if len(unconditional) != rows or any(len(part) != 1 for part in parts):
        return None
    return tuple(part == {False} for part in parts)


def _in_turn(call: HostCall, before: Calls) -> bool:
    """Return whether an unnamed call is conditional: the first at a timestep is, those with another text are not."""
    for other, conditional in before:
        if equal(other.text, call.text):
            if conditional and call.is_same(other):
                raise _same_twice()
            return conditional
    earlier = {conditional for _, conditional in before}
    if not earlier or earlier == {False}:
        return True
    if earlier == {True} and call.picture == "hidden_states" and _class_of(call.host) not in CONDITIONAL_FIRST:
        return False
    raise ConditionError(f"the host was called with several texts at one timestep, in an unknown order: {_DECLARE}")


def _same_twice() -> ConditionError:
    return ConditionError(
        "the host was called twice with the same text at one timestep, so the unconditional call is unknown: give "
        "another negative prompt, or open a block for each picture"
    )


def _calls_before(this: HostCall, call: DenoisingCall) -> Calls:
    """Return the earlier calls at the timestep of this one, none if it begins one."""
    runner = _thread_or_task()
    before = call.timesteps.get(runner)
    if not before or not this.continues(before[0][0]):
        before = call.timesteps[runner] = []
    return before


def _thread_or_task() -> object:
    """Return the asynchronous task under way, or the thread: pipelines in several take turns."""
    try:
        return asyncio.current_task() or current_thread()
    except RuntimeError:  # no event loop runs in this thread
        return current_thread()


def _is_one_of(row: Tensor, embeds: Tensor) -> bool:
    """Return whether a text (m, e) is one of embeddings (b, n, e), the longer one padded with zeros."""
    shorter = min(len(row), embeds.shape[1])
    if row.dim() != embeds.dim() - 1 or row.shape[1:] != embeds.shape[2:] or row[shorter:].any():
        return False
    alike = (embeds[:, :shorter].to(row) == row[:shorter]).flatten(1).all(1)
    return bool((alike & ~embeds[:, shorter:].flatten(1).any(1)).any())
