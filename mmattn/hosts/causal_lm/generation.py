"""`generate` and its relatives on a host with adapters: the whole text is recorded, beams share their row's memory."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from torch import Tensor, nn

from mmattn.adapters.text_state import GenerationInput
from mmattn.errors import ConditionError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.causal_lm.continuous_batching import take_memories
from mmattn.hosts.context import NOTED, Arguments, Keywords, Positional
from mmattn.hosts.interop.peft import inner_host
from mmattn.hosts.replaced import replace_method, restore_methods

# Ways of transformers to generate in a thread of its own.
IN_THREADS = ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager")


def past_length(cache: Any) -> int | None:
    """Return how many tokens a host has in its cache, or None if it does not say."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # states of recurrent layers alone, which count no tokens
        return None


def prompt_of(args: Positional, kwargs: Arguments) -> Tensor | None:
    """The prompt among the arguments of `generate`."""
    if args:
        prompt: Tensor = args[0]
        return prompt
    given = (kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "input_features", "input_values"))
    found = next((value for value in given if value is not None), None)
    encoded = kwargs.get("encoder_outputs")
    return encoded[0] if found is None and encoded is not None else found


def prompt_name(host: nn.Module) -> str:
    """Return the name of the prompt argument of `generate`: "inputs", or as Whisper does "input_features"."""
    own: Any = type(host)
    named = [one for one in inspect.signature(own.generate).parameters.values() if one.name != "self"]
    first = named[0] if named else None
    return first.name if first is not None and first.kind is first.POSITIONAL_OR_KEYWORD else "inputs"


def expansions_of(host: Any, kwargs: Arguments) -> frozenset[int]:
    """Return the numbers of rows that `generate` may make of a prompt's row: one, beams, samples."""

    def number(name: str) -> int:
        value = asked(host, kwargs, name)
        return value if isinstance(value, int) else 1

    beams, returned = number("num_beams"), number("num_return_sequences")
    expansions = {1, max(beams, returned)}
    own = getattr(type(inner_host(host)), "generate", None)
    if getattr(own, "__module__", "") != "transformers.generation.utils":
        expansions |= {returned, beams * returned}  # Whisper's own repeats its inputs for each text first
    if asked(host, kwargs, "penalty_alpha"):
        expansions.add(number("top_k"))
    return frozenset(expansions)


def asked(host: Any, kwargs: Arguments, name: str) -> Any:
    """Return an option of `generate` from its arguments or its config."""
    config = kwargs.get("generation_config") or getattr(host, "generation_config", None)
    return kwargs.get(name, getattr(config, name, None))


def inputs_of(args: Positional, kwargs: Keywords) -> Tensor | None:
    """The ids (b, l) or embeddings (b, l, d) among the arguments of a forward."""
    inputs = kwargs.get("input_ids", args[0] if args else None)
    return kwargs.get("inputs_embeds") if inputs is None else inputs


def bound_method(host: nn.Module, name: str) -> Any:
    """A method of the host as its class has it, also where another stands in its place on the object."""
    return inspect.getattr_static(type(host), name).__get__(host, type(host))


def fewest_logits(host: nn.Module) -> dict[str, int]:
    """The arguments with which a host is read whose logits are of no use: the last token's alone, where it can."""
    forward = inspect.signature(type(inner_host(host)).forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in forward else {}


class TextNotes:
    """Wrapper of `prepare_inputs_for_generation`: the call under way is told the whole
    text.

    Nowhere else do beams, drafts and chunks of a prompt appear in full.
    """

    def __init__(self, model: AdaptedModel, host: Any) -> None:
        self.model, self.host = model, host
        # generate asks the signature what it may pass on.
        self.__signature__ = inspect.signature(host.prepare_inputs_for_generation)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        call = self.model.open_blocks.in_force().call
        if call is not None:
            mask = kwargs.get("attention_mask")
            NOTED.set((call, GenerationInput(input_ids, None if mask is None else mask.bool())))
        return type(self.host).prepare_inputs_for_generation(self.host, input_ids, *args, **kwargs)


def note_texts(model: AdaptedModel, host: nn.Module) -> None:
    """Have `generate` of this host tell the call under way which text it is at."""
    inner = inner_host(host)
    if hasattr(inner, "prepare_inputs_for_generation"):
        replace_method(inner, "prepare_inputs_for_generation", TextNotes(model, inner))


def forget_texts(host: nn.Module) -> None:
    """Undo `note_texts`."""
    restore_methods(inner_host(host), "prepare_inputs_for_generation")


class InThreads:
    """A method of the host that generates in a thread of its own, where the memory of this context does not hold.

    The manager that it makes takes a memory with each request.
    """

    def __init__(self, model: AdaptedModel, host: nn.Module, name: str) -> None:
        self.model, self.host, self.name = model, host, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.open_blocks.in_force().call is not None:
            raise ConditionError(
                f"{self.name} generates in a thread of its own, where the memory given here does not hold: give each "
                "request its own, model.generate_batch(inputs, memory=[…]) or manager.add_request(input_ids, memory=…)"
            )
        own = getattr(type(self.host), self.name)
        if self.name != "init_continuous_batching":
            return own(self.host, *args, **kwargs)
        given = inspect.signature(own).bind(self.host, *args, **kwargs).arguments
        given["continuous_batching_config"] = for_memories(given.get("continuous_batching_config"))
        manager = own(**given)
        take_memories(self.model, manager)
        return manager


def for_memories(config: Any) -> Any:
    """The settings of continuous batching under which each request can have a memory of its own.

    Prompts that begin alike must not share the host's keys and values, which depend on the memory, and a captured graph
    would run without adapters.
    """
    from transformers import ContinuousBatchingConfig

    config = ContinuousBatchingConfig() if config is None else copy.copy(config)
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        raise ConditionError(
            "a compiled forward of continuous batching would leave the adapters out: take varlen_compile_config and "
            "decode_compile_config out of the ContinuousBatchingConfig"
        )
    config.allow_block_sharing, config.use_cuda_graph = False, False
    return config


def guard_threads(model: AdaptedModel, host: nn.Module) -> None:
    """Have the host refuse to generate in a thread of its own while a memory is given here."""
    inner = inner_host(host)
    for name in IN_THREADS:
        if hasattr(type(inner), name):
            replace_method(inner, name, InThreads(model, inner, name))


def unguard_threads(host: nn.Module) -> None:
    """Undo `guard_threads`."""
    restore_methods(inner_host(host), *IN_THREADS)
