"""Diffusion models with adapters inside their attention: what UNets and transformers share.

An adapter acts after an attention layer of the host, by a hook: what the host's own processors are (sliced, fused, an
IP-Adapter's, LoRA) does not matter, and may change. With Z the heads of the host's attention and A those of the
adapters, the host gives Wo Z + bias; Wo A is added to it. `use_core` goes further and puts the host's own text through
our core.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError, check_bool_mask
from mmattn.hosts.base import AdaptedModel, check_unused
from mmattn.hosts.context import Action, ForwardStep, refuse_generator
from mmattn.hosts.diffusion.call import AfterBlock, DenoisingCall, InsideAttention, RowsAndScale, WatchLayer
from mmattn.hosts.diffusion.guided_calls import NAMED, conditional_parts, forget_step, parts_in_order, parts_of
from mmattn.hosts.diffusion.heads import forward_arguments, watched_parts
from mmattn.hosts.diffusion.scale import (
    Grid,
    at_layer,
    at_step,
    check_adapter_scale,
    check_aspect,
    is_zero,
    times_by_row,
)
from mmattn.hosts.hooks import AfterHost, BeforeHost
from mmattn.hosts.keywords import check_keywords
from mmattn.hosts.ownership import forget_compiled
from mmattn.hosts.recomputation import keep_context

# Which model a pipeline calls in this context, and for what: "cond", "uncond", … of diffusers' `cache_context`.
_HALF: ContextVar[tuple[Any, str]] = ContextVar("mmattn_guidance_half", default=(None, ""))


class AdaptedDenoiser(AdaptedModel):
    """A diffusion model and the adapters beside its attention layers.

    Args:
        host: the frozen model.
        layer_names: of the attention layers at which adapters may act.
        require_memory: calls without a memory raise instead of giving the host's own answer.
    """

    positions: ClassVar[tuple[str, ...]] = ("inside",)
    replaced = ("cache_context",)
    attaches_bare: ClassVar[bool] = True

    def __init__(self, host: nn.Module, layer_names: Sequence[str], require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.layer_names = tuple(layer_names)
        self.arguments = forward_arguments(host)
        self.picture_name = "sample" if "sample" in self.arguments else "hidden_states"
        # Processors that put the host's own text through the core, and those whose place they have taken.
        self.own: dict[int, Any] = {}
        self._processors: dict[int, Any] = {}

    # What a kind of diffusion model says of itself -------------------------------------------------------------------

    @abstractmethod
    def grid_of(self, given: Mapping[str, Any]) -> Grid | None:
        """Frames, height and width of the picture that the host is given, as its first layer has it.

        Args:
            given: the arguments of the host by name.
        """

    @abstractmethod
    def text_attention(self, index: int) -> Any:
        """The processor that puts the text of an attention layer through the core, with a `check` of the layer.

        Raises:
            ConditionError: the core cannot compute it.
        """

    def picture_part(self, index: int) -> int:
        """Which of the outputs of an attention layer is that of the picture, where it has several."""
        return 0

    def layer(self, index: int) -> Any:
        """The host's attention layer of this number."""
        return self.host.get_submodule(self.layer_names[index])

    def join(self) -> None:
        """Follow the host, and note which half of guidance its pipelines are at."""
        super().join()
        if hasattr(self.host, "cache_context"):
            self.host.__dict__["cache_context"] = self._cache_context

    @contextlib.contextmanager
    def _cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        before = _HALF.get()
        _HALF.set((self, name))
        try:
            with type(self.host).cache_context(self.host, name, **kwargs):  # type: ignore[attr-defined]
                yield
        finally:
            _HALF.set(before)

    def prediction_name(self) -> str:
        """Return the name that a pipeline gives in `cache_context` to the prediction it computes, "" where none."""
        model, half = _HALF.get()
        return half if model is self else ""

    # Calls -----------------------------------------------------------------------------------------------------------

    def forward(
        self, *args: Any, memory: Any = None, adapter_scale: Any = 1.0, text_mask: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            args: the host's own, in its order.
            memory: (b, m, e), one row for each row of the sample; one for all adapters or one by adapter name. None:
                the memory of the surrounding `condition` block, or the host's own output.
            adapter_scale: as in `condition`, of the memory given here.
            text_mask: as in `condition`.
            kwargs: the host's own.
        """
        check_keywords(self, kwargs)
        if memory is None:
            check_unused(adapter_scale)
            if text_mask is None:
                return self.host(*args, **kwargs)
        around = self.denoising_call() if memory is None else None
        if around is None:
            call = self.make_call(memory, adapter_scale, text_mask=text_mask)
        else:
            call = replace(around, text_mask=self._check_text_mask(text_mask))
        with self.open_blocks.conditioned(call):
            return self.host(*args, **kwargs)

    def predict(self, sample: Tensor, timestep: Any, text: Tensor, **inputs: Any) -> Tensor:
        """What the host makes of a sample under the conditions of the surrounding block, in the sample's shape.

        Args:
            sample: (b, …).
            timestep: of all rows.
            text: (b, m, e), the host's `encoder_hidden_states`.
            inputs: further arguments of the host.
        """
        given = {self.picture_name: sample, "timestep": timestep, "encoder_hidden_states": text}
        predicted: Tensor = self.host(**given, **inputs).sample
        return predicted

    @contextlib.contextmanager
    def condition(
        self,
        memory: Any,
        *,
        adapter_scale: Any = 1.0,
        text_mask: Tensor | None = None,
        guided: bool = False,
        negative_prompt_embeds: Tensor | None = None,
    ) -> Iterator[Any]:
        """Every call of the host inside the block sees this memory; None is no memory.

        What is computed of the memory, and with `use_core` of the text, is computed once for all calls inside the
        block.

        Args:
            memory: one for all active adapters, or one by adapter name.
            adapter_scale: a number, (b,), (b, height, width), (b, frames, height, width), one by block, or a function
                of the time step; a mapping from adapter names gives each its own
                (`mmattn.hosts.diffusion.scale`).
            text_mask: (rows, m) bool, which tokens of the host's own text are real; needs `use_core`.
            guided: a pipeline of diffusers computes classifier-free guidance inside the block, in batches of two or
                three parts or in a call for each: what is unconditional sees no memory. Which part or call that is
                tell the null class of DiT, the names that the pipeline gives to `cache_context`, and else the order of
                diffusers' own pipelines: of calls at one time step the conditional one comes first.
            negative_prompt_embeds: (b, m, e), the embeddings of the negative prompt as the host is given them: rows
                with this text see no memory, in whatever order they come. Implies `guided`; needed by pipelines of
                another order than diffusers', such as InstructPix2Pix.

        Raises:
            ShapeError: a memory or scale that does not fit.
            NonFiniteError: NaN or infinity in either.
            ConfigError: a scale of another kind.

        A call inside a guided block raises ConditionError where nothing tells whether it is unconditional.
        """
        refuse_generator(sys._getframe())
        call = self.make_call(
            memory, adapter_scale, text_mask=text_mask, guided=guided or negative_prompt_embeds is not None
        )
        if call is not None:
            call.negative_prompt_embeds = negative_prompt_embeds
        try:
            with self.open_blocks.conditioned(call, is_condition=True):
                yield self
        finally:
            forget_step(self.host)

    def make_call(  # type: ignore[override]
        self, memory: Any, adapter_scale: Any = 1.0, *, text_mask: Tensor | None = None, guided: bool = False
    ) -> DenoisingCall | None:
        """What a call with this memory sees; None is no memory."""
        self.check_attached()
        text_mask = self._check_text_mask(text_mask)
        if memory is None:
            self.check_not_required()
            return DenoisingCall({}, text_mask=text_mask) if self._processors else None
        sources = self.bind(memory)
        by_name = (
            isinstance(adapter_scale, Mapping) and bool(adapter_scale) and set(adapter_scale) <= set(self.adapters)
        )
        scales = {
            name: check_adapter_scale(
                adapter_scale.get(name, 0.0) if by_name else adapter_scale, self.layer_names, source.rows
            )
            for name, source in sources.items()
        }
        seen = {name: source for name, source in sources.items() if not is_zero(scales[name])}
        return DenoisingCall(seen, scales=scales, guided=guided, text_mask=text_mask)

    def _check_text_mask(self, text_mask: Tensor | None) -> Tensor | None:
        if text_mask is not None and not self._processors:
            raise ConditionError("text_mask needs the host's own attention to go through the core: call use_core()")
        if text_mask is None or not check_bool_mask("text_mask", text_mask).is_inference():
            return text_mask
        with torch.inference_mode(False):
            return text_mask.clone()

    def denoising_call(self) -> DenoisingCall | None:
        """The call under way here."""
        call, _ = self.current_call()
        return call if isinstance(call, DenoisingCall) else None

    # One forward -----------------------------------------------------------------------------------------------------

    def install_hooks(self) -> list[Any]:
        """Hook the adapters to the host and to the attention layers beside which they act."""
        self.hooked = {site: self.host.get_submodule(module) for site, module in self.used_sites().items()}
        adapters = [self.adapter(name) for name in self.adapters]
        blocks = sorted({layer for adapter in adapters if adapter.adds_to_block for layer in adapter.layers})
        return [
            self.host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True),
            self.host.register_forward_hook(AfterHost(self), always_call=True),
            *(
                attn.register_forward_hook(InsideAttention(self, index), with_kwargs=True)
                for (index, _), attn in self.hooked.items()
            ),
            *(self.hook_block(index) for index in blocks),
            *(
                part.register_forward_pre_hook(WatchLayer(self, index))
                for (index, _), attn in self.hooked.items()
                for part in watched_parts(attn)
            ),
        ]

    def hook_block(self, index: int) -> Any:
        """Hook the adapters to what the block around an attention layer hands on."""
        block, part = self.block_of(index)
        return self.host.get_submodule(block).register_forward_hook(AfterBlock(self, index, part))

    def block_of(self, index: int) -> tuple[str, int | None]:
        """Name of the block around an attention layer, and which of its outputs is the picture's; None is its only one.

        Raises:
            AttachError: this kind of host has no such blocks.
        """
        raise AttachError(
            f"layout.added_to='block' adds to the blocks of a transformer, and {type(self.host).__name__} is a host of "
            f"kind {self.kind!r}: leave it out"
        )

    def check_adapter(self, adapter: Any) -> None:
        """Refuse an adapter that adds to blocks which the host has not.

        Raises:
            AttachError: it does.
        """
        if adapter.adds_to_block:
            self.block_of(adapter.layers[0])

    def forward_step(
        self, call: Any, disabled: frozenset[str], host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ForwardStep:
        """What the adapters do in one forward of the host, at its picture's size and its time step."""
        if torch.is_grad_enabled():
            keep_context(host)
        given = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        sample, timestep = given.get(self.picture_name), given.get("timestep")
        if sample is None:
            return ForwardStep(self, host, None, {})  # the host says itself what it misses
        rows, grid, half = sample.shape[0], self.grid_of(given), self.prediction_name()
        actions: dict[tuple[int, str], list[Action]] = {}
        known: dict[int, tuple[bool, ...]] = {}
        for name, source in call.sources.items():
            count = parts_of(name, rows, source.rows, call.guided, half)
            if count not in known:
                known[count] = (
                    conditional_parts(self.host, call, given, self.picture_name, count, half)
                    if call.guided
                    else (True,)
                )
            if not any(sees := known[count]):
                continue
            scale = call.scales[name]
            if not isinstance(scale, float):
                scale = at_step(scale, timestep, self.layer_names, source.rows)
                check_aspect(scale, grid)
            if name in self.active and name not in disabled:
                self._add_actions(actions, name, source, sees, scale, grid, rows=rows, timestep=timestep)
        return ForwardStep(self, host, None, actions, details={})

    def actions_of_attention(self, q: Tensor, index: int) -> Sequence[Action]:
        """What the adapters do for queries (rows, h, l, k) where only a part of the host was called."""
        call, disabled = self.current_call()
        actions: dict[tuple[int, str], list[Action]] = {}
        if not isinstance(call, DenoisingCall):
            return ()
        for name, source in call.sources.items():
            if name not in self.active or name in disabled or index not in self.adapter(name).layers:
                continue
            scale: Any = call.scales[name]
            if self.adapter(name).adds_to_block:
                raise ConditionError("an adapter that adds to whole blocks needs the call of the whole host")
            if callable(scale) and not isinstance(scale, Tensor):
                raise ConditionError("an adapter_scale that follows the time step needs the call of the whole host")
            scale = at_layer(scale, self.layer_names[index])
            if isinstance(scale, Tensor) and scale.dim() > 1:
                raise ConditionError("an adapter_scale by pixel needs the call of the whole host")
            sees = self._parts_of_attention(call, name, q.shape[0], source.rows)
            if any(sees):
                self._add_actions(actions, name, source, sees, scale, (1, 1, q.shape[2]), index)
        return actions.get((index, "inside"), ())

    def _parts_of_attention(
        self, call: DenoisingCall, name: str, rows: int, memory_rows: int | None
    ) -> tuple[bool, ...]:
        """Which parts of the rows of an attention layer see the memory, where the host's arguments are not known."""
        half = self.prediction_name()
        count = parts_of(name, rows, memory_rows, call.guided, half)
        if not call.guided or call.parts:
            return call.parts if count == len(call.parts) else (True,) * count
        unknown = count == 1 and half not in NAMED and self.picture_name == "hidden_states"
        if call.negative_prompt_embeds is not None or unknown:
            raise ConditionError(
                "in a compiled host, or a part of one, nothing tells which half of guidance is unconditional: compile "
                "blocks alone (compile_repeated_blocks), or name the half by host.cache_context('cond') and ('uncond')"
            )
        return parts_in_order(self.host, count) if count > 1 else (NAMED.get(half, True),)

    def _add_actions(
        self,
        actions: dict[tuple[int, str], list[Action]],
        name: str,
        source: Any,
        sees: tuple[bool, ...],
        scale: Any,
        grid: Grid | None,
        only: int | None = None,
        rows: int | None = None,
        timestep: Any = None,
    ) -> None:
        adapter = self.adapter(name)
        frames, height, width = grid or (1, 1, 1)
        if timestep is not None and source.rows is not None:
            timestep = times_by_row(timestep, sees.index(True) * source.rows, source.rows)
        view = source.step(TextState(source.rows, frames * height * width, layer=only, timestep=timestep))
        for index in adapter.layers if only is None else (only,):
            own = at_layer(scale, self.layer_names[index])
            entries = actions.setdefault((index, "inside"), [])
            if not is_zero(own):
                entries.append((view, adapter.block(index), RowsAndScale(sees, own, grid, adapter.adds_to_block, rows)))

    def lost_layers(self, step: ForwardStep) -> list[int]:
        """Return the layers that ran, or were replaced, and that memory did not reach.

        Layers that a pipeline (`skip_layers`) or a cache of diffusers leaves out on purpose do not run.
        """
        ran, lost = step.details.get("ran", ()), super().lost_layers(step)
        parts = set(self.host.modules()) if lost else set()
        return [layer for layer in lost if layer in ran or self.hooked[layer, "inside"] not in parts]

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an answer that memory did not reach.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"memory did not reach {[self.layer_names[index] for index in layers]}: these layers ran without being "
            "called, or were replaced after attach; name others with DecoupledAdapter(blocks=...), or unload() before "
            "the host is changed"
        )

    # The host's own attention ----------------------------------------------------------------------------------------

    @property
    def through_core(self) -> bool:
        """Whether the host's own text runs through the core."""
        return bool(self._processors)

    def call_of_forward(self, host: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
        """Return the memories of a forward that begins; no processor may have been replaced after `use_core`.

        Raises:
            ConditionError: one was.
        """
        for index in self._processors:
            if self.layer(index).processor is not self.own[index]:
                raise ConditionError(
                    f"the processor of {self.layer_names[index]} was replaced after use_core(), so the host's own "
                    "attention left the core: call use_core(False) before load_ip_adapter, set_attn_processor and the "
                    "like"
                )
        return self.current_call()

    def use_core(self, on: bool = True) -> Any:
        """Let the host's own attention to its text run through `mmattn.attend`: padding hidden, and where the text's
        keys and values are the same at every step, computed once per block.

        Where nothing is masked the host's answers stay what they were to rounding. Rows whose text is masked out
        altogether see no text.

        Args:
            on: False gives the host its own processors back.

        Raises:
            ConditionError: layers whose attention the core cannot compute, another processor than diffusers' default,
                or adapters that were unloaded.
        """
        if on:
            self.check_attached()
        if on and not self._processors:
            own = {index: self.text_attention(index) for index in range(len(self.layer_names))}
            for index, processor in own.items():
                processor.check(self.layer(index))
            self.own = own
            for index, processor in own.items():
                self._processors[index] = self.layer(index).processor
                self.layer(index).processor = processor
        elif not on:
            for index, processor in self._processors.items():
                if self.layer(index).processor is self.own[index]:
                    self.layer(index).processor = processor
            self._processors = {}
        forget_compiled()
        return self

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Everything that attends: the adapters, and under "text" the host's own layers that go through the core."""
        own = {("text", index): attention.heads for index, attention in self.own.items() if attention.heads is not None}
        return super().attentions() | (own if self.through_core else {})

    def unload(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        self.use_core(False)
        return super().unload()
