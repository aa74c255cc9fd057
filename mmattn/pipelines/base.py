"""What all pipelines are made of: an adapted model, what its folder says, and for some an index."""

from __future__ import annotations

import shlex
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from mmattn.encoders.registry import load_image_encoder
from mmattn.errors import ConfigError
from mmattn.hosts.interop.hub import FURTHER, upload
from mmattn.pipelines.build import check_encoder, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.index_loading import load_index, load_text_encoder
from mmattn.retrieval.index import Index


class Pipeline:
    """An adapted model with what its folder says.

    Args:
        config: what the adapter's folder says.
        model: the adapted model.
        tokenizer: of its host.
        folder: of the adapter.
    """

    def __init__(self, config: PipelineConfig, model: Any, tokenizer: Any, folder: Path) -> None:
        self.config, self.model, self.tokenizer, self.folder = config, model, tokenizer, folder

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        commit_message: str | None = None,
    ) -> str:
        """Upload the adapter with `pipeline_config.json` and its card, so that its name on the hub is a pipeline.

        Args:
            repository: "org/name"; made where it is missing.
            private: as in `transformers.PreTrainedModel.push_to_hub`.
            revision: a branch, made where it is missing.
            token: as in `transformers.PreTrainedModel.push_to_hub`.
            commit_message: as in `transformers.PreTrainedModel.push_to_hub`.

        Returns:
            The address of the commit.

        Raises:
            ConfigError: a model that is named by a folder or a file, which others do not have.
            AdapterFileError: the hub refused it, or cannot be reached.
        """
        host, encoder = self.config.host, self.config.encoder
        for name in (host.name, host.lora, encoder.name):
            # Of "torchvision:NAME:WEIGHTS" the weights.
            path = "" if name is None else name.removeprefix("torchvision:").rpartition(":")[2]
            if not path.startswith("assets/") and path not in FURTHER and path and (self.folder / path).exists():
                raise ConfigError(
                    f"{self.folder} names {path!r}, which lies on this machine only: upload that model, save the "
                    "adapter's PipelineConfig with its name on the hub, and push again"
                )
        message = commit_message or f"Adapter for {self.config.task}"
        return upload(self.folder, repository, private=private, revision=revision, token=token, message=message)


class ImagePipeline(Pipeline):
    """A pipeline that sees pictures.

    Args:
        config: what the adapter's folder says.
        model: the adapted model.
        tokenizer: of its host.
        folder: of the adapter.
        fingerprint: of the encoder that the adapter was trained with, where its file names it.

    Attributes:
        encoder: what sees them.

    Raises:
        AdapterFileError: the encoder has changed since the training.
    """

    def __init__(
        self, config: PipelineConfig, model: Any, tokenizer: Any, folder: Path, fingerprint: str | None
    ) -> None:
        super().__init__(config, model, tokenizer, folder)
        named = config.encoder
        self.encoder: Any = load_image_encoder(resolve(named.name, folder), self.device, pooled=named.pooled)
        check_encoder(self.encoder, named.name, folder, fingerprint)


class IndexPipeline(Pipeline):
    """A pipeline that answers from an index.

    Args:
        config: what the adapter's folder says.
        model: the adapted language model.
        tokenizer: of its host.
        folder: of the adapter.
        fingerprint: of the encoder that the adapter was trained with, where its file names it.
        index: the index, its folder or its address; or give one at each call.

    Attributes:
        encoder: of the texts of the index.

    Raises:
        AdapterFileError: the encoder has changed since the training.
        ConfigError: the entries of the index have no encoded tokens, which the adapter reads.
    """

    def __init__(
        self,
        config: PipelineConfig,
        model: Any,
        tokenizer: Any,
        folder: Path,
        fingerprint: str | None,
        index: Index | str | PathLike[str] | None = None,
    ) -> None:
        super().__init__(config, model, tokenizer, folder)
        self.encoder = load_text_encoder(config, folder, fingerprint, self.device)
        self.index = None if index is None else self._load_index(index)

    def _load_index(self, index: Any) -> Index:
        loaded = load_index(index, self.encoder)
        assert self.config.memory is not None
        if self.config.memory.fields and len(loaded) and not loaded.has_tokens:
            fields = " and ".join(self.config.memory.fields)
            raise ConfigError(
                f"the entries of {index} have no encoded tokens, which this adapter reads: make an index for it with "
                f"mmattn index build FILE -o DIR --for {shlex.quote(str(self.folder))}, where each line of FILE is a "
                f"JSON object with {fields}"
            )
        return loaded

    def _chosen_index(self, index: Any) -> Index:
        """The index of a call, or that of the pipeline."""
        chosen = self.index if index is None else self._load_index(index)
        if chosen is None:
            assert self.config.memory is not None
            how = (
                f"one made by: mmattn index build FILE -o DIR --for {shlex.quote(str(self.folder))}"
                if self.config.memory.fields
                else "the one that its run left"
            )
            raise ConfigError(
                f"the adapter in {str(self.folder)!r} reads an index, and there is none: give index=, such as {how}"
            )
        return chosen
