"""Hosts whose weights lie in several processes: sharded by FSDP2, or tensor parallel by a plan of transformers.

Sharded (`torch.distributed.fsdp.fully_shard`), every process runs every forward and backward pass: all processes gather
the weights of a layer together, when it is called and again when gradients pass it. A process that has no row left, or
no memory in its rows and therefore nothing to learn, must do so too: the others would wait for it.

Tensor parallel (`from_pretrained(tp_plan="auto")`), the processes compute each layer together, of the same rows.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def shards(host: nn.Module) -> list[FSDPModule]:
    """Return the modules of a host whose weights are sharded over several processes; none where it is not sharded."""
    if "torch.distributed.fsdp" not in sys.modules:  # nothing is sharded
        return []
    from torch.distributed.fsdp import FSDPModule

    return [part for part in host.modules() if isinstance(part, FSDPModule)]


def shard(host: nn.Module, layers: nn.ModuleList, device: torch.device) -> None:
    """Shard the weights of a host over all processes, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    odd = [name for name, parameter in host.named_parameters() if not parameter.is_floating_point()]
    if odd or any(hasattr(parameter, "__tensor_flatten__") for parameter in host.parameters()):
        raise ConfigError(
            f"the weights of {type(host).__name__} are quantised, and FSDP2 shards floating point weights: leave one "
            "of the two out"
        )
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for part in (*layers, host):
        fully_shard(part, mesh=mesh)


def tensor_parallel_size(host: nn.Module) -> int:
    """Return the number of processes that compute the layers of a host together; 1 where each has all of it."""
    sizes = (getattr(part, "tp_size", None) for part in host.modules())
    return next((size for size in sizes if isinstance(size, int)), 1)


def reshard(host: nn.Module) -> None:
    """Shard every weight again: a call leaves some unsharded, as parameters that the next call replaces."""
    for part in shards(host):
        part.reshard()


def check_trained(model: nn.Module) -> None:
    """Refuse trained parameters that are sharded: each process must have all of them."""
    reshard(model)
    pieces = [name for name, p in model.named_parameters() if p.requires_grad and hasattr(p, "full_tensor")]
    if pieces:
        raise ConfigError(
            f"{len(pieces)} trained parameters are sharded ({pieces[0]}, …), and each process must have all of "
            "what is trained: shard the frozen host first, then put adapters or a LoRA on it"
        )


@contextlib.contextmanager
def gradients_throughout(model: nn.Module) -> Iterator[None]:
    """Inside the block gradients flow back to the embedded text, so through every layer, even without a memory."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        raise ConfigError(
            f"the host is sharded and {type(model).__name__} has no input embeddings, so rows without a memory would "
            "block other processes: train an unsharded host"
        )
    with embeddings.register_forward_hook(_ask_gradient):
        yield


def _ask_gradient(module: nn.Module, inputs: object, embedded: Tensor) -> None:
    if torch.is_grad_enabled():
        embedded.requires_grad_()
