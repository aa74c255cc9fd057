"""Base classes of the pipelines: an adapted model with the settings of its folder, and an encoder."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmattn.encoders.base import ImageEncoder
from mmattn.encoders.registry import load_image_encoder
from mmattn.errors import ConfigError
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.interop.hub import FURTHER, upload
from mmattn.hosts.loading import load
from mmattn.pipelines.build import check_encoder, load_host, resolve, saved_fingerprint
from mmattn.pipelines.config import PipelineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmattn.retrieval.index import Index


class Pipeline:
    """An adapted model with the settings of its folder.

    Args:
        config: settings in the folder of the adapter.
        model: the adapted model.
        tokenizer: of its host.
        folder: of the adapter.
    """

    def __init__(
        self, config: PipelineConfig, model: AdaptedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
    ) -> None:
        self.config, self.model, self.tokenizer, self.folder = config, model, tokenizer, folder

    @classmethod
    def load(
        cls,
        config: PipelineConfig,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        index: Index | str | PathLike[str] | None = None,
    ) -> Pipeline:
        """Load the models that `config` names, and the adapter.

        Raises:
            AdapterFileError: a model is missing or has changed since the training.
        """
        host, tokenizer = load_host(config.host, folder, device, dtype)
        options = {} if index is None else {"index": index}
        return cls(config, load(host, folder).eval(), tokenizer, folder, **options)

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
        """Upload the adapter with `pipeline_config.json` and its card; return the address of the commit.

        Arguments and errors as for `AdaptedModel.push_to_hub`.

        Raises:
            ConfigError: a model is named by a folder or a file of this machine.
        """
        host, encoder = self.config.host, self.config.encoder
        for name in (host.name, host.lora, encoder.name):
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
    """A pipeline that encodes images. Arguments as for `Pipeline`.

    Attributes:
        encoder: of the images.

    Raises:
        AdapterFileError: the encoder has changed since the training.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        reference = self.config.encoder
        name = resolve(reference.name, self.folder)
        self.encoder: ImageEncoder = load_image_encoder(name, self.device, pooled=reference.pooled)
        check_encoder(self.encoder, reference.name, self.folder, saved_fingerprint(self.folder))
