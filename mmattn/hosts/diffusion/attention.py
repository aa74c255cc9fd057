"""Processors of diffusers that compute a model's own attention to its text by the attention core.

Padding of the text is masked, K/V of the text are computed once per `condition` block, and attention weights can be
recorded. Transformers with joint attention such as Stable Diffusion 3 otherwise attend to padding as to words
(https://github.com/huggingface/diffusers/issues/8673).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from mmattn.core.attention import attend
from mmattn.core.key_values import KeyValue
from mmattn.core.projection import KeyValueProjection
from mmattn.errors import ConditionError
from mmattn.hosts.diffusion.call import DenoisingCall
from mmattn.hosts.diffusion.heads import bias_of, head_size, query_heads, split_heads
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


#: The call under way; and what the adapters add to the heads of a layer, by the layer, its inputs and its queries.
CallUnderWay = Callable[[], DenoisingCall | None]
AddedHeads = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, float] | None]


class CoreProcessor:
    """A processor that stands for that of an attention layer while `use_core` is on, or raises ConditionError."""

    #: Class names of the processors that it can stand for.
    plain: tuple[str, ...] = ("JointAttnProcessor2_0",)
    #: Keys and values of the text, of which the attention weights can be recorded.
    heads: KeyValueProjection | None = None

    def __init__(self, name: str, attn: Attention, call: CallUnderWay, added: AddedHeads) -> None:
        self.name, self.replaced = name, attn.processor
        self.call, self.added = call, added
        processor = type(attn.processor).__name__
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

    def __init__(self, name: str, attn: Attention, call: CallUnderWay, added: AddedHeads) -> None:
        super().__init__(name, attn, call, added)
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
        call = self.call()
        mask = _padding_mask(call, encoder_hidden_states, attention_mask)
        memory = self._keys_and_values(attn, call, encoder_hidden_states, mask)
        heads = self.heads(q, memory, mask=None if isinstance(memory, KeyValue) else mask)
        out = heads.transpose(1, 2).flatten(2)
        added = self.added(attn, hidden_states, q)
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
        key = (self.name, number, autocast_dtype(text.device))

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
        return not (
            torch.is_grad_enabled() and (text.requires_grad or any(parameter.requires_grad for parameter in parameters))
        )


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
        call = self.call()
        mask = None if call is None else call.text_mask_of(encoder_hidden_states)
        if mask is not None:
            mask = torch.cat([mask.new_ones(hidden_states.shape[:2]), mask], 1)
        heads = attend(queries, keys, values, mask=mask)
        assert isinstance(heads, Tensor)
        picture, text = heads.transpose(1, 2).flatten(2).split([x.shape[1] for x in both], 1)
        added = self.added(attn, hidden_states, q)
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
