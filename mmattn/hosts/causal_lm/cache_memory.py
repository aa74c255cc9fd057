"""Caches of hosts that were read with a memory: one that was read without is not continued with one in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import dtype_of
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError
from mmattn.hosts.causal_lm.continuous_batching import PAGED_CACHE
from mmattn.hosts.context import Arguments, Call, Keywords

if TYPE_CHECKING:
    from mmattn.hosts.model import AdaptedModel

#: Attribute of a cache that was read with a memory (True), or that goes on with and without one (False).
READ = "mmattn_read_with_memory"


def note(cache: object, read: bool = True) -> None:
    """Note how a cache was read."""
    for part in _parts(cache):
        setattr(part, READ, read)


def noted(cache: object) -> bool | None:
    """Return what is noted of a cache, or None."""
    notes = (getattr(part, READ, None) for part in _parts(cache))
    return next((read for read in notes if read is not None), None)


def _parts(cache: object) -> list[object]:
    """Return a cache, and the part of an encoder-decoder's that holds the text and may come into another one."""
    text = getattr(cache, "self_attention_cache", None)
    return [cache] if text is None else [cache, text]


def note_new(output: object) -> None:
    """Note the caches in what `generate` returned with a memory: Whisper's makes new ones of the rows of others."""
    if isinstance(output, Mapping | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            note_new(part)
    elif hasattr(output, "get_seq_length") and noted(output) is None:
        note(output)


def check_with_memory(host: nn.Module, call: Call, text: TextState) -> None:
    """Refuse to go on with a memory after tokens that were read without one, unless `arrived` says so; note it."""
    cache = text.cache
    # Each request of continuous batching has its own.
    if call.reads_memory or type(cache).__name__ == PAGED_CACHE or torch.compiler.is_compiling():
        return
    # Prompts of peft are in the cache before the text.
    peft = getattr(host, "active_peft_config", None)
    declared = call.arrivals is not None or getattr(peft, "is_prompt_learning", False)
    if not declared and (text.past or (text.past is None and _has_state(cache))):
        raise ConditionError(
            "the cache was read without a memory, or put together from other caches: read its tokens with memory=, or "
            "give arrived=, the slots that each token sees"
        )
    note(cache)


def fill_cache(
    model: AdaptedModel, call: Call, text: TextState, kwargs: Keywords
) -> tuple[TextState, Arguments] | None:
    """Fill the cache of a host with the keys and values that a memory has of the first tokens of a prompt.

    Returns:
        the text and the arguments of a forward of the other tokens; None if the host must read the whole prompt.
    """
    from transformers import DynamicCache

    (name, source), *others = call.sources.items()
    cache: Any = text.cache
    ids, positions, last_logits = (kwargs.get(key) for key in ("input_ids", "position_ids", "logits_to_keep"))
    by_token = {
        key for key, value in kwargs.items() if isinstance(value, Tensor) and value.shape[-1:] == (text.length,)
    }
    is_plain = ids is not None and by_token <= {"input_ids", "position_ids", "cache_position", "attention_mask"}
    wants_all = not last_logits or kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
    if others or name not in model.active or call.scales.get(name, 1.0) != 1.0 or not is_plain or wants_all:
        return None
    if type(cache) is not DynamicCache or text.packed is not None or text.generation is None:
        return None
    if positions is None:
        positions = torch.arange(text.length, device=text.whole[0].device)[None]
    keys = source.first_keys(text, positions.expand(text.rows, -1)) if positions.dim() == 2 else None
    if keys is None:
        return None
    dtype = dtype_of(model.host)
    for layer, (key, value) in keys.items():
        cache.update(key.to(dtype), value.to(dtype), layer)
    note(cache)
    past = cache.get_seq_length()
    rest = {key: kwargs[key][..., past:] for key in by_token - {"attention_mask"}}
    text = replace(text, length=text.length - past, inputs=rest["input_ids"], past=past)
    return text, {**kwargs, **rest}


def check_without_memory(cache: object, explicit: bool) -> None:
    """Refuse to go on without a memory after tokens that were read with one, unless a block takes it away."""
    if not explicit:
        raise ConditionError(
            "the cache holds tokens that were read with a memory, and this call has none: give memory=, or call inside "
            "condition(None) or disable_adapter()"
        )
    for part in _parts(cache):
        vars(part).pop(READ, None)


def _has_state(cache: object) -> bool:
    state: object = getattr(cache, "has_previous_state", False)
    return bool(state() if callable(state) else state)
