"""Stable Diffusion from tiny random parts: nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from tests import tiny_unets

LONGEST = 19


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """A tokenizer that spells: letters, letters that end a word, and the two tokens of CLIP."""
    letters = [chr(code) for code in range(97, 123)]
    vocabulary = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=LONGEST)


def text_config(tokenizer: CLIPTokenizer, width: int = 34, **settings: int) -> CLIPTextConfig:
    """Of a text encoder of this width."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=23,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        bos_token_id=len(tokenizer) - 2,
        eos_token_id=len(tokenizer) - 1,
        **settings,
    )


def make_vae() -> AutoencoderKL:
    """Latents of 4 channels at half the height and width of the picture."""
    return AutoencoderKL(
        block_out_channels=(4, 6),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        sample_size=32,
    ).eval()


def make_pipeline(tokenizer: CLIPTokenizer) -> StableDiffusionPipeline:
    """Latents of 4 channels at 16 x 16, pictures of 32 x 32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = CLIPTextModel(text_config(tokenizer)).eval()
        pictures = make_vae()
    unet = tiny_unets.make(in_channels=4, out_channels=4, cross_attention_dim=34, sample_size=16)
    made = StableDiffusionPipeline(
        vae=pictures,
        text_encoder=text,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    made.set_progress_bar_config(disable=True)
    return made


def make_xl_pipeline(tokenizer: CLIPTokenizer) -> StableDiffusionXLPipeline:
    """Stable Diffusion XL of the same sizes, with a second text encoder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = StableDiffusionXLPipeline(
            vae=make_vae(),
            text_encoder=CLIPTextModel(text_config(tokenizer)).eval(),
            text_encoder_2=CLIPTextModelWithProjection(text_config(tokenizer, 26, projection_dim=19)).eval(),
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            unet=tiny_unets.make("sdxl", in_channels=4, out_channels=4, cross_attention_dim=34 + 26, sample_size=16),
            scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
            add_watermarker=False,
        )
    made.set_progress_bar_config(disable=True)
    return made
