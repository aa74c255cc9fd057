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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import ConfigError, NonFiniteError
from mmattn.hosts.interop.quantised import stored
from mmattn.hosts.interop.sharded import check_trained, gradients_throughout, shards
from mmattn.progress import tracked
from mmattn.training import checkpoints
from mmattn.training.activation_checkpointing import gradient_checkpointing
from mmattn.training.compilation import compiled_blocks
from mmattn.training.dry_run import MEASURED, DryRun, DryRunEnded, is_dry_run, measured
from mmattn.training.evaluation import mean_loss
from mmattn.training.fetching import FetchedBatch, Fetcher, MicroBatch
from mmattn.training.optimization import learning_rate_factor, parameter_groups
from mmattn.training.prefetch import Prefetched
from mmattn.training.processes import Processes
from mmattn.training.rows import Row
from mmattn.training.sampling import Batches, RowBatches, derive_seed
from mmattn.training.training_config import Collate, Loss, TrainingConfig, TrainingResult, total_steps

# What of the result a checkpoint holds.
_RESUMED = (
    "global_step",
    "epoch",
    "batch_in_epoch",
    "eval_loss",
    "best_eval_loss",
    "best_global_step",
    "evals_without_improvement",
    "stopped_early",
)
# Settings that may differ when a run is resumed: nothing that is learned depends on them.
_FREE = (
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "dataloader_prefetch_factor",
)


def train(
    model: Any,
    loss: Loss,
    batches: Batches,
    config: TrainingConfig,
    accelerator: Any,
    *,
    collate: Collate | None = None,
    eval_rows: Sequence[Row] = (),
    folder: Path | None = None,
    identity: Mapping[str, Any] | None = None,
    resume: bool = True,
    log: Callable[..., None] | None = None,
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
            done, so that their order must be the same again; a `StatefulDataLoader` of torchdata goes on by its state.
        config: settings of the run.
        accelerator: what `make_accelerator` returned.
        collate: makes what the loss is given of the rows of a micro-batch and a seed for each; see `Collate`. None
            gives the rows themselves.
        eval_rows: rows to evaluate on.
        folder: of the checkpoints; None writes none.
        identity: what else must be equal in the checkpoint to resume from it (the data, say), as JSON values.
        resume: from the last checkpoint in `folder`; False removes those there are.
        log: is called with the metrics as keyword arguments, in the first process.
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
    run = _Run(model, loss, batches, config, accelerator, collate, eval_rows, folder, identity or {}, save_more)
    if resume:
        run.resume()
    elif folder is not None and accelerator.is_main_process:
        checkpoints.remove_checkpoints(folder)
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(stored(model))
        if config.torch_compile:
            contexts.enter_context(compiled_blocks(model, config.torch_compile_backend))
        if config.gradient_checkpointing:
            contexts.enter_context(gradient_checkpointing(model))
        if run.sharded:
            contexts.enter_context(gradients_throughout(model))
        if is_dry_run():
            raise DryRunEnded(run.measure(label))
        return run.train(log if accelerator.is_main_process else None, label, progress and accelerator.is_main_process)


class _Run:
    def __init__(
        self,
        model: Any,
        loss: Loss,
        batches: Batches,
        config: TrainingConfig,
        accelerator: Any,
        collate: Collate | None,
        eval_rows: Sequence[Row],
        folder: Path | None,
        identity: Mapping[str, Any],
        save_more: Callable[[Path], None] | None,
    ) -> None:
        self.model, self.loss, self.batches, self.config = model, loss, batches, config
        self.accelerator, self.collate, self.eval_rows = accelerator, collate, eval_rows
        self.folder, self.save_more = folder, save_more
        self.total = total_steps(config, batches)
        if config.eval_steps and not len(eval_rows):
            raise ConfigError("eval_steps is set and there are no eval_rows: hold some rows out, or set it to 0")
        self.batch_size: Any = getattr(batches, "batch_size", None)
        if len(eval_rows) and self.batch_size is None:
            raise ConfigError(
                f"eval_rows are evaluated in batches of the same size, and batches={type(batches).__name__} has no "
                "batch_size: give RowBatches or a DataLoader"
            )
        check_trained(model)
        self.processes = Processes.of(model, accelerator)
        self.sharded = bool(shards(model))
        self.parameters = checkpoints.trained_parameters(model)
        groups = parameter_groups(
            model,
            config.learning_rate,
            gate_learning_rate=config.gate_learning_rate,
            weight_decay=config.weight_decay,
        )
        self.learning_rates = [group["lr"] for group in groups]
        self.optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(groups, betas=(0.9, 0.98)))
        for parameter in self.parameters.values():
            parameter.data.copy_(self.processes.from_first(parameter.data))
        self.averaged = checkpoints.copies(self.parameters) if config.ema_decay else {}
        self.best: dict[str, Tensor] = {}
        self.done = TrainingResult()
        self.recent: list[tuple[float, float]] = []  # losses and gradient norms since the last metrics
        self.clock = time.perf_counter(), 0.0
        self.data_state: Any = None  # of a StatefulDataLoader, after the last batch that was learned
        settings = {name: value for name, value in asdict(config).items() if name not in _FREE}
        order = batches.sampler if isinstance(batches, RowBatches) else None
        lengths = None if order is None else str(derive_seed(*order.lengths))
        self.identity = {**settings, "batch_size": self.batch_size, "lengths of the rows": lengths, **identity}

    # A step --------------------------------------------------------------------------------------------------------

    def step(self, batch: FetchedBatch) -> tuple[float, float]:
        """Learn a batch; returns its mean loss and the norm of its gradient."""
        state, config, step = self.accelerator, self.config, self.done.global_step
        self.optimizer.zero_grad(set_to_none=True)
        factor = learning_rate_factor(step, self.total, config.warmup_steps, config.lr_scheduler_type)
        for group, own in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = own * factor
        sums = torch.zeros(2, dtype=torch.float64)
        for part in batch.micro_batches:
            torch.manual_seed(derive_seed(config.seed, "piece", step, part.number, self.processes.index))
            total, count = self._loss(part)
            if total.requires_grad:
                # Divided by the rows here, so that half precision can hold it, and by the targets of all below.
                state.backward(total / batch.size)
            sums += torch.tensor([float(total.detach()), count], dtype=torch.float64)
        # Nothing reached an adapter: to learn from that is to learn nothing, in every process alike.
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total_loss, targets = self.processes.sum(sums)
        if not math.isfinite(total_loss):
            raise NonFiniteError(
                f"the loss is {total_loss} at step {step}; lower the learning rate (now "
                f"{max(self.learning_rates) * factor:.2e}), or look at the rows of this step"
            )
        self._sum_gradients(batch.size / max(1.0, targets))
        norm = state.clip_grad_norm_(self.parameters.values(), config.max_grad_norm or math.inf)
        self.optimizer.step()
        for name, average in self.averaged.items():
            average.lerp_(self.parameters[name].detach().to(average), 1 - config.ema_decay)
        return total_loss / max(1.0, targets), float(norm)

    def _loss(self, part: MicroBatch) -> tuple[Tensor, int]:
        with self.accelerator.autocast():
            total, count = self.loss(part.on(self.accelerator.device), part.seeds)
        return (total, count) if part.own else (total * 0, 0)

    def _sum_gradients(self, scale: float) -> None:
        gradients: list[Tensor] = [p.grad for p in self.parameters.values() if p.grad is not None]
        self.processes.sum_gradients(gradients)
        for gradient in gradients:
            gradient.mul_(scale)

    # The run -------------------------------------------------------------------------------------------------------

    def train(self, log: Callable[..., None] | None, label: str, progress: bool) -> TrainingResult:
        done, config, began, recent = self.done, self.config, time.perf_counter(), self.recent
        bar = tracked(max(0, self.total - done.global_step), label, progress, self._status)
        self.model.train()
        next(bar, None)
        fetched = Prefetched(self._fetcher(), config.dataloader_prefetch_factor)
        try:
            for batch in fetched:
                if done.global_step % config.logging_steps == 0:
                    recent.clear()
                    self._begin_clock(fetched)
                recent.append(self.step(batch))
                done.global_step += 1
                done.epoch, done.batch_in_epoch, self.data_state = batch.epoch, batch.place + 1, batch.data_state
                last = done.global_step == self.total
                if config.eval_steps and (done.global_step % config.eval_steps == 0 or last):
                    self._evaluate()
                last = last or done.stopped_early
                if log is not None and (done.global_step % config.logging_steps == 0 or last):
                    log(**self._metrics(fetched), seconds=round(time.perf_counter() - began, 2))
                if done.global_step % config.save_steps == 0 or last:
                    self._save()
                next(bar, None)
                if last:
                    break
        except KeyboardInterrupt:
            done.interrupted = True
        finally:
            fetched.close()
        self.model.eval()
        checkpoints.assign(self.parameters, self.best or self.averaged)
        done.seconds = time.perf_counter() - began
        return done

    def measure(self, label: str) -> DryRun:
        """What the whole run would take, by its first steps."""
        self.model.train()
        seconds, size = [], 0
        with contextlib.closing(Prefetched(self._fetcher(), self.config.dataloader_prefetch_factor)) as fetched:
            for number in range(min(self.total, 1 + MEASURED)):
                began = time.perf_counter()
                batch = next(fetched)
                self.step(batch)
                self.done.global_step, size = self.done.global_step + 1, batch.size
                seconds.append(time.perf_counter() - began)
                if not number:
                    fetched.waited = 0.0
        return measured(self.model, label, seconds[1:] or seconds, fetched.waited, size, self.total, self.accelerator)

    def _fetcher(self) -> Iterator[FetchedBatch]:
        """Batches from where the run is, made ready for this process."""
        steps = 0 if self.done.stopped_early else self.total - self.done.global_step
        fetcher = Fetcher(self.batches, self.config, self.processes, self.collate, self.sharded)
        return fetcher.fetch(self.done.global_step, steps, self.done.epoch, self.done.batch_in_epoch, self.data_state)

    def _begin_clock(self, fetched: Prefetched[FetchedBatch]) -> None:
        """From here on the next metrics count the time of steps, and how much of it was spent waiting for batches."""
        self.clock = time.perf_counter(), fetched.waited

    def _metrics(self, fetched: Prefetched[FetchedBatch]) -> dict[str, Any]:
        losses, norms = zip(*self.recent, strict=True)
        began, waited = self.clock
        metrics: dict[str, Any] = {
            "step": self.done.global_step,
            "epoch": self.done.epoch,
            "loss": sum(losses) / len(losses),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "grad_norm": sum(norms) / len(norms),
            "waiting": round((fetched.waited - waited) / max(time.perf_counter() - began, 1e-9), 4),
        }
        if self.config.eval_steps and self.done.global_step % self.config.eval_steps == 0:
            metrics["eval_loss"] = self.done.eval_loss
        return metrics

    def _status(self) -> str:
        seen = f"loss {sum(loss for loss, _ in self.recent) / len(self.recent):.3f}" if self.recent else ""
        return f"{seen} eval {self.done.eval_loss:.3f}" if math.isfinite(self.done.eval_loss) else seen

    def _evaluate(self) -> None:
        """Evaluate, with the averaged weights where there are some, and remember the best ones."""
        done, own = self.done, checkpoints.copies(self.parameters) if self.averaged else {}
        checkpoints.assign(self.parameters, self.averaged)
        accumulation, seed = self.config.gradient_accumulation_steps, self.config.seed
        # The same noise every time.
        done.eval_loss = mean_loss(
            self.model, self.loss, self.eval_rows, self.batch_size, self.accelerator, accumulation, seed,
            collate=self.collate,
        )  # fmt: skip
        better = done.eval_loss < done.best_eval_loss
        if better:
            done.best_eval_loss, done.best_global_step = done.eval_loss, done.global_step
            if self.config.early_stopping_patience:
                self.best = checkpoints.copies(self.parameters)
        checkpoints.assign(self.parameters, own)
        done.evals_without_improvement = 0 if better else done.evals_without_improvement + 1
        patience = self.config.early_stopping_patience
        done.stopped_early = bool(patience) and done.evals_without_improvement >= patience

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.folder is not None and self.accelerator.is_main_process:
            groups = {"weights": {name: p.detach() for name, p in self.parameters.items()}}
            groups |= {"averaged": self.averaged, "best": self.best}
            groups["moments"] = checkpoints.optimizer_tensors(self.optimizer)
            data, groups["data"] = checkpoints.without_tensors(self.data_state)
            tensors = {f"{group}.{name}": value for group, own in groups.items() for name, value in own.items()}
            # JSON has no infinity and no nan.
            at = {name: str(getattr(self.done, name)) for name in _RESUMED}
            scaler = None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
            recent = [[str(value) for value in one] for one in self.recent]
            about = {"run": self.identity, "at": at, "recent": recent, "scaler": scaler, "data": data}
            step, limit = self.done.global_step, self.config.save_total_limit
            more = self._save_more
            checkpoints.save_checkpoint(self.folder, step, tensors, about, save_total_limit=limit, save_more=more)
        self.accelerator.wait_for_everyone()

    def _save_more(self, folder: Path) -> None:
        """Files of a checkpoint that are to be used as they are: of the averaged weights where there are some."""
        if self.save_more is not None:
            own = checkpoints.copies(self.parameters) if self.averaged else {}
            checkpoints.assign(self.parameters, self.averaged)
            self.save_more(folder)
            checkpoints.assign(self.parameters, own)

    def resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        found = checkpoints.list_checkpoints(self.folder) if self.folder is not None else []
        if not found:
            return
        tensors, about = checkpoints.load_checkpoint(found[-1])
        differing = [
            f"{name}: {about['run'].get(name)!r} there, {self.identity.get(name)!r} here"
            for name in {**about["run"], **self.identity}
            if about["run"].get(name) != self.identity.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{found[-1]} is of a run with other settings ({'; '.join(differing[:5])}): start it with those again, "
                "name another folder, or begin anew with resume=false"
            )
        checkpoints.load_weights(self.parameters, checkpoints.with_prefix(tensors, "weights"), str(found[-1]))
        checkpoints.load_optimizer(self.optimizer, checkpoints.with_prefix(tensors, "moments"))
        device = self.accelerator.device
        averaged = checkpoints.with_prefix(tensors, "averaged")
        self.averaged = {name: value.to(device) for name, value in averaged.items()}
        self.best = checkpoints.with_prefix(tensors, "best")
        self.data_state = checkpoints.with_tensors(about.get("data"), checkpoints.with_prefix(tensors, "data"))
        for name, text in about["at"].items():
            kind = type(getattr(self.done, name))
            setattr(self.done, name, text == "True" if kind is bool else kind(text))
        self.done.resumed_from_step = self.done.global_step
        self.recent = [(float(loss), float(norm)) for loss, norm in about["recent"]]
        if self.accelerator.scaler is not None and about["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(about["scaler"])
