"""Hosts whose weights are stored otherwise: in 4 bits, or in several processes.

4 bits: on processors with AVX512-BF16 bitsandbytes repacks a layer at its first call in evaluation mode, for good (seen
in 0.50). The new layout silently passes no gradient to what is below it, rounds the scales in `state_dict()` to
bfloat16, cannot be undone exactly, and fails where a width is no multiple of 64. So an attached host is computed as
stored, and differs from the bare one in evaluation mode by the rounding of the kernel to bfloat16.

Sharded (`torch.distributed.fsdp.fully_shard`): every process runs every forward and backward pass, since all processes
gather the weights of a layer together, when it is called and again when gradients pass it. A process that has no row
left, or no memory in its rows and therefore nothing to learn, must do so too: the others would wait for it.

Tensor parallel (`from_pretrained(tp_plan="auto")`): the processes compute each layer together, of the same rows.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import nn

from mmattn.errors import ConditionError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


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


def shards(host: nn.Module) -> list[FSDPModule]:
    """Return the modules of a host whose weights are sharded over several processes; none where it is not sharded."""
    if "torch.distributed.fsdp" not in sys.modules:  # nothing is sharded
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in host.modules() if isinstance(part, FSDPModule)]


def tensor_parallel_size(host: nn.Module) -> int:
    """Return the number of processes that compute the layers of a host together; 1 where each has all of it."""
    sizes = (getattr(part, "tp_size", None) for part in host.modules())
    return next((size for size in sizes if isinstance(size, int)), 1)


def reshard(host: nn.Module) -> None:
    """Shard every weight again: a call leaves some unsharded, as parameters that the next call replaces."""
    for part in shards(host):
        part.reshard()
