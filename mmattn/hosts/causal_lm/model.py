"""Causal language models of transformers as hosts: adapters act after or before chosen decoder layers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.host_models import (
    CACHE_NAMES,
    depth_of,
    device_of,
    embeddings_of,
    given_cache,
    text_config,
    width_of,
)
from mmattn.adapters.protocols import Site
from mmattn.adapters.settings import AdapterConfig
from mmattn.adapters.text_state import PACKING_NAMES, TextState, packed_text
from mmattn.core.tracing import refuse_unless_finite, report_checks
from mmattn.errors import ConditionError
from mmattn.hosts.attach import register_host
from mmattn.hosts.causal_lm import joined_slots
from mmattn.hosts.causal_lm.boundary import refuse_rows
from mmattn.hosts.causal_lm.continuous_batching import (
    PAGED_CACHE,
    call_of_step,
    check_memories,
    pending,
    rows_of,
    start_batching,
)
from mmattn.hosts.causal_lm.generation import (
    READ,
    arrivals_of,
    check_with_memory,
    check_without_memory,
    expand_inputs,
    fill_cache,
    generation_call,
    note,
    note_new,
    note_text,
    noted,
    prompt_name,
)
from mmattn.hosts.causal_lm.packing import keep_apart, packed_state
from mmattn.hosts.context import NOTED, Call, ForwardStep, Handle, Keywords, Positional, refuse_reentrant
from mmattn.hosts.hooks import HostHooks
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.peft import inner_host
from mmattn.hosts.probe import find_layers, probe_adapter, random_ids, text_inputs
from mmattn.memory import Memory

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel
    from transformers.generation.continuous_batching.requests import GenerationOutput
    from transformers.utils import ModelOutput

    from mmattn.kv_store.bank import Bank


@register_host
class AdaptedCausalLM(AdaptedModel):
    """A causal language model with adapters.

    Args:
        host: the language model.
        path: dotted name of its list of decoder layers, if it cannot be found.
        require_memory: raise for a call without a memory, instead of returning the host's answer.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> lm = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    ...                                   num_attention_heads=4)).eval()
    >>> import mmattn
    >>> model = mmattn.attach(lm, mmattn.GatedAdapter(memory_dim=24, every=2))
    >>> ids = torch.tensor([[5, 6, 7]])
    >>> torch.equal(model(ids, memory=mmattn.Memory(torch.randn(1, 11, 24))).logits, model(ids).logits)  # fresh
    True
    >>> model.unload() is lm
    True
    """

    kind: ClassVar[str] = "causal_lm"
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    memory_keywords: ClassVar[tuple[str, ...]] = ("adapter_scale", "images", "arrived", "window")
    predicts_tokens: ClassVar[bool] = True
    positions: ClassVar[tuple[str, ...]] = ("after", "before", "joined")

    def __init__(self, host: nn.Module, path: str | None = None, require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.path, _ = find_layers(host, path)

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Match models that no other kind matches; `find_layers` names what is missing."""
        return True

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers of the host."""
        layers = self.host.get_submodule(self.path)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def base_model(self) -> HeadlessHost:
        """The host without its head, called with a memory as this model is; TRL's trainers call it."""
        return HeadlessHost(self)

    def sites(self, position: str) -> list[Site]:
        """Return every decoder layer; at "joined", the attention of each."""
        layers, width = self.layers, width_of(self.host)
        if position == "joined":
            with self.open_blocks.conditioned(None):
                return joined_slots.joined_sites(self.host, layers, self.path, width)
        # The part of the host whose weights produce the hidden states at the site.
        sources = [embeddings_of(self.host), *layers] if position == "before" else list(layers)
        return [
            Site(index, position, f"{self.path}.{index}", width, device_of(source))
            for index, source in zip(range(len(layers)), sources, strict=False)
        ]

    def check_adapter(self, adapter: AdapterLayers) -> None:
        if adapter.position == "joined":
            joined_slots.probe_joined(self, adapter.sites)
        else:
            self.stream_axis = probe_adapter(self.host, self.open_blocks, adapter, partial(text_inputs, self.host))

    # What adapters that join keys and values learn of the host.
    probe_before_text, probe_rotations = joined_slots.probe_before_text, joined_slots.probe_rotations
    embedding_reader = joined_slots.embedding_reader

    def text_state(self, call: Call, args: Positional, kwargs: Keywords) -> TextState:
        inputs = kwargs.get("input_ids", args[0] if args else None)
        if inputs is None:
            inputs = kwargs.get("inputs_embeds")
        cache = kwargs.get("cache")
        if cache is None:
            cache = None if kwargs.keys().isdisjoint(CACHE_NAMES) else given_cache(kwargs)
        noted = NOTED.get()
        generation = noted[1] if noted is not None and noted[0] is call else None
        if noted is not None:
            NOTED.set(None)
        if inputs is None:
            return TextState(0, 0)  # the host raises by itself
        # `generate` writes a text in each row; under a static cache its mask does not show which positions are padding.
        packed = None
        if call.prompt is None and not call.reads_memory and not PACKING_NAMES.isdisjoint(kwargs):
            packed = packed_text(kwargs, *inputs.shape[:2])
        if packed is not None:
            return packed_state(call, packed, inputs, cache, kwargs)
        return TextState(
            rows=inputs.shape[0],
            length=inputs.shape[1],
            inputs=inputs,
            past=0 if cache is None else past_length(cache),
            cache=cache,
            attention_mask=kwargs.get("attention_mask"),
            images=call.images,
            arrivals=call.arrivals,
            prompt=call.prompt,
            expansions=call.expansions,
            generation=generation,
        )

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: Positional, kwargs: Keywords
    ) -> ForwardStep:
        text, inputs = self.text_state(call, args, kwargs), None
        if call.prompt is not None and text.past == 0 and not disabled and call.sources:
            rest = fill_cache(self, call, text, kwargs)
            text, inputs = rest or (text, None)
            kwargs = inputs or kwargs
        step = ForwardStep(self, host, None, self.actions(call, disabled, text), details=text, inputs=inputs)
        # A token may cost little: the note on the cache itself is looked at first.
        if text.cache is not None and not hasattr(text.cache, READ) and noted(text.cache) is None:
            check_with_memory(self.host, call, text)
        for actions in step.actions.values():
            if actions[0][0].stands_in_text or len(actions) > 1:
                step.inputs = joined_slots.shift_text(step, text, dict(kwargs))
                break
        # Keys and values that are joined with the host's own are inside of what checkpointing runs again.
        if self.host.training and torch.is_grad_enabled():
            joined = [block for site in step.actions if site[1] == "joined" for _, block, _ in step.actions[site]]
            if any(True for block in joined for _ in block.parameters()):
                refuse_reentrant(self.host)
        # The paged cache of continuous batching keeps requests apart by itself.
        if text.packed is not None and type(text.cache).__name__ != PAGED_CACHE:
            with self.open_blocks.conditioned(None):
                step.inputs = keep_apart(self.host, step.inputs or dict(kwargs), text.packed)
        return step

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an answer that memory did not reach at some layers, but for those that a host leaves out by design."""
        super().check_reached(layers)
        call = self.open_blocks.in_force().call
        if self.host.training or (call is not None and call.early_exit):
            return  # LayerDrop, and drafts of the first layers alone
        raise ConditionError(
            f"memory did not reach layers {list(layers)} of {type(self.host).__name__} (num_hidden_layers="
            f"{depth_of(self.host)}): they did not run or lost their hooks; unload() before you change the host"
        )

    def check_answer(self, step: ForwardStep, output: object) -> None:
        """Refuse logits that are not finite in the first forward of a text, or beside a memory that was not checked."""
        text, call = step.details, step.call
        if call is None or call.reads_memory:
            return
        if text is None or text.cache is None:
            note_cache(output)
        # Memories whose values need not be finite.
        unchecked = [memory for source in call.sources.values() if (memory := source.unchecked) is not None]
        if text is None or (text.past and not unchecked):
            return
        logits = getattr(output, "logits", None)
        if isinstance(output, tuple):
            logits = next((part for part in output if isinstance(part, Tensor) and part.dim() == 3), None)
        # Requests of continuous batching are looked at one by one.
        if not isinstance(logits, Tensor) or logits.dim() != 3 or not logits.numel():
            return
        if text.packed is not None and text.cache is not None:
            return
        largest = logits.detach().amax(-1)  # a host may hide tokens by -inf

        def explain() -> None:
            if rows := text.rows_of(~torch.isfinite(largest)):
                refuse_rows(rows, text, unchecked, largest.dtype)

        refuse_unless_finite([largest], explain)

    def note_output(self, output: object) -> None:
        if self.open_blocks.in_force().call is not None:
            note_cache(output)

    def install_hooks(self) -> list[Handle]:
        """Hook the adapters to the host and its layers, and have `generate` note texts where memory follows them."""
        hooks = super().install_hooks()
        inner: Any = inner_host(self.host)
        if inner is not self.host:
            # peft's generate calls the model inside its own.
            hooks += HostHooks(self).install(inner)
        vars(inner).pop("prepare_inputs_for_generation", None)
        reads_whole_text = any(self.adapter(name).traits.reads_whole_text for name in self.adapters)
        if reads_whole_text and hasattr(inner, "prepare_inputs_for_generation"):
            notes: Any = partial(note_text, self, inner)
            # generate asks the signature what it may pass on.
            notes.__signature__ = inspect.signature(inner.prepare_inputs_for_generation)
            self.attachment.replace(inner, "prepare_inputs_for_generation", notes)
        return hooks

    # Entries that many requests attend to ----------------------------------------------------------------------------

    def bank(self, memory: Memory | Tensor, dtype: torch.dtype | None = None) -> Bank:
        """Cache the keys and values of every row of a memory (n, m, e) as a `Bank`, from which requests select rows.

        Args:
            memory: one row for each entry.
            dtype: dtype of the cached keys and values, by default that of the weights; `torch.int8` for quantised
                values.
        """
        from mmattn.kv_store.bank import Bank

        return Bank.from_memory(self, memory, dtype)

    def load_bank(self, path: str | PathLike[str], *, mapped: bool = False) -> Bank:
        """Load a `Bank` that was saved; `mapped` leaves entries and pages in the file.

        Raises:
            AdapterFileError: the file is truncated, modified or not a bank, or its pages are of another adapter.
        """
        from mmattn.kv_store.bank import Bank

        return Bank.load(self, path, mapped)

    # Calls ---------------------------------------------------------------------------------------------------------

    def generate(
        self, inputs: Tensor | None = None, *, memory: object = None, **kwargs: object
    ) -> Tensor | ModelOutput:
        """Call the host's `generate` with a memory, one row for each prompt; its beams share the row.

        With `guidance_scale` both passes see the memory; the scale weights the prompt, not the memory.

        Args:
            inputs: the prompt.
            memory: as in `forward`.
            kwargs: arguments of the host, and options of `condition`.

        Raises:
            ConfigError: a misspelt keyword of mmattn.
        """
        options = self.options_of(kwargs)
        if inputs is not None:
            kwargs[prompt_name(self.host)] = inputs
        with self.block_of_call(memory, options):
            return self._host_generate(**kwargs)

    def generate_batch(
        self, inputs: Sequence[list[int]], *, memory: Sequence[object] | Memory | Tensor | None = None, **kwargs: object
    ) -> Mapping[str, GenerationOutput]:
        """Call the host's `generate_batch`: continuous batching of requests of any lengths, each with its memory.

        Prompts with a common prefix do not share its cache, which depends on the memory. For requests that arrive one
        by one use `init_continuous_batching()`, whose `add_request` also takes `memory=`.

        Args:
            inputs: the ids of each prompt.
            memory: a list with a one-row memory or None for each request (the same object to share it), or a memory
                with a row for each request.
            kwargs: arguments of the host.

        Returns:
            The host's output, by request.

        Raises:
            ShapeError: a different number of memories and prompts, or a memory that does not fit the adapters.
            ConditionError: an adapter whose tokens see only a part of their memory, or a compiled forward.
        """
        # transformers logs what is raised while it queues, and answers without it: so all is checked before.
        inputs = list(inputs)
        memories = check_memories(self, rows_of(memory, len(inputs)))
        with pending(inputs, memories):
            host: PreTrainedModel = self.host
            return host.generate_batch(inputs, **kwargs)

    def set_options(
        self,
        call: Call | None,
        images: Tensor | None = None,
        arrived: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        if window is not None and arrived is None:
            raise ConditionError("window= counts back from the slots arrived at each token: give arrived=, too")
        if call is not None:
            call.images = images
            if arrived is not None:
                call.arrivals = arrivals_of(arrived, window, call.sources.values())

    def call_of_forward(self, args: Positional, kwargs: Keywords) -> tuple[Call | None, frozenset[str]]:
        """Return the memories of a forward that begins: in continuous batching those of the requests of this step."""
        cache = kwargs.get("cache")
        if type(cache).__name__ == PAGED_CACHE and (step := call_of_step(self, cache)) is not None:
            return step, frozenset()
        is_set, call, disabled = self.open_blocks.of_call(self.require_memory)
        if call is None and not torch.compiler.is_compiling():
            for cache in (*args, *kwargs.values()):
                if noted(cache):
                    check_without_memory(cache, is_set)
        return call, disabled

    def _host_generate(self, *args: object, **kwargs: object) -> Tensor | ModelOutput:
        """Replace `host.generate`: check the rows before beams multiply them."""
        host_class: type[PreTrainedModel] = type(self.host)
        call = self.open_blocks.of_call(self.require_memory).call
        if call is None:
            return host_class.generate(self.host, *args, **kwargs)
        with self.open_blocks.conditioned(generation_call(self.host, call, args, kwargs)):
            output = host_class.generate(self.host, *args, **kwargs)
        report_checks(wait=True)
        note_new(output)
        return output

    def join(self) -> None:
        """Freeze the host, and take part in its ways to generate."""
        super().join()
        inner = inner_host(self.host)
        for owner, name, method in (
            (self.host, "generate", self._host_generate),
            (inner, "_expand_inputs_for_generation", partial(expand_inputs, self, inner)),
            (inner, "init_continuous_batching", partial(start_batching, self, inner)),
        ):
            if hasattr(type(owner), name):
                self.attachment.replace(owner, name, method)

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: AdapterConfig, rows: int) -> dict[str, Tensor]:
        text = text_config(self.host)
        longest = max(7, 2 * getattr(config, "chunk_size", 0) + 2)
        length = min(longest, getattr(text, "max_position_embeddings", None) or longest)
        batch = {"input_ids": random_ids(self.host, rows, length, generator)}
        if getattr(config, "visible_segments", "all") != "all":
            images = (torch.arange(length) // 3).clamp(max=2).expand(rows, -1)
            batch["images"] = images.to(batch["input_ids"].device)
        return batch


def note_cache(output: object) -> None:
    """Note that the cache in the output of a host, if there is one, was read with a memory."""
    if isinstance(output, Mapping):  # by name: a compiler would follow tensors that are touched
        parts = [output[name] for name in output if name in CACHE_NAMES]
    else:
        parts = [part for part in output if hasattr(part, "get_seq_length")] if isinstance(output, tuple) else []
    for part in parts:
        if hasattr(part, "self_attention_cache"):
            note(part)
        elif part is not None:
            setattr(part, READ, True)


def past_length(cache: Cache) -> int | None:
    """Return how many tokens a host has in its cache, or None if it does not say."""
    try:
        return int(cache.get_seq_length())
    except (AttributeError, ValueError):  # states of recurrent layers alone, which count no tokens
        return None


# The host without its head --------------------------------------------------------------------------------------------


class HeadlessHost:
    """The `base_model` of an adapted language model; other attributes are those of the host's own."""

    def __init__(self, model: AdaptedModel) -> None:
        self._model = model
        host: PreTrainedModel = inner_host(model.host)
        self._own: PreTrainedModel = host.base_model

    def __call__(self, *args: object, memory: object = None, **kwargs: object) -> ModelOutput:
        """Call the host's base model with a memory; returns what it returns."""
        model = self._model
        options = model.options_of(kwargs)
        if getattr(getattr(model.host, "active_peft_config", None), "is_prompt_learning", False):
            raise ConditionError(
                "the base model of a host with prompts of peft was called, and would leave the prompts out: call the "
                "adapted model"
            )
        with model.block_of_call(memory, options):
            if memory is None:
                self._check_trains()
                return self._own(*args, **kwargs)
            # Adapters act as in a forward of the whole host.
            output, hooks = None, HostHooks(model)
            args, kwargs = hooks.before(self._own, args, kwargs) or (args, kwargs)
            try:
                output = self._own(*args, **kwargs)
            finally:
                hooks.after(self._own, args, output)
            return output

    def _check_trains(self) -> None:
        """Refuse a step of training without a memory: the host is frozen, and the adapters would not be reached."""
        model = self._model
        if not (torch.is_grad_enabled() and model.training) or model.open_blocks.in_force().is_set:
            return
        if not any(parameter.requires_grad for parameter in model.host.parameters()):
            raise ConditionError(
                f"{type(model.host).__name__} was called in training without a memory. Give "
                "SFTConfig(remove_unused_columns=False) and data_collator=mmattn.training.MemoryCollator(…)"
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
