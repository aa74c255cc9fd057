"""The methods of torch, transformers and diffusers that are replaced on single objects, as upstream offers no hook.

A method is put on the object, not on its class: on a host by `Attachment.replace`, which `unload` undoes. Beside them,
`attention_hooks` replaces `config` of attention layers, and `recomputation` `_gradient_checkpointing_func` of layers.
"""

from __future__ import annotations

import importlib
import inspect
from typing import NamedTuple

import pytest


class Replaced(NamedTuple):
    """One method of "module:Class" that is replaced, the arguments that are relied on, and the reason."""

    owner: str
    name: str
    arguments: tuple[str, ...]
    why: str


_MANAGER = "transformers.generation.continuous_batching.continuous_api"
_CACHE = "transformers.generation.continuous_batching.cache:PagedAttentionCache"
_RUNNER = "transformers.generation.continuous_batching.model_runner:ModelRunner"
_MIXIN = "transformers.generation.utils:GenerationMixin"
_LOGITS = "transformers.generation.continuous_batching.cb_logits_processors:ContinuousBatchingLogitsProcessorList"

REPLACED = (
    Replaced("torch.nn:Module", "_apply", ("fn", "recurse"), "adapters follow the host's .to() and .half()"),
    Replaced("torch.nn:Module", "train", ("mode",), "adapters follow the host's .train() and .eval()"),
    Replaced(_MIXIN, "generate", (), "rows are checked before beams multiply them"),
    Replaced(_MIXIN, "_expand_inputs_for_generation", ("expand_size",), "beams have the memory of their row"),
    Replaced(_MIXIN, "prepare_inputs_for_generation", ("input_ids",), "a memory that follows the text knows all of it"),
    Replaced("diffusers.models.cache_utils:CacheMixin", "cache_context", ("name",), "tells which half is conditional"),
    Replaced(
        f"{_MANAGER}:ContinuousMixin", "init_continuous_batching", ("continuous_batching_config",), "memory by request"
    ),
    Replaced(f"{_MANAGER}:ContinuousBatchingManager", "add_request", ("input_ids", "request_id"), "takes memory="),
    Replaced(_LOGITS, "check_kwargs", ("kwargs",), "a memory is a keyword of its request"),
    Replaced(f"{_MANAGER}:ContinuousBatchProcessor", "prepare_next_batch", (), "a request that ended frees its memory"),
    Replaced(f"{_MANAGER}:ContinuousBatchProcessor", "update_batch", (), "a broken memory ends its request alone"),
    Replaced(_CACHE, "update", ("key_states", "value_states"), "values that are not finite reach no other request"),
    Replaced(_CACHE, "search_prefix_match", ("request_id",), "a prompt with a memory shares no cache"),
    Replaced(_CACHE, "mark_complete_blocks", ("state",), "nor does one that is not finite"),
    Replaced(_RUNNER, "_sample", ("scores",), "scores that are not finite choose no token"),
)


@pytest.mark.parametrize(
    "replaced", REPLACED, ids=lambda replaced: f"{replaced.owner.partition(':')[2]}.{replaced.name}"
)
def test_upstream_has_what_is_replaced(replaced: Replaced):
    module, _, name = replaced.owner.partition(":")
    owner = getattr(importlib.import_module(module), name)
    methods = [vars(base)[replaced.name] for base in owner.__mro__ if replaced.name in vars(base)]
    assert methods, f"{replaced.owner} has no {replaced.name} any more: {replaced.why}"
    assert set(replaced.arguments) <= set(inspect.signature(methods[0]).parameters), replaced
