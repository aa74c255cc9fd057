"""One call of a diffusion model with memories, and the hooks in its attention layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ShapeError
from mmattn.hosts.context import FORWARD, Action, Call, ForwardStep, step_of
from mmattn.hosts.diffusion.heads import into_output, projections, query_heads
from mmattn.hosts.diffusion.scale import Grid, over_queries

#: Texts that a block remembers: guidance that calls a host for each half alone gives it two in turn.
TEXTS = 4


@dataclass
class DenoisingCall(Call):
    """State shared by the forwards of one block: memories with their scales, and K/V of the text.

    Args:
        scales: as in `mmattn.hosts.diffusion.scale`.
        guided: a pipeline computes guidance: unconditional rows and calls see no memory.
        parts: which parts of the rows are conditional, where the caller has made them itself.
        negative_prompt_embeds: (b, m, e), the text of unconditional rows, where the caller declares it.
        text_mask: (rows, m) bool, the padding of the host's own text.
        padding: the last bias for padding of the host's text, and its mask.
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

    def text_mask_of(self, text: Tensor) -> Tensor | None:
        """Return `text_mask` on the device of a text (b, m, e)."""
        if self.text_mask is None:
            return None
        if self.text_mask.shape != text.shape[:2]:
            shapes = f"(b, m) = {tuple(text.shape[:2])}, got {tuple(self.text_mask.shape)}"
            raise ShapeError(f"text_mask must be {shapes}")
        return self.text_mask.to(text.device)

    def number_of_text(self, text: Tensor) -> int:
        """Return a number for the text of a layer, the same at every step.

        Transformers project their text anew at every step (`caption_projection`), to the same values.
        """
        for number, other in enumerate(self.texts):
            if other is text or (other.shape == text.shape and other.dtype == text.dtype and torch.equal(other, text)):
                return number
        if len(self.texts) == TEXTS:
            self.texts.clear()
        self.texts.append(text)
        return len(self.texts) - 1


@dataclass(frozen=True)
class RowsAndScale:
    """Rows and scale of the result of an adapter in one layer at one step.

    Args:
        sees: for each of the equal parts of the rows of the sample, True if it sees the memory.
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


class Denoiser(Protocol):
    """An adapted diffusion model, as hooks and processors of its layers use it."""

    layer_names: tuple[str, ...]
    processors: dict[int, Any]

    def actions_of_attention(self, q: Tensor, index: int) -> Sequence[Action]:
        """Return the actions in a layer where only a part of the host was called."""

    def denoising_call(self) -> DenoisingCall | None:
        """Return the call under way."""

    def picture_part(self, index: int) -> int:
        """Return the index of the picture among the outputs of a layer."""


def added_heads(model: Denoiser, index: int, attn: nn.Module, x: Tensor, q: Tensor) -> Tensor | None:
    """Return what adapters add to the heads (rows, l, h · k) of attention layer `index`; None for nothing.

    Heads for the block around the layer wait for `AfterBlock`. `x` are the inputs of the layer, `q` (rows, h, l, k) its
    queries.
    """
    step = _step(model)
    actions = model.actions_of_attention(q, index) if step is None else step.actions.get((index, "inside"), ())
    total = None
    for view, block, part in actions:
        queries = projections(attn, x) if getattr(block, "reads_projections", False) else q
        heads = _heads_of_parts(view, block, index, part, queries)
        if heads is not None and part.to_block:
            assert step is not None  # or `actions_of_attention` has raised
            step.details.setdefault(index, []).append(heads)
        elif heads is not None:
            total = heads if total is None else total + heads
    return total


def _heads_of_parts(view: Any, block: nn.Module, index: int, part: RowsAndScale, queries: Tensor) -> Tensor | None:
    """Return the heads (rows, l, h · k) of one adapter, 0 for parts of the rows that see no memory."""
    sees, rows, scale = part.sees, part.rows, part.scale
    if rows is not None and len(sees) > 1 and queries.shape[0] * len(sees) == rows:
        sees, rows = sees[-1:], queries.shape[0]  # FasterCache computes the last part alone
    repeats = 1 if rows is None else queries.shape[0] // rows
    if repeats > 1 and isinstance(scale, Tensor):
        scale = scale.repeat_interleave(repeats, 0)
    parts = [
        view.apply(q, block, index, over_queries(scale, part.grid, q)) if conditional else None
        for conditional, q in zip(sees, queries.chunk(len(sees)), strict=True)
    ]
    like = next((one for one in parts if one is not None), None)
    if like is None:
        return None
    heads: Tensor = torch.cat([torch.zeros_like(like) if one is None else one for one in parts]) if parts[1:] else like
    return heads.transpose(1, 2).flatten(2)


def _step(model: Denoiser) -> ForwardStep | None:
    """Return the forward of a model that is under way."""
    step = FORWARD.get()
    return step if step is None or step.model is model else step_of(model)


class InsideAttention:
    """A forward hook that adds the adapters' heads to the output of one attention layer of the host.

    Args:
        model: the adapted model.
        index: number of the attention layer.
    """

    def __init__(self, model: Denoiser, index: int) -> None:
        self.model, self.index = model, index

    def __call__(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        step = _step(self.model)
        if step is not None:
            step.visited.add(self.index)
            if not step.actions:
                return None
        processor = self.model.processors.get(self.index)
        if processor is not None and attn.processor is processor:
            return None  # the processor of `use_core` adds them
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
    """A forward pre-hook of a projection that notes that its attention layer runs, whatever calls it.

    Args:
        model: the adapted model.
        index: number of the attention layer.
    """

    def __init__(self, model: Denoiser, index: int) -> None:
        self.model, self.index = model, index

    def __call__(self, part: Any, args: tuple[Any, ...]) -> None:
        step = FORWARD.get()
        if step is not None and step.model is self.model and step.details is not None:
            step.details.setdefault("ran", set()).add(self.index)


class AfterBlock:
    """A forward hook that adds the adapters' heads in a block's attention to the output of the block.

    Args:
        model: the adapted model.
        index: number of the attention layer.
        part: index of the picture among the outputs of the block; None for a single output.
    """

    def __init__(self, model: Denoiser, index: int, part: int | None) -> None:
        self.model, self.index, self.part = model, index, part

    def __call__(self, block: Any, args: tuple[Any, ...], output: Any) -> Any:
        step = step_of(self.model)
        waiting = None if step is None or step.details is None else step.details.pop(self.index, None)
        if waiting is None:
            return None
        if self.part is None:
            return output + sum(waiting)
        return (*output[: self.part], output[self.part] + sum(waiting), *output[self.part + 1 :])
