"""The training loop: for any model and loss, in one process or many; a run that was killed can be resumed.

Nothing of the loop depends on how a batch is split. The gradients of a step are those of the mean over all targets of
its batch, whatever the number of processes and micro-batches; random numbers come from seeds derived from the step and
the row. So a step is a function of the weights and moments before it, and a run resumed from a checkpoint ends bit for
bit where the uninterrupted one does (on the CPU).

The host needs no wrapper for many processes: it is frozen, and the gradients of the adapters are summed here, those of
adapters that a process did not use as zeros. It may be sharded by FSDP2: every process then runs the whole forward and
backward pass of every micro-batch, with another's row of weight 0 where it has none of its own.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.core.device_checks import report_checks
from mmattn.data.rows import Row
from mmattn.data.sampling import Batches, derive_seed
from mmattn.errors import ConfigError, NonFiniteError
from mmattn.hosts.calibration import calibrating, fresh_adapters
from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.interop.sharded import shards
from mmattn.hosts.model import AdaptedModel
from mmattn.progress import tracked
from mmattn.training.checkpoints import RunState, remove_checkpoints, trained_parameters
from mmattn.training.config import Collate, Loss, TrainingConfig, TrainingResult, total_steps
from mmattn.training.cost import MEASURED, DryRunEnded, cost, is_dry_run
from mmattn.training.distributed import (
    FetchedBatch,
    Processes,
    check_trained,
    epoch_of,
    fetch,
    gradients_throughout,
    is_stream,
    prefetched,
)
from mmattn.training.evaluation import evaluate, loss_of, sums_of
from mmattn.training.metrics import Figures, StepClock, flops_per_token, tokens_of
from mmattn.training.optimization import compiled_blocks, gradient_checkpointing, learning_rate_factor, parameter_groups
from mmattn.training.run_folder import RunFolder

if TYPE_CHECKING:
    from accelerate import Accelerator

# Settings that may differ when a run is resumed: what is learned depends on none of them, but for rounding.
_FREE = (
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "dataloader_prefetch_factor",
    "torch_compile",
)


def train(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    config: TrainingConfig,
    accelerator: Accelerator,
    *,
    collate: Collate | None = None,
    eval_rows: Sequence[Row] = (),
    shuffled_rows: Sequence[Row] = (),
    folder: Path | None = None,
    identity: Mapping[str, object] | None = None,
    resume: bool = True,
    log: Callable[..., None] | None = None,
    measure: Callable[[int, float], Mapping[str, float]] | None = None,
    label: str = "training",
    progress: bool = True,
    save_more: Callable[[Path], None] | None = None,
) -> TrainingResult:
    """Train the parameters of a model that require gradients, and leave the best or averaged ones in it, where asked.

    The same call, after the process was killed at any moment, resumes from the last checkpoint.

    Args:
        model: a host with adapters, a peft model, or any module; on the accelerator's device.
        loss: see `Loss`; it is given at most a batch's share of one process at a time.
        batches: of rows to train on: `RowBatches`, or anything that is iterated over once an epoch and gives lists of
            whatever the loss takes, such as a `DataLoader` with `collate_fn=list`. A resumed run skips those that are
            done, so that their order must be the same again.
        config: settings of the run.
        accelerator: what `make_accelerator` returned.
        collate: makes what the loss is given of the rows of a micro-batch and a seed for each; see `Collate`. None
            gives the rows themselves.
        eval_rows: rows to evaluate on.
        shuffled_rows: `shuffle_memories(eval_rows)`: each evaluation measures their loss, too, as "eval_loss_shuffled".
        folder: of the checkpoints; None writes none.
        identity: what else must be equal in the checkpoint to resume from it (the data, say), as JSON values.
        resume: from the last checkpoint in `folder`; False removes those there are.
        log: is called with the metrics as keyword arguments, in the first process: every `logging_steps` and at every
            evaluation.
        measure: is called with the number of each step that is logged and the norm of its gradient, while that is there
            and in every process; what it returns is added to the metrics. See `mmattn.inspect.AdapterMetrics`.
        label: what stands before the progress bar.
        progress: show a progress bar, in the first process.
        save_more: writes further files into the folder of a checkpoint, with which it is called.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
        ConfigError: settings that do not fit the data, or a checkpoint of other settings.
        ConditionError: 4-bit weights that an earlier call packed for inference, through which no gradient passes.
        AdapterFileError: a damaged checkpoint, or one of another model.
        DryRunEnded: inside a `dry_run` block, after a few measured steps.
    """
    run = _Run(
        model, loss, batches, config, accelerator, collate, eval_rows, shuffled_rows, folder, identity or {}, measure,
        save_more,
    )  # fmt: skip
    if config.calibrate and not is_dry_run():
        with stored(model):
            run.calibrate()
    if folder is not None and resume:
        run.state.resume(folder, accelerator.device)
    elif folder is not None and accelerator.is_main_process:
        remove_checkpoints(folder)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(stored(model))
        if config.torch_compile:
            contexts.enter_context(compiled_blocks(model))
        if config.gradient_checkpointing:
            contexts.enter_context(gradient_checkpointing(model))
        if run.sharded:
            contexts.enter_context(gradients_throughout(model))
        if is_dry_run():
            raise DryRunEnded(run.dry_run(label))
        return run.train(log if accelerator.is_main_process else None, label, progress and accelerator.is_main_process)


def train_run(
    run: RunFolder,
    label: str,
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    config: TrainingConfig,
    accelerator: Accelerator,
    *,
    progress: bool = True,
) -> TrainingResult:
    """Train as `train` does, log the metrics of this model into the folder of a run, and raise on Ctrl-C.

    Args:
        run: the folder.
        label: names the model in `metrics.jsonl`, and stands before the progress bar.
        model: as in `train`.
        loss: as in `train`.
        batches: as in `train`.
        config: as in `train`.
        accelerator: as in `train`.
        progress: show a progress bar.

    Raises:
        KeyboardInterrupt: Ctrl-C, which `train` alone would only note in its result: a row of a table that was stopped
            early would flatter the others.
    """
    log = partial(run.log, model=label)
    result = train(model, loss, batches, config, accelerator, log=log, label=label, progress=progress)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


@dataclass
class _Run:
    model: nn.Module
    loss: Loss
    batches: Batches
    config: TrainingConfig
    accelerator: Accelerator
    collate: Collate | None
    eval_rows: Sequence[Row]
    shuffled_rows: Sequence[Row]
    folder: Path | None
    identity: Mapping[str, object]
    measure: Callable[[int, float], Mapping[str, float]] | None
    save_more: Callable[[Path], None] | None

    def __post_init__(self) -> None:
        model, batches, config = self.model, self.batches, self.config
        self.total = total_steps(config, batches)
        if config.eval_steps and not len(self.eval_rows):
            raise ConfigError("eval_steps is set and there are no eval_rows: hold some rows out, or set it to 0")
        self.batch_size: int | None = getattr(batches, "batch_size", None)
        if len(self.eval_rows) and self.batch_size is None:
            raise ConfigError(
                f"eval_rows are evaluated in batches of the same size, and batches={type(batches).__name__} has no "
                "batch_size: give RowBatches or a DataLoader"
            )
        check_trained(model)
        self.processes = Processes.of(model, self.accelerator)
        self.sharded = bool(shards(model))
        self.parameters = trained_parameters(model)
        groups = parameter_groups(
            model,
            config.learning_rate,
            gate_learning_rate=config.gate_learning_rate,
            weight_decay=config.weight_decay,
        )
        self.learning_rates = [group["lr"] for group in groups]
        self.optimizer = self.accelerator.prepare_optimizer(torch.optim.AdamW(groups, betas=(0.9, 0.98)))
        for parameter in self.parameters.values():
            parameter.data.copy_(self.processes.from_first(parameter.data))
        self.begun: Iterator[Sequence[object]] | None = None  # the first epoch, where calibration has opened it
        self.measured: dict[str, float] = {}  # of this step, beside its loss
        self.clock, self.flops = StepClock(), flops_per_token(model)
        settings = {name: value for name, value in asdict(config).items() if name not in _FREE}
        lengths = getattr(batches, "fingerprint", None)
        identity = {**settings, "batch_size": self.batch_size, "lengths of the rows": lengths, **self.identity}
        self.state = RunState(
            self.parameters,
            self.optimizer,
            identity,
            averaged=bool(config.ema_decay),
            scaler=self.accelerator.scaler,
        )
        self.done = self.state.done
        self.recent: list[tuple[float, Tensor]] = []  # losses and gradient norms since the last metrics

    def calibrate(self) -> None:
        """Calibrate fresh adapters by the first batch, also of a run that is resumed, whose weights follow."""
        model, batches = self.model, self.batches
        if not isinstance(model, AdaptedModel) or not fresh_adapters(model):
            return
        begun = epoch_of(batches, 0)
        first_batch = list(islice(begun, 1))
        if is_stream(batches):
            self.begun = chain(first_batch, begun)
        whole = replace(self.processes, index=0, count=1)  # nothing may depend on the number of processes
        first = next(fetch(first_batch, self.config, whole, self.collate, self.sharded, TrainingResult(), steps=1))
        with calibrating(model):
            for part in first.micro_batches:
                loss_of(self.loss, part.batch, part.seeds, self.collate, self.accelerator)
        for buffer in model.adapters.buffers():
            buffer.copy_(self.processes.from_first(buffer))

    # A step --------------------------------------------------------------------------------------------------------

    def step(self, batch: FetchedBatch) -> tuple[float, Tensor]:
        """Learn a batch; returns its mean loss and the norm of its gradient."""
        accelerator, config, step = self.accelerator, self.config, self.done.global_step
        self.optimizer.zero_grad(set_to_none=True)
        factor = learning_rate_factor(step, self.total, config.warmup_steps, config.lr_scheduler_type)
        for group, own in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = own * factor
        sums: list[Tensor] = []
        for part in batch.micro_batches:
            torch.manual_seed(derive_seed(config.seed, "piece", step, part.number, self.processes.index))
            total, count = loss_of(self.loss, part.batch, part.seeds, self.collate, accelerator)
            if part.is_filler:
                total, count = total * 0, 0
            if total.requires_grad:
                # Divided by the rows here, so that half precision can hold it, and by the targets of all below.
                accelerator.backward(total / batch.size)
            sums.append(sums_of(total, count))
        # Nothing reached an adapter: to learn from that is to learn nothing, in every process alike.
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # The only place where a step waits for a device.
        total_loss, targets = self.processes.sum(torch.stack(sums).sum(0) if sums else torch.zeros(2))
        report_checks(wait=True)
        if not math.isfinite(total_loss):
            raise NonFiniteError(
                f"the loss is {total_loss} at step {step}; lower the learning rate (now "
                f"{max(self.learning_rates) * factor:.2e}), or look at the rows of this step"
            )
        gradients: list[Tensor] = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.processes.sum_gradients(gradients)
        for gradient in gradients:
            gradient.mul_(batch.size / max(1.0, targets))
        norm = accelerator.clip_grad_norm_(self.parameters.values(), config.max_grad_norm or math.inf)
        self.measured = {}
        if self.measure is not None and self._is_logged(step + 1):
            with self.clock.aside():
                self.measured |= self.measure(step + 1, float(norm))
        self.optimizer.step()
        self.state.average(config.ema_decay)
        self.clock.count(batch.size, targets, sum(self.flops * tokens_of(part.batch) for part in batch.micro_batches))
        return total_loss / max(1.0, targets), norm

    # The run -------------------------------------------------------------------------------------------------------

    def train(self, log: Callable[..., None] | None, label: str, progress: bool) -> TrainingResult:
        done, config, began = self.done, self.config, time.perf_counter()
        if done.resumed_from_step and progress:
            print(f"{label} resumes at step {done.global_step} of {self.total}", file=sys.stderr, flush=True)
        bar = tracked(self.total, label, progress, self._status, done.global_step)
        self.model.train()
        next(bar, None)
        self.clock.begin()
        try:
            with contextlib.closing(self._fetch()) as fetched:
                for batch in self.clock.timed(fetched):
                    if done.global_step % config.logging_steps == 0:
                        self.recent.clear()
                    self.recent.append(self.step(batch))
                    done.global_step += 1
                    done.epoch, done.batch_in_epoch = batch.epoch, batch.place + 1
                    if self._is_evaluated(done.global_step):
                        with self.clock.aside():
                            self._evaluate()
                    last = done.global_step == self.total or done.stopped_early
                    if log is not None and self._is_logged(done.global_step):
                        log(**self._metrics(), seconds=round(time.perf_counter() - began, 2))
                    if done.global_step % config.logging_steps == 0:
                        self.clock.begin()
                    if done.global_step % config.save_steps == 0 or last:
                        with self.clock.aside():
                            self._save()
                    next(bar, None)
                    if last:
                        break
        except KeyboardInterrupt:
            done.interrupted = True
        self.model.eval()
        self.state.finish()
        done.seconds = time.perf_counter() - began
        return done

    def dry_run(self, label: str) -> str:
        """Measure the first steps and return the cost of the run."""
        self.model.train()
        size, last = 0, min(self.total, 1 + MEASURED)
        with contextlib.closing(self._fetch()) as fetched:
            for number, batch in enumerate(self.clock.timed(islice(fetched, last)), start=1):
                self.step(batch)
                self.done.global_step, size = self.done.global_step + 1, batch.size
                if number == 1 and last > 1:
                    self.clock.begin()
        speed = self.clock.metrics()
        seconds = size / speed["rows_per_second"]
        accelerator = self.accelerator
        return cost(self.model, label, size, self.total, seconds, accelerator.num_processes, accelerator.device)

    def _fetch(self) -> Generator[FetchedBatch, None, None]:
        """Return the batches from where the run is, made ready for this process."""
        steps = 0 if self.done.stopped_early else self.total - self.done.global_step
        fetched = fetch(
            self.batches, self.config, self.processes, self.collate, self.sharded, self.done, steps, self.begun
        )
        return prefetched(fetched, self.config.dataloader_prefetch_factor)

    def _is_evaluated(self, step: int) -> bool:
        """True if the run is evaluated after this step."""
        return bool(self.config.eval_steps) and (step % self.config.eval_steps == 0 or step == self.total)

    def _is_logged(self, step: int) -> bool:
        """True if metrics are logged after this step."""
        return step % self.config.logging_steps == 0 or step == self.total or self._is_evaluated(step)

    def _metrics(self) -> Figures:
        losses, norms = zip(*self.recent, strict=True)
        metrics: Figures = {
            "step": self.done.global_step,
            "epoch": self.done.epoch,
            "loss": sum(losses) / len(losses),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": sum(torch.stack(norms).tolist()) / len(norms),
        }
        return {**metrics, **self.clock.metrics(self.accelerator.device), **self.measured}

    def _status(self) -> str:
        recent = self.recent
        status = f"loss {sum(loss for loss, _ in recent) / len(recent):.3f}" if recent else ""
        return f"{status} eval {self.done.eval_loss:.3f}" if math.isfinite(self.done.eval_loss) else status

    def _evaluate(self) -> None:
        """Evaluate, with the averaged weights where there are some, and remember the best ones."""
        accumulation, seed = self.config.gradient_accumulation_steps, self.config.seed
        assert self.batch_size is not None
        with self.state.averaged_weights():
            # The same noise every time.
            self.measured |= evaluate(
                self.model, self.loss, self.eval_rows, self.shuffled_rows, self.batch_size, self.accelerator,
                accumulation, seed, collate=self.collate,
            )  # fmt: skip
            self.state.evaluated(self.measured["eval_loss"], self.config.early_stopping_patience)

    def _save(self) -> None:
        if self.folder is not None and self.accelerator.is_main_process:
            self.state.save(self.folder, self.config.save_total_limit, self.save_more)
        self.accelerator.wait_for_everyone()
