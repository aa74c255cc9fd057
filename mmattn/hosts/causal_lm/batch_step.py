"""What the requests of one step of continuous batching see: one packed row, in which some write and some are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from mmattn.adapters.joined.joint_softmax import JoinedMemory, JoinedRequests, JoinedRequestsView
from mmattn.adapters.joined.rows import JoinedProjectedMemory, JoinedRowsView, JoinedSteps
from mmattn.adapters.packed_text import PackedText
from mmattn.adapters.prepared_memory import ProjectedMemory, ProjectedView
from mmattn.adapters.protocols import View
from mmattn.adapters.text_state import TextState
from mmattn.core.kv_cache import KeyValue
from mmattn.core.per_row_attention import KeyValueRows
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.packing import PackedView

Join = Callable[[tuple[str, int], list[KeyValue]], "KeyValue | KeyValueRows"]
Keep = Callable[[Tensor, Tensor], Tensor]


class RequestsView:
    """What the requests of one step see, in groups of one length: nothing is computed on padding.

    Args:
        views: of each group.
        keep: of hidden states and what they become, those that are finite.
    """

    def __init__(self, views: Sequence[PackedView], keep: Keep) -> None:
        self.views, self._keep = views, keep

    def apply(self, x: Tensor, block: nn.Module, layer: int, adapter_scale: Any) -> Tensor:
        """What x (b, l, d) becomes at a site."""
        out = x
        for view in self.views:
            out = view.apply(out, block, layer, adapter_scale)
        return self._keep(x, out)


def packed_view(view: View, text: PackedText) -> View:
    """What the documents of packed rows see, of what they would as rows; requests are packed already.

    Args:
        view: of the documents as rows.
        text: where they lie.
    """
    if isinstance(view, JoinedRowsView):
        return view if view.is_packed else view.pack(text)
    return view if isinstance(view, (RequestsView, JoinedRequestsView)) else PackedView(view, text)


def step_memories(
    name: str, sources: Sequence[ProjectedMemory | JoinedMemory | None], join: Join, keep: Keep
) -> StepMemories | JoinedRequests | JoinedSteps:
    """The memories of the requests of one step for one adapter; the arguments are those of `StepMemories`."""
    projected = [one for one in sources if not isinstance(one, JoinedMemory)]
    joined = [one for one in sources if isinstance(one, JoinedProjectedMemory)]
    if joined:
        return JoinedSteps([one if isinstance(one, JoinedProjectedMemory) else None for one in sources], name)
    if len(projected) == len(sources):
        return StepMemories(name, projected, join, keep)
    return JoinedRequests([one.slots if isinstance(one, JoinedMemory) else None for one in sources], name)


class StepMemories:
    """The memories of the requests of one step for one adapter.

    Args:
        name: of the adapter.
        sources: of each request; None where it has none.
        join: puts keys and values of one layer together, by the adapter's name and the layer.
        keep: as in `RequestsView`.
    """

    follows_text = False

    def __init__(self, name: str, sources: Sequence[ProjectedMemory | None], join: Join, keep: Keep) -> None:
        self.name, self.sources, self._join, self._keep = name, sources, join, keep
        self.rows: int | None = len(sources)

    def step(self, text: TextState) -> RequestsView:
        """What this forward sees: each request its own memory; one without any passes through.

        Raises:
            ShapeError: the text is not that of the requests.
        """
        text.check_rows(self.rows, self.name)
        packed = text.packed
        assert packed is not None, "transformers says where the requests of a step begin"
        sees = [number for number, source in enumerate(self.sources) if source is not None and sees_any(source)]
        lengths = packed.real.sum(1).tolist()
        # Requests that write have one token each; a prompt is as long as it is.
        writing = [number for number in sees if lengths[number] == 1]
        groups = [[number] for number in sees if lengths[number] > 1] + ([writing] if writing else [])
        return RequestsView([PackedView(self._view(group, text), packed.select(group)) for group in groups], self._keep)

    def _view(self, group: Sequence[int], text: TextState) -> ProjectedView:
        sources = [source for source in (self.sources[number] for number in group) if source is not None]
        adapter = sources[0].adapter
        layers = adapter.layers if text.layer is None else (text.layer,)
        projected: dict[int, Any] = {}
        for layer in layers:
            parts = [source.prepared.project(adapter, layer, source.prepared.read(adapter), 1) for source in sources]
            projected[layer] = parts[0] if len(parts) == 1 else self._join((self.name, layer), parts)
        return ProjectedView(projected, None, None)

    def as_memory(self, text: TextState) -> Any:
        """There is no one memory of several requests."""
        raise ConditionError("a step of continuous batching has several memories: examine one request with a call")


def sees_any(source: ProjectedMemory) -> bool:
    """Whether a request with this memory changes at all."""
    layout = getattr(getattr(source.adapter, "config", None), "layout", None)
    if getattr(layout, "feed_forward_all", False):
        return True
    return bool(source.prepared.read(source.adapter).real_slots().any())
