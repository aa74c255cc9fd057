"""`generate` and its relatives on a host with adapters: the whole text is recorded, beams share their row's memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.host_models import dtype_of
from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import Arrivals, GenerationInput, TextState
from mmattn.errors import ConditionError, MaskError, ShapeError, check_int
from mmattn.hosts.causal_lm.continuous_batching import PAGED_CACHE
from mmattn.hosts.context import NOTED, Arguments, Call, Keywords, Positional
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmattn.hosts.model import AdaptedModel


def prompt_of(args: Positional, kwargs: Arguments) -> Tensor | None:
    """Return the prompt among the arguments of `generate`."""
    prompt: Tensor | None
    if args:
        return args[0]
    inputs = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values"))
    prompt = next((value for value in inputs if value is not None), None)
    encoded = kwargs.get("encoder_outputs")
    return encoded[0] if prompt is None and encoded is not None else prompt


def prompt_name(host: nn.Module) -> str:
    """Return the name of the prompt argument of `generate`: "inputs", or as Whisper does "input_features"."""
    host_class: type[PreTrainedModel] = type(host)
    parameters = inspect.signature(host_class.generate).parameters.values()
    names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self"]
    return names[0] if names else "inputs"


def expansions_of(host: nn.Module, kwargs: Arguments) -> frozenset[int]:
    """Return the numbers of rows that `generate` may make of a prompt's row: one, beams, samples."""
    beams, returned = _number(host, kwargs, "num_beams"), _number(host, kwargs, "num_return_sequences")
    expansions = {1, max(beams, returned)}
    if _has_own_generate(host):
        expansions |= {returned, beams * returned}
    if asked(host, kwargs, "penalty_alpha"):
        expansions.add(_number(host, kwargs, "top_k"))
    return frozenset(expansions)


def unexpanded_rows(host: nn.Module, kwargs: Arguments, rows: int) -> frozenset[int]:
    """Return the numbers of rows that `generate` may have before it expands them: all rows of the prompt.

    Whisper's own repeats its inputs for each answer first, and goes on with the rows that have not ended.
    """
    repeated = rows * (_number(host, kwargs, "num_return_sequences") if _has_own_generate(host) else 1)
    return frozenset({repeated}) if rows > 1 and shrinks_batches(host) else frozenset({rows, repeated})


def shrinks_batches(host: nn.Module) -> bool:
    """Return whether `generate` goes on with the rows that have not ended, as Whisper's does."""
    return hasattr(inner_host(host), "generate_with_fallback")


def _has_own_generate(host: nn.Module) -> bool:
    generate = getattr(type(inner_host(host)), "generate", None)
    return getattr(generate, "__module__", "") != "transformers.generation.utils"


def _number(host: nn.Module, kwargs: Arguments, name: str) -> int:
    value = asked(host, kwargs, name)
    return value if isinstance(value, int) else 1


def asked(host: nn.Module, kwargs: Arguments, name: str) -> object:
    """Return an option of `generate` from its arguments or its config."""
    config = kwargs.get("generation_config") or getattr(host, "generation_config", None)
    return kwargs.get(name, getattr(config, name, None))


def inputs_of(args: Positional, kwargs: Keywords) -> Tensor | None:
    """Return the ids (b, l) or embeddings (b, l, d) among the arguments of a forward."""
    inputs = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if inputs is None else inputs


def fewest_logits(host: nn.Module) -> dict[str, int]:
    """Return the arguments with which a host computes the fewest logits: of the last token alone, where it can."""
    forward = inspect.signature(type(inner_host(host)).forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in forward else {}


def generation_call(host: nn.Module, call: Call, args: Positional, kwargs: Arguments) -> Call:
    """Return the call of all forwards of one `generate`, after a check of its rows."""
    prompt = prompt_of(args, kwargs)
    rows = 1 if prompt is None else prompt.shape[0]
    for source in call.sources.values():
        source.check_rows(TextState(rows, 0))
    inner = replace(
        call,
        prompt=prompt,
        expansions=expansions_of(host, kwargs),
        rows=rows,
        unexpanded=unexpanded_rows(host, kwargs, rows),
        early_exit=call.early_exit or asked(host, kwargs, "assistant_early_exit") is not None,
    )
    with torch.no_grad():
        inner.prepare_graphs()
    return inner


def expand_inputs(
    model: AdaptedModel, host: nn.Module, expand_size: int = 1, **kwargs: Any
) -> tuple[Tensor, Arguments]:
    """Replace `_expand_inputs_for_generation`: refuse rows that are not all rows of the prompt."""
    call, ids = model.open_blocks.in_force().call, kwargs.get("input_ids")
    if call is not None and call.rows and ids is not None and len(ids) not in call.unexpanded:
        raise ConditionError(
            f"{type(host).__name__}.generate was given {call.rows} rows and goes on with {len(ids)}; which memory is "
            "theirs is not known: generate one row at a time"
        )
    method = inspect.getattr_static(type(host), "_expand_inputs_for_generation")
    return method.__get__(host)(expand_size=expand_size, **kwargs)


def note_text(model: AdaptedModel, host: PreTrainedModel, input_ids: Tensor, *args: object, **kwargs: Any) -> Arguments:
    """Replace `prepare_inputs_for_generation`, where alone beams, drafts and chunks of a prompt appear in full."""
    call = model.open_blocks.in_force().call
    if call is not None:
        mask = kwargs.get("attention_mask")
        NOTED.set((call, GenerationInput(input_ids, None if mask is None else mask.bool())))
    return type(host).prepare_inputs_for_generation(host, input_ids, *args, **kwargs)


def arrivals_of(arrived: Tensor, window: int | None, sources: Iterable[BoundMemory]) -> Arrivals:
    """Return the slots that had arrived at each token (b, l), for the memories of one call."""
    if arrived.is_floating_point() or arrived.dtype is torch.bool:
        raise MaskError(f"arrived counts slots and must hold integers, got {arrived.dtype}")
    for source in sources:
        source.hide_arrivals()
        if arrived.dim() != 2 or len(arrived) != source.rows:
            raise ShapeError(
                f"arrived must be (b, l) with b = {source.rows} as the memory has, got {tuple(arrived.shape)}"
            )
    return Arrivals(arrived, None if window is None else check_int("window", window))


# Caches that were read with a memory: one read without is not continued with one in silence ---------------------------


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
    state = getattr(cache, "has_previous_state", False)
    was_read = (state() if callable(state) else state) if text.past is None else text.past
    if was_read and not declared:
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
