"""A UNet's own cross-attention through our core, as a processor of diffusers.

What changes against diffusers' processors: padding of the text is hidden instead of attended to, keys and values of the
text are made once per block of calls, and weights can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmattn.core.kv import KeyValue
from mmattn.core.layers import PlainHeads
from mmattn.core.tensor_cache import autocast_dtype
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.unet.attention_layers import query_heads
from mmattn.hosts.unet.denoising import DenoisingCall, added_heads


class TextHeads(PlainHeads):
    """The host's own key and value projections, looked up at every use: LoRA may have replaced them."""

    def __init__(self, attn: Any) -> None:
        head_dim = attn.inner_dim // attn.heads
        super().__init__(attn.heads, attn.inner_kv_dim // head_dim, head_dim, attn.cross_attention_dim)
        # Not a module of ours: it stays where it is in the host.
        self.__dict__["attn"] = attn

    @property
    def k_proj(self) -> nn.Linear:  # type: ignore[override]
        """The host's `to_k`."""
        return self.__dict__["attn"].to_k

    @property
    def v_proj(self) -> nn.Linear:  # type: ignore[override]
        """The host's `to_v`."""
        return self.__dict__["attn"].to_v


class TextAttention:
    """The processor of one cross-attention layer while `use_core` holds."""

    def __init__(self, model: Any, index: int, attn: Any) -> None:
        self.model, self.index = model, index
        self.heads = TextHeads(attn)

    def check(self, attn: Any) -> None:
        """Refuse layers that the core cannot stand in for.

        Raises:
            ConditionError: the softmax spans text and pixels, queries are normalised, or the processor is not one of
                diffusers' default ones.
        """
        name = self.model.layer_names[self.index]
        processor = type(attn.processor).__name__
        if attn.added_kv_proj_dim is not None:
            raise ConditionError(f"use_core: {name} has one softmax over text and pixels together; adapters work there")
        if attn.norm_q is not None or attn.norm_k is not None:
            raise ConditionError(f"use_core: {name} normalises its queries or keys, which no UNet known here does")
        if processor not in ("AttnProcessor", "AttnProcessor2_0"):
            raise ConditionError(
                f"use_core: {name} has the processor {processor}: put diffusers' default one back first, with "
                "unfuse_qkv_projections(), unload_ip_adapter() or set_default_attn_processor()"
            )

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """The attention layer's output (b, l, d), as diffusers' processors give it."""
        q = query_heads(attn, hidden_states, temb)
        found, seen = self.attend(attn, q, encoder_hidden_states, attention_mask)
        out = found.transpose(1, 2).flatten(2)
        added = added_heads(self.model, self.index, q)
        out = attn.to_out[0](out if added is None else out + added)
        bias = getattr(attn.to_out[0], "bias", None)
        if seen is not None and bias is not None:
            out = torch.where(seen, out, out - bias)
        out = attn.to_out[1](out)
        if hidden_states.dim() == 4:
            out = out.transpose(1, 2).reshape(hidden_states.shape)
        if attn.residual_connection:
            out = out + hidden_states
        return out / attn.rescale_output_factor if attn.rescale_output_factor != 1 else out

    def attend(self, attn: Any, q: Tensor, text: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What the queries find in the text (b, h, l, k), and which rows (b, 1, 1) see any of it, None for all."""
        if isinstance(text, tuple):
            raise ConditionError("the host was given image embeddings of an IP-Adapter: call use_core(False) first")
        if text is None:
            raise ConditionError(f"{self.model.layer_names[self.index]} was given no text (encoder_hidden_states)")
        call = self.model.denoising_call()
        mask = self.padding_mask(call, text, bias)
        seen = None if mask is None else mask.any(1)[:, None, None]

        def normed() -> Tensor:
            return attn.norm_encoder_hidden_states(text) if attn.norm_cross else text

        made: Tensor | KeyValue
        if call is not None and self.is_cacheable(text):
            norm = attn.norm_cross.parameters() if attn.norm_cross else ()
            sources = [text, *norm, *self.heads.projecting_parameters(), *(() if mask is None else (mask,))]
            key = (self.index, autocast_dtype(text.device))
            made = call.text.once(key, sources, lambda: self.heads.project(normed(), mask=mask))
        else:
            made = normed()
        out = self.heads(q, made, mask=None if isinstance(made, KeyValue) else mask)
        return out, seen

    def padding_mask(self, call: DenoisingCall | None, text: Tensor, bias: Tensor | None) -> Tensor | None:
        """Which tokens of the text are real (b, m): by the call, or by the bias that diffusers makes of its masks."""
        given = None if call is None else call.text_mask
        if given is not None:
            if given.shape != text.shape[:2]:
                raise ShapeError(f"text_mask must be (b, m) = {tuple(text.shape[:2])}, got {tuple(given.shape)}")
            return given.to(text.device)
        if bias is None:
            return None
        if bias.shape[-2] != 1:
            raise ConditionError("use_core hides padding of the text; a mask over pixels (attention_mask) is not taken")
        known = None if call is None else call.padding
        if known is not None and known[0] is bias:
            return known[1]
        # diffusers has turned (b, m) into 0 or -10000, anew in every forward. What is kept must count its edits.
        with torch.inference_mode(False):
            mask = bias[:, 0] == 0
        if known is not None and known[1].shape == mask.shape and torch.equal(known[1], mask):
            mask = known[1]
        if call is not None:
            call.padding = (bias, mask)
        return mask

    def is_cacheable(self, text: Tensor) -> bool:
        """Whether K and V of this text can serve later calls: no gradients, and every change would be noticed.

        LoRA is switched, scaled and merged without a trace in its weights.
        """
        if torch.compiler.is_compiling() or text.is_inference():
            return False
        if any(hasattr(layer, "base_layer") for layer in (self.heads.k_proj, self.heads.v_proj)):
            return False
        parameters = self.heads.projecting_parameters()
        return not (torch.is_grad_enabled() and (text.requires_grad or any(one.requires_grad for one in parameters)))
