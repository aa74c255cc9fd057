"""`mmattn.pipeline`, which loads all that an adapter's folder names, and the base classes of the pipelines."""

from __future__ import annotations

import importlib
import os
import warnings
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmattn.adapters.files import CONFIG
from mmattn.encoders.images import ImageEncoder, load_image_encoder
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.hosts.loading import load
from mmattn.hosts.model import AdaptedModel
from mmattn.hosts.saving import FURTHER, local_folder, upload
from mmattn.models.catalogue import find_asset
from mmattn.models.loading import without_progress_bars
from mmattn.pipelines.build import check_encoder, default_device, load_host, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.generation import Prompt, generate_arguments, generate_texts, prompt_with, stream_generate

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from transformers import PreTrainedTokenizerBase

    from mmattn.retrieval.index import Index

    #: An index, its folder or its address.
    IndexSource = Index | str | PathLike[str]

#: Module and class of each task, imported when an adapter has it.
_TASKS = {
    "image-to-text": ("mmattn.pipelines.to_text", "ImageToTextPipeline"),
    "question-answering": ("mmattn.pipelines.question_answering", "QuestionAnsweringPipeline"),
    "passage-answering": ("mmattn.pipelines.passage_answering", "PassageAnsweringPipeline"),
    "text-to-image": ("mmattn.pipelines.text_to_image", "TextToImagePipeline"),
    "memory-to-text": ("mmattn.pipelines.to_text", "MemoryToTextPipeline"),
}


class Pipeline:
    """An adapted model with its tokenizer and the settings of its folder."""

    def __init__(
        self,
        config: PipelineConfig,
        model: AdaptedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        index: IndexSource | None = None,
    ) -> None:
        self.config, self.model, self.tokenizer, self.folder = config, model, tokenizer, folder
        self._set_up(index)

    def _set_up(self, index: IndexSource | None) -> None:
        """Load what the task needs beside host and adapter."""

    @classmethod
    def load(
        cls,
        config: PipelineConfig,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        index: IndexSource | None = None,
    ) -> Pipeline:
        """Load the models that `config` names, and the adapter."""
        host, tokenizer = load_host(config.host, folder, device, dtype)
        return cls(config, load(host, folder).eval(), tokenizer, folder, index)

    def make_prompt(self, text: str = "") -> Prompt:
        """Return the prompt with a text: in place of "{question}", where special tokens are tokens, or behind it."""
        return prompt_with(self.tokenizer, self.config.prompt, text)

    def _generate(
        self, prompts: Sequence[Prompt], memory: Any, batch_size: int, options: Mapping[str, object]
    ) -> list[str]:
        """Return the text after each prompt; `options` of `generate` override those of the folder."""
        how: Any = {"visible_from": self.config.visible_from, "options": {**self.config.generation, **options}}
        return generate_texts(self.model, self.tokenizer, prompts, memory, batch_size=batch_size, **how)

    def _stream(self, prompt: Prompt, memory: Any, options: Mapping[str, object]) -> Generator[str, None, None]:
        """Yield the text after a prompt piece by piece; leaving the loop ends the generation."""
        how: Any = {"visible_from": self.config.visible_from, "options": {**self.config.generation, **options}}
        given = generate_arguments(self.model, self.tokenizer, [prompt], memory, **how)
        return stream_generate(self.model, self.tokenizer, given)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload the adapter with `pipeline_config.json` and its card; return the address of the commit.

        Arguments and errors as for `AdaptedModel.push_to_hub`.

        Raises:
            ConfigError: a model is named by a folder or a file of this machine.
        """
        host, encoder = self.config.host, self.config.encoder
        if not (self.folder / CONFIG).is_file():
            raise ConfigError(f"{str(self.folder)!r} is a host without an adapter: there is nothing to upload")
        for name in (host.name, host.lora, None if encoder is None else encoder.name):
            # The weights of "torchvision:NAME:WEIGHTS".
            path = "" if name is None else name.removeprefix("torchvision:").rpartition(":")[2]
            if not path.startswith("assets/") and path not in FURTHER and path and (self.folder / path).exists():
                raise ConfigError(
                    f"{self.folder} names {path!r}, a path of this machine: upload that model and save the adapter's "
                    "PipelineConfig with its name on the hub"
                )
        message = commit_message or f"Adapter for {self.config.task}"
        return upload(self.folder, repository, private=private, revision=revision, token=token, commit_message=message)


class ImagePipeline(Pipeline):
    """A pipeline with an encoder of images, which must be that of the training."""

    encoder: ImageEncoder

    def _set_up(self, index: IndexSource | None) -> None:
        if index is not None:
            raise ConfigError(f"{type(self).__name__} reads no index: leave index= out")
        reference = self.config.encoder
        assert reference is not None
        name = resolve(reference.name, self.folder)
        self.encoder = load_image_encoder(name, self.device, pooled=reference.pooled)
        check_encoder(self.encoder, reference.name, self.folder)


def pipeline(
    folder: str | PathLike[str] | None = None,
    *,
    host: str | None = None,
    encoder: str | None = None,
    index: IndexSource | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Any:
    """Load an adapter with the host, tokenizer and encoder that its folder names; or a host alone.

    Args:
        folder: folder of the adapter, "assets/…" of the installation, or "org/name" on the Hugging Face hub.
        host: instead of an adapter, a causal language model ("smollm2", a folder, "org/name") that reads the texts of
            an index and answers from them without training.
        encoder: with `host`, the encoder of the index, "minilm" by default.
        index: for answers from an index: the index, its folder or its address (see `Index.open`); you can also pass it
            to each call.
        device: device of all models; by default the accelerator of this machine, or the CPU.
        dtype: dtype of the host's weights, float32 by default.
        revision: branch, tag or commit of a repository on the hub.

    Returns:
        An `ImageToTextPipeline`, `QuestionAnsweringPipeline`, `TextToImagePipeline` or `MemoryToTextPipeline`; with
        `host` a `PassageAnsweringPipeline`.

    Raises:
        AdapterFileError: there is no adapter, its folder does not name its models, or a model has changed since.
        ConfigError: an index for a pipeline that reads none, or not exactly one of `folder` and `host`.
    """
    if folder is None or host is not None:
        if host is None or folder is not None:
            raise ConfigError(f"a pipeline is of an adapter's folder or of a host=; got {folder!r} and {host!r}")
        with without_progress_bars():
            kind, on = _class_of("passage-answering"), torch.device(device or default_device())
            return kind.of_host(host, encoder or "minilm", on, dtype, index, revision)
    if encoder is not None:
        raise ConfigError(f"encoder={encoder!r} goes with host=; the adapter in {folder!r} names its own: leave it out")
    name = os.fspath(folder)
    place = Path(local_folder(find_asset(folder) if isinstance(folder, str) else folder, revision))
    if not place.is_dir():
        raise AdapterFileError(f"there is no adapter folder {name!r}: name the folder that save_adapter wrote")
    if not (place / CONFIG).is_file():
        files = ", ".join(sorted(path.name for path in place.iterdir())[:5]) or "nothing"
        raise AdapterFileError(f"{name!r} has no {CONFIG}, so it is not an adapter's folder; it has {files}")
    config = PipelineConfig.load(place)
    if index is not None and config.memory is None:
        raise ConfigError(
            f"index={index!r} is for adapters that answer from an index, and the one in {name!r} does not: leave it out"
        )
    with without_progress_bars(), warnings.catch_warnings():
        if dtype is not None:  # in another dtype the weights have another fingerprint
            warnings.filterwarnings("ignore", message="the weights of this .* are not those")
        return _class_of(config.task).load(config, place, torch.device(device or default_device()), dtype, index)


def _class_of(task: str) -> Any:
    """Return the class of the pipelines of a task."""
    module, name = _TASKS[task]
    return getattr(importlib.import_module(module), name)
