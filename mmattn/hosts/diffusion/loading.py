"""Models of diffusers from folders, hub names and configs."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from safetensors import SafetensorError
from torch import nn

from mmattn.errors import AdapterFileError, import_extra


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
