"""Diffusion models with adapters inside their attention: the base of UNets and transformers.

An adapter acts after an attention layer of the host, by a hook, whatever processors the host has (sliced, fused, of an
IP-Adapter, LoRA). With Z the heads of the host's attention and A those of the adapters, the host returns Wo Z + bias,
and Wo A is added. `use_core` also computes the host's own attention to its text by the attention core.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.protocols import BoundMemory
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError, check_bool_mask
from mmattn.hosts.base import AdaptedModel, check_unused
from mmattn.hosts.context import Action, ForwardStep
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

#: The model that a pipeline calls in this context, and the name of the prediction in diffusers' `cache_context`.
_PREDICTION: ContextVar[tuple[Any, str]] = ContextVar("mmattn_guidance_prediction", default=(None, ""))


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
        #: Processors of `use_core` by layer, and the host's own that they replace.
        self.processors: dict[int, Any] = {}
        self._replaced: dict[int, Any] = {}

    @abstractmethod
    def grid_of(self, given: Mapping[str, Any]) -> Grid | None:
        """Return frames, height and width of the picture in the host's first layer, by the arguments of a call."""

    @abstractmethod
    def text_attention(self, index: int) -> Any:
        """Return the processor that computes the text attention of a layer by the core, with a `check` of the layer."""

    def picture_part(self, index: int) -> int:
        """Return the index of the picture among the outputs of an attention layer."""
        return 0

    def layer(self, index: int) -> Any:
        """The host's attention layer of this number."""
        return self.host.get_submodule(self.layer_names[index])

    def join(self) -> None:
        """Follow the host, and the names that pipelines give to `cache_context`, which has no hook."""
        super().join()
        if hasattr(self.host, "cache_context"):
            self.host.__dict__["cache_context"] = self._cache_context

    @contextlib.contextmanager
    def _cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        before = _PREDICTION.get()
        _PREDICTION.set((self, name))
        try:
            with type(self.host).cache_context(self.host, name, **kwargs):  # type: ignore[attr-defined]
                yield
        finally:
            _PREDICTION.set(before)

    def prediction_name(self) -> str:
        """Return the name that a pipeline gives to its prediction in `cache_context`, or ""."""
        model, name = _PREDICTION.get()
        return name if model is self else ""

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
        """Return the prediction of the host for a sample (b, …), under the conditions of the surrounding block."""
        kwargs = {self.picture_name: sample, "timestep": timestep, "encoder_hidden_states": text}
        predicted: Tensor = self.host(**kwargs, **inputs).sample
        return predicted

    @contextlib.contextmanager
    def condition(  # type: ignore[override]
        self,
        memory: Any,
        *,
        adapter_scale: Any = 1.0,
        text_mask: Tensor | None = None,
        guided: bool = False,
        negative_prompt_embeds: Tensor | None = None,
    ) -> Iterator[Any]:
        """Give every call of the host inside the block this memory; None for no memory.

        K/V of the memory, and with `use_core` of the text, are computed once for all calls inside the block.

        Args:
            memory: one for all active adapters, or one by adapter name.
            adapter_scale: a number, (b,), (b, height, width), (b, frames, height, width), one by block, or a function
                of the time step; a mapping from adapter names gives each its own
                (`mmattn.hosts.diffusion.scale`).
            text_mask: (rows, m) bool, which tokens of the host's own text are real; needs `use_core`.
            guided: a pipeline of diffusers computes classifier-free guidance inside the block, in batches of two or
                three parts or in a call for each: unconditional rows and calls see no memory. They are known by the
                null class of DiT, by the names that the pipeline gives to `cache_context`, else by the order of
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
        """Return the call with this memory, or None without one."""
        self.check_attached()
        text_mask = self._check_text_mask(text_mask)
        if memory is None:
            self.check_not_required()
            return DenoisingCall({}, text_mask=text_mask) if self._replaced else None
        sources = self.bind(memory)
        by_name = isinstance(adapter_scale, Mapping) and adapter_scale and adapter_scale.keys() <= set(self.adapters)
        scales = {
            name: check_adapter_scale(
                adapter_scale.get(name, 0.0) if by_name else adapter_scale, self.layer_names, source.rows
            )
            for name, source in sources.items()
        }
        sources = {name: source for name, source in sources.items() if not is_zero(scales[name])}
        return DenoisingCall(sources, scales=scales, guided=guided, text_mask=text_mask)

    def _check_text_mask(self, text_mask: Tensor | None) -> Tensor | None:
        if text_mask is not None and not self._replaced:
            raise ConditionError("text_mask needs the host's own attention to go through the core: call use_core()")
        if text_mask is None or not check_bool_mask("text_mask", text_mask).is_inference():
            return text_mask
        with torch.inference_mode(False):
            return text_mask.clone()

    def denoising_call(self) -> DenoisingCall | None:
        """Return the call under way."""
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
        """Hook the adapters to the output of the block around an attention layer."""
        block, part = self.block_of(index)
        return self.host.get_submodule(block).register_forward_hook(AfterBlock(self, index, part))

    def block_of(self, index: int) -> tuple[str, int | None]:
        """Return the block around an attention layer, and the index of the picture in its outputs or None."""
        raise AttachError(
            f"layout.added_to='block' adds to the blocks of a transformer, and {type(self.host).__name__} is a host of "
            f"kind {self.kind!r}: leave it out"
        )

    def check_adapter(self, adapter: AdapterLayers) -> None:
        """Refuse an adapter that adds to blocks where the host has none."""
        if adapter.adds_to_block:
            self.block_of(adapter.layers[0])

    def forward_step(
        self, call: Any, disabled: frozenset[str], host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ForwardStep:
        """Return the actions of one forward, for the size of its picture and its timestep."""
        if torch.is_grad_enabled():
            keep_context(host)
        given = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        sample, timestep = given.get(self.picture_name), given.get("timestep")
        if sample is None:
            return ForwardStep(self, host, None, {})  # the host raises by itself
        rows, grid, prediction = sample.shape[0], self.grid_of(given), self.prediction_name()
        actions: dict[tuple[int, str], list[Action]] = {}
        conditional: dict[int, tuple[bool, ...]] = {}
        for name, source in call.sources.items():
            count = parts_of(name, rows, source.rows, call.guided, prediction)
            if not call.guided:
                conditional[count] = (True,)
            elif count not in conditional:
                conditional[count] = conditional_parts(self.host, call, given, self.picture_name, count, prediction)
            if not any(sees := conditional[count]):
                continue
            scale = call.scales[name]
            if not isinstance(scale, float):
                scale = at_step(scale, timestep, self.layer_names, source.rows)
                check_aspect(scale, grid)
            if name in self.active and name not in disabled:
                self._add_actions(actions, name, source, sees, scale, grid, rows=rows, timestep=timestep)
        return ForwardStep(self, host, None, actions, details={})

    def actions_of_attention(self, q: Tensor, index: int) -> Sequence[Action]:
        """Return the actions for queries (rows, h, l, k) where only a part of the host was called."""
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
        """Return which parts of the rows of a layer see the memory, without the arguments of the host."""
        prediction = self.prediction_name()
        count = parts_of(name, rows, memory_rows, call.guided, prediction)
        if not call.guided or call.parts:
            return call.parts if count == len(call.parts) else (True,) * count
        unknown = count == 1 and prediction not in NAMED and self.picture_name == "hidden_states"
        if call.negative_prompt_embeds is not None or unknown:
            raise ConditionError(
                "a compiled host, or a part of one, does not know which half of guidance is unconditional: compile "
                "blocks alone (compile_repeated_blocks), or name the half by host.cache_context('cond') and ('uncond')"
            )
        return parts_in_order(self.host, count) if count > 1 else (NAMED.get(prediction, True),)

    def _add_actions(
        self,
        actions: dict[tuple[int, str], list[Action]],
        name: str,
        source: BoundMemory,
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
        view = source.step(TextState(source.rows or 0, frames * height * width, layer=only, timestep=timestep))
        for index in adapter.layers if only is None else (only,):
            layer_scale = at_layer(scale, self.layer_names[index])
            entries = actions.setdefault((index, "inside"), [])
            if not is_zero(layer_scale):
                entries.append(
                    (view, adapter.block(index), RowsAndScale(sees, layer_scale, grid, adapter.adds_to_block, rows))
                )

    def lost_layers(self, step: ForwardStep) -> list[int]:
        """Return the layers that ran, or were replaced, and that memory did not reach.

        Layers that a pipeline (`skip_layers`) or a cache of diffusers leaves out on purpose do not run.
        """
        ran, lost = step.details.get("ran", ()), super().lost_layers(step)
        parts = set(self.host.modules()) if lost else set()
        return [layer for layer in lost if layer in ran or self.hooked[layer, "inside"] not in parts]

    def check_reached(self, layers: Sequence[int]) -> None:
        """Raise ConditionError for layers that memory did not reach."""
        raise ConditionError(
            f"memory did not reach {[self.layer_names[index] for index in layers]}: these layers ran without being "
            "called, or were replaced after attach; name others with DecoupledAdapter(blocks=...), or unload() before "
            "the host is changed"
        )

    # The host's own attention ----------------------------------------------------------------------------------------

    @property
    def through_core(self) -> bool:
        """Return whether the host's own attention to its text is computed by the core."""
        return bool(self._replaced)

    def call_of_forward(self, host: nn.Module, kwargs: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
        """Return the memories of a forward that begins; no processor may have been replaced after `use_core`."""
        for index in self._replaced:
            if self.layer(index).processor is not self.processors[index]:
                raise ConditionError(
                    f"the processor of {self.layer_names[index]} was replaced after use_core(), so the host's own "
                    "attention left the core: call use_core(False) before load_ip_adapter, set_attn_processor and the "
                    "like"
                )
        return self.current_call()

    def use_core(self, on: bool = True) -> Any:
        """Compute the host's own attention to its text by `mmattn.attend`: padding is masked, and K/V of the text that
        are the same at every step are computed once per block.

        Without masks the host's outputs are equal but for rounding. Rows whose text is all masked see no text.

        Args:
            on: False gives the host its own processors back.

        Raises:
            ConditionError: layers whose attention the core cannot compute, another processor than diffusers' default,
                or adapters that were unloaded.
        """
        if on:
            self.check_attached()
        if on and not self._replaced:
            processors = {index: self.text_attention(index) for index in range(len(self.layer_names))}
            for index, processor in processors.items():
                processor.check(self.layer(index))
            self.processors = processors
            for index, processor in processors.items():
                self._replaced[index] = self.layer(index).processor
                self.layer(index).processor = processor
        elif not on:
            for index, processor in self._replaced.items():
                if self.layer(index).processor is self.processors[index]:
                    self.layer(index).processor = processor
            self._replaced = {}
        forget_compiled()
        return self

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Return the attention modules of the adapters, and under "text" those of `use_core`."""
        processors = self.processors.items() if self.through_core else ()
        text = {("text", index): one.heads for index, one in processors if one.heads is not None}
        return super().attentions() | text

    def unload(self) -> nn.Module:
        """Return the very same host without any trace of the adapters."""
        self.use_core(False)
        return super().unload()
