"""Checkpoints: what a run needs to go on as if it had never stopped. Trained weights and moments, never the host's.

A checkpoint is a folder `step-00000040` that is written under another name and renamed when all of it is on the disk:
one that has this name is whole. `state.safetensors` in it carries a checksum for each tensor; `adapter/` is the adapter
as `save_adapter` writes it, to be used as it is.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import AdapterFileError
from mmattn.storage.atomic import sync_folder
from mmattn.storage.tensor_files import read_tensors, write_tensors

FORMAT = "mmattn-checkpoint"
STATE = "state.safetensors"

_NAME = re.compile(r"step-(\d{8})")
_UNFINISHED = re.compile(r"\.checkpoint-[0-9a-f]{16}")


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    *,
    keep: int = 2,
    beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of a step and remove those before the last `keep`; return where it is.

    Args:
        about: a JSON object kept with the tensors. beside: writes further files into the folder it is given.

    Raises:
        OSError: the disk is full, or the folder cannot be written to; earlier checkpoints are as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    target, made = folder / f"step-{step:08d}", _unfinished(folder)
    made.mkdir()
    try:
        write_tensors(made / STATE, tensors, {"format": FORMAT, **about})
        if beside is not None:
            beside(made)
        sync_folder(made)
        if target.exists():
            _remove(target)
        os.rename(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    sync_folder(folder)
    for old in list_checkpoints(folder)[:-keep]:
        _remove(old)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the last step last."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def last_step(folder: Path) -> int:
    """The step of the last checkpoint in a folder; 0 where there is none."""
    found = list_checkpoints(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def remove_checkpoints(folder: Path) -> None:
    """Begin anew."""
    for path in list_checkpoints(folder):
        _remove(path)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, and what was kept with them.

    Raises:
        AdapterFileError: it is damaged; the message says how.
    """
    return read_tensors(path / STATE, FORMAT, check_finite=False)


def _unfinished(folder: Path) -> Path:
    return folder / f".checkpoint-{secrets.token_hex(8)}"


def _remove(path: Path) -> None:
    """Rename first: a process killed while it removes must not leave half a checkpoint under a checkpoint's name."""
    gone = _unfinished(path.parent)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


# ---- what is in one


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; nothing of a frozen host is among them."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def put_weights(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy values into the parameters of the same names.

    Raises:
        AdapterFileError: other names or shapes; nothing is changed then.
    """
    wanted = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    there = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != there:
        differing = [name for name in {**wanted, **there} if wanted.get(name) != there.get(name)]
        raise AdapterFileError(
            f"{where} holds {len(there)} trained tensors and this model trains {len(wanted)}; {len(differing)} differ "
            f"({', '.join(differing[:5])}): another adapter or other settings. Name another folder for this run"
        )
    put(parameters, tensors)


@torch.no_grad()
def put(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters of these names."""
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The values of parameters, apart from them."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of an optimiser as flat names."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{key}": torch.as_tensor(value) for index, own in state.items() for key, value in own.items()}


def put_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Give an optimiser the moments that `optimizer_tensors` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
