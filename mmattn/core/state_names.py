"""Names of the weights of a `CrossAttention` in files written before its keys and values had a module of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")

#: What stood in the attention itself in files written before keys and values had a module of their own.
_OWNED = (
    *("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"),
    *("k_norm.weight", "null_key", "null_value", "score_scale"),
)


def upgrade_state_names(state: Mapping[str, Value]) -> dict[str, Value]:
    """The entries of a state dict under the names of today, the others and new ones as they are.

    Before `CrossAttention` had a `kv_proj`, the weights of keys and values stood beside its `q_proj.weight`, which is
    how they differ from those of a `KeyValueProjection` on its own.

    Args:
        state: anything by the names of parameters: tensors, shapes.

    >>> upgrade_state_names({"block.q_proj.weight": 1, "block.k_proj.weight": 2, "k_proj.weight": 3})
    {'block.q_proj.weight': 1, 'block.kv_proj.k_proj.weight': 2, 'k_proj.weight': 3}
    """
    renamed = {}
    for name, value in state.items():
        for owned in _OWNED:
            prefix = name.removesuffix(owned)
            if prefix != name and prefix[-1:] in ("", ".") and f"{prefix}q_proj.weight" in state:
                name = f"{prefix}kv_proj.{owned}"
                break
        renamed[name] = value
    return renamed
