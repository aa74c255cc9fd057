"""The small models of this recipe: a UNet and a text encoder, in the formats of diffusers and transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DDIMScheduler, DDPMScheduler, UNet2DConditionModel
from digits import vocabulary
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

from mmattn.errors import TextError

WIDTH = 64
LONGEST = 16


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the words are all that the captions use."""
    words = {word: index for index, word in enumerate(["[pad]", "[begin]", "[end]", "[unknown]", *vocabulary()])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unknown]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace()])
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


class Words(nn.Module):
    """Sentences to a memory for the UNet's own cross-attention: tokens (b, m, e) and which of them are real."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, encoder: CLIPTextModel) -> None:
        super().__init__()
        self.tokenizer, self.encoder = tokenizer, encoder

    def forward(self, sentences: list[str]) -> tuple[Tensor, Tensor]:
        """(b, m, e) and (b, m) bool.

        Raises:
            TextError: a word that was never trained.
        """
        given = self.tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
        ids, mask = given["input_ids"], given["attention_mask"].bool()
        unknown = (ids == self.tokenizer.unk_token_id) & mask
        if unknown.any():
            row = int(unknown.any(1).nonzero()[0])
            raise TextError(f"{sentences[row]!r} has words this model never saw; it knows: {', '.join(vocabulary())}")
        found = self.encoder(input_ids=ids, attention_mask=given["attention_mask"]).last_hidden_state
        return found, mask


def make_words() -> Words:
    """A text encoder of two layers with random weights."""
    tokenizer = make_tokenizer()
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


def make_unet(size: int, channels: tuple[int, ...] = (32, 64, 96)) -> UNet2DConditionModel:
    """A UNet of about a million and a half parameters for pictures of one channel."""
    depth = len(channels)
    return UNet2DConditionModel(
        sample_size=size,
        in_channels=1,
        out_channels=1,
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


def sampler(steps: int) -> DDIMScheduler:
    """DDIM over the same schedule."""
    scheduler = DDIMScheduler.from_config(noise_schedule().config, clip_sample=True, timestep_spacing="trailing")
    scheduler.set_timesteps(steps)
    return scheduler


def save_models(folder: Path, unet: UNet2DConditionModel, words: Words) -> None:
    """Write both in half precision, as folders that diffusers and transformers read."""
    unet.half().save_pretrained(folder / "unet")
    words.encoder.half().save_pretrained(folder / "text")
    words.tokenizer.save_pretrained(folder / "text")


def load_models(folder: Path) -> tuple[UNet2DConditionModel, Words]:
    """Read what `save_models` wrote, in float32."""
    unet = UNet2DConditionModel.from_pretrained(folder / "unet", torch_dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "text")
    encoder = CLIPTextModel.from_pretrained(folder / "text", dtype=torch.float32)
    return unet.eval(), Words(tokenizer, encoder).eval()
