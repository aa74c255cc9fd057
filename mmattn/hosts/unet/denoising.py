"""One call of a UNet with memories: what its steps share, and the hooks that see to it that memory arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmattn.core.tensor_cache import TensorCache
from mmattn.errors import ShapeError
from mmattn.hosts.calls import FORWARD, Call
from mmattn.hosts.unet.adapter_scale import AdapterScale, over_queries
from mmattn.hosts.unet.attention_layers import query_heads


@dataclass
class DenoisingCall(Call):
    """What the forwards of one block share: memories with a scale each, and the text's keys and values.

    Args:
        scales: by adapter, what multiplies its result.
        guided: the host may be given twice the rows of the memory; the first half then sees none.
        text_mask: (rows, m) bool, the padding of the host's own text.
        padding: the bias by which the host last told of padding in its text, and the mask that it means.
        text: keys and values of the host's own text, where it goes through the core.
    """

    scales: Mapping[str, AdapterScale] = field(default_factory=dict)
    guided: bool = False
    text_mask: Tensor | None = None
    padding: tuple[Tensor, Tensor] | None = None
    text: TensorCache = field(default_factory=TensorCache)


@dataclass(frozen=True)
class RowsAndScale:
    """What multiplies the result of an adapter in one layer at one step, and for which rows.

    Args:
        first: rows before those that see the memory.
        scale: a number, (b,) or (b, height, width).
        size: height and width of the picture at the host's edge.
    """

    first: int
    scale: float | Tensor
    size: tuple[int, int]


def added_heads(model: Any, index: int, q: Tensor) -> Tensor | None:
    """What the adapters add to the heads (rows, l, h · k) of attention layer `index`, or None where nothing.

    Args:
        model: the adapted UNet.
        index: number of the attention layer.
        q: (rows, h, l, k), the host's queries.
    """
    step = FORWARD.get()
    if step is None or step.model is not model:
        actions = model.actions_of_attention(q, index)
    else:
        actions = step.actions.get((index, "inside"), ())
    total = None
    for view, block, part in actions:
        seeing = q[part.first :] if part.first else q
        heads = view.apply(seeing, block, index, over_queries(part.scale, part.size, seeing))
        if part.first:
            heads = F.pad(heads, (0, 0, 0, 0, 0, 0, part.first, 0))
        total = heads if total is None else total + heads
    return None if total is None else total.transpose(1, 2).flatten(2)


class InsideAttention:
    """A forward hook: adds what the adapters attend to to the output of one cross-attention layer of the host.

    Args:
        model: the adapted UNet.
        index: number of the attention layer.
    """

    def __init__(self, model: Any, index: int) -> None:
        self.model, self.index = model, index

    def __call__(self, attn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        step = FORWARD.get()
        if step is not None and step.model is self.model:
            step.visited.add(self.index)
            if not step.actions:
                return None
        if attn.processor is self.model.own[self.index]:
            return None  # it has asked by itself
        x = args[0] if args else kwargs["hidden_states"]
        heads = added_heads(self.model, self.index, query_heads(attn, x, kwargs.get("temb")))
        if heads is None:
            return None
        projection = attn.to_out[0]
        if type(projection) is nn.Linear and not projection.weight.is_meta:
            out = F.linear(heads, projection.weight)
        else:
            # LoRA may add biases of its own, and offloaded weights have values only inside the layer's forward.
            out = projection(heads) - projection(torch.zeros_like(heads[:1, :1]))
        out = attn.to_out[1](out)
        if output.dim() == 4:
            out = out.transpose(1, 2).reshape(output.shape)
        return output + out / attn.rescale_output_factor


def rows_before(rows: int, guided: bool, name: str, memory_rows: int | None) -> int:
    """How many rows of the sample come before those that see the memory: 0, or half of them under guidance.

    Args:
        rows: of the sample.
        guided: the first half may see no memory.
        name: of the adapter.
        memory_rows: rows of its memory; None fits any sample.

    Raises:
        ShapeError: the sample has other rows.
    """
    if memory_rows is None or rows == memory_rows:
        return 0
    if guided and rows == 2 * memory_rows:
        return memory_rows
    if memory_rows == 1:
        hint = f"; to share one memory between all rows say memory.expand({rows})"
    elif rows == 2 * memory_rows and not guided:
        hint = "; if the first half of them is the unconditional half of guidance, say guided=True"
    else:
        hint = ""
    raise ShapeError(
        f"the sample has {rows} rows and the memory of adapter {name!r} has {memory_rows}: give one row of memory for "
        f"each row of the sample{hint}"
    )
