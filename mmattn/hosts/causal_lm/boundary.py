"""The boundary between the requests of continuous batching: values that are not finite in one of them reach no other.

All requests of a step share one row of text and one cache, and masked attention multiplies hidden values by 0, which
leaves NaN as it is. So only finite keys and values are written to the cache, and a request that has others, or logits
that are not finite, ends with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import TextState
from mmattn.core.tracing import Checks, all_finite, collect_checks, may_read, raise_failed, refuse_unless_finite
from mmattn.errors import NonFiniteError
from mmattn.hosts.context import Method
from mmattn.memory import Memory
from mmattn.storage.tensor_cache import TensorVersion

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchProcessor
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

#: The keyword under which transformers carries a memory with its request.
KEY = "memory"

#: Methods of the cache by which prompts that begin alike share it; older versions of transformers have others.
SHARING = ("search_prefix_match", "mark_complete_blocks")


def replace_method(owner: object, name: str, method: Method) -> Method:
    """Put a method on an object in place of the one of its class, and return that."""
    original: Method = getattr(owner, name)
    vars(owner)[name] = method
    return original


class RequestMemory:
    """The memory of one request, bound to the adapters."""

    def __init__(self, sources: Mapping[str, BoundMemory], shared: object, error: str | None = None) -> None:
        self.sources, self.shared, self.error = sources, shared, error
        # The tensors of each source as they were when they were last finite.
        self.finite: dict[str, TensorVersion] = {}
        # Whether they are, where that is not known yet.
        self.checks: Checks = ()

    def __deepcopy__(self, memo: dict[int, object]) -> RequestMemory:
        return self  # transformers copies the state of a request for each further answer


def states_of_step(processor: ContinuousBatchProcessor) -> list[RequestState]:
    """Return the states of the requests in the step under way."""
    return [request.state for request in _requests_in_batch(processor)]


def _requests_in_batch(processor: ContinuousBatchProcessor) -> list[FutureRequestState]:
    batches = processor.inputs_and_outputs
    if hasattr(batches, "io_pairs"):  # on a GPU the next batch is prepared while this one runs
        batches = batches.io_pairs[batches.current_pair].host_io
    return list(batches.requests_in_batch)


class RequestBoundary:
    """Keeps the requests of one manager apart."""

    def __init__(self) -> None:
        self._processor: ContinuousBatchProcessor | None = None
        self._own: dict[str, Method] = {}
        # Of the forward under way: which of its tokens have keys or values that are not finite, (t,) bool.
        self._broken: Tensor | None = None
        # Of steps whose tokens are not delivered yet: requests, and which tokens and logits are not finite.
        self._steps: deque[tuple[list[FutureRequestState], Tensor | None, Tensor]] = deque()

    def guard(self, processor: ContinuousBatchProcessor) -> None:
        """Replace the methods of a manager's parts that write to the cache, sample and update requests."""
        if self._processor is processor:
            return
        self._processor = processor
        for owner, name in (
            (processor.cache, "update"),
            (processor.model_runner, "_sample"),
            (processor, "update_batch"),
            (processor, "prepare_next_batch"),
            *((processor.cache, name) for name in SHARING if hasattr(processor.cache, name)),
        ):
            self._own[name] = replace_method(owner, name, getattr(self, name))

    def admit(self, state: RequestState) -> Mapping[str, BoundMemory]:
        """Return the memory of a request in a step by adapter; one that is not finite ends the request."""
        memory: RequestMemory | None = state.logit_processor_kwargs.get(KEY)
        if memory is None or state.error is not None:
            return {}
        for name, source in memory.sources.items():
            tensors = source.sources()
            if name in memory.finite and memory.finite[name].holds(tensors):
                continue
            try:
                _, checks = collect_checks(partial(check_source, name, source))
            except NonFiniteError as error:
                state.error = str(error)
                return {}
            memory.checks += checks
            memory.finite[name] = TensorVersion(tensors)
        try:
            memory.checks = raise_failed(memory.checks)
        except NonFiniteError as error:
            state.error = str(error)
            return {}
        return memory.sources

    # In place of methods of transformers ------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (1, g, t, k) of a step to the cache, 0 for tokens that are not finite."""
        if not (may_read(key_states) and all_finite(key_states, value_states)):
            broken = self._note(_sizes(key_states) + _sizes(value_states))
            hidden = broken[None, None, :, None]
            key_states, value_states = key_states.masked_fill(hidden, 0), value_states.masked_fill(hidden, 0)
        return self._own["update"](key_states, value_states, *args, **kwargs)

    def keep(self, x: Tensor, adapted: Tensor) -> Tensor:
        """Return changed hidden states; tokens that are no longer finite keep their value from before.

        Some matrix products take NaN from one token to the next.
        """
        if may_read(adapted) and all_finite(adapted):
            return adapted
        broken = self._note(adapted[0].sum(-1, dtype=torch.promote_types(adapted.dtype, torch.float32)))
        return torch.where(broken[None, :, None], x, adapted)

    def _note(self, sizes: Tensor) -> Tensor:
        """Record the tokens of the current forward whose number (t,) is not finite."""
        broken = ~torch.isfinite(sizes)
        self._broken = broken if self._broken is None else self._broken | broken.to(self._broken.device)
        return broken

    def _sample(self, scores: Tensor, *args: object, **kwargs: object) -> None:
        """Choose the next tokens; any token where scores (1, n, v) are not finite: its request ends."""
        lost = ~torch.isfinite(scores[0].amax(-1))
        self._steps.append((_requests_in_batch(self._processor), self._broken, lost))
        self._broken = None
        if not may_read(lost) or bool(lost.any()):
            scores = scores.masked_fill(lost[None, :, None], 0)
        self._own["_sample"](scores, *args, **kwargs)

    def update_batch(self) -> None:
        """Deliver the tokens of a step, and end the requests that are not finite."""
        if self._steps:
            _mark_errors(*self._steps.popleft())
        self._own["update_batch"]()
        processor = self._processor
        assert processor is not None
        scheduler = processor.scheduler
        # Answers that were forked from a request have its error.
        for state in list(scheduler.active_requests.values()):
            if state.error is not None:
                processor._handle_request_error(NonFiniteError(state.error), state)
                scheduler.finish_request(state.request_id)
                # A batch that is prepared already passes over a request that has finished.
                state.status = type(state.status).FINISHED

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Return how many tokens of a prompt are in the cache already: 0 for a request with a memory."""
        assert self._processor is not None
        scheduler = self._processor.scheduler
        state = scheduler.waiting_requests.get(request_id) or scheduler.active_requests.get(request_id)
        if state is None or KEY in state.logit_processor_kwargs:
            return 0
        return int(self._own["search_prefix_match"](request_id, prompt_ids))

    def mark_complete_blocks(self, state: RequestState, *args: object) -> None:
        """Offer the cache of a prompt to those that begin alike, unless it depends on a memory or is not finite."""
        if KEY not in state.logit_processor_kwargs and state.error is None:
            self._own["mark_complete_blocks"](state, *args)

    def prepare_next_batch(self) -> bool:
        """Prepare a batch; where nothing is left, forget the memories of the last one."""
        is_prepared: bool = self._own["prepare_next_batch"]()
        processor = self._processor
        if processor is not None and not is_prepared and not processor.has_pending_requests():
            for state in states_of_step(processor):
                state.logit_processor_kwargs.pop(KEY, None)
        return is_prepared


def check_source(name: str, source: BoundMemory) -> None:
    """Refuse a memory whose keys and values for an adapter are not finite."""
    projected = source.projected()

    def explain() -> None:
        if not all(bool(torch.isfinite(tensor).all()) for tensor in projected):
            raise NonFiniteError(f"the memory of adapter {name!r} is not finite: repair it")

    refuse_unless_finite(projected, explain)


def _mark_errors(requests: Sequence[FutureRequestState], broken: Tensor | None, lost: Tensor) -> None:
    """Set the error of the requests of a step that are not finite."""
    bad: list[RequestState] = []
    if broken is not None:
        owners = [request.state for request in requests for _ in range(request.query_length)]
        bad += [owners[token] for token in broken.nonzero()[:, 0].tolist() if token < len(owners)]
    sampled = [request.state for request in requests if request.has_new_token]
    bad += [sampled[number] for number in lost.nonzero()[:, 0].tolist() if number < len(sampled)]
    for state in bad:
        state.error = state.error or (
            f"the request {state.request_id!r} is not finite: its memory or its text overflows in the host; scale the "
            "vectors of the memory, or use a wider dtype"
        )


def _sizes(states: Tensor) -> Tensor:
    """Return a number for each token (t,) of keys or values (1, g, t, k), finite where all of them are."""
    return states.sum((0, 1, 3), dtype=torch.promote_types(states.dtype, torch.float32))


def refuse_rows(rows: Sequence[int], text: TextState, unchecked: Sequence[Memory], dtype: torch.dtype) -> None:
    """Refuse rows of logits that are not finite, unless all of them read a memory that need not be finite.

    A matrix product may take NaN from one row to the next (bfloat16 on the CPU, odd widths), and documents share
    attention.
    """
    broken = [row for row in rows if any(is_broken(memory, row, text.rows) for memory in unchecked)]
    if broken != rows or text.packed is not None:
        what = "row" if text.packed is None else "document"
        raise NonFiniteError(
            f"the logits of {what} {', '.join(map(str, rows))} are not finite: with its memory it overflows in "
            f"{str(dtype).removeprefix('torch.')}; scale its vectors, or use a wider dtype"
        )


def is_broken(memory: Memory, row: int, rows: int) -> bool:
    """Return whether the memory of a row of text is not finite; `rows` of text are beams of those of the memory."""
    one_row = memory[row // max(rows // max(memory.batch, 1), 1)]
    real = one_row.real_slots()
    values = [one_row.tokens[real]] if one_row.scores is None else [one_row.tokens[real], one_row.scores[real]]
    return not all(bool(value.isfinite().all()) for value in values)
