"""A diffusion UNet that learns to draw pictures as their texts say, with a memory beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.errors import ConfigError
from mmattn.recipes import resolve_asset

from .settings import Config

STEPS = 20  # of denoising, where pictures are drawn


class Painting:
    """The frozen UNet of the settings with its text encoder, and the loss of its rows.

    Attributes:
        models: the UNet, its text encoder, the noise schedule it was trained with, and the VAE where there is one.
        host: the UNet.

    Raises:
        ConfigError: what `unet` names is a transformer.
    """

    def __init__(self, settings: Config, accelerator: Any) -> None:
        self.settings, self.device = settings, accelerator.device
        self.models = pipelines.load_diffusion_host(resolve_asset(settings.unet), device=self.device)
        self.host = self.models.unet
        if "pooled_projection_dim" in self.host.config:
            raise ConfigError(
                f"unet={settings.unet!r} is a {type(self.host).__name__}, and this recipe paints with UNets: name a "
                "UNet, or train its adapter with the recipe diffusion (config_style.yaml)"
            )

    def check(self, rows: Any) -> str | None:
        """The first text with words that the text encoder of this UNet never saw; None where there is none."""
        return self.models.prompts.unknown(rows[number].text for number in range(len(rows)))

    def attach(self, memories: training.MemorySource) -> Any:
        """The UNet with the adapter of the settings."""
        given = self.settings.decoupled
        heads = {"num_heads": 4, "head_dim": 32}
        resampler = None if given.latents is None else mmattn.Resampler(num_latents=given.latents, **heads)
        adapter = mmattn.DecoupledAdapter(
            memory_dim=memories.dim,
            tokens=given.tokens,
            blocks=None if given.blocks is None else tuple(given.blocks),
            start=given.start,
            resampler=resampler,
        )
        model = self._masked(mmattn.attach(self.host, adapter))
        if self.settings.optim.host_gradient_checkpointing:
            model.enable_gradient_checkpointing()
        return model

    def control(self, parameters: int) -> tuple[Any, Any]:
        """The text-only LoRA with as many parameters, and what takes it off again."""
        lora = training.matched_lora(self.host, parameters)
        model = self._masked(mmattn.attach(lora.get_base_model()))

        def undo() -> None:
            model.unload()
            lora.unload()

        return model, undo

    def _masked(self, model: Any) -> Any:
        # A UNet of recipes/diffusion was trained not to see the padding of its text; a Stable Diffusion sees it.
        return model if self.models.prompts.attends_to_padding else model.use_core()

    def collate(self, memories: training.MemorySource | None) -> training.Collate:
        """Pictures, texts and memories of rows, made in a thread beside the training."""

        def collate(rows: Sequence[training.Row], seeds: Sequence[int]) -> dict[str, Any]:
            given = {"pixels": self.pixels([row.picture for row in rows]), "texts": [row.text for row in rows]}
            return {**given, "memory": None if memories is None else memories.of(rows)}

        return collate

    def loss(self, model: Any) -> training.Loss:
        """The loss that `training.train` asks for: the min-SNR weighted error (arXiv 2303.09556) of each picture.

        Time, noise and what is left out of a row come from the row's own seed: whatever the number of processes, the
        row is learned in the same way.
        """
        drop, unet = self.settings.decoupled.conditioning_dropout_prob, model

        def loss(batch: dict[str, Any], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
            random = [torch.Generator().manual_seed(seed) for seed in seeds]
            chances = torch.stack([torch.rand(2, generator=one) for one in random])
            no_text, no_memory = (chances < (drop if unet.training else 0)).unbind(1)
            told = [None if out else text for text, out in zip(batch["texts"], no_text.tolist(), strict=True)]
            memory: mmattn.Memory | None = batch["memory"]
            if memory is not None:
                seen = memory.real_slots() & ~no_memory.to(memory.device)[:, None]
                memory = mmattn.Memory(memory.tokens, seen, memory.segments, memory.scores, check_finite=False)
            clean = self.models.encode(batch["pixels"])
            schedule = self.models.schedule
            steps = schedule.config.num_train_timesteps
            times = torch.cat([torch.randint(steps, (1,), generator=one) for one in random]).to(self.device)
            noise = torch.stack([torch.randn(clean.shape[1:], generator=one) for one in random]).to(self.device)
            given = self.words(told) if memory is None else {**self.words(told), "memory": memory}
            found = unet(schedule.add_noise(clean, noise, times), times, **given).sample
            wanted, weight = self._target(clean, noise, times)
            errors = (found.float() - wanted).square().mean((1, 2, 3))
            return (weight * errors).sum(), len(seeds)

        return loss

    def _target(self, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the UNet should predict at these times, and the weight (b,) of its error."""
        schedule = self.models.schedule
        kept = schedule.alphas_cumprod.to(clean.device)[times]
        snr = kept / (1 - kept)
        most = snr.clamp(max=self.settings.decoupled.min_snr)
        if schedule.config.prediction_type == "v_prediction":
            return schedule.get_velocity(clean, noise, times), most / (snr + 1)
        return noise, most / snr

    @torch.no_grad()
    def words(self, texts: Sequence[str | None]) -> dict[str, torch.Tensor]:
        """The texts (b, m, e) as the UNet's own cross-attention reads them, and their padding where it is hidden."""
        states, mask = self.models.prompts(texts)
        given = {"encoder_hidden_states": states}
        return given if self.models.prompts.attends_to_padding else {**given, "text_mask": mask}

    def draw(self, model: Any, memory: Any, texts: Sequence[str], seed: int, steps: int = STEPS) -> torch.Tensor:
        """Pictures (b, c, height, width) from 0 to 1, as the texts say, without guidance."""
        generator = torch.Generator().manual_seed(seed)
        made = self.models.generate(model, texts, num_inference_steps=steps, generator=generator, memory=memory)
        return made / 2 + 0.5

    def pixels(self, pictures: Sequence[Any]) -> torch.Tensor:
        """The middle square of pictures, (b, c, height, width) from -1 to 1."""
        made, size = [], self.models.size
        for picture in pictures:
            image = mmattn.load_image(picture)
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side)).resize((size, size))
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            pixels = pixels.view(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1
            made.append(pixels.mean(0, keepdim=True) if self.models.channels == 1 else pixels)
        return torch.stack(made)

    def pipeline_config(self, results: str = "", pooled: bool = False) -> pipelines.PipelineConfig:
        """How to run the trained adapter from prompts and examples, pooled or not, to pictures, with its table."""
        settings, data = self.settings, self.settings.data.path
        return pipelines.PipelineConfig(
            task="text-to-image",
            host=pipelines.ModelReference.of(settings.unet, self.models.prompts.tokenizer),
            encoder=pipelines.EncoderReference.of(settings.encoder, pooled=pooled),
            generation={"num_inference_steps": STEPS, "guidance_scale": 1.0},
            trained_on=f"{Path(data).name or data}, a part of it held out.",
            training={"recipe": "finetune", "seed": settings.seed, "learning_rate": settings.optim.learning_rate},
            results=results,
        )
