"""A diffusers UNet with adapters: named, given a memory by call, and gone without a trace.

An adapter acts behind a cross-attention layer of the host, by a hook: what the host's own processors are (sliced,
fused, an IP-Adapter's, LoRA) does not matter, and may change. With Z the heads the host found and A those of the
adapters, the host gives Wo Z + bias; Wo A is added to it. `use_core` goes further and puts the host's own text through
our core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from mmattn.adapters.decoupled import DecoupledAdapter, DecoupledLayers
from mmattn.errors import AdapterFileError, AttachError, ConditionError, check_bool_mask, import_extra
from mmattn.hosts import calls
from mmattn.hosts.adapted import AdaptedModel, Memories, check_host, forget_compiled
from mmattn.hosts.unet.adapter_scale import at_place, check_strength, over_queries
from mmattn.hosts.unet.attention_layers import find_places, head_size, pick_places, text_width
from mmattn.hosts.unet.denoising import (
    AfterHost,
    BeforeHost,
    BesidePlace,
    Denoising,
    InContext,
    is_nothing,
    step_of,
    unseen_rows,
)
from mmattn.hosts.unet.text_attention import OwnAttention


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

    def __init__(self, host: nn.Module, require_memory: bool = False) -> None:
        super().__init__(check_host(host), require_memory)
        self.places = find_places(host)
        self.own = {place: OwnAttention(self, index) for index, place in enumerate(self.places)}
        self._processors: dict[str, Any] = {}

    @property
    def through_core(self) -> bool:
        """Whether the host's own cross-attention runs through the core."""
        return bool(self._processors)

    def place(self, index: int) -> Any:
        """The host's cross-attention layer of this number."""
        return self.host.get_submodule(self.places[index])

    def add_adapter(self, name: str, adapter: DecoupledAdapter) -> None:
        """Put another adapter on the host, active beside those that are.

        Raises:
            AttachError: the name is taken, or the host has no such blocks. ConditionError: this handle was detached.
        """
        self._check_new(name)
        if not isinstance(adapter, DecoupledAdapter):
            raise AttachError(f"a UNet takes a DecoupledAdapter, got {type(adapter).__name__}")
        picked = pick_places(adapter, self.places)
        built = self.build(adapter, picked)
        if adapter.start == "host":
            copy_projections(built, self)
        for index in picked:
            built.attention(index).to(next(self.place(index).parameters()).device)
        first = next(self.place(picked[0]).parameters()).device
        for part in (built.memory_norm, built.projection, built.resampler):
            if part is not None:
                part.to(first)
        built.train(self.host.training)
        self.adapters[name] = built
        self.active.append(name)
        self._refresh_hooks()

    def build(self, adapter: DecoupledAdapter, layers: Sequence[int]) -> DecoupledLayers:
        """The trainable part of an adapter for these attention layers of the host."""
        return adapter.build(text_width(self.host), layers, [head_size(self.place(index)) for index in layers])

    def save_ip_adapter(self, path: str | PathLike[str], name: str = "default") -> None:
        """Write one adapter as a single safetensors file in the layout of published IP-Adapters.

        Raises:
            ConditionError: the adapter is of another kind (`tokens` not given, a part of the blocks, a resampler).
        """
        from mmattn.hosts.unet.ip_adapter import write_ip_adapter

        write_ip_adapter(self, path, name)

    # Calls ---------------------------------------------------------------------------------------------------------

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor | float | int,
        encoder_hidden_states: Tensor | None = None,
        memory: Memories | None = None,
        strength: Any = 1.0,
        text_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the host with a memory; returns what the host returns.

        Args:
            sample, timestep, encoder_hidden_states, kwargs: the host's own.
            memory: (b, m, e), one row for each row of the sample; one for all adapters or one by adapter name. None:
                the memory of the surrounding `condition` block, or the host's own output.
            strength, text_mask: as in `condition`; strength is that of the memory given here.
        """
        given = (sample, timestep, encoder_hidden_states)
        if memory is None and text_mask is None:
            return self.host(*given, **kwargs)
        around = self.denoising() if memory is None else None
        if around is None:
            call = self._call(memory, strength, text_mask)
        else:
            call = replace(around, text_mask=self._check_text_mask(text_mask))
        with calls.entered(self._key, call):
            return self.host(*given, **kwargs)

    @contextlib.contextmanager
    def condition(
        self,
        memory: Memories | None,
        *,
        strength: Any = 1.0,
        text_mask: Tensor | None = None,
        guided: bool = False,
    ) -> Iterator[AdaptedUNet]:
        """Every call of the host inside the block, in this thread, sees this memory; None is no memory.

        What is made of the memory, and with `use_core` of the text, is made once for all calls inside the block.

        Args:
            memory: one for all active adapters, or one by adapter name.
            strength: a number, (b,), (b, height, width), one by block, or a function of the time step; a mapping from
                adapter names gives each its own (`mmattn.hosts.unet.adapter_scale`).
            text_mask: (rows, m) bool, which tokens of the host's own text are real; needs `use_core`.
            guided: calls with twice the rows of the memory are classifier-free guidance as pipelines of diffusers do
                it: the first half sees no memory.

        Raises:
            ShapeError, NonFiniteError, ConfigError: a memory or strength that does not fit.
        """
        with calls.entered(self._key, self._call(memory, strength, text_mask, guided)):
            yield self

    def _call(
        self, memory: Memories | None, strength: Any, text_mask: Tensor | None = None, guided: bool = False
    ) -> Denoising | None:
        self._check_reachable()
        text_mask = self._check_text_mask(text_mask)
        if memory is None:
            self._check_not_needed()
            return Denoising({}, text_mask=text_mask) if self._processors else None
        prepared = self._prepare(memory)
        by_name = isinstance(strength, Mapping) and bool(strength) and set(strength) <= set(self.adapters)
        strengths = {
            name: check_strength(strength.get(name, 0.0) if by_name else strength, self.places, one.batch)
            for name, one in prepared.items()
        }
        seen = {name: one for name, one in prepared.items() if not is_nothing(strengths[name])}
        return Denoising(seen, strengths=strengths, guided=guided, text_mask=text_mask)

    def _check_text_mask(self, text_mask: Tensor | None) -> Tensor | None:
        if text_mask is not None and not self._processors:
            raise ConditionError("text_mask needs the host's own attention to go through the core: call use_core()")
        if text_mask is None or not check_bool_mask("text_mask", text_mask).is_inference():
            return text_mask
        with torch.inference_mode(False):
            return text_mask.clone()

    # Inside a call -------------------------------------------------------------------------------------------------

    def _refresh_hooks(self) -> None:
        forget_compiled()
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self.host.register_forward_pre_hook(BeforeHost(self), with_kwargs=True),
            self.host.register_forward_hook(AfterHost(self), always_call=True),
        ]
        used = sorted({index for name in self.adapters for index in self._adapter(name).layers})
        self._hooks += [
            self.place(index).register_forward_hook(BesidePlace(self, index), with_kwargs=True) for index in used
        ]

    def denoising(self) -> Denoising | None:
        """The call under way here."""
        call = self._current()
        return call if isinstance(call, Denoising) else None

    def added(self, index: int, q: Tensor) -> Tensor | None:
        """What the adapters add to the heads (rows, l, h · k) of attention layer `index`, or None where nothing.

        Args:
            q: (rows, h, l, k), the host's queries.
        """
        call, step = self.denoising(), step_of(self.host)
        if call is None:
            return None
        total = None
        for name, prepared in call.memories.items():
            adapter = self._adapter(name)
            if name not in self.active or index not in adapter.layers or calls.is_off(self._key, name):
                continue
            strength = call.strengths[name] if step is None else step.strengths[name]
            if callable(strength) and not isinstance(strength, Tensor):
                raise ConditionError("a strength that follows the time step needs the call of the whole UNet")
            strength = at_place(strength, self.places[index])
            if is_nothing(strength):
                continue
            first = unseen_rows(q.shape[0], call, name, prepared)
            memory, kept = prepared.look(name, adapter, index, q.shape[2])
            found = adapter.attention(index)(
                q[first:], memory.tokens if kept is None else kept, mask=memory.mask if kept is None else None
            )
            found = found.transpose(1, 2).flatten(2)
            if isinstance(strength, Tensor) and strength.dim() == 3 and step is None:
                raise ConditionError("a strength by pixel needs the call of the whole UNet")
            found = found * over_queries(strength, (0, 0) if step is None else step.size, found)
            found = F.pad(found, (0, 0, 0, 0, first, 0)) if first else found
            total = found if total is None else total + found
        return total

    # The host's own attention --------------------------------------------------------------------------------------

    def use_core(self, on: bool = True) -> AdaptedUNet:
        """Let the host's own cross-attention run through `mmattn.attend`: padding hidden, K/V made once per block.

        Where nothing is masked the host's answers stay what they were to rounding. Rows whose text is masked out
        altogether see no text: the layer adds nothing to them.

        Raises:
            ConditionError: layers whose softmax spans text and pixels, another processor than diffusers' default, or a
                handle that was detached.
        """
        if on:
            self._check_reachable()
        if on and not self._processors:
            for index, place in enumerate(self.places):
                self.own[place].check(self.place(index))
            for index, place in enumerate(self.places):
                self._processors[place] = self.place(index).processor
                self.place(index).processor = self.own[place]
        elif not on:
            for place, processor in self._processors.items():
                module: Any = self.host.get_submodule(place)
                if module.processor is self.own[place]:
                    module.processor = processor
            self._processors = {}
        forget_compiled()
        return self

    def attentions(self) -> dict[tuple[str, int], nn.Module]:
        """Everything that attends: the adapters, and under "text" the host's own layers that go through the core."""
        own = {("text", index): self.own[place].heads for index, place in enumerate(self.places)}
        return super().attentions() | (own if self.through_core else {})

    def detach(self) -> nn.Module:
        """Give back the very same host with no trace of the adapters."""
        self.use_core(False)
        for module in self.host.modules():
            checkpoint = module.__dict__.get("_gradient_checkpointing_func")
            if isinstance(checkpoint, InContext):
                module.__dict__["_gradient_checkpointing_func"] = checkpoint.checkpoint
        return super().detach()


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


@torch.no_grad()
def copy_projections(built: DecoupledLayers, model: AdaptedUNet) -> None:
    """Start an adapter as a copy of the host's own key and value projections.

    Raises:
        AttachError: the memory reaches the blocks in another width than the text.
    """
    for index in built.layers:
        block, attn = built.attention(index), model.place(index)
        k, v = (attn.to_k, attn.to_v) if attn.added_kv_proj_dim is None else (attn.add_k_proj, attn.add_v_proj)
        if k.weight.shape != block.k_proj.weight.shape:
            raise AttachError(
                f"start='host' copies projections of text {k.weight.shape[1]} wide, and the memory comes "
                f"{block.memory_dim} wide: give tokens=, or start='nothing'"
            )
        block.k_proj.weight.copy_(k.weight)
        block.v_proj.weight.copy_(v.weight)
