"""Work by number on the workers of a Ray cluster, as one job of Ray Data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mmattn.errors import import_extra


class _Worker:
    """One actor of Ray, which holds what the work needs."""

    def __init__(self, make: Callable[[int], None]) -> None:
        self.make = make

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["item"]:
            self.make(int(number))
        return batch


def run_on_ray(
    make: Callable[[int], None], numbers: Sequence[int], device: torch.device, done: Callable[[int], None]
) -> None:
    """Call a function for each number, in actors that share them, and wait for all.

    Args:
        make: what is called; it is sent to the actors once, with what it holds.
        numbers: what it is called with.
        device: where its models run: with "cuda" each actor has a GPU of its own, otherwise a processor.
        done: is told each number that is done.

    Raises:
        MissingExtraError: ray is not installed.
    """
    ray = import_extra("ray", "scale")
    data = import_extra("ray.data", "scale")
    if not numbers:
        return
    on_gpu = device.type == "cuda"
    if not ray.is_initialized():
        ray.init()
    workers = max(1, int(ray.cluster_resources().get("GPU" if on_gpu else "CPU", 1)))
    made = data.from_items(list(numbers), override_num_blocks=len(numbers)).map_batches(
        _Worker,
        fn_constructor_args=(make,),
        batch_size=1,
        compute=data.ActorPoolStrategy(min_size=1, max_size=min(workers, len(numbers))),
        num_gpus=1 if on_gpu else 0,
    )
    for batch in made.iter_batches(batch_size=1):
        for number in batch["item"]:
            done(int(number))
