"""Models of diffusers from folders, hub names and configs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from mmattn.errors import AdapterFileError, import_extra

#: Parts of a pipeline that denoise.
PARTS = ("transformer", "unet")


def load_part(name: str | PathLike[str], part: str) -> nn.Module:
    """Load a model from its folder, or the part of a pipeline from a folder or the hub, in evaluation mode."""
    diffusers: Any = import_extra("diffusers", "diffusion")
    subfolder = {} if os.path.isfile(os.path.join(name, "config.json")) else {"subfolder": part}
    kind = diffusers.UNet2DConditionModel if part == "unet" else diffusers.AutoModel
    try:
        model: nn.Module = kind.from_pretrained(name, use_safetensors=True, **subfolder)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise AdapterFileError(
            f"no {part} can be loaded from {os.fspath(name)!r} ({error}): give a pipeline on the hub, or the folder of "
            f"a {part} or a pipeline, with safetensors"
        ) from error
    return model.eval()


def read_diffusers_config(name: str | PathLike[str]) -> dict[str, Any] | None:
    """Return the config of a model, or of the part of a pipeline that denoises; None if there is none."""
    path = Path(name)
    if path.exists():
        files = [path] if path.is_file() else [path / part / "config.json" for part in ("", *PARTS)]
        return next((content for file in files if (content := _config_in(file)) is not None), None)
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
    """Make the model of a config on the meta device."""
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
