"""The models that this recipe trains from nothing: a small UNet or transformer, a text encoder and its words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers import DDPMScheduler, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

import mmattn
from mmattn.pipelines import DiffusionHost, PromptEncoder

from .attributes import Subject
from .settings import ModelSettings

Denoiser = mmattn.hosts.AdaptedUNet | mmattn.hosts.AdaptedDiffusionTransformer

WIDTH = 64
LONGEST = 16


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


def make_prompt_encoder(subject: Subject, attends_to_padding: bool = False) -> PromptEncoder:
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
    return PromptEncoder(tokenizer, CLIPTextModel(config), attends_to_padding)


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


def make_transformer(settings: ModelSettings, colours: int = 1) -> SD3Transformer2DModel:
    """A transformer of under three million parameters, of which picture and text are one sequence (arXiv 2403.03206).

    What the time step and the text multiply and shift starts at 0, as in arXiv 2212.09748 (adaLN-Zero).
    """
    transformer = SD3Transformer2DModel(
        sample_size=settings.size,
        patch_size=settings.patch,
        in_channels=colours,
        out_channels=colours,
        num_layers=settings.layers,
        attention_head_dim=settings.head_dim,
        num_attention_heads=settings.heads,
        joint_attention_dim=WIDTH,
        caption_projection_dim=settings.heads * settings.head_dim,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=settings.size // settings.patch,
        qk_norm="rms_norm",
    )
    for name, module in transformer.named_modules():
        if isinstance(module, nn.Linear) and (name == "proj_out" or "norm" in name):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    return transformer


def make_denoiser(settings: ModelSettings, colours: int = 1) -> UNet2DConditionModel | SD3Transformer2DModel:
    """What stage A trains, with random weights."""
    if settings.kind == "transformer":
        return make_transformer(settings, colours)
    return make_unet(settings.size, settings.channels, colours)


def attach_bare(host: DiffusionHost) -> Denoiser:
    """The host with its text through the core where padding is to be hidden from it."""
    model: Denoiser = mmattn.attach(host.unet)
    return model if host.prompts.attends_to_padding else model.use_core()


def predict(
    model: Denoiser,
    noisy: Tensor,
    times: Tensor,
    text: Tensor,
    mask: Tensor,
    inputs: dict[str, Tensor],
    memory: Any = None,
) -> Tensor:
    """What the model makes of noisy pictures (b, c, size, size) at time steps (b,), in their shape.

    Args:
        model: with its adapter.
        noisy: pictures.
        times: of each.
        text: (b, m, e).
        mask: (b, m), what of the text is read, where the model reads it through the core.
        inputs: what else it takes of the text.
        memory: of examples.
    """
    with model.condition(memory, text_mask=mask if model.through_core else None):
        predicted: Tensor = model.predict(noisy, times, text, **inputs)
    return predicted


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


def save_models(folder: Path, denoiser: UNet2DConditionModel | SD3Transformer2DModel, prompts: PromptEncoder) -> None:
    """Write both in half precision, as folders that diffusers and transformers read."""
    kind = "unet" if isinstance(denoiser, UNet2DConditionModel) else "transformer"
    denoiser.half().save_pretrained(folder / kind)
    prompts.encoder.half().save_pretrained(folder / "text")
    prompts.tokenizer.save_pretrained(folder / "text")
