"""The state of a run and its checkpoints: trained weights, averages, optimizer, progress; never the host's weights.

A checkpoint is a folder `step-00000040` that is written under another name and renamed when all of it is on the disk:
one that has this name is complete. `state.safetensors` in it carries a checksum for each tensor; `adapter/` is the
adapter as `save_adapter` writes it, to be used as it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.files import sync_folder
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import check_values, read_tensors, write_tensors
from mmattn.training.config import TrainingResult

FORMAT = "mmattn-checkpoint"
STATE = "state.safetensors"

_NAME = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"\.checkpoint-[0-9a-f]{16}")
_COUNTS = ("global_step", "epoch", "batch_in_epoch", "best_global_step", "evals_without_improvement")
_RESUMED = (*_COUNTS, "eval_loss", "best_eval_loss", "stopped_early")
"""Fields of `TrainingResult` in a checkpoint."""


class RunState:
    """The trained weights of a run with their averages, the state of its optimizer, and its progress.

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
        self.averaged = _copies(parameters) if averaged else {}
        self.best: dict[str, Tensor] = {}
        self.done = TrainingResult()

    def average(self, decay: float) -> None:
        """Move the averages towards the weights."""
        for name, average in self.averaged.items():
            average.lerp_(self.parameters[name].detach().to(average), 1 - decay)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """A context in which the parameters have their averaged values, where there are some."""
        weights = _copies(self.parameters) if self.averaged else {}
        _assign(self.parameters, self.averaged)
        try:
            yield
        finally:
            _assign(self.parameters, weights)

    def evaluated(self, eval_loss: float, patience: int) -> None:
        """Note the loss of held-out rows; with `patience` keep the best weights, and stop early."""
        done, done.eval_loss = self.done, eval_loss
        better = eval_loss < done.best_eval_loss
        if better:
            done.best_eval_loss, done.best_global_step = eval_loss, done.global_step
            if patience:
                self.best = _copies(self.parameters)
        done.evals_without_improvement = 0 if better else done.evals_without_improvement + 1
        done.stopped_early = bool(patience) and done.evals_without_improvement >= patience

    def finish(self) -> None:
        """Leave the best weights in the parameters where they were kept, else the averaged ones."""
        _assign(self.parameters, self.best or self.averaged)

    def save(self, folder: Path, save_total_limit: int, save_more: Callable[[Path], None] | None) -> None:
        """Write the checkpoint of the step, and remove the oldest ones."""
        groups = {"weights": {name: p.detach() for name, p in self.parameters.items()}}
        groups |= {"averaged": self.averaged, "best": self.best}
        moments = self.optimizer.state_dict()["state"].items()
        groups["moments"] = {f"{n}.{key}": torch.as_tensor(value) for n, one in moments for key, value in one.items()}
        tensors = {f"{group}.{name}": value for group, members in groups.items() for name, value in members.items()}
        # JSON has no infinity and no nan.
        at = {name: str(getattr(self.done, name)) for name in _RESUMED}
        scaler = None if self.scaler is None else self.scaler.state_dict()
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        target, unfinished = folder / f"step-{self.done.global_step:08d}", _unfinished(folder)
        unfinished.mkdir()
        try:
            about = {"format": FORMAT, "run": self.identity, "at": at, "scaler": scaler}
            write_tensors(unfinished / STATE, tensors, about)
            if save_more is not None:
                with self.averaged_weights():
                    save_more(unfinished)
            sync_folder(unfinished)
            if target.exists():
                _remove(target)
            os.rename(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync_folder(folder)
        for old in _list_checkpoints(folder)[:-save_total_limit]:
            _remove(old)

    def resume(self, folder: Path, device: torch.device) -> None:
        """Load the last checkpoint, if there is one."""
        paths = _list_checkpoints(folder)
        if not paths:
            return
        where = str(paths[-1])
        tensors, about = load_checkpoint(paths[-1])
        with parse_errors(paths[-1], "checkpoint"):
            done = _resumed(about["at"])
            identity = validated("its run", dict[str, object], about["run"])
            scaler = validated("its scaler", dict[str, object] | None, about["scaler"])
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
        groups = {name: with_prefix(tensors, name) for name in ("weights", "averaged", "best", "moments")}
        with parse_errors(paths[-1], "checkpoint of this run"):
            for name in ("weights", "averaged", "best"):
                if groups[name] or name == "weights":
                    _check_fits(self.parameters, groups[name], where)
            self._load_moments(groups["moments"], where)
            _assign(self.parameters, groups["weights"])
            if self.scaler is not None and scaler is not None:
                self.scaler.load_state_dict(scaler)
        self.averaged = {name: value.to(device) for name, value in groups["averaged"].items()}
        self.best = groups["best"]
        for name in (*_RESUMED, "resumed_from_step"):
            setattr(self.done, name, getattr(done, name))

    def _load_moments(self, moments: Mapping[str, Tensor], where: str) -> None:
        """Load the moments of AdamW."""
        expected: dict[str, Tensor] = {}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            expected |= {f"{index}.step": torch.tensor(0.0), f"{index}.exp_avg": parameter}
            expected[f"{index}.exp_avg_sq"] = parameter
        if moments:  # none where half precision has left out every step
            _check_fits(expected, moments, where)
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in moments.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})


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


# Folders --------------------------------------------------------------------------------------------------------------


def _list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, the last step last."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def last_step(folder: Path) -> int:
    """Return the step of the last checkpoint in a folder; 0 where there is none."""
    paths = _list_checkpoints(folder)
    return int(paths[-1].name.removeprefix("step-")) if paths else 0


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a folder."""
    for path in _list_checkpoints(folder):
        _remove(path)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint, and the JSON object that was written with them."""
    with parse_errors(path / STATE, "state of a run"):
        tensors, about = read_tensors(path / STATE, FORMAT, check_finite=False)
        for name, tensor in tensors.items():
            check_values(name, tensor)
        return tensors, about


def _unfinished(folder: Path) -> Path:
    return folder / f".checkpoint-{secrets.token_hex(8)}"


def _remove(path: Path) -> None:
    """Rename first: a process killed while it removes must not leave half a checkpoint under a checkpoint's name."""
    gone = _unfinished(path.parent)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


# Weights --------------------------------------------------------------------------------------------------------------


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model that require gradients, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_weights(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy values into the parameters of the same names; AdapterFileError for other names or shapes."""
    _check_fits(parameters, tensors, where)
    _assign(parameters, tensors)


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix.`, under what follows it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}


def _check_fits(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse tensors of other names or shapes than the expected ones, or that are no floating point."""
    sizes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    shapes = {name: tuple(tensor.shape) if tensor.is_floating_point() else None for name, tensor in tensors.items()}
    if sizes != shapes:
        differing = [name for name in {**sizes, **shapes} if sizes.get(name) != shapes.get(name)]
        raise AdapterFileError(
            f"{where} does not fit this model: {len(differing)} of {len(sizes)} trained tensors differ "
            f"({', '.join(differing[:5])}). Use the same adapter and settings, or another folder"
        )


@torch.no_grad()
def _assign(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def _copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}
