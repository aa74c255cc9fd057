"""The state of a run in memory and in checkpoints: weights, averages, optimizer, progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, check_int
from mmattn.storage.json_files import making_sense, validated
from mmattn.training import checkpoints
from mmattn.training.config import TrainingResult

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


class RunState:
    """The trained weights of a run with their averages, the state of its optimizer, and where it is.

    Args:
        parameters: that are trained, by name.
        optimizer: of these.
        identity: of the run, as JSON values: what must be equal in a checkpoint to go on from it.
        averaged: whether a moving average of the weights is computed.
        scaler: of the loss in half precision; None for none.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        identity: Mapping[str, Any],
        *,
        averaged: bool = False,
        scaler: Any = None,
    ) -> None:
        self.parameters, self.optimizer, self.scaler = parameters, optimizer, scaler
        self.identity = dict(identity)
        self.averaged = checkpoints.copies(parameters) if averaged else {}
        self.best: dict[str, Tensor] = {}
        self.done = TrainingResult()
        self.recent: list[tuple[float, float]] = []  # losses and gradient norms since the last metrics
        self.data_state: Any = None  # of a StatefulDataLoader, after the last batch that was learned

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
        data, groups["data"] = checkpoints.without_tensors(self.data_state)
        tensors = {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}
        # JSON has no infinity and no nan.
        at = {name: str(getattr(self.done, name)) for name in _RESUMED}
        scaler = None if self.scaler is None else self.scaler.state_dict()
        recent = [[str(value) for value in one] for one in self.recent]
        about = {"run": self.identity, "at": at, "recent": recent, "scaler": scaler, "data": data}

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
        tensors, about = checkpoints.load_checkpoint(paths[-1])
        with making_sense(paths[-1], "checkpoint"):
            done = _resumed(about["at"])
            recent = [(float(loss), float(norm)) for loss, norm in about["recent"]]
            identity = validated("its run", dict[str, Any], about["run"])
            data_state = checkpoints.with_tensors(about.get("data"), checkpoints.with_prefix(tensors, "data"))
            scaler = validated("its scaler", dict[str, Any] | None, about["scaler"])
        differing = [
            f"{name}: {identity.get(name)!r} there, {self.identity.get(name)!r} here"
            for name in {**identity, **self.identity}
            if identity.get(name) != self.identity.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{paths[-1]} is of a run with other settings ({'; '.join(differing[:5])}): start it with those again, "
                "name another folder, or begin anew with resume=false"
            )
        groups = {name: checkpoints.with_prefix(tensors, name) for name in ("weights", "averaged", "best", "moments")}
        with making_sense(paths[-1], "checkpoint of this run"):
            for name in ("weights", "averaged", "best"):
                if groups[name] or name == "weights":
                    checkpoints.check_fits(self.parameters, groups[name], str(paths[-1]))
            checkpoints.check_moments(self.optimizer, groups["moments"])
            checkpoints.load_weights(self.parameters, groups["weights"], str(paths[-1]))
            checkpoints.load_optimizer(self.optimizer, groups["moments"])
            if self.scaler is not None and scaler is not None:
                self.scaler.load_state_dict(scaler)
        self.averaged = {name: value.to(device) for name, value in groups["averaged"].items()}
        self.best, self.data_state, self.recent = groups["best"], data_state, recent
        for name in (*_RESUMED, "resumed_from_step"):
            setattr(self.done, name, getattr(done, name))


def _resumed(at: Mapping[str, str]) -> TrainingResult:
    """The result of a run so far, of the texts that a checkpoint has of it."""
    done = TrainingResult()
    if not set(at) <= set(_RESUMED):
        raise ConfigError(f"it says {sorted(at)[:10]} of the run, known are {', '.join(_RESUMED)}")
    for name, text in at.items():
        kind = type(getattr(done, name))
        value = text == "True" if kind is bool else kind(text)
        if kind is int:
            check_int(name, value, at_least=0)
        setattr(done, name, value)
    done.resumed_from_step = done.global_step
    return done
