"""One call of a diffusion model with memories, and the hooks in its attention layers."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import BoundMemory, View
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.context import THREAD, Arguments, Call, ForwardStep, Keywords, Positional, step_of
from mmattn.hosts.diffusion.heads import into_output, projections, query_heads
from mmattn.hosts.diffusion.scale import Fixed, Grid, over_queries
from mmattn.storage.tensor_cache import TensorCache

#: Texts that a block caches: guidance that calls a host for each half alone gives it two in turn.
CACHED_TEXTS = 4
#: Arguments with the text of a host, the first that is there.
TEXTS = ("encoder_hidden_states", "class_labels", "text_bth")
#: Beginnings of arguments that follow the prompt, and so differ within a run.
_OF_PROMPT = ("encoder_", "pooled_", "attention_mask", "text_", "prompt_", *TEXTS)
#: Numbers at the end of a sample by which its noise is recognised: films may begin with given frames.
_LAST = 4


@dataclass(frozen=True)
class HostCall:
    """One call of a host inside a guided block."""

    host: nn.Module  # the diffusion model
    kwargs: Keywords  # its arguments by name
    picture: str  # name of the argument that is the sample

    @property
    def sample(self) -> Tensor:
        """Return the sample (rows, …)."""
        return self.kwargs[self.picture]

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
        """Return whether two calls are of one timestep of one run: equal time and noise, and a shared object."""
        sample, earlier = self.sample, before.sample
        if not equal(before.kwargs.get("timestep"), self.kwargs.get("timestep")) or earlier.shape != sample.shape:
            return False
        if sample is not earlier and not torch.equal(*(noise.flatten(1)[:, -_LAST:] for noise in (sample, earlier))):
            return False
        of_run = [
            value is before.kwargs.get(name)
            for name, value in self.kwargs.items()
            if isinstance(value, (Tensor, list, tuple)) and name != self.picture and not name.startswith(_OF_PROMPT)
        ]
        return any(of_run) if of_run else sample is earlier


#: Calls of a host at one timestep, and whether each is conditional.
Calls = list[tuple[HostCall, bool]]


@dataclass
class DenoisingCall(Call):
    """State shared by the forwards of one block: memories with their scales, and K/V of the text."""

    guided: bool = False  # a pipeline computes guidance: unconditional rows and calls see no memory
    parts: tuple[bool, ...] = ()  # which parts of the rows are conditional, where the caller has made them itself
    #: (b, m, e), the text of unconditional rows, where the caller declares it
    negative_prompt_embeds: Tensor | None = None
    #: by thread or asynchronous task, the calls at its present timestep
    timesteps: MutableMapping[object, Calls] = None  # type: ignore[assignment]
    text_mask: Tensor | None = None  # (rows, m) bool, the padding of the host's own text
    padding: tuple[Tensor, Tensor] | None = None  # the last bias for padding of the host's text, and its mask
    #: keys and values of the host's own text, where it goes through the core
    text: TensorCache = None  # type: ignore[assignment]
    #: the last texts of the host's layers, with their masks
    texts: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.timesteps is None and not torch.compiler.is_compiling():  # nothing is cached inside of a graph
            self.timesteps, self.text = WeakKeyDictionary(), TensorCache()

    def text_mask_of(self, text: Tensor) -> Tensor | None:
        """Return `text_mask` on the device of a text (b, m, e)."""
        if self.text_mask is not None and self.text_mask.shape != text.shape[:2]:
            shapes = f"(b, m) = {tuple(text.shape[:2])}, got {tuple(self.text_mask.shape)}"
            raise ShapeError(f"text_mask must be {shapes}")
        return None if self.text_mask is None else self.text_mask.to(text.device)

    def number_of_text(self, text: Tensor, mask: Tensor | None) -> int:
        """Return the index in `texts` of the text of a layer, which some hosts project anew at every step."""
        for number, (other, other_mask) in enumerate(self.texts):
            if equal(other, text) and equal(other_mask, mask):
                return number
        if len(self.texts) == CACHED_TEXTS:
            self.texts.clear()
        self.texts.append((text, mask))
        return len(self.texts) - 1


def equal(first: object, second: object) -> bool:
    """Return whether two arguments of a host are equal, tensors by value."""
    if first is second:
        return True
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
            return False
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and bool(first == second)


class Reading(NamedTuple):
    """The memory of one adapter as a forward reads it."""

    name: str  # of the adapter
    source: BoundMemory
    conditional: tuple[bool, ...]  # for each of the equal parts of the rows of the sample, True if it sees the memory
    scale: Fixed  # at this timestep
    to_block: bool  # it is added to the output of the block, not of its attention
    #: frames, height and width of the picture as the host's first layer has it; None where it is not known
    grid: Grid | None
    timestep: Tensor | float | None
    #: of the sample; layers of films have a row for each frame or pixel of it, those of one row one after the other.
    #: None where only a part of the host was called
    rows: int | None


# Hooks ----------------------------------------------------------------------------------------------------------------


#: What an attention layer or a block returns: the picture, or a tuple with it.
Output = Tensor | tuple[Tensor, ...]


def inside_attention(
    model: Any, index: int, attn: nn.Module, args: Positional, kwargs: Arguments, output: Output
) -> Output | None:
    """A forward hook: add the adapters' heads to the output of attention layer `index` of the host."""
    step = _step(model)
    if step is not None:
        step.visited.add(index)
        if not (step.actions or step.details):
            return None
    processor = model.processors.get(index)
    if processor is not None and getattr(attn, "processor", None) is processor:
        return None  # the processor of `use_core` adds them
    x = args[0] if args else kwargs["hidden_states"]
    projected = None if step is None else step.details.get("queries", {}).pop(index, None)
    added = added_heads(model, index, attn, x, query_heads(attn, x, kwargs.get("temb"), projected))
    if added is None:
        return None
    part = 0 if isinstance(output, Tensor) else model.picture_part(index)
    picture, (heads, factor) = output if isinstance(output, Tensor) else output[part], added
    return add_to_picture(output, part, *into_output(attn, heads, factor, picture))


def note_queries(model: Any, index: int, part: nn.Module, args: Positional, output: Tensor) -> None:
    """A forward hook of a projection of queries: note them, and that its attention layer runs."""
    step = getattr(THREAD, "step", None)
    if step is not None and step.model is model and step.actions:
        queries = step.details.setdefault("queries", {})
        queries[index] = None if index in queries else (part, output)


def after_block(model: Any, index: int, part: int, block: nn.Module, args: Positional, output: Output) -> Output:
    """A forward hook: add the heads in a block's attention to the picture, output `part` of the block."""
    step = step_of(model)
    added = None if step is None or step.details is None else step.details.pop(index, None)
    for heads, factor in added or ():
        output = add_to_picture(output, part, heads, factor)
    return output


def _step(model: Any) -> ForwardStep | None:
    """Return the forward of this model that is under way."""
    step = getattr(THREAD, "step", None)
    return step if step is None or step.model is model else step_of(model)


def added_heads(model: Any, index: int, attn: nn.Module, x: Tensor, q: Tensor) -> tuple[Tensor, float] | None:
    """Return what the adapters add to the heads of a layer, (rows, l, h · k) and its factor, or None.

    Args:
        model: the diffusion model.
        index: number of the layer.
        attn: the layer.
        x: its inputs.
        q: its queries (rows, h, l, k).
    """
    total, factor, step = None, 1.0, _step(model)
    if step is None or "readings" in step.details:
        actions = model.actions_of_attention(step, index, q)
    else:
        actions = step.actions.get((index, "inside"), [])
    for view, block, (reading, scale) in actions:
        queries = projections(attn, x) if getattr(block, "reads_projections", False) else q
        heads = _heads_of_parts(view, block, index, reading, scale, queries)
        if heads is None:
            continue
        if isinstance(scale, Tensor):
            scale = 1.0  # in the heads
        if reading.to_block:
            if step is None:
                raise ConditionError("an adapter that adds to whole blocks needs the call of the whole host")
            step.details.setdefault(index, []).append((heads, scale))
        elif total is None:
            total, factor = heads, scale
        else:
            total, factor = torch.add(total if factor == 1 else total * factor, heads, alpha=scale), 1.0
    return None if total is None else (total, factor)


def _heads_of_parts(
    view: View, block: nn.Module, index: int, reading: Reading, scale: float | Tensor, queries: Tensor
) -> Tensor | None:
    """Return the heads (rows, l, h · k) of one adapter, times a scale that is a tensor; 0 where rows see no memory."""
    conditional, rows = reading.conditional, reading.rows
    if rows is not None and len(conditional) > 1 and queries.shape[0] * len(conditional) == rows:
        conditional, rows = conditional[-1:], queries.shape[0]  # FasterCache computes the last part alone
    repeats = 1 if rows is None else queries.shape[0] // rows
    if repeats > 1 and isinstance(scale, Tensor):
        scale = scale.repeat_interleave(repeats, 0)
    parts: list[Tensor | None] = []
    like: Tensor | None = None
    for sees_memory, q in zip(conditional, queries.chunk(len(conditional)), strict=True):
        factor = over_queries(scale, reading.grid, q) if sees_memory and isinstance(scale, Tensor) else 1.0
        parts.append(view.apply(q, block, index, factor) if sees_memory else None)
        like = parts[-1] if like is None else like
    if like is None:
        return None
    heads: Tensor = (
        torch.cat([torch.zeros_like(like) if part is None else part for part in parts]) if parts[1:] else like
    )
    return heads.transpose(1, 2).flatten(2)


def add_to_picture(output: Output, part: int, change: Tensor, factor: float) -> Output:
    """Add a change times a factor to an output, of several to that of number `part`."""
    if isinstance(output, Tensor):
        return torch.add(output, change, alpha=factor)
    return (*output[:part], torch.add(output[part], change, alpha=factor), *output[part + 1 :])
