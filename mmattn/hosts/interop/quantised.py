"""4-bit hosts of bitsandbytes on the CPU: keep their layers in the layout of gradients and `state_dict`.

On processors with AVX512-BF16 bitsandbytes repacks a layer at its first call in evaluation mode, for good (seen in
0.50). The new layout silently passes no gradient to what is below it, rounds the scales in `state_dict()` to bfloat16,
cannot be undone exactly, and fails where a width is no multiple of 64. So an attached host is computed as stored, and
differs from the bare one in evaluation mode by the rounding of the kernel to bfloat16.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

from torch import nn

from mmattn.errors import ConditionError

_SWITCH = "support_avx512bf16_for_cpu"  # of bitsandbytes.nn.Linear4bit, which reads it at every call


def keep_stored(host: nn.Module) -> list[nn.Module]:
    """Switch repacking off in the 4-bit layers of a host; returns those that had it on."""
    layers = {name: layer for name, layer in host.named_modules() if layer.__dict__.get(_SWITCH)}
    for name, layer in layers.items():
        if getattr(getattr(layer.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ConditionError(
                f"the 4-bit weights of {name} were repacked by a call in evaluation mode, so no gradient passes them: "
                "load the host again, and attach (or train) before its first call"
            )
    for layer in layers.values():
        setattr(layer, _SWITCH, False)
    return list(layers.values())


def let_change(layers: Sequence[nn.Module]) -> None:
    """Undo `keep_stored`."""
    for layer in layers:
        setattr(layer, _SWITCH, True)


def size_of(parameter: nn.Parameter) -> int:
    """Return the number of weights in a parameter; two 4-bit weights are packed in a byte."""
    quantised = getattr(parameter, "quant_state", None)
    return parameter.numel() if quantised is None else math.prod(quantised.shape)


@contextlib.contextmanager
def stored(host: nn.Module) -> Iterator[None]:
    """Keep the 4-bit layers of a host from being repacked inside the block."""
    layers = keep_stored(host)
    try:
        yield
    finally:
        let_change(layers)
