"""A model of diffusers without weights, from its config alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmattn.errors import AdapterFileError, import_extra

#: Which part of a pipeline denoises.
PARTS = ("transformer", "unet")


def read_diffusers_config(name: str | PathLike[str]) -> dict[str, Any] | None:
    """The config of a model of diffusers, or of the part of a pipeline that denoises; None where there is none.

    Args:
        name: a file, the folder of a model or of a pipeline, or the name of a pipeline on the hub.
    """
    path = Path(name)
    if path.exists():
        files = [path] if path.is_file() else [path / part / "config.json" for part in ("", *PARTS)]
        return next((found for file in files if (found := _config_in(file)) is not None), None)
    diffusers: Any = import_extra("diffusers", "diffusion")
    for part in PARTS:
        try:
            config: dict[str, Any] = diffusers.ConfigMixin.load_config(str(name), subfolder=part)
        except (OSError, ValueError):
            continue
        return config
    return None


def _config_in(file: Path) -> dict[str, Any] | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and "_class_name" in config else None


def empty_model(config: Mapping[str, Any]) -> nn.Module:
    """The model of a config of diffusers on the meta device.

    Raises:
        AdapterFileError: there is none.
    """
    diffusers: Any = import_extra("diffusers", "diffusion")
    name = str(config.get("_class_name"))
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise AdapterFileError(f"diffusers {diffusers.__version__} has no model {name!r}: its config names it")
    try:
        with torch.device("meta"):
            model: nn.Module = kind.from_config(dict(config))
    except Exception as error:
        raise AdapterFileError(f"diffusers makes no {name} of this config: {error}") from error
    return model.eval()
