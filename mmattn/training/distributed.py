"""The processes of a run: the share of a batch that each learns, fetched ahead, and the sums of their gradients."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torch.utils.data._utils.pin_memory import pin_memory

from mmattn.data.sampling import Batches, EpochBatches, derive_seed, split_between_processes
from mmattn.errors import ConfigError, check_choice, import_extra
from mmattn.hosts.interop.sharded import reshard, tensor_parallel_size
from mmattn.hosts.layers import find_layers
from mmattn.training.compare import flattened
from mmattn.training.config import Collate, TrainingConfig, TrainingResult

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among those of a run.

    A batch has `count` shares, of which this process learns number `index`. Processes that share the layers of one
    host, tensor parallel, are `copies` that learn one share together, each with whole adapters and gradients.
    """

    accelerator: Accelerator
    index: int
    count: int
    copies: int

    @classmethod
    def of(cls, model: nn.Module, accelerator: Accelerator) -> Processes:
        """Return the layout of the processes that train a model."""
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
        for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def from_first(self, tensor: Tensor) -> Tensor:
        """The values of the first process, so that all begin alike."""
        if self.accelerator.num_processes > 1:
            torch.distributed.broadcast(tensor, 0)
        return tensor


def shard_host(host: nn.Module, accelerator: Accelerator) -> nn.Module:
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
    assert isinstance(layers, nn.ModuleList)
    shard(host, layers, accelerator.device)
    return host


def make_accelerator(
    folder: str | os.PathLike[str] | None = None,
    *,
    mixed_precision: str = "no",
    device: str = "auto",
    trackers: tuple[str, ...] = (),
    settings: Mapping[str, object] | None = None,
    resumed_step: int = 0,
) -> Accelerator:
    """The `accelerate.Accelerator` of this process: one of many under torchrun, alone otherwise.

    Args:
        folder: of the run, where trackers write.
        mixed_precision: "no", "bf16" or "fp16".
        device: "auto", or "cpu" whatever else there is.
        trackers: those of accelerate besides the metrics, which are always written: "tensorboard", "wandb", "mlflow", …
        settings: of the run, which the trackers show.
        resumed_step: of the checkpoint from which the run is resumed; TensorBoard forgets later steps.

    Raises:
        ConfigError: a precision this device does not have, a tracker that is not installed, or several processes that
            would not know of each other.
        MissingExtraError: accelerate is not installed.
    """
    check_choice("mixed_precision", mixed_precision, ("no", "bf16", "fp16"))
    check_choice("device", device, ("auto", "cpu"))
    accelerate = import_extra("accelerate", "train")
    cpu = device == "cpu" or not torch.accelerator.is_available()
    options: dict[str, object] = {"cpu": cpu, "mixed_precision": mixed_precision}
    if trackers:
        available = sorted(name.value for name in accelerate.tracking.get_available_trackers())
        if lacking := sorted(set(trackers) - set(available)):
            raise ConfigError(
                f"the tracker {lacking[0]!r} is not installed, or accelerate does not know it; there are: "
                f"{', '.join(available) or 'none'}. Metrics are written as JSON lines in any case"
            )
        options |= {"log_with": list(trackers), "project_dir": None if folder is None else str(folder)}
    # The accelerator of an earlier run of this process is forgotten; the group of processes stays.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    accelerate.state.GradientState._reset_state()
    _join_restarted(cpu)
    try:
        run_accelerator = accelerate.Accelerator(**options)
    except ValueError as error:
        raise ConfigError(f"mixed_precision={mixed_precision}: {error}") from error
    if mixed_precision != "no" and not run_accelerator.native_amp:
        # accelerate leaves fp16 on the CPU out without a word.
        raise ConfigError(
            f"mixed_precision={mixed_precision} does not exist on {run_accelerator.device.type}: use bf16 there, or no"
        )
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != run_accelerator.num_processes:
        raise ConfigError(
            f"{launched} processes were launched and this one knows of {run_accelerator.num_processes}: each would "
            "work alone. Launch with torchrun --nproc-per-node N -m mmattn train CONFIG"
        )
    if trackers:
        _start_trackers(run_accelerator, folder, settings, resumed_step)
    return run_accelerator


def end_training(accelerator: Accelerator) -> None:
    """Wait for the other processes, flush what was printed, close the trackers, leave the process group."""
    accelerator.wait_for_everyone()
    sys.stdout.flush()
    sys.stderr.flush()
    accelerator.end_training()


def _start_trackers(
    accelerator: Accelerator, folder: str | os.PathLike[str] | None, settings: Mapping[str, object] | None, step: int
) -> None:
    """Begin a run in each tracker of an accelerator, named after its folder."""
    place: dict[str, object] = {} if folder is None else {"dir": str(folder), "name": Path(folder).resolve().name}
    options: dict[str, dict[str, object]] = {
        # Steps that were logged after the checkpoint come again.
        "tensorboard": {"purge_step": step + 1} if step else {},
        "wandb": place,
        "mlflow": {"run_name": place["name"]} if place else {},
    }
    # A project is a folder in TensorBoard's.
    project = "tensorboard" if [str(name) for name in accelerator.log_with] == ["tensorboard"] else "mmattn"
    accelerator.init_trackers(project, config=flattened(settings or {}), init_kwargs=options)


def _join_restarted(cpu: bool) -> None:
    """Join the other processes that torchrun has started again, after one of them died.

    All of its starts share one store, in which a process that comes first finds the addresses of those that are gone
    (torch 2.15): here each start has names of its own.
    """
    environment, starts = os.environ, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not starts or not shared or torch.distributed.is_initialized():
        return
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = torch.distributed.TCPStore(
        environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), world, is_master=False
    )
    prefixed = torch.distributed.PrefixStore(f"start {starts}", store)
    torch.distributed.init_process_group("gloo" if cpu else None, store=prefixed, rank=rank, world_size=world)


# Batches --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MicroBatch:
    """The part of a batch that one process computes at once.

    `is_filler` marks the row of another process, with which a sharded host is called where this one has none.
    """

    number: int
    batch: object
    seeds: Sequence[int]
    is_filler: bool


@dataclass(frozen=True)
class FetchedBatch:
    """A batch of the run: its place in its epoch, its rows over all processes, the micro-batches of this one."""

    epoch: int
    place: int
    size: int
    micro_batches: Sequence[MicroBatch]


def fetch(
    batches: Batches,
    config: TrainingConfig,
    processes: Processes,
    collate: Collate | None,
    sharded: bool,
    done: TrainingResult,
    steps: int,
    begun: Iterator[Sequence[object]] | None = None,
) -> Iterator[FetchedBatch]:
    """Yield the batches of the next steps of a run; `begun` are those of the first epoch, where that was opened."""
    pinned = processes.accelerator.device.type == "cuda"
    ordered = itertools.islice(_in_order(batches, done.epoch, done.batch_in_epoch, begun), steps)
    for step, (epoch, place, batch) in enumerate(ordered, start=done.global_step):
        seeded = [(row, derive_seed(config.seed, "row", step, number)) for number, row in enumerate(batch)]
        shares = split_between_processes(seeded, processes.index, processes.count, config.gradient_accumulation_steps)
        micro_batches = []
        for number, share in enumerate(shares):
            if share or sharded:
                rows, seeds = zip(*(share or seeded[:1]), strict=True)
                content = list(rows) if collate is None else collate(rows, seeds)
                if pinned and collate is not None:
                    content = pin_memory(content)  # in this thread, so that a step need not wait for its copy
                micro_batches.append(MicroBatch(number, content, seeds, is_filler=not share))
        yield FetchedBatch(epoch, place, len(batch), micro_batches)


def _in_order(
    batches: Batches, epoch: int, start: int, begun: Iterator[Sequence[object]] | None
) -> Iterator[tuple[int, int, Sequence[object]]]:
    """Yield epoch, place in it and rows of each batch, epoch after epoch."""
    for number in itertools.count(epoch):
        if begun is not None and not number:
            rest: Iterable[Sequence[object]] = itertools.islice(begun, start, None)
        else:
            rest = epoch_of(batches, number, start)
        place = start
        for place, batch in enumerate(rest, start=start + 1):
            yield number, place - 1, batch
        if not place:
            raise ConfigError("the data has no rows to train on")
        start = 0


def epoch_of(batches: Batches, number: int, start: int = 0) -> Iterator[Sequence[object]]:
    """Return the batches of an epoch, from batch `start` on."""
    if isinstance(batches, EpochBatches):
        return batches.epoch(number, start)
    return itertools.islice(batches, start, None)


def is_stream(batches: Batches) -> bool:
    """Return whether batches may be given only once; those of a known number are given anew in each epoch."""
    if isinstance(batches, EpochBatches):
        return batches.batches_per_epoch is None
    try:
        len(batches)  # type: ignore[arg-type]
    except TypeError:
        return True
    return isinstance(getattr(batches, "dataset", None), IterableDataset)


def prefetched(items: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield items that a thread takes from an iterator, some of them ahead; with 0 there is no thread.

    Errors of the iterator are raised where their item would have come.

    >>> list(prefetched(iter(range(3)), ahead=2))
    [0, 1, 2]
    """
    if not ahead:
        yield from items
        return

    def take() -> list[T]:
        """Return the next item in a list, an empty one at the end."""
        return list(itertools.islice(items, 1))

    pool = ThreadPoolExecutor(1, "mmattn-prefetch")
    try:
        waiting = deque(pool.submit(take) for _ in range(ahead))
        while item := waiting.popleft().result():
            waiting.append(pool.submit(take))
            yield item[0]
    finally:
        pool.shutdown(cancel_futures=True)


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
