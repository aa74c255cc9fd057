"""Prompts to pictures: a UNet, and an adapter that attends to an example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.images import as_list, load_image
from mmattn.errors import ConfigError, check_float, check_int
from mmattn.memory import Memory
from mmattn.pipelines.base import ImagePipeline
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.diffusion_host import DiffusionHost
from mmattn.tokenization import check_text


class TextToImagePipeline(ImagePipeline):
    """Pictures from prompts, like an example where there is one.

    Args:
        config: what the adapter's folder says.
        model: the adapted UNet.
        host: the UNet with its text encoder, noise schedule and VAE.
        folder: of the adapter.
        fingerprint: of the encoder that the adapter was trained with, where its file names it.

    Attributes:
        encoder: what sees the examples.

    Raises:
        AdapterFileError: the encoder has changed since the training.
    """

    def __init__(
        self, config: PipelineConfig, model: Any, host: DiffusionHost, folder: Path, fingerprint: str | None
    ) -> None:
        # Only through the core is the padding of the text hidden, as it was in training.
        model = model if host.prompts.attends_to_padding else model.use_core()
        super().__init__(config, model, host.prompts.tokenizer, folder, fingerprint)
        self.host = host

    def __call__(
        self,
        prompts: str | Sequence[str],
        images: Any = None,
        *,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        adapter_scale: float = 1.0,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Any:
        """A picture of Pillow, in the size that the UNet was trained on, or a list of them for a list of prompts.

        Args:
            prompts: one or a list.
            images: examples of any kind that `mmattn.load_image` reads: one for all prompts, or as many; None for none.
            num_inference_steps: denoising steps, by default those of the adapter's folder.
            guidance_scale: of classifier-free guidance, by default that of the adapter's folder; 1 is none.
            adapter_scale: how closely to follow the examples; 0 is not at all.
            generator: of the noise, on the CPU; equal seeds draw equal pictures.
            progress: show a bar.

        Raises:
            TextError: a word that the text encoder was not trained on.
            ImageError: an example that cannot be read.
            ConfigError: a number outside its range, or another number of examples than of prompts.
        """
        texts = check_text(prompts)
        steps = self._setting("num_inference_steps", num_inference_steps, 30)
        scale = self._setting("guidance_scale", guidance_scale, 1.0)
        made = self.host.generate(
            self.model,
            texts,
            num_inference_steps=check_int("num_inference_steps", steps, at_most=1000),
            guidance_scale=check_float("guidance_scale", scale),
            generator=generator,
            memory=None if images is None else self._memory(images, len(texts)),
            adapter_scale=check_float("adapter_scale", adapter_scale),
            progress=progress,
        )
        pictures = [as_image(picture) for picture in made]
        return pictures[0] if isinstance(prompts, str) else pictures

    def _setting(self, name: str, given: Any, default: Any) -> Any:
        return self.config.generation.get(name, default) if given is None else given

    def _memory(self, images: Any, count: int) -> Memory:
        given = as_list(images)
        if len(given) not in (1, count):
            raise ConfigError(f"{len(given)} examples for {count} prompts: give one, or one for each prompt")
        memory: Memory = self.encoder(given)
        return memory.expand(count) if len(given) == 1 else memory


def as_image(picture: Tensor) -> Any:
    """A picture (c, height, width) from -1 to 1 as one of Pillow: one channel is ink on paper, three are colours.

    Args:
        picture: on the CPU.
    """
    shown = 127.5 * ((1 - picture) if len(picture) == 1 else (1 + picture))
    image = load_image(shown.round().to(torch.uint8))
    return image.convert("L") if len(picture) == 1 else image
