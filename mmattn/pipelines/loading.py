"""`mmattn.pipeline`: everything that an adapter's folder names, loaded and ready to be called."""

from __future__ import annotations

import os
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mmattn.adapters.passages.adapter import PassageLayers
from mmattn.adapters.serialization import CONFIG
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.hosts.interop.hub import local_folder
from mmattn.hosts.loading import load
from mmattn.pipelines.build import check_tokenizer, default_device, load_host, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.diffusion_host import load_diffusion_host
from mmattn.pipelines.image_to_text import ImageToTextPipeline
from mmattn.pipelines.passage_answering import PassageAnsweringPipeline
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline
from mmattn.pipelines.text_generation import TextGenerationPipeline
from mmattn.pipelines.text_to_image import TextToImagePipeline
from mmattn.recipes import asset_path
from mmattn.storage.hub import without_progress_bars
from mmattn.storage.json_files import read_json


def pipeline(
    folder: str | PathLike[str],
    *,
    index: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> ImageToTextPipeline | QuestionAnsweringPipeline | TextGenerationPipeline | TextToImagePipeline:
    """Load an adapter with the host, the tokenizer and the encoder that its folder names.

    Args:
        folder: of the adapter, "assets/…" of the installation, or "org/name" on the Hugging Face hub.
        index: for answers from an index: the index, its folder or its address (see `Index.open`); or give one at each
            call.
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
        found = ", ".join(sorted(path.name for path in place.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{name!r} has no {CONFIG}, so it is not an adapter's folder; it has {found}")
    config = PipelineConfig.load(place)
    if index is not None and config.memory is None:
        raise ConfigError(
            f"index={index!r} is for adapters that answer from an index; the one in {name!r} attends to pictures: "
            "leave it out"
        )
    run_on = torch.device(device or default_device())
    with without_progress_bars(), warnings.catch_warnings():
        if dtype is not None:  # in another dtype the weights have another fingerprint
            warnings.filterwarnings("ignore", message="the weights of this .* are not those")
        fingerprint = read_json(place / CONFIG).get("encoder")
        if config.task == "text-to-image":
            painter = load_diffusion_host(
                resolve(config.host.name, place), device=run_on, dtype=dtype, revision=config.host.revision
            )
            check_tokenizer(painter.prompts.tokenizer, config.host, place)
            unet = load(painter.unet, place).eval()
            return TextToImagePipeline(config, unet, painter, place, fingerprint)
        host, tokenizer = load_host(config.host, place, run_on, dtype)
        model = load(host, place).eval()
        if config.task == "image-to-text":
            return ImageToTextPipeline(config, model, tokenizer, place, fingerprint)
        if config.task == "question-answering" and any(
            isinstance(one, PassageLayers) for one in model.adapters.values()
        ):
            return PassageAnsweringPipeline(config, model, tokenizer, place, fingerprint, index)
        if config.task == "question-answering":
            return QuestionAnsweringPipeline(config, model, tokenizer, place, fingerprint, index)
        return TextGenerationPipeline(config, model, tokenizer, place, fingerprint, index)
