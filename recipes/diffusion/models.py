"""The models of both stages: a small UNet or transformer, a text encoder, the control of stage B, and their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from diffusers import DDPMScheduler, SD3Transformer2DModel, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, get_scheduler

import mmattn
from mmattn import training
from mmattn.encoders import StyleEncoder
from mmattn.pipelines import DiffusionHost, PromptEncoder

from .data import vocabulary
from .settings import ModelSettings

Denoiser = mmattn.hosts.AdaptedUNet | mmattn.hosts.AdaptedDiffusionTransformer

WIDTH = 64
MAX_LENGTH = 16


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word of these texts."""
    splits = pre_tokenizers.Whitespace()
    words = sorted({word for text in texts for word, _ in splits.pre_tokenize_str(text.lower())})
    ids = {word: index for index, word in enumerate(["[pad]", "[begin]", "[end]", "[unknown]", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[unknown]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([splits])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[begin] $A [end]", special_tokens=[("[begin]", ids["[begin]"]), ("[end]", ids["[end]"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[pad]",
        bos_token="[begin]",
        eos_token="[end]",
        unk_token="[unknown]",
        model_max_length=MAX_LENGTH,
    )


def make_prompt_encoder(attends_to_padding: bool) -> PromptEncoder:
    """Return a text encoder of two layers with random weights."""
    tokenizer = make_tokenizer(vocabulary())
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        projection_dim=WIDTH,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return PromptEncoder(tokenizer, CLIPTextModel(config), attends_to_padding)


def make_denoiser(settings: ModelSettings) -> UNet2DConditionModel | SD3Transformer2DModel:
    """Return the host of stage A with random weights: a UNet of 1.7, or a transformer of 2.9 million parameters."""
    if settings.kind == "transformer":
        return make_transformer(settings)
    depth = len(settings.channels)
    return UNet2DConditionModel(
        sample_size=settings.size,
        in_channels=1,
        out_channels=1,
        block_out_channels=settings.channels,
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * (depth - 1)),
        up_block_types=(*["CrossAttnUpBlock2D"] * (depth - 1), "UpBlock2D"),
    )


def make_transformer(settings: ModelSettings) -> SD3Transformer2DModel:
    """Return a transformer with picture and text in one sequence (arXiv 2403.03206)."""
    transformer = SD3Transformer2DModel(
        sample_size=settings.size,
        patch_size=settings.patch,
        in_channels=1,
        out_channels=1,
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


def attach_without_adapter(host: DiffusionHost) -> Denoiser:
    """Return the host with its text through the core, unless it was trained to attend to padding."""
    model: Denoiser = mmattn.attach(host.unet)
    return model if host.prompts.attends_to_padding else model.use_core()


class Concatenated(nn.Module):
    """The control of stage B: the example as more words after the text, for the host's own projections."""

    def __init__(self, parameters: int, text_dim: int, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        hidden = round((parameters - 2 * width - text_dim) / (width + text_dim + 1))
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, text_dim)

    def forward(self, text: Tensor, mask: Tensor, memory: mmattn.Memory) -> tuple[Tensor, Tensor]:
        """Return text (b, m + 16, e) and its mask; masked memory stays masked."""
        slots = self.down(nn.functional.gelu(self.up(self.norm(memory.tokens))))
        visible = torch.ones_like(slots[..., 0], dtype=torch.bool) if memory.mask is None else memory.mask
        return torch.cat([text, slots], 1), torch.cat([mask, visible], 1)


def style_memory(encoder: StyleEncoder, pictures: Tensor) -> mmattn.Memory:
    """Return a memory (b, 16, 64) of pictures (b, c, size, size) from -1 to 1."""
    with torch.no_grad():
        return mmattn.Memory(encoder.features(pictures.to(encoder.device)).flatten(2).transpose(1, 2))


def predict(
    model: Denoiser,
    noisy: Tensor,
    times: Tensor,
    text: Tensor,
    mask: Tensor,
    inputs: dict[str, Tensor],
    memory: mmattn.Memory | None = None,
) -> Tensor:
    """Return the host's prediction (b, c, size, size) at time steps (b,), with text (b, m, e) and its mask."""
    with model.condition(memory, text_mask=mask if model.through_core else None):
        predicted: Tensor = model.predict(noisy, times, text, **inputs)
    return predicted


def denoising_loss(
    schedule: DDPMScheduler,
    predict: Callable[[Tensor, Tensor], Tensor],
    clean: Tensor,
    noise: Tensor,
    times: Tensor,
    min_snr: float,
) -> Tensor:
    """Return the min-SNR weighted error (b,) (arXiv 2303.09556) of the predicted v, or noise."""
    noisy, snr = schedule.add_noise(clean, noise, times), compute_snr(schedule, times)
    if schedule.config.prediction_type == "v_prediction":
        target, weight = schedule.get_velocity(clean, noise, times), snr.clamp(max=min_snr) / (snr + 1)
    else:
        target, weight = noise, snr.clamp(max=min_snr) / snr
    return weight * (predict(noisy, times) - target).square().mean((1, 2, 3))


def minimise(
    module: nn.Module,
    compute_loss: Callable[[], Tensor],
    optim: training.OptimSettings,
    *,
    label: str,
    progress: bool,
) -> Iterator[float]:
    """Train a module with AdamW; yield the loss after each step."""
    groups = training.parameter_groups(module, optim.learning_rate, weight_decay=optim.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, optim.adam_beta2))
    scheduler = get_scheduler(optim.lr_scheduler_type, optimizer, optim.warmup_steps, optim.max_steps)
    for _ in training.tracked(optim.max_steps, label, progress):
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        yield float(loss.detach())


def save_models(folder: Path, denoiser: UNet2DConditionModel | SD3Transformer2DModel, prompts: PromptEncoder) -> None:
    """Write both in half precision, as folders for diffusers and transformers."""
    kind = "unet" if isinstance(denoiser, UNet2DConditionModel) else "transformer"
    denoiser.half().save_pretrained(folder / kind)
    prompts.encoder.half().save_pretrained(folder / "text")
    prompts.tokenizer.save_pretrained(folder / "text")
