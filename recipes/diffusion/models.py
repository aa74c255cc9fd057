"""The models that this recipe trains from nothing: a small UNet, a text encoder and its words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from mmattn.pipelines import PromptEncoder

from .attributes import Subject

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


def make_prompt_encoder(subject: Subject) -> PromptEncoder:
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
    return PromptEncoder(tokenizer, CLIPTextModel(config))


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


def save_models(folder: Path, unet: UNet2DConditionModel, prompts: PromptEncoder) -> None:
    """Write both in half precision, as folders that diffusers and transformers read."""
    unet.half().save_pretrained(folder / "unet")
    prompts.encoder.half().save_pretrained(folder / "text")
    prompts.tokenizer.save_pretrained(folder / "text")
