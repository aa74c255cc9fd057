"""Keys and values as inputs of a compiled host: computed before its graph runs, which then projects nothing.

A graph cannot see whether a tensor was edited since, so they are given to it only by a call that was begun outside of
it (`condition`, `generate`), and that call looks at its end whether they still hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mmattn.core.kv_cache import KeyValue
from mmattn.memory import Memory


@dataclass(frozen=True)
class GraphInputs:
    """What one adapter reads of a memory, as tensors from which a graph depends on no size.

    Args:
        memory: as the adapter reads it.
        tensors: by host layer keys, values, mask and bias.
        null: a learned first slot is in front of every row.
        finite: as in `KeyValue`.
    """

    memory: Memory
    tensors: Mapping[int, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    null: bool
    finite: bool

    @staticmethod
    def of(memory: Memory, projected: Mapping[int, KeyValue]) -> GraphInputs | None:
        """Those of keys and values by host layer; None of a layout whose lengths a graph would depend on."""
        if any(one.lengths is not None or one.absorbed for one in projected.values()):
            return None
        tensors = {layer: (one.keys, one.values, one.mask, one.bias) for layer, one in projected.items()}
        first = next(iter(projected.values()))
        return GraphInputs(memory, tensors, first.null, all(one.finite for one in projected.values()))

    def project(self, layers: Iterable[int]) -> dict[int, KeyValue]:
        """Keys and values of some layers, put together inside the graph."""
        return {layer: KeyValue(*self.tensors[layer], null=self.null, finite=self.finite) for layer in layers}
