"""One call of a diffusion model with memories: what its steps share, and the hook inside its attention layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmattn.core.tensor_cache import TensorCache
from mmattn.hosts.context import FORWARD, Call, step_of
from mmattn.hosts.diffusion.heads import into_output, projections, query_heads
from mmattn.hosts.diffusion.scale import Grid, over_queries

#: Texts that a block remembers: guidance that calls a host for each half alone gives it two in turn.
TEXTS = 4


@dataclass
class DenoisingCall(Call):
    """What the forwards of one block share: memories with a scale each, and the text's keys and values.

    Args:
        scales: as in `mmattn.hosts.diffusion.scale`.
        guided: a pipeline computes guidance: unconditional rows and calls see no memory.
        parts: which parts of the rows are conditional, where the caller has made them itself.
        negative_prompt_embeds: (b, m, e), the text of unconditional rows, where the caller declares it.
        text_mask: (rows, m) bool, the padding of the host's own text.
        padding: the bias by which the host last told of padding in its text, and the mask that it means.
        text: keys and values of the host's own text, where it goes through the core.
        texts: the host's own texts as its layers were given them, those of the last calls.
    """

    guided: bool = False
    parts: tuple[bool, ...] = ()
    negative_prompt_embeds: Tensor | None = None
    text_mask: Tensor | None = None
    padding: tuple[Tensor, Tensor] | None = None
    text: TensorCache = field(default_factory=TensorCache)
    texts: list[Tensor] = field(default_factory=list)

    def number_of_text(self, text: Tensor) -> int:
        """A number for the text that a layer is given, the same at every step.

        Transformers project their text anew at every step (`caption_projection`), to the same values.
        """
        for number, known in enumerate(self.texts):
            if known is text or (known.shape == text.shape and known.dtype == text.dtype and torch.equal(known, text)):
                return number
        if len(self.texts) == TEXTS:
            self.texts.clear()
        self.texts.append(text)
        return len(self.texts) - 1


@dataclass(frozen=True)
class RowsAndScale:
    """What multiplies the result of an adapter in one layer at one step, and for which rows.

    Args:
        sees: for each of the equal parts of the rows of the sample, whether it sees the memory.
        scale: a number, (b,), (b, height, width) or (b, frames, height, width).
        grid: frames, height and width of the picture as the host's first layer has it; None where it is not known.
        to_block: it is added to what the block hands on, not to the output of its attention.
        rows: of the sample; layers of films have a row for each frame of it, or for each pixel, those of one row of the
            sample one after the other. None where only a part of the host was called.
    """

    sees: tuple[bool, ...]
    scale: float | Tensor
    grid: Grid | None
    to_block: bool = False
    rows: int | None = None


def added_heads(model: Any, index: int, attn: Any, x: Tensor, q: Tensor) -> Tensor | None:
    """What the adapters add to the heads (rows, l, h · k) of attention layer `index`, or None where nothing.

    What is for the block around it waits for `AfterBlock`.

    Args:
        model: the adapted model.
        index: number of the attention layer.
        attn: the layer.
        x: what it is given.
        q: (rows, h, l, k), the host's queries.
    """
    step = FORWARD.get()
    if step is not None and step.model is not model:
        step = step_of(model)
    if step is None:
        actions = model.actions_of_attention(q, index)
    else:
        actions = step.actions.get((index, "inside"), ())
    total = None
    for view, block, part in actions:
        seeing = projections(attn, x) if getattr(block, "reads_projections", False) else q
        sees, rows, scale = part.sees, part.rows, part.scale
        if rows is not None and len(sees) > 1 and q.shape[0] * len(sees) == rows:
            sees, rows = sees[-1:], q.shape[0]  # FasterCache hands on the last part alone
        repeats = 1 if rows is None else q.shape[0] // rows
        if repeats > 1 and isinstance(scale, Tensor):
            scale = scale.repeat_interleave(repeats, 0)
        found = [
            view.apply(rows_of, block, index, over_queries(scale, part.grid, rows_of)) if one else None
            for one, rows_of in zip(sees, seeing.chunk(len(sees)), strict=True)
        ]
        some = next((one for one in found if one is not None), None)
        if some is None:
            continue
        heads = (
            some if len(found) == 1 else torch.cat([torch.zeros_like(some) if one is None else one for one in found])
        )
        if part.to_block:
            assert step is not None  # or `actions_of_attention` has refused it
            waiting = step.details.setdefault(index, [])
            waiting.append(heads.transpose(1, 2).flatten(2))
            continue
        total = heads if total is None else total + heads
    return None if total is None else total.transpose(1, 2).flatten(2)


class InsideAttention:
    """A forward hook: adds what the adapters attend to to the output of one attention layer of the host.

    Args:
        model: the adapted model.
        index: number of the attention layer.
    """

    def __init__(self, model: Any, index: int) -> None:
        self.model, self.index = model, index

    def __call__(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        step = FORWARD.get()
        if step is not None and step.model is not self.model:
            step = step_of(self.model)
        if step is not None:
            step.visited.add(self.index)
            if not step.actions:
                return None
        own = self.model.own.get(self.index)
        if own is not None and attn.processor is own:
            return None  # it has asked by itself
        x = args[0] if args else kwargs["hidden_states"]
        heads = added_heads(self.model, self.index, attn, x, query_heads(attn, x, kwargs.get("temb")))
        if heads is None:
            return None
        if isinstance(output, Tensor):
            return output + into_output(attn, heads, output)
        part = self.model.picture_part(self.index)
        changed = output[part] + into_output(attn, heads, output[part])
        return (*output[:part], changed, *output[part + 1 :])


class WatchLayer:
    """A forward pre-hook of a part of an attention layer: notes that the layer runs, whoever calls it.

    Args:
        model: the adapted model.
        index: number of the attention layer.
    """

    def __init__(self, model: Any, index: int) -> None:
        self.model, self.index = model, index

    def __call__(self, part: Any, args: tuple[Any, ...]) -> None:
        step = FORWARD.get()
        if step is not None and step.model is self.model and step.details is not None:
            step.details.setdefault("ran", set()).add(self.index)


class AfterBlock:
    """A forward hook: adds what the queries of a block's attention have found to the hidden states that it hands on.

    Args:
        model: the adapted model.
        index: number of the attention layer.
        part: which of the outputs of the block is the picture's; None where it has one output.
    """

    def __init__(self, model: Any, index: int, part: int | None) -> None:
        self.model, self.index, self.part = model, index, part

    def __call__(self, block: Any, args: tuple[Any, ...], output: Any) -> Any:
        step = step_of(self.model)
        waiting = None if step is None or step.details is None else step.details.pop(self.index, None)
        if waiting is None:
            return None
        if self.part is None:
            return output + sum(waiting)
        return (*output[: self.part], output[self.part] + sum(waiting), *output[self.part + 1 :])
