"""The step in a host's attention at which slots are joined: what `mmattn.inspect.record` listens to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmattn.adapters.gated.block import Gate
from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.core.attention import attend
from mmattn.errors import ConditionError


class JoinSlots(nn.Module):
    """Joins keys and values of slots to the attention of one layer.

    Args:
        gate: weighs what they change; None adds all of it.
        window: as in `HostAttention.join`.
    """

    def __init__(self, gate: Gate | None = None, window: int | None = None) -> None:
        super().__init__()
        self.gate, self.window = gate, window

    def forward(
        self,
        x: HostAttention,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        sees: Tensor | None = None,
        adapter_scale: float = 1.0,
        return_weights: bool = False,
    ) -> Any:
        """The attention with the slots joined to it; on request also the weights (b, h, l, m) of the slots.

        Args:
            x: the attention of a layer.
            key: (b or 1, g, m, k).
            value: (b or 1, g, m, v).
            attention_mask: (b or 1, 1, l or 1, m) bool, which slots each token sees; None for all.
            sees: (b, l or 1) bool, tokens that see any; None for all.
            adapter_scale: multiplies what the slots change.
            return_weights: also give the weights; those of the text's own tokens make up the rest of 1.

        Raises:
            ConditionError: weights are wanted of an attention that does more than a softmax of scaled scores.
        """
        mask = self.score_mask(attention_mask, key.shape[2])
        gate = None if self.gate is None else self.gate()
        joined = x.join(key, value, mask, sees, adapter_scale, gate, self.window)
        if not return_weights:
            return joined
        both = joined if gate is None else x.widened(key, value, mask, self.window)
        return joined, _weights(both)[..., : key.shape[2]]

    def score_mask(self, attention_mask: Tensor | None, slots: int) -> Tensor | None:
        """What hides slots and what is added to their scores: the mask as it is.

        Args:
            attention_mask: as in `forward`.
            slots: m.
        """
        return attention_mask


def _weights(x: HostAttention) -> Tensor:
    """The weights (b, h, l, m) of an attention."""
    more = [name for name in ("softcap", "s_aux", "position_bias") if x.options.get(name) is not None]
    if more:
        raise ConditionError(
            f"the attention of {type(x.module).__name__} is more than a softmax of scaled scores ({', '.join(more)}), "
            "and its weights are not recorded"
        )
    b, h, l, m = x.query.shape[0], x.query.shape[1], x.query.shape[2], x.key.shape[2]
    allowed = bias = None
    if x.mask is not None:
        allowed = x.mask if not x.mask.is_floating_point() else x.mask > -1e4
        bias = None if not x.mask.is_floating_point() else x.mask.masked_fill(~allowed, 0)
        allowed = allowed.expand(b, -1, l, m).expand(b, h, l, m)
    _, weights = attend(
        x.query,
        x.key,
        x.value,
        attention_mask=allowed,
        bias=bias,
        scale=x.options.get("scaling"),
        return_weights=True,
    )
    return weights
