"""The joint attention of a diffusion transformer over picture and text, computed by the attention core.

Transformers with joint attention, Stable Diffusion 3 first among them, let pictures attend to the padding of their text
as to words (https://github.com/huggingface/diffusers/issues/8673). As a processor of diffusers this one hides it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmattn.core.attention import attend
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.diffusion.call import DenoisingCall, added_heads
from mmattn.hosts.diffusion.heads import query_heads


class JointAttention:
    """The processor of one joint attention layer while `use_core` is on.

    Args:
        model: the adapted model.
        index: number of the layer.
    """

    # Its keys and values are the picture's, too, so that no step can use those of another.
    heads = None

    def __init__(self, model: Any, index: int) -> None:
        self.model, self.index = model, index

    def check(self, attn: Any) -> None:
        """Refuse layers whose attention the core cannot compute.

        Raises:
            ConditionError: it has another processor than that of Stable Diffusion 3.
        """
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
        """The outputs of the attention layer for picture and text.

        Args:
            attn: the layer, an `Attention` of diffusers.
            hidden_states: (b, l, d), the picture.
            encoder_hidden_states: (b, m, e), the text.
            attention_mask: diffusers gives none.
            kwargs: what the host gives the processors of IP-Adapters.

        Raises:
            ConditionError: no text, or a mask.
            ShapeError: a `text_mask` that does not fit the text.
        """
        if encoder_hidden_states is None or attention_mask is not None:
            raise ConditionError(
                f"use_core: {self.model.layer_names[self.index]} was given no text or a mask over its tokens: give "
                "text_mask= to the call"
            )
        own = query_heads(attn, hidden_states)
        text = _heads(attn, attn.add_q_proj, attn.norm_added_q, encoder_hidden_states)
        q = torch.cat([own, text], 2)
        k = torch.cat(
            [
                _heads(attn, attn.to_k, attn.norm_k, hidden_states),
                _heads(attn, attn.add_k_proj, attn.norm_added_k, encoder_hidden_states),
            ],
            2,
        )
        v = torch.cat(
            [
                _heads(attn, attn.to_v, None, hidden_states),
                _heads(attn, attn.add_v_proj, None, encoder_hidden_states),
            ],
            2,
        )
        heads = attend(q, k, v, mask=self.visible(hidden_states, encoder_hidden_states))
        assert isinstance(heads, Tensor)
        picture, words = (
            heads.transpose(1, 2).flatten(2).split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        )
        added = added_heads(self.model, self.index, attn, hidden_states, own)
        picture = attn.to_out[1](attn.to_out[0](picture if added is None else picture + added))
        return picture, words if attn.context_pre_only else attn.to_add_out(words)

    def visible(self, picture: Tensor, text: Tensor) -> Tensor | None:
        """Which tokens (b, l + m) of picture and text may be attended to; None is all.

        Raises:
            ShapeError: a `text_mask` that does not fit the text.
        """
        call: DenoisingCall | None = self.model.denoising_call()
        mask = None if call is None else call.text_mask
        if mask is None:
            return None
        if mask.shape != text.shape[:2]:
            raise ShapeError(f"text_mask must be (b, m) = {tuple(text.shape[:2])}, got {tuple(mask.shape)}")
        mask = mask.to(text.device)
        return torch.cat([mask.new_ones(picture.shape[:2]), mask], 1)


def _heads(attn: Any, projection: Any, norm: Any, x: Tensor) -> Tensor:
    """(b, l, d) projected and by head, (b, h, l, k)."""
    heads: Tensor = projection(x).unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return heads if norm is None else norm(heads)
