"""Continuous batching: transformers schedules the requests, and each sees the memory that it was given.

All requests of a step share one packed row. Which they are, transformers' manager knows; here is what each may attend
to. Nothing of its scheduler or its paged cache is written again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from torch import Tensor

from mmattn.adapters.protocols import BoundMemory
from mmattn.core.kv_cache import KeyValue
from mmattn.core.split_attention import KeyValueRows
from mmattn.errors import ConditionError, NonFiniteError, ShapeError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.causal_lm.boundary import RequestBoundary
from mmattn.hosts.context import Call
from mmattn.hosts.replaced import replace_method

#: Memories of the prompts that `generate_batch` is about to hand to the manager, in their order.
_PENDING: ContextVar[Iterator[object] | None] = ContextVar("mmattn_pending", default=None)

#: Of every manager that runs requests with memories.
_MEMORIES: WeakSet[RequestMemories] = WeakSet()

#: Where requests that write attend one by one. Elsewhere that would be many small kernels, and their keys and values
#: are put together instead, a copy that is made anew whenever a request comes or goes.
ROW_BY_ROW = {"cpu"}


@dataclass
class Shared:
    """Memories of several requests for the same adapter.

    Args:
        given: by adapter, as it was given.
        prepared: by adapter, what computed keys and values are cached in.
        users: how many requests use it.
    """

    given: Mapping[str, object]
    prepared: Mapping[str, object]
    users: int = 0


@dataclass(eq=False)
class Held:
    """Memory of a request and its unfinished sequences, of which a fork has several.

    Args:
        shared: the memory; None is none.
        sources: the memory, bound to the adapters.
        names: of its answers, those that are still to be forked as well.
        running: the names of those that have been added or forked, and have not ended.
    """

    shared: Shared | None
    sources: Mapping[str, BoundMemory]
    names: tuple[str, ...]
    running: set[str] = field(default_factory=set)

    def __deepcopy__(self, memo: dict[int, object]) -> Held:
        return self  # transformers copies the state of a request for each further answer


class RequestMemories:
    """The memories of the requests of one manager; its `add_request` takes `memory=`."""

    def __init__(self, model: AdaptedModel, manager: Any) -> None:
        self.model, self.manager, self._lock = model, manager, threading.Lock()
        self._by_request: dict[str, Held] = {}
        self._by_memory: dict[tuple[tuple[str, int], ...], Shared] = {}
        self._joined: dict[tuple[str, int], tuple[list[KeyValue], KeyValue]] = {}
        self._releases = 0
        self.boundary = RequestBoundary()
        _MEMORIES.add(self)
        router, self._own = manager.output_router, {}
        for owner, names in (
            (manager, ("add_request", "add_requests", "cancel_request", "stop", "_create_batch_processor")),
            (router, ("deliver", "deliver_batch")),
        ):
            for name in names:
                self._own[name] = replace_method(owner, name, getattr(self, name))

    def __len__(self) -> int:
        """Requests with a memory that have not ended."""
        with self._lock:
            return len({held for held in self._by_request.values() if held.shared is not None})

    def nbytes(self) -> int:
        """Bytes of cached keys and values of all memories in use, those put together for the last step included."""
        with self._lock:
            held = list(self._by_request.values())
            joined = sum(one.nbytes() for _, one in self._joined.values())
        shared: dict[int, Any] = {id(source.shared): source.shared for one in held for source in one.sources.values()}
        return joined + sum(one.nbytes() for one in shared.values())

    # What the manager does -------------------------------------------------------------------------------------------

    def add_request(
        self, input_ids: list[int], request_id: str | None = None, *args: Any, memory: object = None, **kwargs: Any
    ) -> str | None:
        """Queue a request, with a memory of its own, one shared with others, or none."""
        pending = _PENDING.get()
        if memory is None and pending is not None:
            memory = next(pending)
        if memory is None:
            self.model.check_not_required()
        refused = memory if isinstance(memory, NonFiniteError) else None
        memory = None if refused is not None else memory
        if request_id is None:
            with self.manager._request_lock:
                request_id = self._next_names(1)[0]
                self.manager._request_counter += 1
        self._hold(request_id, memory)
        if refused is not None:
            self.boundary.refused[request_id] = str(refused)
        added = None
        try:
            added = self._own["add_request"](input_ids, request_id, *args, **kwargs)
        finally:
            if added is None:
                self._end(request_id)
        return request_id if added is not None else None

    def add_requests(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> list[str]:
        """Queue several requests under names that no running one has."""
        with self.manager._request_lock:
            self._next_names(len(inputs))
        added: list[str] = self._own["add_requests"](inputs, *args, **kwargs)
        return added

    def _next_names(self, count: int) -> list[str]:
        """The names that the manager makes up next; it goes past those that users have chosen for running requests."""
        manager = self.manager
        while True:
            first = manager._request_counter
            names = [f"req_{number}" for number in range(first, first + count)]
            if not any(name in self._by_request for name in names):
                return names
            manager._request_counter += 1

    def cancel_request(self, request_id: str) -> None:
        """Take a request back; what was computed for it alone is freed."""
        self._own["cancel_request"](request_id)
        self._end(request_id)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Stop the manager, and forget all memories once no request runs any more."""
        self._own["stop"](*args, **kwargs)
        if not self.manager.is_running():
            for request_id in list(self._by_request):
                self._end(request_id)

    def deliver(self, output: Any) -> None:
        """Hand out what a request has written; one that has ended needs its memory no more."""
        if output.is_finished():
            self._end(output.request_id)
        self._own["deliver"](output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        """The same for several."""
        for output in outputs:
            if output.is_finished():
                self._end(output.request_id)
        self._own["deliver_batch"](outputs)

    def _create_batch_processor(self) -> Any:
        """Processor of the steps; its cache, an argument of each forward, identifies it and records forks."""
        processor = self._own["_create_batch_processor"]()
        cache = processor.cache
        if getattr(cache, "memories", None) is None:
            name = "prepare_fork_request" if hasattr(cache, "prepare_fork_request") else "fork_request"
            self._own["fork"] = replace_method(cache, name, self._fork)
        cache.memories = self
        self.boundary.guard(processor)
        return processor

    def _fork(self, source: Any, names: list[str], *args: Any) -> Any:
        """Begin further answers to a prompt, which attend to what the first one does."""
        with self._lock:
            held = getattr(source, "held", None) or self._by_request.get(getattr(source, "request_id", source))
            if held is not None:
                held.running.update(names)
                self._by_request.update(dict.fromkeys(names, held))
        return self._own["fork"](source, names, *args)

    def _hold(self, request_id: str, memory: object) -> None:
        shared: Shared | None = None
        sources: Mapping[str, BoundMemory] = {}
        if memory is not None:
            given = dict(memory) if isinstance(memory, Mapping) else dict.fromkeys(self.model.active, memory)
            # What is held below keeps these numbers from being given to other objects.
            key = tuple((name, id(one)) for name, one in given.items())
            shared = self._by_memory.get(key) or Shared(given, prepared_by_name(self.model, memory))
            # Bound anew for each request: the memory may have been edited since.
            sources = bind_request(self.model, shared.prepared)
        count = self.manager.num_return_sequences
        names = (request_id, *(f"{request_id}__child#{number}" for number in range(count - 1)))
        with self._lock:
            running = set(self._by_request)
            if count > 1:  # those that transformers will fork are taken, too
                running.update(name for held in self._by_request.values() for name in held.names)
            if running.intersection(names):
                raise ConditionError(
                    f"the request {request_id!r} has not ended, and another was added under its name: choose another"
                )
            if shared is not None:
                shared = self._by_memory.setdefault(key, shared)
                shared.users += 1
            self._by_request[request_id] = Held(shared, sources, names, {request_id})

    def _end(self, request_id: str) -> None:
        """One answer of a request has ended; with the last one its memory is let go, if no other request has it."""
        with self._lock:
            held = self._by_request.pop(request_id, None)
            if held is None:
                return
            held.running.discard(request_id)
            if held.running or held.shared is None:
                return
            held.shared.users -= 1
            if not held.shared.users:
                self._by_memory = {key: one for key, one in self._by_memory.items() if one.users}
            self._joined.clear()
            self._releases += 1

    # What a step sees ------------------------------------------------------------------------------------------------

    def call(self) -> Call | None:
        """Return the memories of the requests in this step, or None if no request has one."""
        batches = self.manager.batch_processor.inputs_and_outputs
        if hasattr(batches, "io_pairs"):  # on a GPU the next batch is prepared while this one runs
            batches = batches.io_pairs[batches.current_pair].host_io
        with self._lock:
            states = [one.state for one in batches.requests_in_batch]
            for state in states:
                # Kept with the state: a request that is cancelled goes on until transformers takes it out.
                state.held = getattr(state, "held", None) or self._by_request.get(state.request_id)
            releases = self._releases
        given: list[Mapping[str, BoundMemory]] = [
            {} if state.held is None else self.boundary.admit(state.request_id, state.held.sources) for state in states
        ]

        def join(key: tuple[str, int], parts: list[KeyValue]) -> KeyValue | KeyValueRows:
            if parts[0].keys.device.type in ROW_BY_ROW:
                return KeyValueRows(tuple(parts))
            before, known = self._joined.get(key, ([], None))
            if known is not None and list(map(id, before)) == list(map(id, parts)):
                return known
            joined = KeyValue.gather([(part, 0) for part in parts])
            with self._lock:
                if releases == self._releases:  # else it holds what was let go meanwhile
                    self._joined[key] = parts, joined
            return joined

        by_name: dict[str, list[BoundMemory | None]] = {
            name: [one.get(name) for one in given] for name in sorted({name for one in given for name in one})
        }
        keep = self.boundary.keep
        together = {
            name: next(one for one in sources if one is not None).together(sources, join, keep)
            for name, sources in by_name.items()
        }
        return Call(together) if together else None


def take_memories(model: AdaptedModel, manager: Any) -> None:
    """Have a manager take a memory with each request."""
    if getattr(manager, "memories", None) is None:
        manager.memories = RequestMemories(model, manager)


def bind_request(model: AdaptedModel, memory: object) -> dict[str, BoundMemory]:
    """Return the memory of one request, bound to the adapters."""
    bound = {name: one.for_request() for name, one in model.bind(memory).items()}
    return {name: one for name, one in bound.items() if one is not None}


def prepared_by_name(model: AdaptedModel, memory: object) -> dict[str, object]:
    """Return the memory of one request as an object for many calls, for each adapter that is given it."""
    return {name: bound.shared for name, bound in model.bind(memory).items()}


def read_before(model: AdaptedModel, memories: Sequence[object]) -> list[object]:
    """Return the memories of requests, all of them checked, and read where the host reads them itself.

    In place of one that is not finite is the error with which its request ends.
    """
    checked: dict[int, object] = {}
    for one in {id(one): one for one in memories}.values():
        if one is None:
            model.check_not_required()
            continue
        try:
            prepared = prepared_by_name(model, one)
            bind_request(model, prepared)
        except NonFiniteError as error:  # the other requests are answered
            checked[id(one)] = error
            continue
        checked[id(one)] = prepared
    return [checked.get(id(one)) for one in memories]


@contextmanager
def paused(model: AdaptedModel) -> Iterator[None]:
    """Inside the block no manager runs a step of this model.

    transformers keeps on the config of a model what holds for the step under way: a forward in another thread, beside
    it, attends otherwise than it does alone.
    """
    with ExitStack() as stack:
        for one in list(_MEMORIES):
            if one.model is model and one.manager.is_running():
                stack.enter_context(one.manager.pause())
        yield


@contextmanager
def pending(memories: Sequence[object]) -> Iterator[None]:
    """Inside the block, requests that are added without a memory get these, one after the other."""
    token = _PENDING.set(iter(memories))
    try:
        yield
    finally:
        _PENDING.reset(token)


def rows_of(memory: Any, requests: int) -> list[object]:
    """The memory of each request."""
    if memory is None:
        return [None] * requests
    if isinstance(memory, (list, tuple)):
        found = list(memory)
    else:
        count = memory.shape[0] if isinstance(memory, Tensor) else memory.batch
        found = [memory[row : row + 1] for row in range(count)]
    if len(found) != requests:
        raise ShapeError(
            f"{requests} requests need {requests} memories, got {len(found)}: give a list with one for each (None for "
            f"none); to share one between all say [memory] * {requests}"
        )
    return found
