"""Checkpoints on the disk: trained weights and the state of the optimizer, never the host's weights.

A checkpoint is a folder `step-00000040` that is written under another name and renamed when all of it is on the disk:
one that has this name is complete. `state.safetensors` in it carries a checksum for each tensor; `adapter/` is the
adapter as `save_adapter` writes it, to be used as it is.
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
from mmattn.storage.files import sync_folder
from mmattn.storage.json_files import making_sense
from mmattn.storage.safetensors import check_values, read_tensors, write_tensors

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
    save_total_limit: int,
    save_more: Callable[[Path], None],
) -> None:
    """Write the checkpoint of a step, and remove the oldest ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
    target, unfinished = folder / f"step-{step:08d}", _unfinished(folder)
    unfinished.mkdir()
    try:
        write_tensors(unfinished / STATE, tensors, {"format": FORMAT, **about})
        save_more(unfinished)
        sync_folder(unfinished)
        if target.exists():
            _remove(target)
        os.rename(unfinished, target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync_folder(folder)
    for old in list_checkpoints(folder)[:-save_total_limit]:
        _remove(old)


def list_checkpoints(folder: Path) -> list[Path]:
    """The paths of the checkpoints in a folder, the last step last."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir())


def last_step(folder: Path) -> int:
    """The step of the last checkpoint in a folder; 0 where there is none."""
    paths = list_checkpoints(folder)
    return int(paths[-1].name.removeprefix("step-")) if paths else 0


def remove_checkpoints(folder: Path) -> None:
    """Remove all checkpoints of a folder."""
    for path in list_checkpoints(folder):
        _remove(path)


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint, and the JSON object that was written with them."""
    with making_sense(path / STATE, "state of a run"):
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


# ---- what is in one


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that require gradients, by name; none of a frozen host is among them."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def load_weights(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy values into the parameters of the same names."""
    check_fits(parameters, tensors, where)
    assign(parameters, tensors)


def check_fits(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], where: str) -> None:
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
def assign(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Copy values into the parameters of these names."""
    for name, tensor in tensors.items():
        parameters[name].copy_(tensor)


def copies(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies of the values of parameters."""
    return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The moments of an optimizer under flat names."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{key}": torch.as_tensor(value) for index, one in state.items() for key, value in one.items()}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], where: str) -> None:
    """Load the moments that `optimizer_tensors` returned into an AdamW optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    expected: dict[str, Tensor] = {}
    for index, parameter in enumerate(parameters):
        expected |= {f"{index}.step": torch.tensor(0.0), f"{index}.exp_avg": parameter}
        expected[f"{index}.exp_avg_sq"] = parameter
    if tensors:  # none where half precision has left out every step
        check_fits(expected, tensors, where)
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix.`, under what follows it."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
