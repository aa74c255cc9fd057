"""Continuous batching: transformers schedules the requests, and each attends to the memory that it was added with.

transformers carries the memory with the state of its request, as a keyword for processors of logits: forks and restarts
of the request keep it, and it is freed with the request. Nothing of the scheduler or the paged cache is written again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet, WeakValueDictionary

from torch import Tensor, nn

from mmattn.adapters.host_models import text_config
from mmattn.adapters.protocols import BoundMemory
from mmattn.core.key_values import KeyValue
from mmattn.core.split_attention import KeyValueRows
from mmattn.core.tracing import collect_checks, raise_failed
from mmattn.errors import ConditionError, NonFiniteError, ShapeError, check_int
from mmattn.hosts.causal_lm.boundary import KEY, SHARING, RequestBoundary, RequestMemory, replace_method, states_of_step
from mmattn.hosts.context import Arguments, Call, Keywords, check_not_required
from mmattn.hosts.model import AdaptedModel
from mmattn.memory import Memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

T = TypeVar("T")

#: Memories of the prompts that `generate_batch` is about to hand to the manager in any order, by `id` of the prompt.
_PENDING: ContextVar[Mapping[int, list[object]] | None] = ContextVar("mmattn_pending", default=None)

#: Of every manager that runs requests with memories.
_MEMORIES: WeakSet[RequestMemories] = WeakSet()

#: Class of the cache of continuous batching, which keeps requests apart by itself.
PAGED_CACHE = "PagedAttentionCache"

#: Settings of a ContinuousBatchingConfig, and of the configs that it falls back on, by which a forward is compiled.
COMPILES = (
    "varlen_compile_config",
    "decode_compile_config",
    "default_compile_level",
    "use_default_compile_configs",
    "compile_config",
)

#: Devices on which requests that write attend one by one; elsewhere these would be many small kernels.
ROW_BY_ROW = {"cpu"}


@dataclass
class Shared:
    """A memory by adapter as it was passed, and the objects in which keys and values of it are cached."""

    memory: Mapping[str, object]
    prepared: Mapping[str, object]


class RequestMemories:
    """The memories of the requests of one manager; its `add_request` takes `memory=`."""

    def __init__(self, model: AdaptedModel, manager: ContinuousBatchingManager) -> None:
        self.model, self.manager = model, manager
        self._running: WeakSet[RequestMemory] = WeakSet()
        self._shared: WeakValueDictionary[tuple[tuple[str, int], ...], Shared] = WeakValueDictionary()
        self._boundary = RequestBoundary()
        self._add = replace_method(manager, "add_request", self.add_request)
        self._check = replace_method(manager.logit_processor, "check_kwargs", self._check_kwargs)
        _MEMORIES.add(self)

    def __len__(self) -> int:
        """Return the number of memories of requests that have not ended."""
        return len(self._running)

    def nbytes(self) -> int:
        """Return the bytes of cached keys and values of all memories in use."""
        used: dict[int, Any] = {
            id(source.shared): source.shared for request in list(self._running) for source in request.sources.values()
        }
        return sum(shared.nbytes() for shared in used.values())

    def share_prompts(self) -> None:
        """Let prompts that begin alike share their cache, of requests without a memory that are added one by one."""
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        if all(hasattr(PagedAttentionCache, name) for name in SHARING):
            self.manager.continuous_batching_config.allow_block_sharing = True

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        *args: object,
        memory: object = None,
        visible_from: int = 0,
        **kwargs: object,
    ) -> str | None:
        """Queue a request, with a memory of its own or a shared one that tokens from a place on see, or with none."""
        pending = _PENDING.get()
        if memory is None and pending is not None:
            memory = pending[id(input_ids)].pop(0)
        if memory is None:
            check_not_required(self.model.require_memory)
            if visible_from:
                raise ConditionError("visible_from= is for a memory, and this request has none: leave it out")
        else:
            kwargs[KEY] = memory if isinstance(memory, RequestMemory) else self._bind(memory, visible_from)
        name = f"req_{self.manager._request_counter}" if request_id is None else request_id
        if not _names(name, self.manager.num_return_sequences - 1).isdisjoint(self._used_names()):
            raise ConditionError(
                f"the request {name!r} has not ended, and another was added under its name: choose another"
            )
        return self._add(input_ids, request_id, *args, **kwargs)

    def _bind(self, memory: object, visible_from: int) -> RequestMemory:
        by_adapter = dict(memory) if isinstance(memory, Mapping) else dict.fromkeys(self.model.active, memory)
        key = tuple((name, id(value)) for name, value in by_adapter.items())
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = Shared(by_adapter, prepared_by_name(self.model, by_adapter))
        # Bound anew for each request: the memory may have been edited since.
        bound = RequestMemory(bind_request(self.model, shared.prepared), shared)
        for source in bound.sources.values() if check_int("visible_from", visible_from, at_least=0) else ():
            source.hide_from(visible_from)
        self._running.add(bound)
        return bound

    def _used_names(self) -> set[object]:
        """Return the names of all requests that have not ended, and of the answers that will be forked from them."""
        queue, processor = self.manager.input_queue, self.manager.batch_processor
        with queue.mutex:
            states = list(queue.queue)
        if processor is not None:
            scheduler = processor.scheduler
            states += [*scheduler.waiting_requests.values(), *scheduler.active_requests.values()]
        return {name for state in states for name in _names(state.request_id, state.num_children)}

    def _check_kwargs(self, kwargs: Keywords) -> None:
        """Check the keywords of a request, in place of `check_kwargs`; an error ends this request alone."""
        memory = kwargs.get(KEY)
        if isinstance(memory, RequestMemory):
            if memory.error is not None:
                raise NonFiniteError(memory.error)
            kwargs = {name: value for name, value in kwargs.items() if name != KEY}
        self._check(kwargs)

    def call(self) -> Call | None:
        """Return the memories of the requests in this step, or None if no request has one."""
        processor = self.manager.batch_processor
        self._boundary.guard(processor)
        by_request = [self._boundary.admit(state) for state in states_of_step(processor)]
        by_name: dict[str, list[BoundMemory | None]] = {
            name: [sources.get(name) for sources in by_request]
            for name in sorted({name for sources in by_request for name in sources})
        }
        together = {
            name: next(source for source in sources if source is not None).together(sources, _join, self._boundary.keep)
            for name, sources in by_name.items()
        }
        return Call(together) if together else None


def _join(key: tuple[str, int], parts: list[KeyValue]) -> KeyValue | KeyValueRows:
    """Put keys and values of several requests together."""
    if parts[0].keys.device.type in ROW_BY_ROW:
        return KeyValueRows(tuple(parts))
    return KeyValue.gather([(part, 0) for part in parts])


def _names(name: object, children: int) -> set[object]:
    return {name, *(f"{name}__child#{number}" for number in range(children))}


def call_of_step(model: AdaptedModel, cache: object) -> Call | None:
    """Return the memories of the step of continuous batching that uses this cache, or None."""
    for running in list(_MEMORIES):
        processor = running.manager.batch_processor
        if running.model is model and processor is not None and processor.cache is cache:
            return running.call()
    return None


def bind_request(model: AdaptedModel, memory: object) -> dict[str, BoundMemory]:
    """Return the memory of one request, bound to the adapters."""
    bound = _check_now(lambda: {name: source.for_request() for name, source in model.bind(memory).items()})
    return {name: source for name, source in bound.items() if source is not None}


def prepared_by_name(model: AdaptedModel, memory: object) -> dict[str, object]:
    """Return the memory of one request as an object for many calls, for each adapter that reads it."""
    return {name: bound.shared for name, bound in _check_now(partial(model.bind, memory)).items()}


def _check_now(work: Callable[[], T]) -> T:
    """Return the result of `work` on the memory of one request, and wait for its checks: a later call is another's."""
    result, checks = collect_checks(work)
    raise_failed(checks, wait=True)
    return result


def check_memories(model: AdaptedModel, memories: Sequence[object]) -> list[object]:
    """Check the memories of requests, and read them where the host does; of one that is not finite keep the error."""
    checked: dict[int, object] = {id(None): None}
    for memory in {id(memory): memory for memory in memories}.values():
        if memory is None:
            check_not_required(model.require_memory)
            continue
        try:
            checked[id(memory)] = prepared = prepared_by_name(model, memory)
            bind_request(model, prepared)
        except NonFiniteError as error:  # the other requests are answered
            checked[id(memory)] = RequestMemory({}, None, str(error))
    return [checked[id(memory)] for memory in memories]


@contextmanager
def paused(model: AdaptedModel) -> Iterator[None]:
    """Inside the block no manager runs a step of this model.

    transformers notes the step under way on the config of a model: a forward in another thread would attend otherwise.
    """
    with ExitStack() as stack:
        for running in list(_MEMORIES):
            if running.model is model and running.manager.is_running():
                stack.enter_context(running.manager.pause())
        yield


@contextmanager
def pending(prompts: Sequence[list[int]], memories: Sequence[object]) -> Iterator[None]:
    """Inside the block, these prompts get these memories where they are added without one."""
    by_prompt: dict[int, list[object]] = {}
    for prompt, memory in zip(prompts, memories, strict=True):
        by_prompt.setdefault(id(prompt), []).append(memory)
    token = _PENDING.set(by_prompt)
    try:
        yield
    finally:
        _PENDING.reset(token)


def rows_of(memory: Sequence[object] | Memory | Tensor | None, requests: int) -> list[object]:
    """Return the memory of each request."""
    if memory is None:
        return [None] * requests
    rows: list[object]
    if isinstance(memory, (Tensor, Memory)):
        rows = [memory[row : row + 1] for row in range(len(memory))]
    else:
        rows = list(memory)
    if len(rows) != requests:
        raise ShapeError(
            f"{requests} requests need {requests} memories, got {len(rows)}: give a list with one for each (None for "
            f"none); to share one between all say [memory] * {requests}"
        )
    return rows


def start_batching(model: AdaptedModel, host: nn.Module, *args: object, **kwargs: object) -> ContinuousBatchingManager:
    """Replace `init_continuous_batching`, through which every way to batch continuously goes.

    The manager takes a memory with each request; in its thread no memory of this context would hold.
    """
    if model.open_blocks.in_force().call is not None:
        raise ConditionError(
            "continuous batching runs in another thread, where this memory does not hold: use "
            "model.generate_batch(inputs, memory=[…]) or manager.add_request(ids, memory=…)"
        )
    host_class: type[PreTrainedModel] = type(host)
    persistent = getattr(host, "_cached_continuous_batching_manager", None)
    if persistent is not None and getattr(getattr(persistent, "memories", None), "model", None) is not model:
        raise ConditionError(
            "the manager that persistent_manager=True keeps was made without these adapters: call "
            "destroy_cached_continuous_batching_manager() first"
        )
    options = inspect.signature(host_class.init_continuous_batching).bind(host, *args, **kwargs).arguments
    _prepare_options(host, options)
    manager = host_class.init_continuous_batching(**options)
    if persistent is None:
        manager.memories = RequestMemories(model, manager)
    return manager


def _prepare_options(host: nn.Module, options: Arguments) -> None:
    """Set the options of `init_continuous_batching` so that each request can have a memory of its own.

    Prompts that begin alike must not share keys and values, which depend on the memory, and a graph that is compiled or
    captured would run without adapters.
    """
    from transformers import ContinuousBatchingConfig

    answers: Any = options.get("generation_config") or getattr(host, "generation_config", None)
    batching = options.get("continuous_batching_config") or getattr(answers, "continuous_batching_config", None)
    config = ContinuousBatchingConfig() if batching is None else copy.copy(batching)
    compiled = [
        f"{type(settings).__name__}.{name}"
        for settings in (config, answers, text_config(host))
        for name in COMPILES
        if getattr(settings, name, None)
    ]
    if compiled:
        raise ConditionError(
            f"a compiled forward of continuous batching would leave the adapters out: take {', '.join(compiled)} out"
        )
    config.allow_block_sharing, config.use_cuda_graph = False, False
    options["continuous_batching_config"] = config
