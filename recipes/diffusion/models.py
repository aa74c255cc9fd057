"""The models of this recipe: a small UNet and text encoder from nothing, or a Stable Diffusion as it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from mmattn.errors import ConfigError, TextError

from .attributes import Subject

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

WIDTH = 64
LONGEST = 16


class Words(nn.Module):
    """Sentences to a memory for the UNet's own cross-attention: tokens (b, m, e) and which of them are real."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, encoder: CLIPTextModel) -> None:
        super().__init__()
        self.tokenizer, self.encoder = tokenizer, encoder

    def forward(self, sentences: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """(b, m, e) and (b, m) bool; a row of None has no text at all.

        Raises:
            TextError: a word that was never trained.
        """
        given = self.tokenizer([text or "" for text in sentences], padding=True, truncation=True, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"].bool()
        unknown = (ids == self.tokenizer.unk_token_id) & mask
        if unknown.any():
            row = int(unknown.any(1).nonzero()[0])
            known = sorted(word for word in self.tokenizer.get_vocab() if not word.startswith("["))
            raise TextError(f"{sentences[row]!r} has words this model never saw; it knows: {', '.join(known)}")
        device = self.encoder.device
        found = self.encoder(input_ids=ids.to(device), attention_mask=given["attention_mask"].to(device))
        mask = mask & torch.tensor([text is not None for text in sentences])[:, None]
        return found.last_hidden_state, mask.to(device)

    def null(self) -> Tensor | None:
        """What stands for no text; None is a real nothing."""
        return None

    def tokens(self, sentence: str) -> list[str]:
        """The words of a sentence, one for each slot of its memory."""
        return self.tokenizer.convert_ids_to_tokens(self.tokenizer(sentence, truncation=True)["input_ids"])


class Prompts(Words):
    """The same for Stable Diffusion, which attends to its padding, and knows no text as the empty one."""

    def forward(self, sentences: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        """(b, m, e) and (b, m) bool, all of it real."""
        ids = self.tokenizer(
            [text or "" for text in sentences], padding="max_length", truncation=True, return_tensors="pt"
        )["input_ids"].to(self.encoder.device)
        return self.encoder(input_ids=ids).last_hidden_state, torch.ones_like(ids, dtype=torch.bool)

    def null(self) -> Tensor:
        """The empty text, (1, m, e)."""
        return self([None])[0]


@dataclass
class Models:
    """All that turns sentences into pictures.

    Args:
        unet: of text alone.
        words: the text encoder with its tokenizer.
        schedule: of the noise, as the UNet was trained.
        vae: between pictures and what the UNet sees, if not the same.
    """

    unet: UNet2DConditionModel
    words: Words
    schedule: DDPMScheduler
    vae: AutoencoderKL | None = None

    def to(self, device: torch.device) -> Models:
        """Itself, on a device."""
        for part in (self.unet, self.words, self.vae):
            if part is not None:
                part.to(device)
        return self

    @property
    def scale(self) -> int:
        """Pixels for each place that the UNet sees."""
        return 1 if self.vae is None else 2 ** (len(self.vae.config.block_out_channels) - 1)

    @property
    def size(self) -> int:
        """Pixels a side."""
        return int(self.unet.config.sample_size * self.scale)

    @property
    def channels(self) -> int:
        """Of a picture."""
        return int(self.unet.config.in_channels if self.vae is None else self.vae.config.in_channels)

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """What the UNet sees of pictures from -1 to 1, on its device."""
        pictures = pictures.to(self.unet.device)
        if self.vae is None:
            return pictures
        return self.vae.encode(pictures).latent_dist.sample() * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode(self, seen: Tensor) -> Tensor:
        """Pictures from -1 to 1."""
        made = seen if self.vae is None else self.vae.decode(seen / self.vae.config.scaling_factor).sample
        return made.clamp(-1, 1)

    def sampler(self, steps: int) -> DDIMScheduler:
        """DDIM over the schedule; in pixels it keeps to their bounds."""
        settings = {"timestep_spacing": "trailing", "clip_sample": self.vae is None}
        scheduler = DDIMScheduler.from_config(self.schedule.config, **settings)
        scheduler.set_timesteps(steps)
        return scheduler


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word of these texts, and no others."""
    splits = pre_tokenizers.Whitespace()
    known = sorted({word for text in texts for word, _ in splits.pre_tokenize_str(text.lower())})
    words = {word: index for index, word in enumerate(["[pad]", "[begin]", "[end]", "[unknown]", *known])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unknown]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[begin] $A [end]", special_tokens=[("[begin]", words["[begin]"]), ("[end]", words["[end]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[pad]",
        bos_token="[begin]",
        eos_token="[end]",
        unk_token="[unknown]",
        model_max_length=LONGEST,
    )


def make_words(subject: Subject) -> Words:
    """A text encoder of two layers with random weights."""
    tokenizer = make_tokenizer(subject.vocabulary())
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        projection_dim=WIDTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Words(tokenizer, CLIPTextModel(config))


def make_unet(size: int, channels: tuple[int, ...], colours: int = 1) -> UNet2DConditionModel:
    """A UNet of about a million and a half parameters."""
    depth = len(channels)
    return UNet2DConditionModel(
        sample_size=size,
        in_channels=colours,
        out_channels=colours,
        block_out_channels=channels,
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * (depth - 1)),
        up_block_types=(*["CrossAttnUpBlock2D"] * (depth - 1), "UpBlock2D"),
    )


def noise_schedule() -> DDPMScheduler:
    """A thousand steps of a squared cosine; the UNet predicts v (arXiv 2202.00512)."""
    return DDPMScheduler(1000, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")


def denoising_loss(
    schedule: DDPMScheduler, predict: Any, clean: Tensor, noise: Tensor, times: Tensor, min_snr: float
) -> Tensor:
    """The min-SNR weighted error (b,) (arXiv 2303.09556) of the predicted v, or noise, of pictures at time steps."""
    noisy, snr = schedule.add_noise(clean, noise, times), compute_snr(schedule, times)
    if schedule.config.prediction_type == "v_prediction":
        wanted, weight = schedule.get_velocity(clean, noise, times), snr.clamp(max=min_snr) / (snr + 1)
    else:
        wanted, weight = noise, snr.clamp(max=min_snr) / snr
    return weight * (predict(noisy, times) - wanted).square().mean((1, 2, 3))


def save_models(folder: Path, unet: UNet2DConditionModel, words: Words) -> None:
    """Write both in half precision, as folders that diffusers and transformers read."""
    unet.half().save_pretrained(folder / "unet")
    words.encoder.half().save_pretrained(folder / "text")
    words.tokenizer.save_pretrained(folder / "text")


def load_models(place: str | Path) -> Models:
    """What `save_models` wrote, or a Stable Diffusion: a folder in diffusers' layout or a name on the hub; in float32.

    Raises:
        ConfigError: neither, or a pipeline of another kind.
    """
    folder = Path(place)
    if (folder / "text").is_dir():
        unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "text")
        encoder = CLIPTextModel.from_pretrained(folder / "text", dtype=torch.float32)
        return Models(unet.eval(), Words(tokenizer, encoder).eval(), noise_schedule())
    return load_published(str(place))


def load_published(place: str) -> Models:
    """Stable Diffusion 1.x or 2.x from a folder or the hub.

    Raises:
        ConfigError: there is none, or a pipeline whose UNet needs more than text.
    """
    from diffusers import StableDiffusionPipeline

    given: dict[str, Any] = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    try:
        pipe = StableDiffusionPipeline.from_pretrained(place, **given)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"unet={place} is neither the run of a stage A nor a Stable Diffusion in diffusers' layout: {error}"
        ) from error
    if pipe.unet.config.addition_embed_type is not None:
        raise ConfigError(f"unet={place} needs more than text ({pipe.unet.config.addition_embed_type}), as SDXL does")
    for part in (pipe.unet, pipe.vae, pipe.text_encoder):
        part.eval().requires_grad_(False)
    schedule = DDPMScheduler.from_config(pipe.scheduler.config)
    return Models(pipe.unet, Prompts(pipe.tokenizer, pipe.text_encoder), schedule, pipe.vae)
