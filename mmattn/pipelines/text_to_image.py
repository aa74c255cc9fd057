"""Prompts to images: the frozen models, and a pipeline with an adapter that attends to an example."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmattn.encoders.images import image_list, load_image
from mmattn.errors import ConfigError, TextError, check_float, check_int, import_extra
from mmattn.hosts.diffusion.guidance import Guidance
from mmattn.hosts.diffusion.model import AdaptedDenoiser
from mmattn.hosts.loading import load
from mmattn.memory import Memory
from mmattn.pipelines.base import ImagePipeline
from mmattn.pipelines.build import check_tokenizer, resolve
from mmattn.pipelines.config import PipelineConfig
from mmattn.progress import tracked
from mmattn.tokenization import call_tokenizer, check_text

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DDIMScheduler, DDPMScheduler, ModelMixin, StableDiffusionXLPipeline
    from PIL.Image import Image
    from transformers import CLIPTextModel, PreTrainedTokenizerBase

    from mmattn.hosts.diffusion.scale import AdapterScale
    from mmattn.pipelines.base import IndexSource


class PromptEncoder(nn.Module):
    """Encodes prompts to the hidden states that the host's own attention reads.

    Args:
        tokenizer: of the text encoder.
        encoder: `CLIPTextModel` of transformers.
        attends_to_padding: the host was trained to attend to padding, and "no prompt" is the empty prompt, as in
            Stable Diffusion. Otherwise a row without a prompt has no state at all.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, encoder: CLIPTextModel, attends_to_padding: bool = False
    ) -> None:
        super().__init__()
        self.tokenizer, self.encoder, self.attends_to_padding = tokenizer, encoder, attends_to_padding

    def forward(self, prompts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """Return hidden states (b, m, e) and their mask (b, m).

        Args:
            prompts: None for no prompt.

        Raises:
            TextError: a word that the text encoder was not trained on.
        """
        states, mask = self._encode(prompts)
        if self.attends_to_padding:
            return states, torch.ones_like(mask)
        return states, mask & torch.tensor([text is not None for text in prompts], device=mask.device)[:, None]

    def pooled(self, prompts: Sequence[str | None]) -> Tensor:
        """Return the state (b, e) at the end of each prompt, an input of diffusers' transformers."""
        states, mask = self._encode(prompts)
        # Not `pooler_output`: a `CLIPTextModel` whose eos_token_id is 2 takes the token of the highest number.
        return states[torch.arange(len(states), device=states.device), mask.sum(1) - 1]

    def _encode(self, prompts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """Return hidden states (b, m, e), and the mask (b, m) that hides padding."""
        texts = [text or "" for text in prompts]
        unknown = self.unknown(texts)
        if unknown is not None:
            vocabulary = sorted(word for word in self.tokenizer.get_vocab() if not word.startswith("["))
            raise TextError(f"{unknown!r} has words this model never saw; it knows: {', '.join(vocabulary)}")
        padding = "max_length" if self.attends_to_padding else True
        options = {"padding": padding, "truncation": True, "return_tensors": "pt"}
        inputs = call_tokenizer(self.tokenizer, texts, **options).to(self.encoder.device)
        mask = None if self.attends_to_padding else inputs["attention_mask"]
        states: Tensor = self.encoder(input_ids=inputs["input_ids"], attention_mask=mask).last_hidden_state
        return states, inputs["attention_mask"].bool()

    def unknown(self, texts: Iterable[str]) -> str | None:
        """Return the first text with a word that the text encoder was not trained on."""
        unknown = self.tokenizer.unk_token_id
        # A vocabulary of pieces spells any word; one of whole words does not.
        if unknown is None or self.tokenizer.unk_token == self.tokenizer.eos_token:
            return None
        return next((text for text in texts if unknown in call_tokenizer(self.tokenizer, text)["input_ids"]), None)

    def null(self) -> Tensor | None:
        """Return states (1, m, e) of no prompt, or None if the host then reads nothing."""
        return self([None])[0] if self.attends_to_padding else None

    def tokens(self, prompt: str) -> list[str]:
        """Return the tokens of a prompt, one for each state."""
        ids = call_tokenizer(self.tokenizer, prompt, truncation=True)["input_ids"]
        return self.tokenizer.convert_ids_to_tokens(ids)


class XLPromptEncoder(PromptEncoder):
    """Encodes prompts as Stable Diffusion XL reads them, by two text encoders; "no prompt" is all zeros."""

    def __init__(self, pipe: StableDiffusionXLPipeline) -> None:
        super().__init__(pipe.tokenizer, pipe.text_encoder, attends_to_padding=True)
        self.second, self._encode_prompt = pipe.text_encoder_2, pipe.encode_prompt

    def pooled(self, prompts: Sequence[str | None]) -> Tensor:
        """Return the projected state (b, e) of the second text encoder."""
        return self._both(prompts)[1]

    def _encode(self, prompts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        states = self._both(prompts)[0]
        return states, torch.ones_like(states[..., 0], dtype=torch.bool)

    def _both(self, prompts: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """Return the states (b, m, e) of both text encoders side by side, and the projected ones (b, e)."""
        device, texts = self.encoder.device, [text or "" for text in prompts]
        states, _, pooled, _ = self._encode_prompt(texts, device=device, do_classifier_free_guidance=False)
        real = torch.tensor([text is not None for text in prompts], device=device)[:, None]
        return states * real[..., None], pooled * real


class DiffusionHost(nn.Module):
    """The models of text-to-image, frozen or not.

    Args:
        unet: `UNet2DConditionModel` or `SD3Transformer2DModel` of diffusers.
        prompts: the text encoder.
        schedule: `DDPMScheduler` of the noise that it was trained with.
        vae: between images and latents; None if the UNet works on pixels.
    """

    def __init__(
        self, unet: ModelMixin, prompts: PromptEncoder, schedule: DDPMScheduler, vae: AutoencoderKL | None = None
    ) -> None:
        super().__init__()
        self.unet, self.prompts, self.schedule, self.vae = unet, prompts, schedule, vae

    @property
    def size(self) -> int:
        """Return the pixels of a side of an image."""
        scale = 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)
        return int(self.unet.config.sample_size * scale)

    @property
    def channels(self) -> int:
        """Return the channels of an image: 1, of ink on paper, or 3."""
        return int((self.unet if self.vae is None else self.vae).config.in_channels)

    def inputs(self, prompts: Sequence[str | None]) -> dict[str, object]:
        """Return further inputs of the host by name, such as the pooled states of the prompts for a transformer."""
        config = self.unet.config
        if getattr(config, "addition_embed_type", None) == "text_time":
            pooled = self.prompts.pooled(prompts)
            sizes = pooled.new_tensor([self.size, self.size, 0, 0, self.size, self.size])  # of the picture, uncropped
            return {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": sizes.expand(len(pooled), 6)}}
        return {"pooled_projections": self.prompts.pooled(prompts)} if "pooled_projection_dim" in config else {}

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """Return the inputs of the UNet for images (b, c, size, size) from -1 to 1: with a VAE its mean latents."""
        pictures = pictures.to(self.unet.device)
        if self.vae is None:
            return pictures
        return self.vae.encode(pictures).latent_dist.mode() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return images (b, c, size, size) from -1 to 1."""
        if self.vae is not None:
            latents = self.vae.decode(latents / self.vae.config.scaling_factor).sample
        return latents.clamp(-1, 1)

    def sampler(self, num_inference_steps: int) -> DDIMScheduler:
        """Return a `DDIMScheduler` of diffusers over the schedule; pixels are clipped to their range."""
        from diffusers import DDIMScheduler

        settings = {"timestep_spacing": "trailing", "clip_sample": self.vae is None}
        scheduler = DDIMScheduler.from_config(self.schedule.config, **settings)
        scheduler.set_timesteps(num_inference_steps)
        return scheduler

    @torch.no_grad()
    def generate(
        self,
        model: AdaptedDenoiser,
        prompts: Sequence[str],
        *,
        num_inference_steps: int = 30,
        guidance_scale: float = 1.0,
        generator: torch.Generator | None = None,
        memory: Memory | None = None,
        adapter_scale: AdapterScale = 1.0,
        progress: bool = False,
    ) -> Tensor:
        """Generate images (b, c, size, size) from -1 to 1, on the CPU, by DDIM (arXiv 2010.02502).

        Args:
            model: the adapted host.
            prompts: b of them.
            num_inference_steps: denoising steps.
            guidance_scale: of classifier-free guidance (arXiv 2207.12598), as in diffusers; 1 is none.
            generator: of the noise, on the CPU.
            memory: of b rows.
            adapter_scale: strength of the memory.
            progress: show a bar.

        Raises:
            TextError: a word that the text encoder was not trained on.
        """
        scheduler, settings = self.sampler(num_inference_steps), self.unet.config
        (states, mask), null = self.prompts(list(prompts)), self.prompts.null()
        inputs, null_inputs = self.inputs(list(prompts)), self.inputs([None] * len(states))
        memory = None if memory is None else memory.to(states.device, states.dtype)
        side = settings.sample_size
        noise = torch.randn(len(states), settings.in_channels, side, side, generator=generator)
        latents = noise.to(states.device, states.dtype)
        guided = Guidance(guidance_scale).run(
            model, states, text_mask=mask if model.through_core else None, null_text=null, memory=memory,
            adapter_scale=adapter_scale, inputs=inputs, null_inputs=null_inputs,
        )  # fmt: skip
        # Guidance overshoots: the noise must be that of the clipped picture, or the next step starts from neither.
        clipped = {"use_clipped_model_output": True} if scheduler.config.clip_sample else {}
        with guided as predict:
            for index in tracked(len(scheduler.timesteps), "drawing", progress):
                time = scheduler.timesteps[index]
                latents = scheduler.step(predict(latents, time), time, latents, **clipped).prev_sample
        return self.decode(latents).float().cpu()


def load_diffusion_host(
    name: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> DiffusionHost:
    """Load the models of a folder, frozen and in evaluation mode.

    Args:
        name: a run of the recipe diffusion (a UNet in "unet" or a transformer in "transformer", tokenizer and text
            encoder in "text", trained on `noise_schedule`), or Stable Diffusion 1, 2 or XL: a folder in diffusers'
            layout or a name on the hub.
        device: of all models.
        dtype: of the weights, float32 by default.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: neither, or a UNet that needs more than text.
        MissingExtraError: diffusers is not installed.
    """
    diffusers = import_extra("diffusers", "diffusion")
    from transformers import CLIPTextModel, PreTrainedTokenizerFast

    folder, dtype = Path(name), dtype or torch.float32
    if (folder / "text").is_dir():
        joint = (folder / "transformer").is_dir()
        kind = diffusers.SD3Transformer2DModel if joint else diffusers.UNet2DConditionModel
        model = kind.from_pretrained(folder / ("transformer" if joint else "unet"), torch_dtype=dtype)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "text")
        encoder = CLIPTextModel.from_pretrained(folder / "text", dtype=dtype)
        # Like Stable Diffusion 3, it is trained to attend to padding.
        host = DiffusionHost(model, PromptEncoder(tokenizer, encoder, joint), noise_schedule())
    else:
        try:
            config = diffusers.DiffusionPipeline.load_config(str(name), revision=revision)
            is_xl = config["_class_name"].startswith("StableDiffusionXL")
            kind = diffusers.StableDiffusionXLPipeline if is_xl else diffusers.StableDiffusionPipeline
            checker = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
            unused: Any = {"add_watermarker": False} if is_xl else checker
            pipe = kind.from_pretrained(str(name), revision=revision, **unused).to(dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{str(name)!r} is no run of the recipe diffusion and no Stable Diffusion of diffusers: {error}"
            ) from error
        extra = pipe.unet.config.addition_embed_type
        if extra != ("text_time" if is_xl else None) or pipe.text_encoder is None:
            raise ConfigError(f"{str(name)!r} needs more than text ({extra}): use Stable Diffusion 1, 2 or XL base")
        prompts = XLPromptEncoder(pipe) if is_xl else PromptEncoder(pipe.tokenizer, pipe.text_encoder, True)
        schedule = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
        host = DiffusionHost(pipe.unet, prompts, schedule, pipe.vae)
    return host.eval().requires_grad_(False).to(device)


def noise_schedule() -> DDPMScheduler:
    """Return a `DDPMScheduler` of a thousand steps of a squared cosine, for v-prediction (arXiv 2202.00512)."""
    from diffusers import DDPMScheduler

    return DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")


class TextToImagePipeline(ImagePipeline):
    """Images from prompts, in the style of an example if one is given."""

    model: AdaptedDenoiser

    def __init__(self, config: PipelineConfig, model: AdaptedDenoiser, host: DiffusionHost, folder: Path) -> None:
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
        index: IndexSource | None = None,
    ) -> TextToImagePipeline:
        """Load the models that `config` names, and the adapter. Arguments and errors as for `Pipeline`."""
        name = resolve(config.host.name, folder)
        host = load_diffusion_host(name, device=device, dtype=dtype, revision=config.host.revision)
        check_tokenizer(host.prompts.tokenizer, config.host, folder)
        model = load(host.unet, folder).eval()
        assert isinstance(model, AdaptedDenoiser)
        return cls(config, model, host, folder)

    def __call__(
        self,
        prompts: str | Sequence[str],
        images: object = None,
        *,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        adapter_scale: float = 1.0,
        generator: torch.Generator | None = None,
        progress: bool = False,
    ) -> Image | list[Image]:
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

    def _memory(self, images: object, count: int) -> Memory:
        examples = image_list(images)
        if len(examples) not in (1, count):
            raise ConfigError(f"{len(examples)} examples for {count} prompts: give one, or one for each prompt")
        memory: Memory = self.encoder(examples)
        return memory.expand(count) if len(examples) == 1 else memory


def as_image(pixels: Tensor) -> Image:
    """Convert pixels (c, height, width) from -1 to 1 to an image of Pillow.

    Args:
        pixels: on the CPU; one channel is ink on paper, three are colours.
    """
    levels = 127.5 * ((1 - pixels) if len(pixels) == 1 else (1 + pixels))
    image = load_image(levels.round().to(torch.uint8))
    return image.convert("L") if len(pixels) == 1 else image
