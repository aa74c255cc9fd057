"""Prompts to images: a UNet or transformer, and an adapter that attends to an example."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.images import image_list, load_image
from mmattn.errors import ConfigError, check_float, check_int
from mmattn.hosts.base import AdaptedModel
from mmattn.hosts.loading import load
from mmattn.memory import Memory
from mmattn.pipelines.base import ImagePipeline
from mmattn.pipelines.build import check_tokenizer, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.pipelines.diffusion_host import DiffusionHost, load_diffusion_host
from mmattn.tokenization import check_text


class TextToImagePipeline(ImagePipeline):
    """Images from prompts, in the style of an example if one is given.

    Args:
        config: settings in the folder of the adapter.
        model: the adapted UNet or transformer.
        host: the UNet with its text encoder, noise schedule and VAE.
        folder: of the adapter.

    Attributes:
        encoder: of the examples.

    Raises:
        AdapterFileError: the encoder has changed since the training.
    """

    def __init__(self, config: PipelineConfig, model: AdaptedModel, host: DiffusionHost, folder: Path) -> None:
        # Only the core hides the padding of the text, as in training.
        model = model if host.prompts.attends_to_padding else model.use_core()
        super().__init__(config, model, host.prompts.tokenizer, folder)
        self.host = host

    @classmethod
    def load(
        cls,
        config: PipelineConfig,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype | None = None,
        index: Any = None,
    ) -> TextToImagePipeline:
        """Load the models that `config` names, and the adapter. Arguments and errors as for `Pipeline`."""
        name = resolve(config.host.name, folder)
        host = load_diffusion_host(name, device=device, dtype=dtype, revision=config.host.revision)
        check_tokenizer(host.prompts.tokenizer, config.host, folder)
        return cls(config, load(host.unet, folder).eval(), host, folder)

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
        """Return an image of Pillow, in the size that the UNet was trained on, or a list for a list of prompts.

        Args:
            prompts: one or a list.
            images: examples of any kind that `mmattn.load_image` reads: one for all prompts, or as many; None for none.
            num_inference_steps: denoising steps, by default those of the adapter's folder.
            guidance_scale: of classifier-free guidance, by default that of the adapter's folder; 1 is none.
            adapter_scale: how closely to follow the examples; 0 is not at all.
            generator: of the noise, on the CPU; equal seeds draw equal images.
            progress: show a bar.

        Raises:
            TextError: a word that the text encoder was not trained on.
            ImageError: an example that cannot be read.
            ConfigError: a number outside its range, or another number of examples than of prompts.
        """
        texts = check_text(prompts)
        defaults = {"num_inference_steps": 30, "guidance_scale": 1.0} | self.config.generation
        steps = defaults["num_inference_steps"] if num_inference_steps is None else num_inference_steps
        scale = defaults["guidance_scale"] if guidance_scale is None else guidance_scale
        pixels = self.host.generate(
            self.model,
            texts,
            num_inference_steps=check_int("num_inference_steps", steps, at_most=1000),
            guidance_scale=check_float("guidance_scale", scale),
            generator=generator,
            memory=None if images is None else self._memory(images, len(texts)),
            adapter_scale=check_float("adapter_scale", adapter_scale),
            progress=progress,
        )
        pictures = [as_image(picture) for picture in pixels]
        return pictures[0] if isinstance(prompts, str) else pictures

    def _memory(self, images: Any, count: int) -> Memory:
        examples = image_list(images)
        if len(examples) not in (1, count):
            raise ConfigError(f"{len(examples)} examples for {count} prompts: give one, or one for each prompt")
        memory: Memory = self.encoder(examples)
        return memory.expand(count) if len(examples) == 1 else memory


def as_image(pixels: Tensor) -> Any:
    """Convert pixels (c, height, width) from -1 to 1 to an image of Pillow.

    Args:
        pixels: on the CPU; one channel is ink on paper, three are colours.
    """
    levels = 127.5 * ((1 - pixels) if len(pixels) == 1 else (1 + pixels))
    image = load_image(levels.round().to(torch.uint8))
    return image.convert("L") if len(pixels) == 1 else image
