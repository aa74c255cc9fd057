"""The attention of one layer of a host, into whose own softmax the keys and values of a memory can be joined.

With q, K, V of the host and K′, V′ of a memory, a token gets softmax(q [K′; K]ᵀ) [V′; V]: one softmax over both, as
with a prompt that stands before the text ("rectangular attention", arXiv 2410.10450, equation 4; prefixes, arXiv
2101.00190).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConditionError


@dataclass(frozen=True)
class GatedSlots:
    """Keys and values that are joined with a gate.

    Args:
        key: (b or 1, g, m, k).
        value: (b or 1, g, m, v).
        mask: as in `HostAttention.join`.
        sees: (b, l or 1) bool, tokens that see any; None is all.
        gate: of each head (h,) or of all, how much of what they change is added.
        adapter_scale: multiplies it.
        window: as in `HostAttention.join`.
    """

    key: Tensor
    value: Tensor
    mask: Tensor | None
    sees: Tensor | None
    gate: Tensor
    adapter_scale: float
    window: int | None = None


@dataclass(frozen=True)
class HostAttention:
    """What a layer of a host gives to its attention, with what was joined to it.

    Args:
        function: the host's own, as transformers calls it: module, queries, keys, values, mask, options.
        module: the attention layer.
        query: (b, h, l, k).
        key: (b, g, m, k), those of a memory first.
        value: (b, g, m, v).
        mask: (b or 1, 1 or h, l, m), bool with True = may look, or float to be added; None where all may look, or all
            that is not later.
        options: other arguments of the function.
        adapter_scale: multiplies what the joined keys and values change.
        sees: (b, l or 1) bool, tokens that see what was joined; None is all.
        before: the same without what was joined; None where nothing was.
        gated: what was joined with a gate; each is beside all that was joined without.
        computed: keys and values of the text as the host computed them, where they were changed; else None.
    """

    function: Callable[..., Any]
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter_scale: float = 1.0
    sees: Tensor | None = None
    before: HostAttention | None = None
    gated: tuple[GatedSlots, ...] = ()
    computed: tuple[Tensor, Tensor] | None = None

    def with_text(self, key: Tensor, value: Tensor) -> HostAttention:
        """The same with other keys and values of the text.

        Args:
            key: (b, g, m, k).
            value: (b, g, m, v).
        """
        return replace(self, key=key, value=value, computed=self.computed or (self.key, self.value))

    @property
    def window(self) -> int | None:
        """How far back a token of this layer sees, itself included; None is to the first."""
        window = self.options.get("sliding_window")
        return window if isinstance(window, int) else None

    def join(
        self,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sees: Tensor | None = None,
        adapter_scale: float = 1.0,
        gate: Tensor | None = None,
        window: int | None = None,
    ) -> HostAttention:
        """The same with keys and values before those that are there.

        Args:
            key: (b or 1, g, m, k).
            value: (b or 1, g, m, v).
            mask: (b or 1, 1, l or 1, m), bool with True = a token sees it, or float to be added to the scores; None for
                all.
            sees: (b, l or 1) bool, tokens that see any; the others stay bit for bit what they were. None is all.
            adapter_scale: multiplies what they change.
            gate: of each head (h,) or of all, how much of what they change is added; at 0 nothing changes, bit for bit.
                None is all of it.
            window: of the text, how many tokens share the softmax with the slots, a token itself and those before it;
                None is all that it sees. Only with a gate.

        Raises:
            ConditionError: an attention whose mask cannot be widened, or whose cache is not read before it.
        """
        if self.options.get("cache") is not None:
            raise ConditionError(
                "keys and values of a memory are joined with those of a paged cache where the host's attention is "
                "'sdpa': host.set_attn_implementation('sdpa')"
            )
        if gate is not None:
            slots = GatedSlots(key, value, mask, sees, gate, adapter_scale, window)
            return replace(self, gated=(*self.gated, slots))
        if self.before is not None:
            sees = None if sees is None or self.sees is None else sees | self.sees
        return replace(
            self.widened(key, value, mask),
            adapter_scale=adapter_scale,
            sees=sees,
            before=replace(self, gated=()) if self.before is None else self.before,
        )

    def result(self) -> tuple[Tensor, Any]:
        """What the attention gives: (b, l, h, v), and its weights where the host asks for them."""
        found = self._attend(self.options)
        if self.before is None and not self.gated:
            return found
        out = full = found[0]
        if self.before is not None and not (self.sees is None and self.adapter_scale == 1.0):
            own, _ = self.before.result()
            if self.adapter_scale != 1.0:
                out = own + self.adapter_scale * (out - own)
            if self.sees is not None:
                out = torch.where(self.sees[..., None, None], out, own)
        for slots in self.gated:
            out = self._added(slots, full, out)
        return out, *found[1:]

    def _attend(self, options: Mapping[str, Any]) -> tuple[Tensor, Any]:
        found: tuple[Tensor, Any] = self.function(self.module, self.query, self.key, self.value, self.mask, **options)
        return found

    def _added(self, slots: GatedSlots, full: Tensor, out: Tensor) -> Tensor:
        """`out` with what gated slots change of `full`, the attention without them."""
        options = dict(self.options)
        if "dropout" in options:
            options["dropout"] = 0.0  # drawn again, it would take the random numbers of later layers
        joined, _ = self.widened(slots.key, slots.value, slots.mask, slots.window)._attend(options)
        wide = torch.promote_types(slots.gate.dtype, out.dtype)
        share = slots.adapter_scale * slots.gate.to(out.device, wide)
        changed = out.to(wide) + share[..., None] * (joined.to(wide) - full.to(wide))
        changed = changed.to(out.dtype)
        return changed if slots.sees is None else torch.where(slots.sees[..., None, None], changed, out)

    def widened(self, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None = None) -> HostAttention:
        """The same with keys and values in front, and nothing else changed.

        Args:
            key: as in `join`.
            value: as in `join`.
            mask: as in `join`.
            window: as in `join`.
        """
        b, l = self.query.shape[0], self.query.shape[2]
        own = self._own_mask(mask is not None or window is not None)
        if window is not None:
            assert own is not None
            own = _near(own, window)
        joined = None
        if own is not None:
            if mask is None:
                mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=own.device)
            dtype = own.dtype if own.is_floating_point() else self.query.dtype
            mask = mask.to(own.device)
            if own.is_floating_point() or mask.is_floating_point():
                own, mask = _added_to_scores(own, dtype), _added_to_scores(mask, dtype)
            shape = b if b in (mask.shape[0], own.shape[0]) else 1, own.shape[1], l
            joined = torch.cat([mask.expand(*shape, -1), own.expand(*shape, -1)], -1)
        key, value = (one.expand(b, -1, -1, -1) for one in (key, value))
        return replace(
            self,
            key=torch.cat([key.to(self.key.dtype), self._own_seen(self.key)], 2),
            value=torch.cat([value.to(self.value.dtype), self._own_seen(self.value)], 2),
            mask=joined,
        )

    @property
    def _is_causal(self) -> bool:
        """Whether the function hides later tokens itself, which it does where it is given no mask."""
        given = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if given is None else given
        return bool(causal) and self.mask is None and self.query.shape[2] > 1

    def _own_seen(self, tensor: Tensor) -> Tensor:
        """Keys or values without the room of a static cache in which nothing was written yet."""
        return tensor[:, :, : self.query.shape[2]] if self._is_causal else tensor

    def _own_mask(self, wanted: bool) -> Tensor | None:
        """The mask as a tensor; None where every token sees every key, unless one is wanted.

        Raises:
            ConditionError: it is no tensor (b, h, l, m).
        """
        l, m = self.query.shape[2], self.key.shape[2]
        if self._is_causal:
            return torch.ones(1, 1, l, l, dtype=torch.bool, device=self.query.device).tril()
        if self.mask is None:
            return torch.ones(1, 1, l, m, dtype=torch.bool, device=self.query.device) if wanted else None
        if not isinstance(self.mask, Tensor) or self.mask.dim() != 4:
            shown = list(self.mask.shape) if isinstance(self.mask, Tensor) else type(self.mask).__name__
            raise ConditionError(
                f"keys and values of a memory are joined where the attention of {type(self.module).__name__} has a "
                f"mask (b, h, l, m), and it has {shown}: host.set_attn_implementation('sdpa') or 'eager'"
            )
        return self.mask


def _near(mask: Tensor, window: int) -> Tensor:
    """A mask (b, h, l, m) of which each token sees the last keys that it saw, itself among them."""
    seen = mask > -1e4 if mask.is_floating_point() else mask
    near = seen & (seen.flip(-1).cumsum(-1).flip(-1) <= window)
    # A plain softmax adds its mask to the scores, which a boolean one would not hide.
    return mask.masked_fill(~near, torch.finfo(mask.dtype).min) if mask.is_floating_point() else near


def _added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores: 0 where a token may look, else the least that the dtype has."""
    if mask.is_floating_point():
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
