"""`generate` and its relatives on a host with adapters: the whole text is recorded, beams share their row's memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import Arrivals, GenerationInput, TextState
from mmattn.errors import ConditionError, MaskError, ShapeError, check_int
from mmattn.hosts.context import NOTED, Arguments, Call, Keywords, Positional
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.model import AdaptedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    parameters = [
        parameter
        for parameter in inspect.signature(host_class.generate).parameters.values()
        if parameter.name != "self"
    ]
    first = parameters[0] if parameters else None
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else "inputs"


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


class ExpandsInputs:
    """Replacement of `_expand_inputs_for_generation`, which refuses rows that are not all rows of the prompt."""

    def __init__(self, model: AdaptedModel, host: nn.Module) -> None:
        self.model, self.host = model, host

    def __call__(self, expand_size: int = 1, **kwargs: Any) -> tuple[Tensor, Arguments]:
        call, ids = self.model.open_blocks.in_force().call, kwargs.get("input_ids")
        if call is not None and call.rows and ids is not None and len(ids) not in call.unexpanded:
            raise ConditionError(
                f"{type(self.host).__name__}.generate was given {call.rows} rows and goes on with {len(ids)}; which "
                "memory is theirs is not known: generate one row at a time"
            )
        method = inspect.getattr_static(type(self.host), "_expand_inputs_for_generation")
        return method.__get__(self.host)(expand_size=expand_size, **kwargs)


class TextNotes:
    """Wrapper of `prepare_inputs_for_generation`, where alone beams, drafts and chunks of a prompt appear in full."""

    def __init__(self, model: AdaptedModel, host: PreTrainedModel) -> None:
        self.model, self.host = model, host
        # generate asks the signature what it may pass on.
        self.__signature__ = inspect.signature(host.prepare_inputs_for_generation)

    def __call__(self, input_ids: Tensor, *args: object, **kwargs: Any) -> Arguments:
        call = self.model.open_blocks.in_force().call
        if call is not None:
            mask = kwargs.get("attention_mask")
            NOTED.set((call, GenerationInput(input_ids, None if mask is None else mask.bool())))
        return type(self.host).prepare_inputs_for_generation(self.host, input_ids, *args, **kwargs)


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
