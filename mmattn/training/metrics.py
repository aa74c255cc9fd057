"""The metrics of a run: as JSON lines, in trackers of accelerate; the speed of its steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mmattn.adapters.language_models import text_config
from mmattn.storage.files import write_text
from mmattn.training.lower_layers import count_below

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
Figures = dict[str, object]
"""Metrics of a step, a row of a table, or settings, by name."""
PATIENCE = 3
"""Evaluations in a row that must agree."""
ERRORS = 2.0
"""Standard errors that a gain must exceed to be one."""
#: Dense bfloat16 operations a second, as NVIDIA states them, of cards by the name that torch gives them.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


class MetricsLog:
    """Write metrics to `metrics.jsonl` and the trackers, and print the warning of `memory_warning`.

    Args:
        accelerator: what `make_accelerator` returned; only its first process writes.
        folder: of the run.
        step: of the checkpoint from which the run is resumed: lines of later steps are dropped, as they come again. 0
            empties the file.
        name: of the file, without its ending.
        prefix: of the figures in trackers, which count the steps of each prefix by themselves.
        targets: unit of the throughput, such as "tokens".
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: str | os.PathLike[str],
        step: int = 0,
        *,
        name: str = "metrics",
        prefix: str = "adapter",
        targets: str = "targets",
    ) -> None:
        self.accelerator, self.prefix, self.targets = accelerator, prefix, targets
        self.path = Path(folder) / f"{name}.jsonl"
        if accelerator.is_main_process:
            earlier = [line for line in read_metrics(self.path) if _step(line) <= step] if step else []
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in earlier))

    def __call__(self, **figures: object) -> None:
        """Write the metrics of a step; numbers that are not finite become null.

        Args:
            **figures: by name, as `train` gives them.
        """
        if not self.accelerator.is_main_process:
            return
        named = {
            name.replace("targets_per_", f"{self.targets}_per_"): None
            if isinstance(value, float) and not math.isfinite(value)
            else value
            for name, value in figures.items()
        }
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(named) + "\n")
        _track(self.accelerator, self.prefix, named)
        if (warning := memory_warning(read_metrics(self.path))) is not None:
            self.accelerator.print(f"{self.prefix}: {warning}")


def _track(accelerator: Accelerator, prefix: str, figures: Mapping[str, object]) -> None:
    """Give the numbers of a step to every tracker, as "prefix/name"."""
    step = figures["step"]
    values = {
        f"{prefix}/{name}": value
        for name, value in figures.items()
        if name != "step" and isinstance(value, (int, float))
    }
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            # Its own count of steps may not go back, as that of a second training in the same run does.
            tracker.tracker.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
            tracker.log({**values, f"{prefix}/step": step})
        else:
            tracker.log(values, step=step)


def read_metrics(path: str | os.PathLike[str]) -> list[Figures]:
    """The complete lines of a `metrics.jsonl`; a process killed while it wrote leaves half a one.

    Args:
        path: of the file; where there is none, there are no lines.
    """
    lines: list[Figures] = []
    for text in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def _step(line: Figures) -> float:
    step = line.get("step")
    return step if isinstance(step, int) else math.inf


def memory_warning(lines: Sequence[Mapping[str, object]]) -> str | None:
    """Warn after the last evaluation if the adapter ignores its memory, or say that it no longer does.

    A memory does nothing where the loss on held-out rows is no higher with the memories of other rows, by more than two
    standard errors, in three evaluations in a row. That is said once; and once more when it is no longer so.

    Args:
        lines: of metrics, as `read_metrics` returns them; evaluations have "eval_loss", "eval_loss_shuffled" and
            "memory_gain_stderr".

    >>> noise = [{"step": n, "eval_loss": 2.5, "eval_loss_shuffled": 2.5, "memory_gain_stderr": 0.1} for n in (1, 2, 3)]
    >>> memory_warning(noise[:2]) is None
    True
    >>> print(memory_warning(noise)[:55])
    the adapter ignores its memory so far: in 3 evaluations
    """
    if not lines or "eval_loss_shuffled" not in lines[-1]:
        return None
    ignored = [_is_ignored(line) for line in lines if "eval_loss_shuffled" in line]
    streak, before, last = _streak(ignored), _streak(ignored[:-1]), lines[-1]
    losses = f"{last['eval_loss']:.4f} with its own memory, {last['eval_loss_shuffled']:.4f} with another row's"
    if streak == PATIENCE:
        return (
            f"the adapter ignores its memory so far: in {PATIENCE} evaluations up to step {last['step']} the loss of "
            f"held-out rows was no higher with the memories of other rows ({losses}). See gate/ and memory_attention/ "
            "in the metrics; and whether the texts can be told from these memories at all, by a linear probe for "
            "instance"
        )
    if not streak and before >= PATIENCE:
        return f"the adapter uses its memory from step {last['step']} on ({losses})"
    return None


def _streak(flags: Sequence[bool]) -> int:
    """Return the length of the run of true values at the end."""
    return next((count for count, one in enumerate(reversed(flags)) if not one), len(flags))


def _is_ignored(line: Mapping[str, object]) -> bool:
    eval_loss, other, error = (line.get(name) for name in ("eval_loss", "eval_loss_shuffled", "memory_gain_stderr"))
    if not isinstance(eval_loss, (int, float)) or not isinstance(other, (int, float)):
        return False
    # Of a single batch no error is known: then only what is equal to rounding is.
    return other - eval_loss <= (ERRORS * error if isinstance(error, (int, float)) else 1e-6 * abs(eval_loss))


class StepClock:
    """The time of the steps since `begin`; that of evaluations and checkpoints does not count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self._began, self._waited, self._aside = time.perf_counter(), 0.0, 0.0
        self._rows = self._targets = self._flops = 0.0

    def count(self, rows: int, targets: float, flops: float = 0.0) -> None:
        """Count the rows and targets of a step, and its floating-point operations on this process's device."""
        self._rows, self._targets, self._flops = self._rows + rows, self._targets + targets, self._flops + flops

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items, and count the time until each is there as waiting."""
        began = time.perf_counter()
        for item in items:
            self._waited += time.perf_counter() - began
            yield item
            began = time.perf_counter()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - began

    def metrics(self, device: torch.device | None = None) -> dict[str, float]:
        """Rows and targets a second, the share of the time spent waiting for rows, and of what the device can do."""
        seconds = max(time.perf_counter() - self._began - self._aside, 1e-9)
        metrics = {
            "waiting": round(self._waited / seconds, 4),
            "rows_per_second": round(self._rows / seconds, 3),
            "targets_per_second": round(self._targets / seconds, 3),
        }
        peak = None if device is None else peak_flops(device)
        return metrics | ({"mfu": round(self._flops / seconds / peak, 4)} if peak and self._flops else {})


# Floating-point operations --------------------------------------------------------------------------------------------


def peak_flops(device: torch.device) -> float | None:
    """Return the floating-point operations a second of a known card, dense and in bfloat16; else None."""
    return PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def tokens_of(batch: object) -> int:
    """Return the number of token ids in a batch, padding included; 0 where there are none."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else getattr(batch, "input_ids", None)
    return ids.numel() if isinstance(ids, Tensor) else 0


def flops_per_token(model: Any) -> float:
    """Return the floating-point operations of a training step for each token that an adapted language model reads.

    As in PaLM's model FLOPs utilization (arXiv 2204.02311, appendix B), 2 for each weight in the forward pass and 2 for
    each gradient: of the inputs of layers above the lowest adapter, and of the inputs and weights of what is trained.
    Attention scores are left out, and a slot of a memory counts as nothing.

    Returns:
        0 where that is no measure: of other models, of experts, of which each token passes few, and of weights that are
        stored packed.
    """
    if not getattr(model, "predicts_tokens", False) or not model.adapters or model.config.is_encoder_decoder:
        return 0.0
    head = model.host.get_output_embeddings()
    few = getattr(model, "is_quantized", False) or getattr(text_config(model.host), "num_experts_per_tok", None)
    if few or not isinstance(head, nn.Linear):
        return 0.0
    tables = {id(part.weight) for part in model.host.modules() if isinstance(part, nn.Embedding)}
    host = {id(one): one for one in (*model.host.parameters(), *head.parameters())}
    trained = {id(one): one for one in model.parameters() if one.requires_grad}
    upper = {id(one): one for part in (*model.layers[count_below(model) :], head) for one in part.parameters()}
    products = {id(head.weight), *(host.keys() - tables)}
    numbers = (products, upper.keys() | trained.keys(), trained.keys() - host.keys(), trained.keys())
    every = host | trained | upper
    return 2.0 * sum(every[one].numel() for group in numbers for one in group)
