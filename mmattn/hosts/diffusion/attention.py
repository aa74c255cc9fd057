"""Processors of diffusers that compute a model's own attention to its text by the attention core.

Padding of the text is masked, K/V of the text are computed once per `condition` block, and attention weights can be
recorded. Transformers with joint attention such as Stable Diffusion 3 otherwise attend to padding as to words
(https://github.com/huggingface/diffusers/issues/8673).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from mmattn.core.attention import attend
from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.core.kv_cache import KeyValue
from mmattn.errors import ConditionError, check_bool_mask
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.context import Call, Keywords, Positional
from mmattn.hosts.diffusion.call import Denoiser, DenoisingCall, added_heads, denoising_step
from mmattn.hosts.diffusion.heads import bias_of, head_size, query_heads, split_heads
from mmattn.hosts.ownership import forget_compiled
from mmattn.storage.tensor_cache import autocast_dtype

if TYPE_CHECKING:
    from diffusers.models.attention_processor import Attention

#: Processors of diffusers that do nothing but attend: queries, keys and values, normalised or not, and one projection.
PLAIN = (
    "AttnProcessor",
    "AttnProcessor2_0",
    "LTXVideoAttnProcessor",
    "SanaAttnProcessor2_0",
    "SkyReelsV2AttnProcessor",
    "WanAttnProcessor",
)


class CoreProcessor:
    """A processor that stands for that of an attention layer while `use_core` is on, or raises ConditionError."""

    #: Class names of the processors that it can stand for.
    plain: tuple[str, ...] = ("JointAttnProcessor2_0",)
    #: Keys and values of the text, of which the attention weights can be recorded.
    heads: KeyValueProjection | None = None

    def __init__(self, model: Denoiser, index: int, attn: Attention) -> None:
        self.model, self.index, self.replaced = model, index, attn.processor
        self.name, processor = model.layer_names[index], type(attn.processor).__name__
        if processor not in self.plain:
            raise ConditionError(
                f"use_core: the core cannot stand for {processor} of {self.name}; adapters work there. Put diffusers' "
                "default one back first if another replaced it"
            )


class NormedKeys(nn.Module):
    """The key projection of an attention layer of the host and the norm after it."""

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.projection, self.norm, self.num_heads = attn.to_k, attn.norm_k, attn.heads

    @property
    def weight(self) -> Tensor:
        """Weight of `to_k`."""
        return cast(Tensor, self.projection.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return keys (b, m, h · k) of x (b, m, e)."""
        return split_heads(self.projection(x), self.num_heads, self.norm).transpose(1, 2).flatten(2)


class TextAttention(CoreProcessor):
    """The processor of one cross-attention layer while `use_core` is on."""

    plain = PLAIN
    heads: KeyValueProjection

    def __init__(self, model: Denoiser, index: int, attn: Attention) -> None:
        super().__init__(model, index, attn)
        sizes = head_size(attn).heads()
        self.heads = KeyValueProjection(attn.to_k, attn.to_v, **sizes, memory_dim=attn.to_k.in_features)

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the attention layer, in the shape of `hidden_states`."""
        if not isinstance(encoder_hidden_states, Tensor):
            raise ConditionError(
                f"use_core: {self.name} needs a text (encoder_hidden_states), without image embeddings of an "
                "IP-Adapter: call use_core(False) first"
            )
        q = query_heads(attn, hidden_states, temb)
        # LoRA may replace the host's projections at any time.
        normed = getattr(attn, "norm_k", None) is not None
        self.heads.register_module("k_proj", NormedKeys(attn) if normed else attn.to_k)
        self.heads.v_proj = attn.to_v
        call = self.model.denoising_call()
        mask = _padding_mask(call, encoder_hidden_states, attention_mask)
        memory = self._keys_and_values(attn, call, encoder_hidden_states, mask)
        heads = self.heads(q, memory, mask=None if isinstance(memory, KeyValue) else mask)
        out = heads.transpose(1, 2).flatten(2)
        added = added_heads(self.model, denoising_step(self.model), self.index, attn, hidden_states, q)
        x = out if added is None else torch.add(out, added[0], alpha=added[1])
        out = attn.to_out[0](x)
        bias = None if mask is None else bias_of(attn.to_out[0], x)
        if mask is not None and bias is not None:
            out = torch.where(mask.any(1)[:, None, None], out, out - bias)
        out = attn.to_out[1](out)
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if getattr(attn, "residual_connection", False):
            out = out + hidden_states
        rescale = getattr(attn, "rescale_output_factor", 1)
        return out / rescale if rescale != 1 else out

    def _keys_and_values(
        self, attn: Attention, call: DenoisingCall | None, text: Tensor, mask: Tensor | None
    ) -> Tensor | KeyValue:
        """Return cached K/V of the text, or the text itself where K/V cannot be cached."""
        norm = getattr(attn, "norm_cross", None)
        if call is None or not self.is_cacheable(text):
            return attn.norm_encoder_hidden_states(text) if norm else text
        number = call.number_of_text(text, mask)
        text, mask = call.texts[number]
        sources = [text, *(norm.parameters() if norm else ()), *self.heads.projecting_parameters()]
        key = (self.index, number, autocast_dtype(text.device))

        def project() -> KeyValue:
            return self.heads.project(attn.norm_encoder_hidden_states(text) if norm else text, mask=mask)

        return call.text.get(key, [*sources, *(() if mask is None else (mask,))], project)

    def is_cacheable(self, text: Tensor) -> bool:
        """Return whether K/V of this text can be cached: without gradients, and with changes that can be seen."""
        if torch.compiler.is_compiling() or text.is_inference():
            return False
        modules = [module for part in (self.heads.k_proj, self.heads.v_proj) for module in part.modules()]
        if any(hasattr(module, "base_layer") for module in modules):
            return False  # LoRA is switched, scaled and merged without a change of its weights
        parameters = self.heads.projecting_parameters()
        return not (torch.is_grad_enabled() and (text.requires_grad or any(one.requires_grad for one in parameters)))


class JointAttention(CoreProcessor):
    """The processor of one joint attention layer over picture and text while `use_core` is on."""

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the attention layer for picture and text."""
        if encoder_hidden_states is None or attention_mask is not None:
            raise ConditionError(
                f"use_core: {self.name} was given no text or a mask over its tokens: give text_mask= to the call"
            )
        q = query_heads(attn, hidden_states)
        both = hidden_states, encoder_hidden_states

        def joined(*projections: tuple[nn.Module, nn.Module | None]) -> Tensor:
            parts = zip(projections, both, strict=True)
            return torch.cat([split_heads(project(x), attn.heads, norm) for (project, norm), x in parts], 2)

        queries = torch.cat([q, split_heads(attn.add_q_proj(both[1]), attn.heads, attn.norm_added_q)], 2)
        keys = joined((attn.to_k, attn.norm_k), (attn.add_k_proj, attn.norm_added_k))
        values = joined((attn.to_v, None), (attn.add_v_proj, None))
        call = self.model.denoising_call()
        mask = None if call is None else call.text_mask_of(encoder_hidden_states)
        if mask is not None:
            mask = torch.cat([mask.new_ones(hidden_states.shape[:2]), mask], 1)
        heads = attend(queries, keys, values, mask=mask)
        assert isinstance(heads, Tensor)
        picture, text = heads.transpose(1, 2).flatten(2).split([x.shape[1] for x in both], 1)
        added = added_heads(self.model, denoising_step(self.model), self.index, attn, hidden_states, q)
        if added is not None:
            picture = torch.add(picture, added[0], alpha=added[1])
        picture = attn.to_out[1](attn.to_out[0](picture))
        return picture, text if attn.context_pre_only else attn.to_add_out(text)


def _padding_mask(call: DenoisingCall | None, text: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the padding mask (b, m) of a text, from the call or from the bias of diffusers."""
    if call is not None and call.text_mask is not None:
        return call.text_mask_of(text)
    if bias is None:
        return None
    if bias.shape[-2] != 1:
        raise ConditionError("use_core masks padding of the text, not pixels: leave attention_mask out")
    if call is not None and call.padding is not None and call.padding[0] is bias:
        return call.padding[1]
    with torch.inference_mode(False):
        mask = bias[:, 0] == 0
    if call is not None:
        call.padding = (bias, mask)
    return mask


class TextThroughCore(AdaptedModel):
    """A diffusion model whose own attention to its text can be computed by the core."""

    def __init__(self, host: nn.Module, layer_names: Sequence[str], require_memory: bool = False) -> None:
        super().__init__(host, require_memory)
        self.layer_names = tuple(layer_names)
        self.processors: dict[int, CoreProcessor] = {}

    @abstractmethod
    def text_attention(self, index: int) -> CoreProcessor:
        """Return the processor that computes the text attention of a layer by the core."""

    def picture_part(self, index: int) -> int:
        """Return the index of the picture among the outputs of an attention layer."""
        return 0

    def layer(self, index: int) -> Attention:
        """Return the host's attention layer of this number."""
        return self.host.get_submodule(self.layer_names[index])

    def denoising_call(self) -> DenoisingCall | None:
        """Return the call under way."""
        call, _ = self.current_call()
        return call if isinstance(call, DenoisingCall) else None

    @property
    def through_core(self) -> bool:
        """Return whether the host's own attention to its text is computed by the core."""
        return bool(self.processors)

    def call_of_forward(
        self, host: nn.Module, args: Positional, kwargs: Keywords
    ) -> tuple[Call | None, frozenset[str]]:
        """Return the memories of a forward that begins; no processor may have been replaced after `use_core`."""
        for index, processor in self.processors.items():
            if self.layer(index).processor is not processor:
                raise ConditionError(
                    f"the processor of {self.layer_names[index]} was replaced after use_core(): call use_core(False) "
                    "before load_ip_adapter, set_attn_processor and the like"
                )
        return self.current_call()

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
            self.processors = {index: self.text_attention(index) for index in range(len(self.layer_names))}
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
        text = {("text", index): one.heads for index, one in processors if one.heads is not None}
        return super().attentions() | text

    def unload(self) -> nn.Module:
        """Return the very same host without any trace of the adapters."""
        self.use_core(False)
        return super().unload()

    def _check_text_mask(self, text_mask: Tensor | None) -> Tensor | None:
        if text_mask is not None and not self.processors:
            raise ConditionError("text_mask needs the host's own attention to go through the core: call use_core()")
        if text_mask is None or not check_bool_mask("text_mask", text_mask).is_inference():
            return text_mask
        with torch.inference_mode(False):
            return text_mask.clone()
