"""The boundary between the requests of continuous batching: what is not finite in one of them reaches no other.

All requests of a step share one row of text and one cache, and masked attention multiplies what it hides by 0, which
leaves NaN as it is. So nothing but finite keys and values is ever written to the cache, and a request that has others,
or logits that are not finite, ends with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmattn.adapters.protocols import BoundMemory
from mmattn.core.tensor_cache import TensorVersion
from mmattn.core.tracing import all_finite, may_read
from mmattn.errors import NonFiniteError
from mmattn.hosts.replaced import replace_method

Sources = Mapping[str, BoundMemory]


class RequestBoundary:
    """Keeps the requests of one manager apart."""

    def __init__(self) -> None:
        self.refused: dict[str, str] = {}
        self._processor: Any = None
        self._own: dict[str, Any] = {}
        # Of the forward under way: which of its tokens have keys or values that are not finite, (t,) bool.
        self._broken: Tensor | None = None
        # Of steps whose tokens are not handed out yet: requests, and which tokens and logits are not finite.
        self._steps: deque[tuple[list[Any], Tensor | None, Tensor]] = deque()
        self._read: WeakKeyDictionary[BoundMemory, TensorVersion] = WeakKeyDictionary()

    def guard(self, processor: Any) -> None:
        """Stand between what runs the steps of a manager, its cache and the answers."""
        if self._processor is processor:
            return
        self._processor = processor
        router = processor.output_router
        for owner, name in (
            (processor.cache, "update"),
            (processor.model_runner, "_sample"),
            (processor, "_generation_step"),
            (processor, "update_batch"),
            (router, "deliver"),
            (router, "deliver_batch"),
        ):
            mine = getattr(self, name)
            if getattr(owner, name) != mine:
                self._own[name] = replace_method(owner, name, mine)

    def admit(self, request_id: str, sources: Sources) -> Sources:
        """Return the memory of a request in a step, or None if it is not finite: the request then ends.

        Keys and values are computed here where that has not been done since the memory last changed.
        """
        for name, source in sources.items():
            if request_id in self.refused:
                break
            tensors = source.sources()
            known = self._read.get(source)
            if known is not None and known.holds(tensors):
                continue
            try:
                if not all(torch.isfinite(one).all() for one in source.projected()):
                    raise NonFiniteError(f"the memory of adapter {name!r} is not finite: repair it")
            except NonFiniteError as error:
                self.refused[request_id] = str(error)
            else:
                self._read[source] = TensorVersion(tensors)
        return {} if request_id in self.refused else sources

    # In place of what transformers has -------------------------------------------------------------------------------

    def _generation_step(self, model: Any) -> None:
        """Run a step; once more where a memory was edited after it had been admitted, without that."""
        try:
            self._own["_generation_step"](model)
        except NonFiniteError:
            self._read.clear()
            self._broken = None
            self._own["_generation_step"](model)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
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

    def _sample(self, scores: Tensor, *args: Any, **kwargs: Any) -> None:
        """Choose the next tokens; of scores (1, n, v) that are not finite one of no meaning, which nobody is given."""
        batches = self._processor.inputs_and_outputs
        if hasattr(batches, "io_pairs"):
            batches = batches.io_pairs[batches.current_pair].host_io
        lost = ~torch.isfinite(scores[0].amax(-1))
        self._steps.append((list(batches.requests_in_batch), self._broken, lost))
        self._broken = None
        if not may_read(lost) or bool(lost.any()):
            scores = scores.masked_fill(lost[None, :, None], 0)
        self._own["_sample"](scores, *args, **kwargs)

    def update_batch(self) -> None:
        """Hand out the tokens of a step, and end the requests that are not finite."""
        requests, broken, lost = self._steps.popleft() if self._steps else ([], None, torch.zeros(0))
        failed = self._failed(requests, broken, lost)
        scheduler = self._processor.scheduler
        before = set(scheduler.active_requests)
        self.refused |= failed
        self._own["update_batch"]()
        active = scheduler.active_requests
        forked = [name for name in active if name not in before]
        for one in requests:
            name = one.state.request_id
            if name in failed:
                # Further answers that were forked from it now begin with what it had in the cache.
                for each in (name, *(other for other in forked if str(other).startswith(f"{name}__child#"))):
                    if each in active:
                        self._end(active[each], failed[name])
                self.refused.pop(name, None)

    def deliver(self, output: Any) -> None:
        """Hand out what a request has written; of one that is not finite its error alone."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: Sequence[Any]) -> None:
        """The same for several."""
        kept = []
        for output in outputs:
            error = self.refused.get(output.request_id)
            if error is None or output.error is not None:
                kept.append(output)
            elif output.is_finished():
                failed = type(output.status).FAILED
                kept.append(replace(output, error=error, status=failed, generated_tokens=[]))
        if len(kept) == 1:
            self._own["deliver"](kept[0])
        elif kept:
            self._own["deliver_batch"](kept)

    def _end(self, state: Any, error: str) -> None:
        """End a request with an error; what it has in the cache is freed."""
        processor = self._processor
        state.generated_tokens.clear()
        processor._handle_request_error(NonFiniteError(error), state)
        processor.scheduler.finish_request(state.request_id)
        # A batch that is prepared already passes over a request that has finished.
        state.status = type(state.status).FINISHED

    def _failed(self, requests: Sequence[Any], broken: Tensor | None, lost: Tensor) -> dict[str, str]:
        """The requests of a step that are not finite, with what is wrong."""
        names = [one.state.request_id for one in requests]
        failed = {name: self.refused[name] for name in names if name in self.refused}
        bad = set()
        if broken is not None:
            owners = [name for name, one in zip(names, requests, strict=True) for _ in range(one.query_length)]
            bad |= {owners[token] for token in broken.nonzero()[:, 0].tolist() if token < len(owners)}
        given = [name for name, one in zip(names, requests, strict=True) if one.has_new_token]
        bad |= {given[number] for number in lost.nonzero()[:, 0].tolist() if number < len(given)}
        for name in bad - failed.keys():
            failed[name] = (
                f"the request {name!r} is not finite: its memory or its text overflows in the host; scale the vectors "
                "of the memory, or use a wider dtype"
            )
        return failed


def _sizes(states: Tensor) -> Tensor:
    """A number for each token (t,) of keys or values (1, g, t, k), finite where all of them are."""
    return states.sum((0, 1, 3), dtype=torch.promote_types(states.dtype, torch.float32))
