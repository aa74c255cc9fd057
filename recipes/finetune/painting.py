"""The host `unet`: a diffusion UNet that learns to draw pictures as their texts say, with a memory beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.errors import ConfigError

from .settings import Config

STEPS = 20  # of denoising, where pictures are drawn


class Painting:
    """The frozen UNet `host` of the settings; `models` has its text encoder, noise schedule and VAE, too."""

    def __init__(self, settings: Config, arguments: Any) -> None:
        self.settings, self.device = settings, arguments.device
        self.models = pipelines.load_diffusion_host(settings.unet, device=self.device)
        self.host = self.models.unet
        if "pooled_projection_dim" in self.host.config:
            raise ConfigError(
                f"unet={settings.unet!r} is a {type(self.host).__name__}, and this recipe paints with UNets: name a "
                "UNet, or train its adapter with the recipe diffusion (config_style.yaml)"
            )

    def check(self, rows: Any) -> str | None:
        """Return the first text with words unknown to the text encoder of this UNet, or None."""
        return self.models.prompts.unknown(rows["text"])

    def attach(self, memory_dim: int) -> Any:
        """Return the UNet with the adapter of the settings."""
        options = self.settings.decoupled.model_dump(include={"tokens", "blocks", "start"})
        if (latents := self.settings.decoupled.latents) is not None:
            options["resampler"] = mmattn.Resampler(num_latents=latents, num_heads=4, head_dim=32)
        model = self._masked(mmattn.attach(self.host, mmattn.DecoupledAdapter(memory_dim=memory_dim, **options)))
        if self.settings.optim.checkpoint_host:
            model.enable_gradient_checkpointing()
        return model

    def control(self, parameters: int) -> tuple[Any, Any]:
        """Return the text-only LoRA with as many parameters, and the function that removes it."""
        lora = training.matched_lora(self.host, parameters)
        model = self._masked(mmattn.attach(lora.get_base_model()))

        def undo() -> None:
            model.unload()
            lora.unload()

        return model, undo

    def _masked(self, model: Any) -> Any:
        # A UNet of recipes/diffusion masks the padding of its text; a Stable Diffusion attends to it.
        return model if self.models.prompts.attends_to_padding else model.use_core()

    def trainer(self, *args: Any, text_only: bool = False, **kwargs: Any) -> training.AdapterTrainer:
        """Return the trainer, whose loss is `loss`."""
        painting = self

        class DenoisingTrainer(training.AdapterTrainer):
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
                return painting.loss(model, inputs)

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
            batch = {"pixels": self.pixels([row["image"] for row in rows]), "texts": [row["text"] for row in rows]}
            return batch if text_only else batch | {"memory": training.stack_memories(rows)}

        return DenoisingTrainer(*args, data_collator=collate, **kwargs)

    def loss(self, model: Any, batch: dict[str, Any]) -> torch.Tensor:
        """Return the min-SNR weighted error (arXiv 2303.09556), with the same noise in every evaluation."""
        random = None if model.training else torch.Generator().manual_seed(0)
        drop, schedule = self.settings.decoupled.conditioning_dropout_prob, self.models.schedule
        clean = self.models.encode(batch["pixels"])
        chances = torch.rand(len(clean), 2, generator=random)
        no_text, no_memory = (chances < (drop if model.training else 0)).unbind(1)
        texts = [None if out else text for text, out in zip(batch["texts"], no_text.tolist(), strict=True)]
        inputs, memory = self.words(texts), batch.get("memory")
        if memory is not None:
            mask = memory.real_slots() & ~no_memory.to(memory.device)[:, None]
            inputs["memory"] = mmattn.Memory(memory.tokens, mask, memory.segments, memory.scores, check_finite=False)
        times = torch.randint(schedule.config.num_train_timesteps, (len(clean),), generator=random).to(self.device)
        noise = torch.randn(clean.shape, generator=random).to(self.device)
        output = model(schedule.add_noise(clean, noise, times), times, **inputs).sample
        target, weight = self._target(clean, noise, times)
        return (weight * (output.float() - target).square().mean((1, 2, 3))).mean()

    def _target(self, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the target of the UNet at these times, and the weight (b,) of its error."""
        schedule = self.models.schedule
        signal = schedule.alphas_cumprod.to(clean.device)[times]
        snr = signal / (1 - signal)
        clamped = snr.clamp(max=self.settings.decoupled.min_snr)
        if schedule.config.prediction_type == "v_prediction":
            return schedule.get_velocity(clean, noise, times), clamped / (snr + 1)
        return noise, clamped / snr

    @torch.no_grad()
    def words(self, texts: Sequence[str | None]) -> dict[str, Any]:
        """Return the hidden states (b, m, e) of texts for the UNet's own cross-attention, their mask, and the rest."""
        states, mask = self.models.prompts(texts)
        inputs = {"encoder_hidden_states": states, **self.models.inputs(texts)}
        return inputs if self.models.prompts.attends_to_padding else {**inputs, "text_mask": mask}

    def draw(self, model: Any, memory: Any, texts: Sequence[str], seed: int) -> torch.Tensor:
        """Draw pictures (b, c, height, width) from 0 to 1, as the texts say, without guidance."""
        random = torch.Generator().manual_seed(seed)
        options = {"num_inference_steps": STEPS, "generator": random, "memory": memory}
        return self.models.generate(model, texts, **options) / 2 + 0.5

    def pixels(self, pictures: Sequence[Any]) -> torch.Tensor:
        """Return the middle square of pictures, (b, c, height, width) from -1 to 1."""
        size, squares = self.models.size, []
        for picture in pictures:
            image = mmattn.load_image(picture)
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side)).resize((size, size))
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            pixels = pixels.view(size, size, 3).permute(2, 0, 1).float() / 127.5 - 1
            squares.append(pixels.mean(0, keepdim=True) if self.models.channels == 1 else pixels)
        return torch.stack(squares)

    def pipeline_config(self, results: str = "", pooled: bool = False) -> pipelines.PipelineConfig:
        """Return the file that lets `mmattn.pipeline` draw with the adapter."""
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
