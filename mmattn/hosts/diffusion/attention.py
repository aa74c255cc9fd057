"""The attention of a diffusion model to its own text, computed by the attention core, as a processor of diffusers.

Differences from diffusers' processors: padding of the text is masked, keys and values of the text are computed once per
block of calls, and attention weights can be recorded.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.key_value_projection import KeyValueProjection
from mmattn.core.kv_cache import KeyValue
from mmattn.core.tensor_cache import autocast_dtype
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.diffusion.call import DenoisingCall, added_heads
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
        """That of the projection."""
        weight: Tensor = self.projection.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Keys (b, m, h · k) of x (b, m, e)."""
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
        super().__init__(attn.to_k, attn.to_v, **asdict(head_size(attn)), memory_dim=attn.to_k.in_features)
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

    def __init__(self, model: Any, index: int, attn: Any) -> None:
        self.model, self.index = model, index
        self.check(attn)
        self.heads = TextHeads(attn)

    def check(self, attn: Any) -> None:
        """Refuse layers whose attention the core cannot compute.

        Args:
            attn: the layer, an `Attention` of diffusers.

        Raises:
            ConditionError: one softmax spans text and pixels, or the processor is not one that the core can stand for.
        """
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
        """The output of the attention layer, in the shape of `hidden_states`.

        Args:
            attn: the layer, an `Attention` of diffusers.
            hidden_states: (b, l, d) or (b, d, height, width).
            encoder_hidden_states: (b, m, e), the text.
            attention_mask: (b, 1, m), the bias that diffusers computes of its mask.
            temb: (b, c), the embedded time step.

        Raises:
            ConditionError: no text, or an argument that the core does not support.
            ShapeError: a `text_mask` that does not fit the text.
        """
        q = query_heads(attn, hidden_states, temb)
        heads, seen = self.attend(attn, q, encoder_hidden_states, attention_mask)
        out = heads.transpose(1, 2).flatten(2)
        added = added_heads(self.model, self.index, attn, hidden_states, q)
        out = attn.to_out[0](out if added is None else out + added)
        bias = getattr(attn.to_out[0], "bias", None)
        if seen is not None and bias is not None:
            out = torch.where(seen, out, out - bias)
        out = attn.to_out[1](out)
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if getattr(attn, "residual_connection", False):
            out = out + hidden_states
        rescale = getattr(attn, "rescale_output_factor", 1)
        return out / rescale if rescale != 1 else out

    def attend(self, attn: Any, q: Tensor, text: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Attention over the text (b, h, l, k), and which rows (b, 1, 1) have a token that is not masked, None for all.

        Args:
            attn: the layer, an `Attention` of diffusers.
            q: (b, h, l, k), queries.
            text: (b, m, e).
            bias: (b, 1, m), the bias that diffusers computes of its mask.

        Raises:
            ConditionError: no text, or embeddings of an IP-Adapter.
        """
        if isinstance(text, tuple):
            raise ConditionError("the host was given image embeddings of an IP-Adapter: call use_core(False) first")
        if text is None:
            raise ConditionError(f"{self.model.layer_names[self.index]} was given no text (encoder_hidden_states)")
        self.heads.look_up()
        call = self.model.denoising_call()
        mask = self.padding_mask(call, text, bias)
        seen = None if mask is None else mask.any(1)[:, None, None]
        norm_cross: Any = getattr(attn, "norm_cross", None)

        read = text

        def normed() -> Tensor:
            states: Tensor = attn.norm_encoder_hidden_states(read) if norm_cross else read
            return states

        memory: Tensor | KeyValue
        if call is not None and self.is_cacheable(text):
            norm = norm_cross.parameters() if norm_cross else ()
            number = call.number_of_text(text)
            read = call.texts[number]
            sources = [read, *norm, *self.heads.projecting_parameters(), *(() if mask is None else (mask,))]
            key = (self.index, number, autocast_dtype(text.device))
            memory = call.text.get(key, sources, lambda: self.heads.project(normed(), mask=mask))
        else:
            memory = normed()
        out = self.heads(q, memory, mask=None if isinstance(memory, KeyValue) else mask)
        return out, seen

    def padding_mask(self, call: DenoisingCall | None, text: Tensor, bias: Tensor | None) -> Tensor | None:
        """The padding mask (b, m) of the text: that of the call, or from the bias that diffusers computes of its mask.

        Args:
            call: what this call is conditioned on.
            text: (b, m, e).
            bias: (b, 1, m).

        Raises:
            ShapeError: a `text_mask` that does not fit the text.
            ConditionError: a mask over pixels.
        """
        given = None if call is None else call.text_mask
        if given is not None:
            if given.shape != text.shape[:2]:
                raise ShapeError(f"text_mask must be (b, m) = {tuple(text.shape[:2])}, got {tuple(given.shape)}")
            return given.to(text.device)
        if bias is None:
            return None
        if bias.shape[-2] != 1:
            raise ConditionError(
                "use_core masks padding of the text; a mask over pixels (attention_mask) is not supported"
            )
        known = None if call is None else call.padding
        if known is not None and known[0] is bias:
            return known[1]
        # diffusers has turned (b, m) into 0 or -10000, again in every forward. What is cached must count its edits.
        with torch.inference_mode(False):
            mask = bias[:, 0] == 0
        if known is not None and known[1].shape == mask.shape and torch.equal(known[1], mask):
            mask = known[1]
        if call is not None:
            call.padding = (bias, mask)
        return mask

    def is_cacheable(self, text: Tensor) -> bool:
        """Whether keys and values of this text can be cached: no gradients, and every change would be noticed.

        LoRA is switched, scaled and merged without a trace in its weights.
        """
        if torch.compiler.is_compiling() or text.is_inference():
            return False
        if any(
            hasattr(module, "base_layer")
            for part in (self.heads.k_proj, self.heads.v_proj)
            for module in part.modules()
        ):
            return False
        parameters = self.heads.projecting_parameters()
        return not (torch.is_grad_enabled() and (text.requires_grad or any(one.requires_grad for one in parameters)))
