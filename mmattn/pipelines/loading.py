"""`mmattn.pipeline`: everything that an adapter's folder names, loaded and ready to be called."""

from __future__ import annotations

import importlib
import os
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mmattn.adapters.serialization import CONFIG
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.hosts.interop.hub import local_folder
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.build import default_device
from mmattn.pipelines.config import PipelineConfig
from mmattn.recipes.assets import asset_path
from mmattn.storage.hub import without_progress_bars

#: Module and class of each task, imported when an adapter has it.
_TASKS = {
    "image-to-text": ("mmattn.pipelines.image_to_text", "ImageToTextPipeline"),
    "question-answering": ("mmattn.pipelines.question_answering", "QuestionAnsweringPipeline"),
    "passage-answering": ("mmattn.pipelines.passage_answering", "PassageAnsweringPipeline"),
    "text-generation": ("mmattn.pipelines.text_generation", "TextGenerationPipeline"),
    "text-to-image": ("mmattn.pipelines.text_to_image", "TextToImagePipeline"),
}


def pipeline(
    folder: str | PathLike[str],
    *,
    index: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Any:
    """Load an adapter with the host, the tokenizer and the encoder that its folder names.

    Args:
        folder: of the adapter, "assets/…" of the installation, or "org/name" on the Hugging Face hub.
        index: for answers from an index: the index, its folder or its address (see `Index.open`); it can also be
            given to each call.
        device: of all models; the accelerator of this machine by default, or the CPU.
        dtype: of the host's weights, float32 by default.
        revision: branch, tag or commit of a repository on the hub.

    Returns:
        An `ImageToTextPipeline`, `QuestionAnsweringPipeline` (of a passage adapter a `PassageAnsweringPipeline`),
        `TextGenerationPipeline` or `TextToImagePipeline`.

    Raises:
        AdapterFileError: no adapter is there, its folder does not say what it needs, or a model has changed since.
        ConfigError: an index for a pipeline that reads none.
    """
    name = os.fspath(folder)
    place = Path(asset_path(name) if name.startswith("assets/") else local_folder(folder, revision))
    if not place.is_dir():
        raise AdapterFileError(f"there is no adapter folder {name!r}: name the folder that save_adapter wrote")
    if not (place / CONFIG).is_file():
        files = ", ".join(sorted(path.name for path in place.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{name!r} has no {CONFIG}, so it is not an adapter's folder; it has {files}")
    config = PipelineConfig.load(place)
    if index is not None and config.memory is None:
        raise ConfigError(
            f"index={index!r} is for adapters that answer from an index; the one in {name!r} attends to pictures: "
            "leave it out"
        )
    module, cls = _TASKS[config.task]
    kind: type[Pipeline] = getattr(importlib.import_module(module), cls)
    with without_progress_bars(), warnings.catch_warnings():
        if dtype is not None:  # in another dtype the weights have another fingerprint
            warnings.filterwarnings("ignore", message="the weights of this .* are not those")
        return kind.load(config, place, torch.device(device or default_device()), dtype, index)
