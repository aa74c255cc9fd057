"""The state of a run in memory and in checkpoints: weights, averages, optimizer, progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError
from mmattn.storage.json_files import making_sense, validated
from mmattn.training import checkpoints
from mmattn.training.config import TrainingResult

# What of the result a checkpoint holds.
_COUNTS = ("global_step", "epoch", "batch_in_epoch", "best_global_step", "evals_without_improvement")
_RESUMED = (*_COUNTS, "eval_loss", "best_eval_loss", "stopped_early")


class RunState:
    """The trained weights of a run with their averages, the state of its optimizer, and where it is.

    `identity` must be equal in a checkpoint to go on from it. `averaged` asks for a moving average of the weights.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        identity: Mapping[str, object],
        *,
        averaged: bool,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self.parameters, self.optimizer, self.scaler = parameters, optimizer, scaler
        self.identity = dict(identity)
        self.averaged = checkpoints.copies(parameters) if averaged else {}
        self.best: dict[str, Tensor] = {}
        self.done = TrainingResult()

    def average(self, decay: float) -> None:
        """Move the averages towards the weights."""
        for name, average in self.averaged.items():
            average.lerp_(self.parameters[name].detach().to(average), 1 - decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters have their averaged values, where there are some."""
        weights = checkpoints.copies(self.parameters) if self.averaged else {}
        checkpoints.assign(self.parameters, self.averaged)
        try:
            yield
        finally:
            checkpoints.assign(self.parameters, weights)

    def evaluated(self, eval_loss: float, patience: int) -> None:
        """Note the loss of held-out rows, and whether the run ends early."""
        done, done.eval_loss = self.done, eval_loss
        better = eval_loss < done.best_eval_loss
        if better:
            done.best_eval_loss, done.best_global_step = eval_loss, done.global_step
            if patience:
                self.best = checkpoints.copies(self.parameters)
        done.evals_without_improvement = 0 if better else done.evals_without_improvement + 1
        done.stopped_early = bool(patience) and done.evals_without_improvement >= patience

    def finish(self) -> None:
        """Leave the best weights in the parameters where they were kept, else the averaged ones."""
        checkpoints.assign(self.parameters, self.best or self.averaged)

    def save(self, folder: Path, save_total_limit: int, save_more: Callable[[Path], None] | None) -> None:
        """Write a checkpoint."""
        groups = {"weights": {name: p.detach() for name, p in self.parameters.items()}}
        groups |= {"averaged": self.averaged, "best": self.best}
        groups["moments"] = checkpoints.optimizer_tensors(self.optimizer)
        tensors = {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}
        # JSON has no infinity and no nan.
        at = {name: str(getattr(self.done, name)) for name in _RESUMED}
        about = {"run": self.identity, "at": at, "scaler": None if self.scaler is None else self.scaler.state_dict()}

        def more(where: Path) -> None:
            if save_more is not None:
                with self.averaged_weights():
                    save_more(where)

        checkpoints.save_checkpoint(
            folder, self.done.global_step, tensors, about, save_total_limit=save_total_limit, save_more=more
        )

    def resume(self, folder: Path, device: torch.device) -> None:
        """Load the last checkpoint, if there is one."""
        paths = checkpoints.list_checkpoints(folder)
        if not paths:
            return
        where = str(paths[-1])
        tensors, about = checkpoints.load_checkpoint(paths[-1])
        with making_sense(paths[-1], "checkpoint"):
            done = _resumed(about["at"])
            identity = validated("its run", dict[str, Any], about["run"])
            scaler = validated("its scaler", dict[str, Any] | None, about["scaler"])
        differing = [
            f"{name}: {identity.get(name)!r} there, {self.identity.get(name)!r} here"
            for name in {**identity, **self.identity}
            if identity.get(name) != self.identity.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{where} is of a run with other settings ({'; '.join(differing[:5])}): start it with those again, "
                "name another folder, or begin anew with resume=false"
            )
        groups = {name: checkpoints.with_prefix(tensors, name) for name in ("weights", "averaged", "best", "moments")}
        with making_sense(paths[-1], "checkpoint of this run"):
            for name in ("weights", "averaged", "best"):
                if groups[name] or name == "weights":
                    checkpoints.check_fits(self.parameters, groups[name], where)
            checkpoints.load_optimizer(self.optimizer, groups["moments"], where)
            checkpoints.assign(self.parameters, groups["weights"])
            if self.scaler is not None and scaler is not None:
                self.scaler.load_state_dict(scaler)
        self.averaged = {name: value.to(device) for name, value in groups["averaged"].items()}
        self.best = groups["best"]
        for name in (*_RESUMED, "resumed_from_step"):
            setattr(self.done, name, getattr(done, name))


def _resumed(at: Mapping[str, str]) -> TrainingResult:
    """Return the result of a run so far, as a checkpoint has it."""
    done = TrainingResult()
    for name in _RESUMED:
        kind = type(getattr(done, name))
        setattr(done, name, at[name] == "True" if kind is bool else kind(at[name]))
    if min(getattr(done, name) for name in _COUNTS) < 0:
        raise ConfigError(f"counts of steps are 0 or more, got {at}")
    done.resumed_from_step = done.global_step
    return done
