"""A diffusers UNet with adapters: named, given a memory by call, and gone without a trace.

An adapter acts after a cross-attention layer of the host, by a hook: what the host's own processors are (sliced, fused,
an IP-Adapter's, LoRA) does not matter, and may change. With Z the heads of the host's attention and A those of the
adapters, the host gives Wo Z + bias; Wo A is added to it. `use_core` goes further and puts the host's own text through
our core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from mmattn.adapters.language_models import device_of
from mmattn.adapters.protocols import Site
from mmattn.adapters.text_state import TextState
from mmattn.errors import AdapterFileError, ConditionError, check_bool_mask, import_extra
from mmattn.hosts.adapted import AdaptedModel, check_unused
from mmattn.hosts.attached import forget_compiled
from mmattn.hosts.calls import Action, ForwardStep
from mmattn.hosts.hooks import AfterHost, BeforeHost
from mmattn.hosts.recomputation import keep_context
from mmattn.hosts.registry import register_host
from mmattn.hosts.unet.adapter_scale import at_layer, at_step, check_adapter_scale, check_aspect, is_zero
from mmattn.hosts.unet.attention_layers import (
    attention_names,
    find_layer_names,
    forward_arguments,
    head_size,
    text_width,
)
from mmattn.hosts.unet.denoising import (
    DenoisingCall,
    InsideAttention,
    RowsAndScale,
    rows_before,
)
from mmattn.hosts.unet.ip_adapter import read_ip_adapter, write_ip_adapter
from mmattn.hosts.unet.text_attention import TextAttention


@register_host
class AdaptedUNet(AdaptedModel):
    """A UNet of diffusers and the adapters beside its cross-attention layers.

    >>> from diffusers import UNet2DConditionModel
    >>> import mmattn
    >>> unet = UNet2DConditionModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
    ...     down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2, cross_attention_dim=12,
    ...     up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")).eval()
    >>> model = mmattn.attach(unet, mmattn.DecoupledAdapter(memory_dim=24))
    >>> picture, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 12)
    >>> out = model(picture, 3, text, memory=mmattn.Memory(torch.randn(1, 7, 24))).sample
    >>> torch.equal(out, model(picture, 3, text).sample)  # fresh
    True
    """

    kind: ClassVar[str] = "unet"
    positions: ClassVar[tuple[str, ...]] = ("inside",)
    attaches_bare: ClassVar[bool] = True

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.layer_names = find_layer_names(host)
        self.arguments = forward_arguments(host)
        self.own = [TextAttention(self, index, self.layer(index)) for index in range(len(self.layer_names))]
        self._processors: dict[int, Any] = {}

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Whether it has attention layers as the models of diffusers have, or is one of those."""
        return bool(attention_names(model)) or type(model).__module__.startswith("diffusers.")

    @property
    def through_core(self) -> bool:
        """Whether the host's own cross-attention runs through the core."""
        return bool(self._processors)

    def layer(self, index: int) -> Any:
        """The host's cross-attention layer of this number."""
        return self.host.get_submodule(self.layer_names[index])

    def sites(self, position: str) -> list[Site]:
        """Every cross-attention layer."""
        width = text_width(self.host)
        layers = [(index, name, self.layer(index)) for index, name in enumerate(self.layer_names)]
        return [Site(index, position, name, width, device_of(attn), head_size(attn)) for index, name, attn in layers]

    def key_value_weights(self, index: int) -> tuple[Tensor, Tensor]:
        """The weights of the host's own key and value projections of the text."""
        attn = self.layer(index)
        k, v = (attn.to_k, attn.to_v) if attn.added_kv_proj_dim is None else (attn.add_k_proj, attn.add_v_proj)
        return k.weight, v.weight

    def read_single_file(self, path: str | PathLike[str]) -> tuple[Any, dict[str, Tensor]]:
        """The settings and weights in the single file of a published IP-Adapter.

        Raises:
            AdapterFileError: torn, of another kind, or made for another base model.
        """
        return read_ip_adapter(self.host, path)

    def save_ip_adapter(self, path: str | PathLike[str], name: str = "default") -> None:
        """Write one adapter as a single safetensors file in the layout of published IP-Adapters.

        Args:
            path: the file.
            name: of the adapter.

        Raises:
            ConditionError: the adapter is of another kind (`tokens` not given, a part of the blocks, a resampler).
        """
        write_ip_adapter(self, path, name)

    # Calls ---------------------------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor | None = None,
        memory: Any = None,
        adapter_scale: Any = 1.0,
        text_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            sample: the host's own.
            timestep: the host's own.
            encoder_hidden_states: the host's own.
            memory: (b, m, e), one row for each row of the sample; one for all adapters or one by adapter name. None:
                the memory of the surrounding `condition` block, or the host's own output.
            adapter_scale: as in `condition`, of the memory given here.
            text_mask: as in `condition`.
            kwargs: the host's own.
        """
        given: tuple[Any, ...] = (sample, timestep, encoder_hidden_states)
        if self.arguments[:3] != ("sample", "timestep", "encoder_hidden_states"):
            name = "sample" if "sample" in self.arguments else "hidden_states"
            kwargs |= {name: sample, "timestep": timestep, "encoder_hidden_states": encoder_hidden_states}
            given = ()
        if memory is None:
            check_unused(adapter_scale)
            if text_mask is None:
                return self.host(*given, **kwargs)
        around = self.denoising_call() if memory is None else None
        if around is None:
            call = self.make_call(memory, adapter_scale, text_mask=text_mask)
        else:
            call = replace(around, text_mask=self._check_text_mask(text_mask))
        with self.open_blocks.conditioned(call):
            return self.host(*given, **kwargs)

    @contextlib.contextmanager
    def condition(
        self,
        memory: Any,
        *,
        adapter_scale: Any = 1.0,
        text_mask: Tensor | None = None,
        guided: bool = False,
    ) -> Iterator[AdaptedUNet]:
        """Every call of the host inside the block sees this memory; None is no memory.

        What is computed of the memory, and with `use_core` of the text, is computed once for all calls inside the
        block.

        Args:
            memory: one for all active adapters, or one by adapter name.
            adapter_scale: a number, (b,), (b, height, width), one by block, or a function of the time step; a mapping
                from adapter names gives each its own (`mmattn.hosts.unet.adapter_scale`).
            text_mask: (rows, m) bool, which tokens of the host's own text are real; needs `use_core`.
            guided: calls with twice the rows of the memory are classifier-free guidance as pipelines of diffusers do
                it: the first half sees no memory.

        Raises:
            ShapeError: a memory or scale that does not fit.
            NonFiniteError: NaN or infinity in either.
            ConfigError: a scale of another kind.
        """
        call = self.make_call(memory, adapter_scale, text_mask=text_mask, guided=guided)
        with self.open_blocks.conditioned(call, is_condition=True):
            yield self

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

    # One forward ---------------------------------------------------------------------------------------------------

    def install_hooks(self) -> list[Any]:
        """Hook the adapters to the host and to the attention layers beside which they act."""
        self.hooked = {site: self.host.get_submodule(module) for site, module in self.used_sites().items()}
        return [
            self.host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True),
            self.host.register_forward_hook(AfterHost(self), always_call=True),
        ] + [
            attn.register_forward_hook(InsideAttention(self, index), with_kwargs=True)
            for (index, _), attn in self.hooked.items()
        ]

    def forward_step(
        self, call: Any, disabled: frozenset[str], host: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> ForwardStep:
        """What the adapters do in one forward of the host, at its picture's size and its time step."""
        if torch.is_grad_enabled():
            keep_context(host)
        given = dict(zip(self.arguments, args, strict=False)) | dict(kwargs)
        sample, timestep = given.get("sample", given.get("hidden_states")), given.get("timestep")
        if sample is None or timestep is None:
            return ForwardStep(self, host, None, {})  # the host says itself what it misses
        rows, size = sample.shape[0], (sample.shape[-2], sample.shape[-1])
        actions: dict[tuple[int, str], list[Action]] = {}
        for name, source in call.sources.items():
            first = rows_before(rows, call.guided, name, source.rows)
            scale = call.scales[name]
            if not isinstance(scale, float):
                scale = at_step(scale, timestep, self.layer_names, source.rows)
                check_aspect(scale, *size)
            if name in self.active and name not in disabled:
                self._add_actions(actions, name, source, first, scale, size)
        return ForwardStep(self, host, None, actions)

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
            if callable(scale) and not isinstance(scale, Tensor):
                raise ConditionError("an adapter_scale that follows the time step needs the call of the whole UNet")
            scale = at_layer(scale, self.layer_names[index])
            if isinstance(scale, Tensor) and scale.dim() == 3:
                raise ConditionError("an adapter_scale by pixel needs the call of the whole UNet")
            first = rows_before(q.shape[0], call.guided, name, source.rows)
            self._add_actions(actions, name, source, first, scale, (1, q.shape[2]), index)
        return actions.get((index, "inside"), ())

    def _add_actions(
        self,
        actions: dict[tuple[int, str], list[Action]],
        name: str,
        source: Any,
        first: int,
        scale: Any,
        size: tuple[int, int],
        only: int | None = None,
    ) -> None:
        adapter = self.adapter(name)
        view = source.step(TextState(source.rows, size[0] * size[1], layer=only))
        for index in adapter.layers if only is None else (only,):
            own = at_layer(scale, self.layer_names[index])
            entries = actions.setdefault((index, "inside"), [])
            if not is_zero(own):
                entries.append((view, adapter.block(index), RowsAndScale(first, own, size)))

    def check_host_call(self, host: nn.Module) -> None:
        """Refuse a processor that was replaced while the host's own attention was to run through the core.

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

    def check_reached(self, layers: Sequence[int]) -> None:
        """Refuse an answer that memory did not reach.

        Raises:
            ConditionError: always.
        """
        raise ConditionError(
            f"memory did not reach {[self.layer_names[index] for index in layers]}: the host left these layers out of "
            "its forward, or they were replaced after attach; name others with DecoupledAdapter(blocks=...), or "
            "unload() before the host is changed"
        )

    # The host's own attention --------------------------------------------------------------------------------------

    def use_core(self, on: bool = True) -> AdaptedUNet:
        """Let the host's own cross-attention run through `mmattn.attend`: padding hidden, K/V computed once per block.

        Where nothing is masked the host's answers stay what they were to rounding. Rows whose text is masked out
        altogether see no text: the layer adds nothing to them.

        Args:
            on: False gives the host its own processors back.

        Raises:
            ConditionError: layers whose softmax spans text and pixels, another processor than diffusers' default, or
                adapters that were unloaded.
        """
        if on:
            self.check_attached()
        if on and not self._processors:
            for index, own in enumerate(self.own):
                own.check(self.layer(index))
            for index, own in enumerate(self.own):
                self._processors[index] = self.layer(index).processor
                self.layer(index).processor = own
        elif not on:
            for index, processor in self._processors.items():
                if self.layer(index).processor is self.own[index]:
                    self.layer(index).processor = processor
            self._processors = {}
        forget_compiled()
        return self

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Everything that attends: the adapters, and under "text" the host's own layers that go through the core."""
        own = {("text", index): attention.heads for index, attention in enumerate(self.own)}
        return super().attentions() | (own if self.through_core else {})

    def unload(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        self.use_core(False)
        return super().unload()

    # For the doctor and the shared tests -----------------------------------------------------------------------------

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """A noisy picture, a time step and a text, with what the UNets of SDXL are given besides."""
        host: Any = self.host.config
        size = host.sample_size or 32
        height, width = size if isinstance(size, (list, tuple)) else (size, size)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device_of(self.host))

        batch = {
            "sample": random(rows, host.in_channels, height, width),
            "timestep": 11,
            "encoder_hidden_states": random(rows, 7, text_width(self.host)),
        }
        if host.addition_embed_type == "text_time":
            pooled = host.projection_class_embeddings_input_dim - 6 * host.addition_time_embed_dim
            batch["added_cond_kwargs"] = {"text_embeds": random(rows, pooled), "time_ids": random(rows, 6)}
        return batch

    @classmethod
    def load_host(cls, name: str | PathLike[str]) -> nn.Module:
        """The UNet in a folder, or the `unet` of a pipeline in a folder or under a name on the hub.

        Raises:
            AdapterFileError: there is none, or its weights are no safetensors.
        """
        unet: nn.Module = load_unet(name)
        return unet


def load_unet(name: str | PathLike[str]) -> Any:
    """The UNet in a folder, or the `unet` of a pipeline in a folder or under a name on the hub.

    Raises:
        AdapterFileError: there is none, or its weights are no safetensors.
    """
    diffusers: Any = import_extra("diffusers", "diffusion")
    inner = {} if os.path.isfile(os.path.join(name, "config.json")) else {"subfolder": "unet"}
    try:
        return diffusers.UNet2DConditionModel.from_pretrained(name, use_safetensors=True, **inner).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise AdapterFileError(
            f"no UNet can be loaded from {os.fspath(name)!r} ({error}); give a pipeline on the hub that is "
            "reachable or kept from before, or the folder of a UNet or a pipeline, with safetensors"
        ) from error
