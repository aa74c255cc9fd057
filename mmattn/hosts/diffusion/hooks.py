"""The hooks of a diffusion model: what adapters find is added inside its attention layers, or after their blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import View
from mmattn.errors import ConditionError
from mmattn.hosts.context import THREAD, Arguments, ForwardStep, Positional, step_of
from mmattn.hosts.diffusion.call import RowsAndScale
from mmattn.hosts.diffusion.heads import into_output, projections, query_heads
from mmattn.hosts.diffusion.scale import over_queries

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
    for view, block, part in actions:
        queries = projections(attn, x) if getattr(block, "reads_projections", False) else q
        heads = _heads_of_parts(view, block, index, part, queries)
        if heads is None:
            continue
        scale = 1.0 if isinstance(part.scale, Tensor) else part.scale
        if part.to_block:
            if step is None:
                raise ConditionError("an adapter that adds to whole blocks needs the call of the whole host")
            step.details.setdefault(index, []).append((heads, scale))
        elif total is None:
            total, factor = heads, scale
        else:
            total, factor = torch.add(total if factor == 1 else total * factor, heads, alpha=scale), 1.0
    return None if total is None else (total, factor)


def _heads_of_parts(view: View, block: nn.Module, index: int, part: RowsAndScale, queries: Tensor) -> Tensor | None:
    """Return the heads (rows, l, h · k) of one adapter, 0 for parts of the rows that see no memory.

    They are times the scale where that is a tensor.
    """
    conditional, rows, scale = part.conditional, part.rows, part.scale
    if rows is not None and len(conditional) > 1 and queries.shape[0] * len(conditional) == rows:
        conditional, rows = conditional[-1:], queries.shape[0]  # FasterCache computes the last part alone
    repeats = 1 if rows is None else queries.shape[0] // rows
    if repeats > 1 and isinstance(scale, Tensor):
        scale = scale.repeat_interleave(repeats, 0)
    parts: list[Tensor | None] = []
    like: Tensor | None = None
    for sees_memory, q in zip(conditional, queries.chunk(len(conditional)), strict=True):
        factor = over_queries(scale, part.grid, q) if sees_memory and isinstance(scale, Tensor) else 1.0
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
