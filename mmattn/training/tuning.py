"""Fine-tuning: one loop for language models and UNets, in one process or many, that can be killed and taken up again.

Nothing of the loop depends on how a batch is cut. The gradients of a step are those of the mean over all targets of its
batch, whatever the number of processes and pieces; random numbers come from seeds made of the step and the row. So a
step is a function of the weights and moments before it, and a run taken up at a checkpoint ends bit for bit where the
uninterrupted one does (on the CPU).

The host needs no wrapper for many processes: it is frozen, and the gradients of the adapters are summed here, those of
adapters that a process had no use for as zeros. It may be sharded by FSDP2: every process then goes the whole way
forward and back in every piece, with another's row that counts nothing where it has none of its own.
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
from mmattn.training.loop import parameter_groups, rate
from mmattn.training.order import RowBatches, seed_of, share
from mmattn.training.plan import Loss, Tuned, Tuning, total_steps
from mmattn.training.recompute import recomputed
from mmattn.training.rows import Row

_KEPT = ("step", "epoch", "place", "held_out", "best", "best_step", "bad", "stopped")
# What may be another when a run is taken up again: nothing that is learned depends on it.
_FREE = ("save_every", "keep", "log_every", "pieces", "recompute")


def tune(
    model: Any,
    loss: Loss,
    batches: RowBatches,
    tuning: Tuning,
    accelerator: Any,
    *,
    held_out: Sequence[Row] = (),
    folder: Path | None = None,
    about: Mapping[str, Any] | None = None,
    resume: bool = True,
    log: Callable[..., None] | None = None,
    label: str = "training",
    progress: bool = True,
    save: Callable[[Path], None] | None = None,
) -> Tuned:
    """Train what is trained in a model, and leave the weights to be used in it: the best or averaged ones, where asked.

    The same call, after the process was killed at any moment, goes on from the last checkpoint.

    Args:
        model: a host with adapters, a peft model, or any module; on the accelerator's device.
        loss: see `Loss`; it is given at most a batch's share of one process at a time.
        accelerator: what `make_accelerator` returned. held_out: rows to measure on.
        folder: of the checkpoints; None writes none. about: what else must be the same to go on (the data, say).
        log: is given the figures, in the first process. save: writes what is to lie in each checkpoint.

    Raises:
        NonFiniteError: the loss is not a number any more. ConfigError: settings that do not fit the data, or a
            checkpoint of other settings. ConditionError: 4-bit weights that an earlier call laid out anew, so that no
            gradient passes them. AdapterFileError: a damaged checkpoint, or one of another model.
    """
    run = _Run(model, loss, batches, tuning, accelerator, held_out, folder, about or {}, save)
    if resume:
        run.take_up()
    elif folder is not None and accelerator.is_main_process:
        checkpoints.remove_checkpoints(folder)
    with contextlib.ExitStack() as inside:
        inside.enter_context(stored(model))
        if tuning.recompute:
            inside.enter_context(recomputed(model))
        if run.sharded:
            inside.enter_context(gradients_throughout(model))
        return run.train(log if accelerator.is_main_process else None, label, progress and accelerator.is_main_process)


class _Run:
    def __init__(
        self,
        model: Any,
        loss: Loss,
        batches: RowBatches,
        tuning: Tuning,
        accelerator: Any,
        held_out: Sequence[Row],
        folder: Path | None,
        about: Mapping[str, Any],
        save: Callable[[Path], None] | None,
    ) -> None:
        self.model, self.loss, self.batches, self.tuning = model, loss, batches, tuning
        self.accelerator, self.held_out, self.folder, self.save = accelerator, held_out, folder, save
        self.total = total_steps(tuning, batches)
        if tuning.evaluate_every and not len(held_out):
            raise ConfigError("evaluate_every is set and no row is held out: hold some out, or set it to 0")
        check_trained(model)
        self.sharded = bool(shards(model))
        self.parameters = checkpoints.trained(model)
        groups = parameter_groups(model, tuning.lr, gate_lr=tuning.gate_lr, weight_decay=tuning.weight_decay)
        self.rates = [group["lr"] for group in groups]
        self.optimizer = accelerator.prepare_optimizer(torch.optim.AdamW(groups, betas=(0.9, 0.98)))
        for parameter in self.parameters.values():
            parameter.data.copy_(_from_first(accelerator, parameter.data))
        self.averaged = checkpoints.copied(self.parameters) if tuning.ema else {}
        self.best: dict[str, Tensor] = {}
        self.done = Tuned()
        self.recent: list[tuple[float, float]] = []  # losses and norms since the last metrics
        settings = {name: value for name, value in asdict(tuning).items() if name not in _FREE}
        lengths = None if batches.order is None else str(seed_of(*batches.order.lengths))
        self.about = {**settings, "batch": batches.batch, "lengths of the rows": lengths, **about}

    # A step --------------------------------------------------------------------------------------------------------

    def step(self, batch: Sequence[Row]) -> tuple[float, float]:
        """Learn a batch; its mean loss and the norm of its gradient."""
        state, tuning = self.accelerator, self.tuning
        self.optimizer.zero_grad(set_to_none=True)
        share_of_rate = rate(self.done.step, self.total, tuning.warmup, tuning.schedule)
        for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = own * share_of_rate
        placed = [(row, seed_of(tuning.seed, "row", self.done.step, place)) for place, row in enumerate(batch)]
        sums = torch.zeros(2, dtype=torch.float64)
        for number, piece in enumerate(share(placed, state.process_index, state.num_processes, tuning.pieces)):
            if not (piece or self.sharded):
                continue
            torch.manual_seed(seed_of(tuning.seed, "piece", self.done.step, number, state.process_index))
            total, count = self._loss(piece or placed[:1])
            if not piece:
                total, count = total * 0, 0
            if total.requires_grad:
                # Divided by the rows here, so that half precision can hold it, and by the targets of all below.
                state.backward(total / len(batch))
            sums += torch.tensor([float(total.detach()), count], dtype=torch.float64)
        # Nothing reached an adapter: to learn from that is to learn nothing, in every process alike.
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        total_loss, targets = _summed(state, sums)
        if not math.isfinite(total_loss):
            raise NonFiniteError(
                f"the loss is {total_loss} at step {self.done.step}; lower the learning rate (now "
                f"{max(self.rates) * share_of_rate:.2e}), or look at the rows of this step"
            )
        self._sum_gradients(len(batch) / max(1.0, targets))
        norm = state.clip_grad_norm_(self.parameters.values(), tuning.clip or math.inf)
        self.optimizer.step()
        for name, kept in self.averaged.items():
            kept.lerp_(self.parameters[name].detach().to(kept), 1 - tuning.ema)
        return total_loss / max(1.0, targets), float(norm)

    def _loss(self, placed: Sequence[tuple[Row, int]]) -> tuple[Tensor, int]:
        with self.accelerator.autocast():
            return self.loss([row for row, _ in placed], [seed for _, seed in placed])

    def _sum_gradients(self, scale: float) -> None:
        gradients: list[Tensor] = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.accelerator.num_processes > 1:
            device = self.accelerator.device
            flat = torch.cat([gradient.to(device, torch.float32).flatten() for gradient in gradients])
            flat = self.accelerator.reduce(flat, "sum")
            for gradient, own in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(own.view_as(gradient))
        for gradient in gradients:
            gradient.mul_(scale)

    # The run -------------------------------------------------------------------------------------------------------

    def train(self, log: Callable[..., None] | None, label: str, progress: bool) -> Tuned:
        done, began, recent = self.done, time.perf_counter(), self.recent
        bar = tracked(max(0, self.total - done.step), label, progress, self._note)
        self.model.train()
        next(bar, None)
        try:
            for batch in self._from_here():
                if done.step % self.tuning.log_every == 0:
                    recent.clear()
                recent.append(self.step(batch))
                done.step, done.place = done.step + 1, done.place + 1
                last = done.step == self.total
                if self.tuning.evaluate_every and (done.step % self.tuning.evaluate_every == 0 or last):
                    self._judge()
                if log is not None and (done.step % self.tuning.log_every == 0 or last or done.stopped):
                    log(**self._figures(), seconds=round(time.perf_counter() - began, 2))
                if done.step % self.tuning.save_every == 0 or last or done.stopped:
                    self._save()
                next(bar, None)
                if last or done.stopped:
                    break
        except KeyboardInterrupt:
            done.interrupted = True
        self.model.eval()
        checkpoints.put(self.parameters, self.best or self.averaged)
        done.seconds = time.perf_counter() - began
        return done

    def _from_here(self) -> Iterator[list[Row]]:
        """Batches from where the run is, epoch after epoch."""
        while self.done.step < self.total and not self.done.stopped:
            yield from self.batches.epoch(self.done.epoch, self.done.place)
            if not self.done.place:
                raise ConfigError("the data has no rows to train on")
            self.done.epoch, self.done.place = self.done.epoch + 1, 0

    def _figures(self) -> dict[str, Any]:
        losses, norms = zip(*self.recent, strict=True)
        figures: dict[str, Any] = {
            "step": self.done.step,
            "epoch": self.done.epoch,
            "loss": sum(losses) / len(losses),
            "lr": self.optimizer.param_groups[0]["lr"],
            "gradient_norm": sum(norms) / len(norms),
        }
        if self.tuning.evaluate_every and self.done.step % self.tuning.evaluate_every == 0:
            figures["held_out_loss"] = self.done.held_out
        return figures

    def _note(self) -> str:
        seen = f"loss {sum(loss for loss, _ in self.recent) / len(self.recent):.3f}" if self.recent else ""
        return f"{seen} held out {self.done.held_out:.3f}" if math.isfinite(self.done.held_out) else seen

    # Held-out rows -------------------------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Measure the held-out loss, with the averaged weights where there are some, and remember the best ones."""
        done, own = self.done, checkpoints.copied(self.parameters) if self.averaged else {}
        checkpoints.put(self.parameters, self.averaged)
        done.held_out = self.measure()
        better = done.held_out < done.best
        if better:
            done.best, done.best_step, done.bad = done.held_out, done.step, 0
            if self.tuning.patience:
                self.best = checkpoints.copied(self.parameters)
        checkpoints.put(self.parameters, own)
        done.bad += not better
        done.stopped = bool(self.tuning.patience) and done.bad >= self.tuning.patience

    def measure(self) -> float:
        """The mean loss over all targets of the held-out rows; the same noise every time."""
        given = (self.held_out, self.batches.batch, self.accelerator, self.tuning.pieces, self.tuning.seed)
        return mean_loss(self.model, self.loss, *given)

    # Checkpoints ---------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.folder is not None and self.accelerator.is_main_process:
            groups = {"weights": {name: p.detach() for name, p in self.parameters.items()}}
            groups |= {"averaged": self.averaged, "best": self.best}
            groups["moments"] = checkpoints.optimizer_tensors(self.optimizer)
            tensors = {f"{group}.{name}": value for group, own in groups.items() for name, value in own.items()}
            # JSON has no infinity and no nan.
            at = {name: str(getattr(self.done, name)) for name in _KEPT}
            scaler = None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()
            recent = [[str(value) for value in one] for one in self.recent]
            about = {"run": self.about, "at": at, "recent": recent, "scaler": scaler}
            where, keep = self.folder, self.tuning.keep
            checkpoints.save_checkpoint(where, self.done.step, tensors, about, keep=keep, beside=self._beside)
        self.accelerator.wait_for_everyone()

    def _beside(self, folder: Path) -> None:
        """What lies in a checkpoint to be used as it is: with the averaged weights where there are some."""
        if self.save is not None:
            own = checkpoints.copied(self.parameters) if self.averaged else {}
            checkpoints.put(self.parameters, self.averaged)
            self.save(folder)
            checkpoints.put(self.parameters, own)

    def take_up(self) -> None:
        """Go on from the last checkpoint, if there is one."""
        found = checkpoints.list_checkpoints(self.folder) if self.folder is not None else []
        if not found:
            return
        tensors, about = checkpoints.load_checkpoint(found[-1])
        differing = [
            f"{name}: {about['run'].get(name)!r} there, {self.about.get(name)!r} here"
            for name in {**about["run"], **self.about}
            if about["run"].get(name) != self.about.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{found[-1]} is of a run with other settings ({'; '.join(differing[:5])}): start it with those again, "
                "name another folder, or begin anew with resume=false"
            )
        checkpoints.put_weights(self.parameters, checkpoints.part(tensors, "weights"), str(found[-1]))
        checkpoints.put_optimizer(self.optimizer, checkpoints.part(tensors, "moments"))
        device = self.accelerator.device
        self.averaged = {name: value.to(device) for name, value in checkpoints.part(tensors, "averaged").items()}
        self.best = checkpoints.part(tensors, "best")
        for name, text in about["at"].items():
            kind = type(getattr(self.done, name))
            setattr(self.done, name, text == "True" if kind is bool else kind(text))
        self.done.begun_at = self.done.step
        self.recent = [(float(loss), float(norm)) for loss, norm in about["recent"]]
        if self.accelerator.scaler is not None and about["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(about["scaler"])


@torch.no_grad()
def mean_loss(
    model: Any, loss: Loss, rows: Sequence[Row], batch: int, accelerator: Any, pieces: int = 1, seed: int = 0
) -> float:
    """The mean of a loss over all targets of these rows, in evaluation mode; processes share the rows.

    Args:
        batch: rows at once, over all processes and pieces. seed: of the loss's own noise, the same every time.
    """
    was = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    placed = [(rows[i], seed_of(seed, "held out", i)) for i in range(len(rows))]
    (own,) = share(placed, accelerator.process_index, accelerator.num_processes)
    size = max(1, batch // (pieces * accelerator.num_processes))
    longest = math.ceil(len(rows) / accelerator.num_processes) if shards(model) else len(own)
    for start in range(0, longest, size):
        part = own[start : start + size]
        called = part or placed[:1]
        with accelerator.autocast(), stored(model):
            total, count = loss([row for row, _ in called], [seed for _, seed in called])
        if part:
            sums += torch.tensor([float(total), count], dtype=torch.float64)
    model.train(was)
    losses, targets = _summed(accelerator, sums)
    return losses / max(1.0, targets)


def _summed(accelerator: Any, sums: Tensor) -> list[float]:
    """Over all processes."""
    if accelerator.num_processes > 1:
        # Some devices have no float64, and float32 holds these sums well enough.
        sums = sums if accelerator.device.type in ("cpu", "cuda") else sums.float()
        sums = accelerator.reduce(sums.to(accelerator.device), "sum")
    return sums.tolist()


def _from_first(accelerator: Any, tensor: Tensor) -> Tensor:
    """The values of the first process, so that all begin alike."""
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(tensor, 0)
    return tensor
