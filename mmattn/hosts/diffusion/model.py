"""Diffusion models with adapters inside their attention: the base of UNets and transformers.

An adapter acts after an attention layer of the host, by a hook, whatever processors the host has (sliced, fused, of an
IP-Adapter, LoRA). With Z the heads of the host's attention and A those of the adapters, the host returns Wo Z + bias,
and Wo A is added. `use_core` also computes the host's own attention to its text by the attention core.
"""

from __future__ import annotations

import contextlib
import math
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from typing_extensions import Self

from mmattn.adapters.base import AdapterLayers
from mmattn.adapters.decoupled import JointDecoupledAdapter
from mmattn.adapters.protocols import View
from mmattn.adapters.text_state import TextState
from mmattn.errors import AdapterFileError, AttachError, ConditionError, check_bool_mask, import_extra
from mmattn.hosts.attachment import forget_compiled
from mmattn.hosts.context import (
    Action,
    Arguments,
    Call,
    ForwardStep,
    Handle,
    Keywords,
    Positional,
    check_not_required,
    is_compiled,
    keep_context,
)
from mmattn.hosts.diffusion.attention import CoreProcessor
from mmattn.hosts.diffusion.call import (
    DenoisingCall,
    Reading,
    added_heads,
    after_block,
    inside_attention,
    note_queries,
)
from mmattn.hosts.diffusion.guided_calls import conditional_parts, parts_of
from mmattn.hosts.diffusion.heads import forward_arguments, query_projections
from mmattn.hosts.diffusion.published import PublishedLayout, Settings
from mmattn.hosts.diffusion.scale import (
    AdapterScale,
    Grid,
    at_layer,
    at_step,
    check_adapter_scale,
    check_aspect,
    is_zero,
    times_by_row,
)
from mmattn.hosts.model import AdaptedModel, check_unused
from mmattn.models.loading import read_weights

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention

#: The model that a pipeline calls in this context, and the name of the prediction in diffusers' `cache_context`.
_PREDICTION: ContextVar[tuple[object, str]] = ContextVar("mmattn_guidance_prediction", default=(None, ""))


class AdaptedDenoiser(AdaptedModel):
    """A diffusion model and the adapters beside its attention layers, or its own attention to its text in the core."""

    positions: ClassVar[tuple[str, ...]] = ("inside",)
    attaches_bare: ClassVar[bool] = True
    memory_keywords: ClassVar[tuple[str, ...]] = ("adapter_scale", "text_mask")
    #: Name of the model in a pipeline of diffusers.
    part: ClassVar[str]

    def __init__(self, host: nn.Module, layer_names: Sequence[str], require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.layer_names = tuple(layer_names)
        self.processors: dict[int, CoreProcessor] = {}
        self.picture_name = "sample" if "sample" in forward_arguments(host) else "hidden_states"

    @abstractmethod
    def grid_of(self, kwargs: Keywords) -> Grid | None:
        """Return frames, height and width of the picture in the host's first layer, by the arguments of a call."""

    @abstractmethod
    def text_attention(self, index: int) -> type[CoreProcessor]:
        """Return the processor that computes the text attention of a layer by the core."""

    @abstractmethod
    def published_layout(self, follows_time: bool) -> PublishedLayout:
        """Return the layout of published IP-Adapters for this host."""

    def join(self) -> None:
        """Follow the host, and the names that pipelines give to `cache_context`, which has no hook."""
        super().join()
        if hasattr(self.host, "cache_context"):
            self.attachment.replace(self.host, "cache_context", self._cache_context)

    @contextlib.contextmanager
    def _cache_context(self, name: str, **kwargs: object) -> Iterator[None]:
        before = _PREDICTION.get()
        _PREDICTION.set((self, name))
        try:
            with type(self.host).cache_context(self.host, name, **kwargs):  # type: ignore[attr-defined]
                yield
        finally:
            _PREDICTION.set(before)

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        diffusers: Any = import_extra("diffusers", "diffusion")
        subfolder = {} if os.path.isfile(os.path.join(name, "config.json")) else {"subfolder": cls.part}
        kind = diffusers.UNet2DConditionModel if cls.part == "unet" else diffusers.AutoModel
        try:
            model: nn.Module = kind.from_pretrained(name, use_safetensors=True, **subfolder)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise AdapterFileError(
                f"no {cls.part} can be loaded from {os.fspath(name)!r} ({error}): give a pipeline on the hub, or the "
                f"folder of a {cls.part} or a pipeline, with safetensors"
            ) from error
        return model.eval()

    def read_single_file(self, path: str | PathLike[str]) -> tuple[Settings, dict[str, Tensor]]:
        tensors = read_weights(path, pickles=True)
        follows_time = any(name.endswith("norm_ip.linear.weight") for name in tensors)
        return self.published_layout(follows_time).read(tensors, path)

    def save_ip_adapter(self, path: str | PathLike[str], name: str = "default") -> None:
        """Write one adapter as a single safetensors file in the layout of published IP-Adapters.

        Args:
            path: the file.
            name: of the adapter.

        Raises:
            ConditionError: the layout has no such adapter (`tokens` not given, a part of the blocks, a resampler).
        """
        follows_time = isinstance(self.adapter(name).config, JointDecoupledAdapter)
        self.published_layout(follows_time).write(path, name)

    def picture_part(self, index: int) -> int:
        """Return the index of the picture among the outputs of an attention layer."""
        return 0

    def layer(self, index: int) -> Attention:
        return self.host.get_submodule(self.layer_names[index])

    # The host's own text ----------------------------------------------------------------------------------------------

    @property
    def through_core(self) -> bool:
        """Return whether the host's own attention to its text is computed by the core."""
        return bool(self.processors)

    def use_core(self, on: bool = True) -> Self:
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
        if on and not self.processors:
            processors: dict[int, CoreProcessor] = {}
            for index, name in enumerate(self.layer_names):
                kind, added = self.text_attention(index), partial(added_heads, self, index)
                processors[index] = kind(name, self.layer(index), self.denoising_call, added)
            self.processors = processors
            for index, processor in self.processors.items():
                self.layer(index).processor = processor
        elif not on:
            for index, processor in self.processors.items():
                if self.layer(index).processor is processor:
                    self.layer(index).processor = processor.replaced
            self.processors = {}
        forget_compiled()
        return self

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Return the attention modules of the adapters, and under "text" those of `use_core`."""
        processors = self.processors.items()
        text = {("text", index): processor.heads for index, processor in processors if processor.heads is not None}
        return super().attentions() | text

    def unload(self) -> nn.Module:
        self.use_core(False)
        return super().unload()

    def _check_text_mask(self, text_mask: Tensor | None) -> Tensor | None:
        if text_mask is not None and not self.processors:
            raise ConditionError("text_mask needs the host's own attention to go through the core: call use_core()")
        if text_mask is None or not check_bool_mask("text_mask", text_mask).is_inference():
            return text_mask
        with torch.inference_mode(False):
            return text_mask.clone()

    # Calls -----------------------------------------------------------------------------------------------------------

    def block_of_call(self, memory: object, options: Arguments) -> AbstractContextManager[None]:
        """Return the block of one call; `text_mask=` also goes with the memory of the block around it, or with none."""
        text_mask = options.pop("text_mask", None) if memory is None else None
        if text_mask is None:
            return super().block_of_call(memory, options)
        check_unused(**options)
        call = self.denoising_call()
        if call is None:
            return self.open_blocks.conditioned(self.make_call(None, text_mask=text_mask))
        return self.open_blocks.conditioned(replace(call, text_mask=self._check_text_mask(text_mask)))

    def predict(self, sample: Tensor, timestep: Tensor | float, text: Tensor, **inputs: object) -> Tensor:
        """Return the prediction of a sample (b, …), with the timestep, or (1, frames) of them, for every row."""
        time = torch.as_tensor(timestep, device=sample.device)
        time = time.expand(sample.shape[0], *time.shape[1:])
        kwargs = {self.picture_name: sample, "timestep": time, "encoder_hidden_states": text}
        return self.host(**kwargs, **inputs).sample

    def make_call(  # type: ignore[override]
        self,
        memory: object,
        adapter_scale: AdapterScale = 1.0,
        *,
        text_mask: Tensor | None = None,
        guided: bool = False,
        negative_prompt_embeds: Tensor | None = None,
    ) -> DenoisingCall | None:
        self.check_attached()
        text_mask = self._check_text_mask(text_mask)
        if memory is None:
            check_not_required(self.require_memory)
            return DenoisingCall({}, text_mask=text_mask) if self.processors else None
        sources = self.bind(memory)
        by_name: Mapping[str, AdapterScale] = dict.fromkeys(sources, adapter_scale)
        if isinstance(adapter_scale, Mapping) and adapter_scale and adapter_scale.keys() <= set(self.adapters):
            by_name = {name: adapter_scale.get(name, 0.0) for name in sources}
        scales = {
            name: check_adapter_scale(by_name[name], self.layer_names, source.rows) for name, source in sources.items()
        }
        return DenoisingCall(
            {name: source for name, source in sources.items() if not is_zero(scales[name])},
            scales,
            guided=guided or negative_prompt_embeds is not None,
            negative_prompt_embeds=negative_prompt_embeds,
            text_mask=text_mask,
        )

    # One forward -----------------------------------------------------------------------------------------------------

    def call_of_forward(self, args: Positional, kwargs: Keywords) -> tuple[Call | None, frozenset[str]]:
        """Return the memories of a forward that begins; no processor may have been replaced after `use_core`."""
        for index, processor in self.processors.items():
            if self.layer(index).processor is not processor:
                raise ConditionError(
                    f"the processor of {self.layer_names[index]} was replaced after use_core(): call use_core(False) "
                    "before load_ip_adapter, set_attn_processor and the like"
                )
        return super().call_of_forward(args, kwargs)

    def hook_site(self, module: nn.Module, layer: int, position: str) -> list[Handle]:
        hooks: list[Handle] = [
            module.register_forward_hook(partial(inside_attention, self, layer), with_kwargs=True),
            *(part.register_forward_hook(partial(note_queries, self, layer)) for part in query_projections(module)),
        ]
        adapters = [self.adapter(name) for name in self.adapters]
        if any(adapter.traits.adds_to_block and layer in adapter.layers for adapter in adapters):
            block, part = self.block_of(layer)
            hook = partial(after_block, self, layer, part)
            hooks.append(self.host.get_submodule(block).register_forward_hook(hook))
        return hooks

    def block_of(self, index: int) -> tuple[str, int]:
        """Return the block around an attention layer, and the index of the picture in its outputs."""
        raise AttachError(
            f"layout.added_to='block' is for blocks of a transformer, and {type(self.host).__name__} is of kind "
            f"{self.kind!r}: leave it out"
        )

    def check_adapter(self, adapter: AdapterLayers) -> None:
        if adapter.traits.adds_to_block:
            self.block_of(adapter.layers[0])

    def asks_by_layer(self, call: Call) -> bool:
        """Return False: layers do not know the timestep and the size of the picture."""
        return False

    def forward_step(
        self, call: Call, disabled: frozenset[str], host: nn.Module, args: Positional, kwargs: Keywords
    ) -> ForwardStep:
        assert isinstance(call, DenoisingCall)
        if torch.is_grad_enabled() and not is_compiled():
            keep_context(host)
        sample = kwargs.get(self.picture_name)
        if not isinstance(sample, Tensor):
            return ForwardStep(self, host, None, {})  # the host raises by itself
        readings = self._readings(call, disabled, sample.shape[0], kwargs)
        if is_compiled() and not any(source.follows_text for source in call.sources.values()):
            return ForwardStep(self, host, None, {}, details={"readings": readings})
        actions: dict[tuple[int, str], list[Action]] = {}
        for reading in readings:
            view = self._view(reading, None, math.prod(reading.grid or (1,)))
            for index in self.adapter(reading.name).layers:
                actions.setdefault((index, "inside"), []).extend(self._actions(reading, index, view))
        return ForwardStep(self, host, None, actions, details={})

    def denoising_call(self) -> DenoisingCall | None:
        """Return the call under way."""
        call = self.open_blocks.of_call(self.require_memory).call
        return call if isinstance(call, DenoisingCall) else None

    def actions_of_attention(self, step: ForwardStep | None, index: int, q: Tensor) -> list[Action]:
        """Return the actions in a layer of a graph, or of a part of the host, on queries (rows, h, l, k)."""
        if step is not None:
            readings = step.details["readings"]
        else:  # only a part of the host was called
            call, disabled = self.open_blocks.of_call(self.require_memory)[1:]
            readings = self._readings(call, disabled, q.shape[0]) if isinstance(call, DenoisingCall) else []
        actions: list[Action] = []
        for reading in readings:
            if index in self.adapter(reading.name).layers:
                actions += self._actions(reading, index, self._view(reading, index, q.shape[2]))
        return actions

    def _readings(
        self, call: DenoisingCall, disabled: frozenset[str], rows: int, kwargs: Keywords | None = None
    ) -> list[Reading]:
        """Return how a forward reads each memory; without arguments only a part of the host was called."""
        readings: list[Reading] = []
        parts: dict[int, tuple[bool, ...]] = {}
        timestep = None if kwargs is None else kwargs.get("timestep")
        # Some hosts say it by positions, which a graph cannot read; only maps over a picture need it.
        by_number = is_compiled() and all(isinstance(scale, float) for scale in call.scales.values())
        grid = None if kwargs is None or by_number else self.grid_of(kwargs)
        model, name_in_pipeline = _PREDICTION.get() if call.guided else (None, "")
        prediction = name_in_pipeline if model is self else ""
        for name, source in call.sources.items():
            if name not in self.active or name in disabled:
                continue
            count = parts_of(name, rows, source.rows, call.guided, prediction)
            if count not in parts:
                parts[count] = conditional_parts(self.host, call, kwargs, self.picture_name, count, prediction)
            if not any(parts[count]):
                continue
            scale = call.scales[name]
            if not isinstance(scale, float):
                scale = at_step(scale, timestep, self.layer_names, source.rows)
                check_aspect(scale, grid)
            to_block = self.adapter(name).traits.adds_to_block
            of_sample = None if kwargs is None else rows
            readings.append(Reading(name, source, parts[count], scale, to_block, grid, timestep, of_sample))
        return readings

    def _actions(self, reading: Reading, index: int, view: View) -> list[Action]:
        """Return what an adapter does in a layer."""
        scale = at_layer(reading.scale, self.layer_names[index])
        if is_zero(scale):
            return []
        return [(view, self.adapter(reading.name).block(index), (reading, scale))]

    def _view(self, reading: Reading, only: int | None, length: int) -> View:
        """Return the memory as so many queries in the rows of the first conditional part attend to it."""
        source, times = reading.source, None
        rows = source.rows
        if source.follows_text and reading.timestep is not None and rows is not None:
            times = times_by_row(torch.as_tensor(reading.timestep), reading.conditional.index(True) * rows, rows)
        return source.step(TextState(rows or 0, length, layer=only, timestep=times))

    def lost_layers(self, step: ForwardStep) -> list[int]:
        # Layers that a pipeline (`skip_layers`) or a cache of diffusers leaves out on purpose do not run.
        ran, lost = step.details.get("queries", ()), super().lost_layers(step)
        parts = set(self.host.modules()) if lost else set()
        return [layer for layer in lost if layer in ran or self.hooked[layer, "inside"] not in parts]

    def check_reached(self, layers: Sequence[int]) -> None:
        raise ConditionError(
            f"memory did not reach {[self.layer_names[index] for index in layers]}, which ran without being called or "
            "were replaced: name others with blocks=, or unload() before the host is changed"
        )
