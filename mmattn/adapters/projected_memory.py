"""A memory of vectors in one call: its keys and values by layer, and which slots each token attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmattn.adapters.prepared_memory import PreparedMemory, Reader
from mmattn.adapters.protocols import BoundMemory, JoinRequests, KeepFinite, PackedView, Scale, View, check_one_row
from mmattn.adapters.text_state import TextState
from mmattn.core.attention_inputs import combine_masks, visible_rows
from mmattn.core.key_value_projection import AttendableMemory
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConditionError
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorVersion


class ProjectedView(View):
    """A memory in one forward: its keys and values, and which slots each token attends to."""

    def __init__(
        self, projected: Mapping[int, KeyValue | AttendableMemory], attention_mask: Tensor | None, seen: Tensor | None
    ) -> None:
        self.projected, self.attention_mask, self.seen = projected, attention_mask, seen

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        return block(
            x,
            self.projected[layer],
            attention_mask=self.attention_mask,
            seen=self.seen,
            adapter_scale=adapter_scale,
        )

    def key_values(self) -> dict[int, KeyValue]:
        """Return keys and values by layer of a memory in one piece."""
        return {layer: one for layer, one in self.projected.items() if isinstance(one, KeyValue)}


class VectorMemory(BoundMemory):
    """A prepared memory bound to the adapter that reads it."""

    adapter: Reader

    def __init__(self, prepared: PreparedMemory, adapter: Reader) -> None:
        self.prepared, self.adapter = prepared, adapter
        self.name, self.shared = adapter.name, prepared
        self.rows = prepared.memory.tokens.shape[0]
        self.unchecked = None if prepared.memory.finite_checked else prepared.memory

    def as_memory(self, text: TextState) -> Memory:
        return self.prepared.memory.detach()

    def shareable(self) -> PreparedMemory:
        return self.prepared

    def sources(self) -> list[Tensor]:
        return self.prepared.memory.tensors()


class ProjectedMemory(VectorMemory):
    """A prepared memory whose keys and values are projected for each layer."""

    def __init__(self, prepared: PreparedMemory, adapter: Reader, view: type[ProjectedView] = ProjectedView) -> None:
        super().__init__(prepared, adapter)
        self.view = view
        self.follows_text = adapter.follows_text
        self._graph: GraphInputs | None = None
        self._graph_version: TensorVersion | None = None
        self._read_by_graph = False

    def step(self, text: TextState) -> ProjectedView:
        """Return what this forward attends to; the same object until a tensor that it depends on changes."""
        if text.rows != self.rows:
            self.check_rows(text)
        prepared, adapter = self.prepared, self.adapter
        if self.follows_text or text.layer is not None:
            return self.see(text)
        if (torch.is_grad_enabled() or torch.compiler.is_compiling()) and prepared.is_uncached(adapter):
            return self.see(text)
        return prepared.cache.get(adapter, ("view", text.rows), lambda: self.see(text))

    def see(self, text: TextState) -> ProjectedView:
        prepared, adapter = self.prepared, self.adapter
        layers = adapter.layers if text.layer is None else (text.layer,)
        graph = self._graph if torch.compiler.is_compiling() and not self._may_not_cache() else None
        memory = prepared.read(adapter) if graph is None else graph.memory
        rule = adapter.visible_slots(text, memory)
        arrived = text.arrived_slots(memory.length)
        if arrived is not None:
            arrived = arrived.to(memory.device)
            rule = arrived if rule is None else rule & arrived
        sizes = (text.rows, memory.batch, 1, text.length, memory.length)
        allowed = combine_masks(memory.mask, rule, sizes)
        seen = None
        if not adapter.changes_all:
            seen = visible_rows(allowed, text.rows, memory.length, device=memory.device)
        if graph is not None:
            self._read_by_graph = True
            projected = graph.project(layers)
        else:
            queries = text.rows // max(memory.batch, 1) * text.length
            projected = prepared.project(adapter, layers, memory, queries)
        return self.view(projected, rule, seen)

    def hide_arrivals(self) -> None:
        if self.adapter.resampler is not None:
            super().hide_arrivals()
        self.follows_text = True

    # Continuous batching ---------------------------------------------------------------------------------------------

    def for_request(self) -> BoundMemory:
        if self.follows_text:
            super().for_request()
        check_one_row(self)
        return self

    def together(self, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> BoundMemory:
        return RequestMemories(self.name, requests, join, keep)

    def projected(self) -> list[Tensor]:
        return [tensor for one in self.project_all().values() for tensor in one.unchecked()]

    def project_all(self) -> dict[int, KeyValue]:
        """Return keys and values by host layer for tokens that are written one by one."""
        with torch.no_grad():
            memory = self.prepared.read(self.adapter)
            return self.prepared.project(self.adapter, self.adapter.layers, memory, 1)

    @property
    def changes_request(self) -> bool:
        """Return whether a request with this memory changes at all."""
        return self.adapter.changes_all or bool(self.prepared.read(self.adapter).real_slots().any())

    # Compiled hosts --------------------------------------------------------------------------------------------------

    def prepare_graph(self) -> None:
        if torch.compiler.is_compiling() or self._may_not_cache():
            return
        self.check_graph()
        self._graph = GraphInputs.of(self.prepared.read(self.adapter), self.project_all())
        self._graph_version = TensorVersion(self._graph_sources())

    def check_graph(self) -> None:
        """Refuse results of a compiled host for which the weights or the memory were edited too late."""
        version = self._graph_version
        if self._read_by_graph and version is not None and not version.holds(self._graph_sources()):
            raise ConditionError(
                f"weights or memory of adapter {self.name!r} were changed inside a condition block, which a compiled "
                "host cannot notice: begin a new block after each change"
            )

    def _may_not_cache(self) -> bool:
        return torch.is_grad_enabled() or torch.is_autocast_enabled(self.adapter.weight.device.type)

    def _graph_sources(self) -> list[Tensor]:
        projecting = [
            weight
            for layer in self.adapter.layers
            for weight in self.adapter.kv_projection(layer).projecting_parameters()
        ]
        return [*self.sources(), *self.adapter.reading_parameters(), *projecting]


@dataclass(frozen=True)
class GraphInputs:
    """Keys and values as inputs of a compiled host, computed before its graph runs, which then projects nothing.

    A graph cannot notice an edit of a tensor, so it is given them only by a call that was begun outside of it
    (`condition`, `generate`), and that call checks at its end that they still hold.
    """

    memory: Memory  # as the adapter reads it
    # by host layer keys, values, mask and bias
    tensors: Mapping[int, tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    null: bool  # a learned first slot is in front of every row
    finite: bool  # as in `KeyValue`

    @staticmethod
    def of(memory: Memory, projected: Mapping[int, KeyValue]) -> GraphInputs | None:
        """Return the inputs; None for a layout whose lengths a graph would depend on."""
        if any(one.lengths is not None for one in projected.values()):
            return None
        tensors = {layer: (one.keys, one.values, one.mask, one.bias) for layer, one in projected.items()}
        first = next(iter(projected.values()))
        return GraphInputs(memory, tensors, first.null, all(one.finite for one in projected.values()))

    def project(self, layers: Sequence[int]) -> dict[int, KeyValue]:
        """Return keys and values of some layers, put together inside the graph."""
        return {layer: KeyValue(*self.tensors[layer], null=self.null, finite=self.finite) for layer in layers}


class RequestMemories(BoundMemory):
    """The memories of the requests in one step of continuous batching, which share one packed row, for one adapter."""

    def __init__(self, name: str, requests: Sequence[BoundMemory | None], join: JoinRequests, keep: KeepFinite) -> None:
        self.name, self._join, self._keep = name, join, keep
        self.requests = [one if isinstance(one, ProjectedMemory) else None for one in requests]
        self.rows = len(requests)

    def step(self, text: TextState) -> RequestsView:
        """Return what each request attends to; one without a memory passes through."""
        self.check_rows(text)
        packed = text.packed
        assert packed is not None, "transformers says where the requests of a step begin"
        changing = [number for number, one in enumerate(self.requests) if one is not None and one.changes_request]
        lengths = packed.real.sum(1).tolist()
        # Requests that write have one token each; a prompt is as long as it is.
        writing = [number for number in changing if lengths[number] == 1]
        groups = [[number] for number in changing if lengths[number] > 1] + ([writing] if writing else [])
        return RequestsView([PackedView(self._view(group), packed.select(group)) for group in groups], self._keep)

    def _view(self, group: Sequence[int]) -> ProjectedView:
        parts = [one.project_all() for one in (self.requests[number] for number in group) if one is not None]
        if len(parts) == 1:
            return ProjectedView(parts[0], None, None)
        return ProjectedView(
            {layer: self._join((self.name, layer), [one[layer] for one in parts]) for layer in parts[0]}, None, None
        )


class RequestsView(View):
    """The memories of requests in one step, in groups of one length: nothing is computed on padding."""

    is_packed = True

    def __init__(self, views: Sequence[PackedView], keep: KeepFinite) -> None:
        self.views, self._keep = views, keep

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Scale) -> Tensor:
        out = x
        for view in self.views:
            out = view.apply(out, block, layer, adapter_scale)
        return self._keep(x, out)
