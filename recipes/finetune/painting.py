"""A diffusion UNet that learns to draw pictures as their texts say, with a memory beside the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn import training
from mmattn.errors import ConfigError

from .memories import without
from .settings import Config, place


class Painting:
    """The frozen UNet of the settings with its text encoder, and the loss of its rows.

    Attributes:
        host: the UNet.
        schedule: of the noise it was trained with.
    """

    def __init__(self, settings: Config, device: torch.device) -> None:
        self.settings, self.device = settings, device
        folder = Path(place(settings.unet))
        if (folder / "unet").is_dir() and (folder / "text").is_dir():
            found = _own(folder)
        else:
            found = _published(place(settings.unet))
        self.host, self.tokenizer, self.text, self.schedule, self.vae = found
        for part in (self.host, self.text, self.vae):
            if part is not None:
                part.to(device).eval().requires_grad_(False)
        scale = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        self.size = int(self.host.config.sample_size * scale)
        self.channels = int((self.host if self.vae is None else self.vae).config.in_channels)

    def check(self, rows: Any) -> str | None:
        """The first text with words that the text encoder of this UNet never saw; None where there is none."""
        for number in range(len(rows)):
            text = rows[number].text
            # A vocabulary of pieces spells any word; one of whole words does not.
            if (
                self.tokenizer.unk_token_id in self.tokenizer(text)["input_ids"]
                and self.tokenizer.unk_token != self.tokenizer.eos_token
            ):
                return text
        return None

    def attach(self, memories: training.RowMemories) -> Any:
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
        return model.use_core() if self.vae is None else model

    def loss(self, model: Any, memories: training.RowMemories | None) -> Any:
        """The loss that `training.train` asks for: the min-SNR weighted error (arXiv 2303.09556) of each picture.

        Time, noise and what is left out of a row come from the row's own seed: whatever the number of processes, the
        row is learned in the same way.
        """
        drop, unet = self.settings.decoupled.conditioning_dropout_prob, model

        def loss(rows: Sequence[training.Row], seeds: Sequence[int]) -> tuple[torch.Tensor, int]:
            random = [torch.Generator().manual_seed(seed) for seed in seeds]
            chances = torch.stack([torch.rand(2, generator=one) for one in random])
            left_out = (chances < (drop if unet.training else 0)).tolist()
            told = [None if out else row.text for row, (out, _) in zip(rows, left_out, strict=True)]
            seen = [without([row])[0] if out else row for row, (_, out) in zip(rows, left_out, strict=True)]
            memory = None if memories is None else memories.of(seen)
            clean = self.latents([row.picture for row in rows])
            steps = self.schedule.config.num_train_timesteps
            times = torch.cat([torch.randint(steps, (1,), generator=one) for one in random]).to(self.device)
            noise = torch.stack([torch.randn(clean.shape[1:], generator=one) for one in random]).to(self.device)
            given = self.words(told) if memory is None else {**self.words(told), "memory": memory.to(self.device)}
            found = unet(self.schedule.add_noise(clean, noise, times), times, **given).sample
            wanted, weight = self.target(clean, noise, times)
            errors = (found.float() - wanted).square().mean((1, 2, 3))
            return (weight * errors).sum(), len(rows)

        return loss

    def target(self, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """What the UNet should predict at these times, and the weight (b,) of its error."""
        kept = self.schedule.alphas_cumprod.to(clean.device)[times]
        snr = kept / (1 - kept)
        most = snr.clamp(max=self.settings.decoupled.min_snr)
        if self.schedule.config.prediction_type == "v_prediction":
            return self.schedule.get_velocity(clean, noise, times), most / (snr + 1)
        return noise, most / snr

    @torch.no_grad()
    def words(self, texts: Sequence[str | None]) -> dict[str, torch.Tensor]:
        """The texts (b, m, e) as the UNet's own cross-attention reads them, and their padding where it is hidden."""
        padding = True if self.vae is None else "max_length"
        given = self.tokenizer([text or "" for text in texts], padding=padding, truncation=True, return_tensors="pt")
        ids, mask = given["input_ids"].to(self.device), given["attention_mask"].to(self.device)
        if self.vae is not None:
            return {"encoder_hidden_states": self.text(input_ids=ids).last_hidden_state}
        told = torch.tensor([text is not None for text in texts], device=self.device)
        found = self.text(input_ids=ids, attention_mask=mask).last_hidden_state
        return {"encoder_hidden_states": found, "text_mask": mask.bool() & told[:, None]}

    @torch.no_grad()
    def draw(self, model: Any, memory: Any, texts: Sequence[str], seed: int, steps: int = 20) -> torch.Tensor:
        """Pictures (b, c, height, width) from 0 to 1, as the texts say, by DDIM (arXiv 2010.02502) without guidance."""
        from diffusers import DDIMScheduler

        schedule = DDIMScheduler.from_config(self.schedule.config, timestep_spacing="trailing")
        schedule.set_timesteps(steps)
        channels, size = self.host.config.in_channels, self.host.config.sample_size
        noise = torch.randn(channels, size, size, generator=torch.Generator().manual_seed(seed))
        made = noise.expand(len(texts), -1, -1, -1).to(self.device)
        given = {**self.words(texts), "memory": memory.to(self.device)}
        for time in schedule.timesteps:
            made = schedule.step(model(made, time, **given).sample, time, made).prev_sample
        if self.vae is not None:
            made = self.vae.decode(made / self.vae.config.scaling_factor).sample
        return (made / 2 + 0.5).clamp(0, 1).cpu()

    @torch.no_grad()
    def latents(self, pictures: Sequence[Any]) -> torch.Tensor:
        """What the UNet sees of pictures: their middle square, from -1 to 1, through the VAE where there is one."""
        made = []
        for picture in pictures:
            image = mmattn.load_image(picture)
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            image = image.crop((left, top, left + side, top + side)).resize((self.size, self.size))
            pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
            pixels = pixels.view(self.size, self.size, 3).permute(2, 0, 1).float() / 127.5 - 1
            made.append(pixels.mean(0, keepdim=True) if self.channels == 1 else pixels)
        clean = torch.stack(made).to(self.device)
        if self.vae is None:
            return clean
        # The mean, not a sample: what is learned of a picture must not depend on what else is in its batch.
        latents: torch.Tensor = self.vae.encode(clean).latent_dist.mode() * self.vae.config.scaling_factor
        return latents


def _own(folder: Path) -> tuple[Any, ...]:
    """What recipes/diffusion leaves behind: it works in pixels, on a squared cosine, and predicts v."""
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from transformers import CLIPTextModel, PreTrainedTokenizerFast

    unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "text")
    text = CLIPTextModel.from_pretrained(folder / "text", dtype=torch.float32)
    schedule = DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")
    return unet, tokenizer, text, schedule, None


def _published(name: str) -> tuple[Any, ...]:
    from diffusers import DDPMScheduler, StableDiffusionPipeline

    given: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    try:
        pipe = StableDiffusionPipeline.from_pretrained(name, **given)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"unet={name} is neither a run of recipes/diffusion nor a Stable Diffusion in diffusers' layout: {error}"
        ) from error
    if pipe.unet.config.addition_embed_type is not None:
        raise ConfigError(f"unet={name} needs more than text ({pipe.unet.config.addition_embed_type}), as SDXL does")
    schedule = DDPMScheduler.from_config(pipe.scheduler.config)
    return pipe.unet, pipe.tokenizer, pipe.text_encoder, schedule, pipe.vae
