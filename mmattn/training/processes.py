"""The processes of a run: which share of a batch each learns, and how what they found is added up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError
from mmattn.hosts.interop.sharded import shard, tensor_parallel_size
from mmattn.hosts.layers import find_layers


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    Processes that share the layers of one host, tensor parallel, compute together: they learn the same rows, and each
    has the adapters and their gradients whole.

    Args:
        accelerator: what `make_accelerator` returned.
        index: of the share of a batch that is learned here, from 0.
        count: of the shares.
        copies: processes that learn one share together.
    """

    accelerator: Any
    index: int
    count: int
    copies: int

    @classmethod
    def of(cls, model: Any, accelerator: Any) -> Processes:
        """Those that train a model.

        Raises:
            ConfigError: processes that cannot be dealt out in groups that share a host.
        """
        copies, processes = tensor_parallel_size(model), accelerator.num_processes
        if processes % copies:
            raise ConfigError(
                f"the host is tensor parallel over {copies} processes and {processes} were launched: launch a multiple "
                f"of {copies}"
            )
        return cls(accelerator, accelerator.process_index // copies, processes // copies, copies)

    def sum(self, sums: Tensor) -> list[float]:
        """The sums of all shares, added up."""
        if self.accelerator.num_processes > 1:
            # Some devices have no float64, and float32 holds these sums well enough.
            sums = sums if self.accelerator.device.type in ("cpu", "cuda") else sums.float()
            sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum") / self.copies
        return sums.tolist()

    def sum_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add up the gradients of all shares, in place."""
        if self.accelerator.num_processes == 1:
            return
        flat = torch.cat([gradient.to(self.accelerator.device, torch.float32).flatten() for gradient in gradients])
        # Copies of a share differ by rounding: their mean keeps the adapters of all equal.
        flat = self.accelerator.reduce(flat, "sum") / self.copies
        for gradient, own in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(own.view_as(gradient))

    def from_first(self, tensor: Tensor) -> Tensor:
        """The values of the first process, so that all begin alike."""
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast(tensor, 0)
        return tensor


def shard_host(host: Any, accelerator: Any) -> Any:
    """Shard the weights of a language model over the processes of a run by FSDP2, before adapters are put on it.

    Args:
        host: frozen, with all its weights in each process; it comes back.
        accelerator: what `make_accelerator` returned.

    Raises:
        ConfigError: one process, or weights that cannot be sharded.
        AttachError: its layers cannot be found.
    """
    if accelerator.num_processes == 1:
        raise ConfigError(
            "FSDP2 shards a host over several processes, and there is one: torchrun --nproc-per-node N -m mmattn train "
            "CONFIG, or leave fsdp out"
        )
    path, _ = find_layers(host, None)
    layers = host.get_submodule(path)
    shard(host, layers, accelerator.device)
    return host
