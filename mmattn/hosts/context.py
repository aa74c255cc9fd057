"""What belongs to one call of a host, and to one forward within it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from mmattn.adapters.prepared_memory import ProjectedMemory
from mmattn.adapters.protocols import MemorySource, View
from mmattn.adapters.text_state import Arrivals, GenerationInput
from mmattn.errors import ConfigError, check_float
from mmattn.hosts.generation_rows import RowsLeft
from mmattn.memory import Memory


@dataclass
class Call:
    """The memories of one call or block, by adapter.

    Args:
        sources: for each adapter that is given a memory, its source.
        scales: for each of these adapters, what multiplies its result; 1 where there is none.
        images: (b, l) images begun at or before each token, where the caller says so.
        arrivals: how many slots of the memory had arrived at each token, where the caller says so.
        prompt: ids (b, l) or embeddings (b, l, d) that `generate` was called with.
        expansions: inside `generate`, how many rows of text a row of the prompt may become.
        rows: inside `generate`, how many rows its first pass over the prompt had.
        rows_left: inside a `generate` that goes on with some rows only, which.
        early_exit: inside a `generate` whose drafts leave out the last layers.
        reads_memory: it is no call of the caller's: a memory is read by the host itself.
    """

    sources: Mapping[str, MemorySource]
    scales: Mapping[str, Any] = field(default_factory=dict)
    images: Tensor | None = None
    arrivals: Arrivals | None = None
    prompt: Tensor | None = None
    expansions: Collection[int] = ()
    rows: int | None = None
    rows_left: RowsLeft | None = None
    early_exit: bool = False
    reads_memory: bool = False

    def prepare_graphs(self) -> None:
        """Compute what a compiled host is to be given, outside of its graph."""
        for source in self.sources.values():
            if isinstance(source, ProjectedMemory):
                source.prepare_graph()

    def check_graphs(self) -> None:
        """Refuse answers of a compiled host that missed a change.

        Raises:
            ConditionError: weights or a memory were changed since the call was begun.
        """
        for source in self.sources.values():
            if isinstance(source, ProjectedMemory):
                source.check_graph()


@contextlib.contextmanager
def prepared_for_graphs(call: Call | None) -> Iterator[None]:
    """A block inside of which a compiled host may be called, with what its graph is to be given.

    Raises:
        ConditionError: weights or a memory were changed inside, and a graph missed it.
    """
    if call is not None:
        call.prepare_graphs()
    yield
    if call is not None:
        call.check_graphs()


def scale_by_adapter(adapter_scale: float | Mapping[str, float], names: Collection[str]) -> dict[str, float]:
    """What multiplies the result of each adapter of a call.

    Args:
        adapter_scale: one for all, or one by adapter name.
        names: of the adapters that are given a memory.

    Raises:
        ConfigError: no finite number, or names that are not exactly these.
    """
    if not isinstance(adapter_scale, Mapping):
        return dict.fromkeys(names, check_float("adapter_scale", adapter_scale))
    if set(adapter_scale) != set(names):
        raise ConfigError(
            f"adapter_scale by name must name the adapters that are given a memory, {sorted(names)}, and names "
            f"{list(adapter_scale)}"
        )
    return {name: check_float(f"adapter_scale[{name!r}]", one) for name, one in adapter_scale.items()}


# What a hook does at a site: a view, the block that it applies, and what multiplies the result.
Action = tuple[View, nn.Module, Any]


@dataclass
class ForwardStep:
    """One forward of a host: what its adapters do at each site.

    Args:
        model: the adapted model.
        module: the part of the host whose call began it: the host, or the model that peft has wrapped.
        outer: the forward, of this or another host, inside of which this one runs.
        actions: by number of the layer and position.
        details: what a kind of host keeps besides.
        call: what this forward sees.
        visited: the layers whose hooks have run.
        nested: calls of other parts of the host that are within this one, and belong to it.
    """

    model: Any
    module: nn.Module
    outer: ForwardStep | None
    actions: Mapping[tuple[int, str], list[Action]]
    details: Any = None
    call: Call | None = None
    visited: set[int] = field(default_factory=set)
    nested: int = 0


FORWARD: ContextVar[ForwardStep | None] = ContextVar("mmattn_forward", default=None)


# What `generate` has prepared for the next forward of this thread, and of which call.
NOTED: ContextVar[tuple[Call, GenerationInput] | None] = ContextVar("mmattn_noted", default=None)


def step_of(model: Any) -> ForwardStep | None:
    """The forward of a model's host that is under way; those of hosts that are parts of it may run inside.

    Args:
        model: the adapted model.
    """
    step = FORWARD.get()
    while step is not None and step.model is not model:
        step = step.outer
    return step


def is_reading_memory() -> bool:
    """Whether the forward under way is one in which a host reads a memory, not one of a text."""
    step = FORWARD.get()
    while step is not None and (step.call is None or not step.call.reads_memory):
        step = step.outer
    return step is not None


def unchecked_memories(call: Call) -> list[Memory]:
    """Memories of a call whose values need not be finite, as their caller said.

    Args:
        call: what a forward sees.
    """
    given = (getattr(source, "neighbours", source) for source in call.sources.values())
    memories = (getattr(getattr(one, "prepared", None), "memory", None) for one in given)
    return [one for one in memories if isinstance(one, Memory) and not one.finite_checked]


def is_broken(memory: Memory, row: int, rows: int) -> bool:
    """Whether the memory of a row of text is not finite.

    Args:
        memory: of the call.
        row: of the text.
        rows: of the text, those of the memory or a multiple of them (beams).
    """
    own = memory[row // max(rows // max(memory.batch, 1), 1)]
    real = own.real_slots()
    sound = bool(own.tokens[real].isfinite().all())
    return not (sound and (own.scores is None or bool(own.scores[real].isfinite().all())))
