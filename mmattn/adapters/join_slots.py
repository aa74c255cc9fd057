"""The step in a host's attention at which slots are joined: what `mmattn.inspect.record` listens to."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmattn.adapters.gated_block import Gate
from mmattn.adapters.host_attention import HostAttention
from mmattn.core.attention import attend
from mmattn.errors import ConditionError


class JoinSlots(nn.Module):
    """Joins keys and values of slots to the attention of one layer.

    Args:
        gated: what they change is weighed by tanh of a number that starts at 0; else it has no weights.
    """

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.gate = Gate() if gated else None

    def forward(
        self,
        x: HostAttention,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sees: Tensor | None = None,
        adapter_scale: float = 1.0,
        return_weights: bool = False,
    ) -> Any:
        """The attention with the slots joined to it; on request also the weights (b, h, l, m) of the slots.

        Args:
            x: the attention of a layer.
            key: (b, g, m, k).
            value: (b, g, m, v).
            mask: (b, 1, l or 1, m) bool, which slots each token sees; None for all.
            sees: (b, l or 1) bool, tokens that see any; None for all.
            adapter_scale: multiplies what the slots change.
            return_weights: also give the weights; those of the text's own tokens make up the rest of 1.

        Raises:
            ConditionError: weights are wanted of an attention that does more than a softmax of scaled scores.
        """
        joined = x.join(key, value, mask, sees, adapter_scale, None if self.gate is None else self.gate())
        if not return_weights:
            return joined
        return joined, _weights(joined)[..., : key.shape[2]]


def _weights(x: HostAttention) -> Tensor:
    """The weights (b, h, l, m) of an attention."""
    more = [name for name in ("softcap", "s_aux", "position_bias") if x.options.get(name) is not None]
    if more:
        raise ConditionError(
            f"the attention of {type(x.module).__name__} is more than a softmax of scaled scores ({', '.join(more)}), "
            "and its weights are not recorded"
        )
    b, h, l, m = x.query.shape[0], x.query.shape[1], x.query.shape[2], x.key.shape[2]
    allowed = None
    if x.mask is not None:
        allowed = (x.mask if not x.mask.is_floating_point() else x.mask > -1e4).expand(b, -1, l, m)
        allowed = allowed.expand(b, h, l, m)
    _, weights = attend(
        x.query,
        x.key,
        x.value,
        attention_mask=allowed,
        scale=x.options.get("scaling"),
        return_weights=True,
    )
    return weights
