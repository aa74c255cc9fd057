"""Processors of diffusers that compute a model's own attention to its text by the attention core.

Padding of the text is masked, K/V of the text are computed once per `condition` block, and attention weights can be
recorded. Transformers with joint attention such as Stable Diffusion 3 otherwise attend to padding as to words
(https://github.com/huggingface/diffusers/issues/8673).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.attention import attend
from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import autocast_dtype
from mmattn.errors import ConditionError
from mmattn.hosts.diffusion.call import Denoiser, DenoisingCall, added_heads
from mmattn.hosts.diffusion.heads import head_size, norm_width, query_heads

#: Processors of diffusers that do nothing but attend: queries, keys and values, normalised or not, and one projection.
PLAIN = {
    "AttnProcessor",
    "AttnProcessor2_0",
    "LTXVideoAttnProcessor",
    "SanaAttnProcessor2_0",
    "SkyReelsV2AttnProcessor",
    "WanAttnProcessor",
}


class NormedKeys(nn.Module):
    """The key projection of an attention layer of the host and the norm after it.

    Args:
        attn: the layer.
    """

    def __init__(self, attn: Any) -> None:
        super().__init__()
        self.projection, self.norm, self.num_heads = attn.to_k, attn.norm_k, attn.heads

    @property
    def weight(self) -> Tensor:
        """Weight of `to_k`."""
        weight: Tensor = self.projection.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return keys (b, m, h · k) of x (b, m, e)."""
        keys: Tensor = self.projection(x)
        if norm_width(self.norm) == keys.shape[-1]:
            whole: Tensor = self.norm(keys)
            return whole
        by_head: Tensor = self.norm(keys.unflatten(2, (self.num_heads, -1)))
        return by_head.flatten(2)


class TextHeads(KeyValueProjection):
    """The key and value projections of an attention layer of the host, read at every use: LoRA may have replaced them.

    Args:
        attn: the layer, an `Attention` of diffusers.
    """

    def __init__(self, attn: Any) -> None:
        super().__init__(attn.to_k, attn.to_v, **head_size(attn).heads(), memory_dim=attn.to_k.in_features)
        # Not a module of ours: it stays where it is in the host.
        self.__dict__["attn"] = attn

    def look_up(self) -> None:
        """Update `k_proj` and `v_proj` to the projections that the host has now."""
        attn = self.__dict__["attn"]
        norm: Any = getattr(attn, "norm_k", None)
        keys: Any = attn.to_k if norm is None else NormedKeys(attn)
        self.k_proj, self.v_proj = keys, attn.to_v


class TextAttention:
    """The processor of one cross-attention layer while `use_core` is on.

    Args:
        model: the adapted model.
        index: number of the layer.
        attn: the layer, an `Attention` of diffusers.

    Raises:
        ConditionError: the core cannot compute it.
    """

    def __init__(self, model: Denoiser, index: int, attn: Any) -> None:
        self.model, self.index = model, index
        self.check(attn)
        self.heads = TextHeads(attn)

    def check(self, attn: Any) -> None:
        """Refuse layers whose attention the core cannot compute."""
        name = self.model.layer_names[self.index]
        processor = type(attn.processor).__name__
        if getattr(attn, "added_kv_proj_dim", None) is not None:
            raise ConditionError(f"use_core: {name} has one softmax over text and pixels together; adapters work there")
        if processor not in PLAIN:
            raise ConditionError(
                f"use_core: {name} has the processor {processor}, which the core cannot stand for: if it is not the "
                "host's own, put diffusers' default one back first, with unfuse_qkv_projections(), unload_ip_adapter() "
                "or set_default_attn_processor()"
            )

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Return the output of the attention layer, in the shape of `hidden_states`."""
        q = query_heads(attn, hidden_states, temb)
        heads, visible = self.attend(attn, q, encoder_hidden_states, attention_mask)
        out = heads.transpose(1, 2).flatten(2)
        added = added_heads(self.model, self.index, attn, hidden_states, q)
        out = attn.to_out[0](out if added is None else out + added)
        bias = getattr(attn.to_out[0], "bias", None)
        if visible is not None and bias is not None:
            out = torch.where(visible, out, out - bias)
        out = attn.to_out[1](out)
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if getattr(attn, "residual_connection", False):
            out = out + hidden_states
        rescale = getattr(attn, "rescale_output_factor", 1)
        return out / rescale if rescale != 1 else out

    def attend(self, attn: Any, q: Tensor, text: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attend to the text: (b, h, l, k), and which rows (b, 1, 1) have an unmasked token, None for all."""
        if isinstance(text, tuple):
            raise ConditionError("the host was given image embeddings of an IP-Adapter: call use_core(False) first")
        if text is None:
            raise ConditionError(f"{self.model.layer_names[self.index]} was given no text (encoder_hidden_states)")
        self.heads.look_up()
        call = self.model.denoising_call()
        mask = self.padding_mask(call, text, bias)
        memory = self._keys_and_values(attn, call, text, mask)
        out = self.heads(q, memory, mask=None if isinstance(memory, KeyValue) else mask)
        return out, None if mask is None else mask.any(1)[:, None, None]

    def _keys_and_values(
        self, attn: Any, call: DenoisingCall | None, text: Tensor, mask: Tensor | None
    ) -> Tensor | KeyValue:
        """Return cached K/V of the text, or the text itself where K/V cannot be cached."""
        norm: Any = getattr(attn, "norm_cross", None)
        if call is None or not self.is_cacheable(text):
            normed: Tensor = attn.norm_encoder_hidden_states(text) if norm else text
            return normed
        number = call.number_of_text(text)
        text = call.texts[number]
        sources = [text, *(norm.parameters() if norm else ()), *self.heads.projecting_parameters()]
        key = (self.index, number, autocast_dtype(text.device))

        def project() -> KeyValue:
            return self.heads.project(attn.norm_encoder_hidden_states(text) if norm else text, mask=mask)

        keys_and_values: KeyValue = call.text.get(key, [*sources, *(() if mask is None else (mask,))], project)
        return keys_and_values

    def padding_mask(self, call: DenoisingCall | None, text: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the padding mask (b, m) of the text, from the call or from the bias of diffusers."""
        if call is not None and call.text_mask is not None:
            return call.text_mask_of(text)
        if bias is None:
            return None
        if bias.shape[-2] != 1:
            raise ConditionError("use_core masks padding of the text, not pixels: leave attention_mask out")
        known = None if call is None else call.padding
        if known is not None and known[0] is bias:
            return known[1]
        # diffusers turns (b, m) into 0 or -10000 again in every forward; an equal mask stays the same object.
        with torch.inference_mode(False):
            mask = bias[:, 0] == 0
        if known is not None and known[1].shape == mask.shape and torch.equal(known[1], mask):
            mask = known[1]
        if call is not None:
            call.padding = (bias, mask)
        return mask

    def is_cacheable(self, text: Tensor) -> bool:
        """Return whether K/V of this text can be cached: without gradients, and with changes that can be seen."""
        if torch.compiler.is_compiling() or text.is_inference():
            return False
        modules = [module for part in (self.heads.k_proj, self.heads.v_proj) for module in part.modules()]
        if any(hasattr(module, "base_layer") for module in modules):
            return False  # LoRA is switched, scaled and merged without a change of its weights
        parameters = self.heads.projecting_parameters()
        return not (torch.is_grad_enabled() and (text.requires_grad or any(one.requires_grad for one in parameters)))


class JointAttention:
    """The processor of one joint attention layer over picture and text while `use_core` is on.

    Args:
        model: the adapted model.
        index: number of the layer.
    """

    # K/V are also those of the picture, which no other step can use.
    heads = None

    def __init__(self, model: Denoiser, index: int) -> None:
        self.model, self.index = model, index

    def check(self, attn: Any) -> None:
        """Refuse layers whose attention the core cannot compute."""
        processor = type(attn.processor).__name__
        if processor != "JointAttnProcessor2_0":
            raise ConditionError(
                f"use_core: {self.model.layer_names[self.index]} has the processor {processor}, which the core cannot "
                "stand for: of joint attention it knows that of Stable Diffusion 3; adapters work there"
            )

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs of the attention layer for picture and text."""
        if encoder_hidden_states is None or attention_mask is not None:
            raise ConditionError(
                f"use_core: {self.model.layer_names[self.index]} was given no text or a mask over its tokens: give "
                "text_mask= to the call"
            )
        q = query_heads(attn, hidden_states)
        both = hidden_states, encoder_hidden_states
        queries = torch.cat([q, _heads(attn, attn.add_q_proj, attn.norm_added_q, encoder_hidden_states)], 2)
        keys = [(attn.to_k, attn.norm_k), (attn.add_k_proj, attn.norm_added_k)]
        k = torch.cat([_heads(attn, *key, x) for key, x in zip(keys, both, strict=True)], 2)
        values = attn.to_v, attn.add_v_proj
        v = torch.cat([_heads(attn, value, None, x) for value, x in zip(values, both, strict=True)], 2)
        call = self.model.denoising_call()
        mask = None if call is None else call.text_mask_of(encoder_hidden_states)
        if mask is not None:
            mask = torch.cat([mask.new_ones(hidden_states.shape[:2]), mask], 1)
        heads = attend(queries, k, v, mask=mask)
        assert isinstance(heads, Tensor)
        picture, text = heads.transpose(1, 2).flatten(2).split([x.shape[1] for x in both], 1)
        added = added_heads(self.model, self.index, attn, hidden_states, q)
        picture = attn.to_out[1](attn.to_out[0](picture if added is None else picture + added))
        return picture, text if attn.context_pre_only else attn.to_add_out(text)


def _heads(attn: Any, projection: Any, norm: Any, x: Tensor) -> Tensor:
    """Project x (b, l, d) to heads (b, h, l, k)."""
    heads: Tensor = projection(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return heads if norm is None else norm(heads)
