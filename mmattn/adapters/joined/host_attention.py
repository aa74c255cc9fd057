"""The attention of one layer of a host, with the keys and values of memories in its softmax.

With q, K, V of the host and K′, V′ of a memory, a token gets softmax(q [K′; K]ᵀ) [V′; V]: one softmax over both, as
with a prompt before the text ("rectangular attention", arXiv 2410.10450, equation 4; prefixes, arXiv 2101.00190).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

from mmattn.adapters.gated.block import Gate
from mmattn.adapters.text_state import Keywords
from mmattn.core.attention import attend, grouped_sdpa
from mmattn.core.attention_inputs import additive_mask
from mmattn.errors import ConditionError


@dataclass(frozen=True)
class ExtraSlots:
    """Keys and values beside those of the text."""

    key: Tensor
    value: Tensor
    mask: Tensor | None = None  # of slots, bool or added to the scores
    sees: Tensor | None = None  # (b, l) tokens that attend to any slot; None for all
    adapter_scale: float = 1.0
    gate: Tensor | None = None


@dataclass(frozen=True)
class HostAttention:
    """The arguments of the attention function in a layer of a host, and the slots that adapters add to it."""

    # the host's own, called as transformers does: module, queries, keys, values, mask, options
    function: Callable[..., tuple[Tensor, Tensor | None]]
    module: nn.Module  # the attention layer
    query: Tensor  # (b, h, l, k)
    key: Tensor  # (b, g, m, k), of the text
    value: Tensor  # (b, g, m, v), of the text
    # (b or 1, 1 or h, l, m), bool with True = may attend, or float to be added to the scores; None for all, or in a
    # causal function for all that are not later
    mask: Tensor | None
    options: Keywords = field(default_factory=dict)  # other arguments of the function
    # of the memories, without a gate in one softmax, each with a gate in a softmax of its own beside those
    slots: tuple[ExtraSlots, ...] = ()
    # keys and values of the text as the host computed them, if an adapter has changed them
    computed: tuple[Tensor, Tensor] | None = None
    is_sdpa: bool = False  # the function is that of transformers for `scaled_dot_product_attention`
    # masks of slots and text that layers of this forward have made, which later layers take
    masks: dict[object, tuple[Tensor | None, object]] | None = None

    def with_text(self, key: Tensor, value: Tensor) -> HostAttention:
        """Return this attention with other keys and values of the text."""
        return replace(self, key=key, value=value, computed=self.computed or (self.key, self.value))

    @property
    def window(self) -> int | None:
        """Sliding window of this layer, the token itself included; None for the whole text."""
        window = self.options.get("sliding_window")
        return window if isinstance(window, int) else None

    def join(self, slots: ExtraSlots) -> HostAttention:
        """Return this attention with further slots."""
        if self.options.get("cache") is not None:
            raise ConditionError(
                "keys and values of a memory are joined with those of a paged cache where the host's attention is "
                "'sdpa': host.set_attn_implementation('sdpa')"
            )
        return replace(self, slots=(*self.slots, slots))

    def result(self) -> tuple[Tensor, Tensor | None]:
        """Compute the attention: (b, l, h, v), and its weights if the host asks for them."""
        full = self._with_shared()
        result = full._call()
        out = self._scaled(result[0])
        for one in self.slots:
            if one.gate is not None:
                out = full._add_gated(one, one.gate, result[0], out)
        return out, result[1]

    def _scaled(self, out: Tensor) -> Tensor:
        """Return attention over slots without a gate, scaled; tokens that see none have that over the text alone."""
        shared = [one for one in self.slots if one.gate is None]
        sees = [one.sees for one in shared if one.sees is not None]
        scale, all_see = shared[-1].adapter_scale if shared else 1.0, len(sees) < len(shared) or not shared
        if all_see and scale == 1.0:
            return out
        text, _ = self._call()
        out = out if scale == 1.0 else text + scale * (out - text)
        return out if all_see else torch.where(reduce(torch.logical_or, sees)[..., None, None], out, text)

    def weights(self, slots: ExtraSlots) -> Tensor:
        """Return the weights (b, h, l, m) of slots in their softmax; those of the text make up the rest of 1."""
        more = [name for name in ("softcap", "s_aux", "position_bias") if self.options.get(name) is not None]
        if more:
            raise ConditionError(
                f"the attention of {type(self.module).__name__} is more than a softmax of scaled scores "
                f"({', '.join(more)}), and its weights are not recorded"
            )
        x = replace(self, is_sdpa=False)._with_shared()._widened([slots])
        b, h, l, m = x.query.shape[0], x.query.shape[1], x.query.shape[2], x.key.shape[2]
        allowed = bias = None
        if x.mask is not None:
            allowed = x.mask if not x.mask.is_floating_point() else x.mask > -1e4
            bias = None if not x.mask.is_floating_point() else x.mask.masked_fill(~allowed, 0)
            allowed = allowed.expand(b, -1, l, m).expand(b, h, l, m)
        scale = x.options.get("scaling")
        weights = attend(x.query, x.key, x.value, attention_mask=allowed, bias=bias, scale=scale, return_weights=True)[
            1
        ]
        return weights[..., : slots.key.shape[2]]

    def _call(self, **options: object) -> tuple[Tensor, Tensor | None]:
        return self.function(self.module, self.query, self.key, self.value, self.mask, **{**self.options, **options})

    def _add_gated(self, slots: ExtraSlots, gate: Tensor, full: Tensor, out: Tensor) -> Tensor:
        """Return `out` plus the change by gated slots of `full`, the attention without them."""
        # Dropout drawn again would take the random numbers of later layers.
        options = {"dropout": 0.0} if "dropout" in self.options else {}
        joined, _ = self._widened([slots])._call(**options)
        wide = torch.promote_types(gate.dtype, out.dtype)
        share = slots.adapter_scale * gate.to(out.device, wide)
        changed = (out.to(wide) + share[..., None] * (joined.to(wide) - full.to(wide))).to(out.dtype)
        return changed if slots.sees is None else torch.where(slots.sees[..., None, None], changed, out)

    def _with_shared(self) -> HostAttention:
        """Return this attention with the slots without a gate among its keys, the newest first."""
        shared = [one for one in reversed(self.slots) if one.gate is None]
        return self._widened(shared) if shared else self

    def _widened(self, slots: Sequence[ExtraSlots]) -> HostAttention:
        """Return this attention with slots in front of its keys and values."""
        rows = self.query.shape[0]

        def joined(slots: Sequence[Tensor], text: Tensor) -> Tensor:
            # A static cache has room in which nothing was written yet.
            text = text[:, :, : self.query.shape[2]] if self._is_causal else text
            return torch.cat([*(one.to(text.dtype).expand(rows, -1, -1, -1) for one in slots), text], 2)

        key, value = joined([one.key for one in slots], self.key), joined([one.value for one in slots], self.value)
        if self._is_causal and all(one.mask is None for one in slots) and self._has_causal_kernel(key, value):
            causal = causal_lower_right(self.query.shape[2], key.shape[2])
            return replace(self, function=grouped_sdpa, key=key, value=value, mask=causal)
        mask = self._mask_with(slots)
        # Beside a mask transformers copies keys for each head of a group, which the kernel of the CPU does not need.
        is_grouped = mask is not None and key.shape[1] != self.query.shape[1] and self.query.shape[2] > 1
        function = grouped_sdpa if is_grouped and self._is_plain_sdpa and key.device.type == "cpu" else self.function
        return replace(self, function=function, key=key, value=value, mask=mask)

    @property
    def _is_plain_sdpa(self) -> bool:
        return self.is_sdpa and all(self.options.get(name) is None for name in ("softcap", "position_bias"))

    def _has_causal_kernel(self, key: Tensor, value: Tensor) -> bool:
        """Return whether a kernel of this device lets all tokens see all slots without a mask."""
        if not self._is_plain_sdpa or key.device.type != "cuda" or torch.compiler.is_compiling():
            return False
        is_grouped = key.shape[1] != self.query.shape[1]
        return can_use_flash_attention(SDPAParams(self.query, key, value, None, 0.0, False, is_grouped))

    def _mask_with(self, slots: Sequence[ExtraSlots]) -> Tensor | None:
        """Return the mask of slots and text, once for the layers of a forward; None if everything is visible."""
        masks = [one.mask for one in slots]
        if (
            self.masks is None
            or torch.compiler.is_compiling()
            or any(one is not None and one.is_floating_point() for one in masks)
        ):
            return self._make_mask(slots)
        sizes = *self.query.shape, self.key.shape[2], *(one.key.shape[2] for one in slots)
        key = id(self.mask), *map(id, masks), sizes, self.query.dtype, self.query.device, self._is_causal, self.is_sdpa
        if key not in self.masks:
            self.masks[key] = self._make_mask(slots), (self.mask, masks)  # kept, so that no other gets their ids
        return self.masks[key][0]

    def _make_mask(self, slots: Sequence[ExtraSlots]) -> Tensor | None:
        """Return the mask of slots and text: bool, or float if one of them is or torch adds it to the scores."""
        text_mask = self._text_mask(any(one.mask is not None for one in slots))
        if text_mask is None:
            return None
        masks = [
            torch.ones(1, 1, 1, one.key.shape[2], dtype=torch.bool, device=text_mask.device)
            if one.mask is None
            else one.mask.to(text_mask.device)
            for one in slots
        ]
        masks.append(text_mask)
        if any(one.is_floating_point() for one in masks):
            dtype = text_mask.dtype if text_mask.is_floating_point() else self.query.dtype
            masks = [one.to(dtype) if one.is_floating_point() else additive_mask(one, dtype) for one in masks]
        rows = len(self.query) if any(len(one) == len(self.query) for one in masks) else 1
        mask = torch.cat([one.expand(rows, text_mask.shape[1], self.query.shape[2], -1) for one in masks], -1)
        if mask.is_floating_point() or not self.is_sdpa:
            return mask
        # What torch adds to the scores, and would compute from a bool mask in each layer.
        return torch.zeros_like(mask, dtype=self.query.dtype).masked_fill_(~mask, -torch.inf)

    @property
    def _is_causal(self) -> bool:
        """Return True if the attention function is causal by itself, as it is without a mask."""
        option = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if option is None else option
        return bool(causal) and self.mask is None and self.query.shape[2] > 1

    def _text_mask(self, needed: bool) -> Tensor | None:
        """Return the mask of the text as a tensor; None if every token attends to every key, unless one is needed."""
        l, m = self.query.shape[2], self.key.shape[2]
        if self._is_causal:
            return torch.ones(1, 1, l, l, dtype=torch.bool, device=self.query.device).tril()
        if self.mask is None:
            return torch.ones(1, 1, l, m, dtype=torch.bool, device=self.query.device) if needed else None
        if not isinstance(self.mask, Tensor) or self.mask.dim() != 4:
            kind = list(self.mask.shape) if isinstance(self.mask, Tensor) else type(self.mask).__name__
            raise ConditionError(
                f"keys and values of a memory are joined where the attention of {type(self.module).__name__} has a "
                f"mask (b, h, l, m), and it has {kind}: host.set_attn_implementation('sdpa') or 'eager'"
            )
        return self.mask


class JoinSlots(nn.Module):
    """Adds slots, with an optional gate, to the attention of one layer; its weights can be recorded."""

    def __init__(self, gate: Gate | None = None) -> None:
        super().__init__()
        self.gate = gate

    def forward(
        self,
        x: HostAttention,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        sees: Tensor | None = None,
        adapter_scale: float = 1.0,
        return_weights: bool = False,
    ) -> HostAttention | tuple[HostAttention, Tensor]:
        """Return the attention with slots (`HostAttention.join`); on request also their weights (b, h, l, m)."""
        mask, gate = self.score_mask(attention_mask, key.shape[2]), None if self.gate is None else self.gate()
        slots = ExtraSlots(key, value, mask, sees, adapter_scale, gate)
        return (x.join(slots), x.weights(slots)) if return_weights else x.join(slots)

    def score_mask(self, attention_mask: Tensor | None, slots: int) -> Tensor | None:
        """Return the mask of slots as `ExtraSlots` has it."""
        return attention_mask
