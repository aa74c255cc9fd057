"""4-bit weights on the CPU stay as they are stored: bitsandbytes would lay them out anew, for good.

It does so on processors with AVX512-BF16, at a layer's first call in evaluation mode (seen in 0.50). The new layout
passes no gradient to what lies below it, and says nothing; it comes back from `state_dict()` as other weights; and it
fails where a width is no multiple of 64. Left as they are, the weights are read alike with gradients and without.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from torch import nn

from mmattn.errors import ConditionError

_SWITCH = "support_avx512bf16_for_cpu"  # of bitsandbytes.nn.Linear4bit, which reads it at every call


def keep_stored(host: nn.Module) -> list[nn.Module]:
    """Have the 4-bit layers of a host keep their layout; returns those that were going to change it.

    Raises:
        ConditionError: one has changed it already.
    """
    layers = {name: layer for name, layer in host.named_modules() if layer.__dict__.get(_SWITCH)}
    for name, layer in layers.items():
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ConditionError(
                f"the 4-bit weights of {name} were laid out anew for inference when the host was called in evaluation "
                "mode on the CPU: no gradient passes them now, nor are they those that were loaded. Load the host "
                "again, and attach (or train) before its first call"
            )
    for layer in layers.values():
        setattr(layer, _SWITCH, False)
    return list(layers.values())


def let_change(layers: Sequence[nn.Module]) -> None:
    """Undo `keep_stored`."""
    for layer in layers:
        setattr(layer, _SWITCH, True)


def size_of(parameter: nn.Parameter) -> int:
    """How many weights a parameter stands for: 4-bit ones lie two in a byte.

    >>> size_of(nn.Linear(5, 3).weight)
    15
    """
    quantised = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantised is None else math.prod(quantised.shape)


@contextlib.contextmanager
def stored(host: nn.Module) -> Iterator[None]:
    """Inside the block, the 4-bit layers of a host keep their layout.

    Raises:
        ConditionError: one has changed it already.
    """
    layers = keep_stored(host)
    try:
        yield
    finally:
        let_change(layers)
