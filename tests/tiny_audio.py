"""Tiny audio encoders of transformers with random weights, and sounds for them."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor

WIDTH = 24
#: Samples in a second that all of them read.
RATE = 16000
SPEECH = {
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2Model"),
    "hubert": ("HubertConfig", "HubertModel"),
    "wavlm": ("WavLMConfig", "WavLMModel"),
}
FAMILIES = ("whisper", "wav2vec2", "hubert", "wavlm", "clap", "clap-fused")


def tiny_audio(family: str) -> tuple[Any, Any]:
    """A model, whole as its checkpoints are, and its feature extractor."""
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 17}
    if family == "whisper":
        config: Any = transformers.WhisperConfig(
            d_model=WIDTH, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=17, decoder_ffn_dim=17, max_source_positions=50, num_mel_bins=19, vocab_size=61,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )  # fmt: skip
        return transformers.WhisperModel(config), transformers.WhisperFeatureExtractor(19, chunk_length=1)
    if family in SPEECH:
        names = SPEECH[family]
        config = getattr(transformers, names[0])(
            **sizes, conv_dim=(8, 8, 8), conv_kernel=(10, 3, 3), conv_stride=(5, 4, 4), num_feat_extract_layers=3,
            num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
            # WavLM's: with more of them tiny positions are all alike.
            num_buckets=20, max_bucket_distance=50,
        )  # fmt: skip
        return getattr(transformers, names[1])(config), transformers.Wav2Vec2FeatureExtractor()
    audio = {
        "patch_embeds_hidden_size": WIDTH // 2, "hidden_size": WIDTH, "depths": [1, 1], "num_attention_heads": [2, 2],
        "spec_size": 64, "window_size": 2, "num_mel_bins": 16, "num_classes": 7, "enable_fusion": family != "clap",
    }  # fmt: skip
    text = {**sizes, "vocab_size": 61, "max_position_embeddings": 40, "pad_token_id": 1}
    config = transformers.ClapConfig(audio_config=audio, text_config=text, projection_dim=13)
    features = transformers.ClapFeatureExtractor(
        16, sampling_rate=RATE, hop_length=160, max_length_s=1, fft_window_size=256, frequency_max=8000,
        truncation="rand_trunc" if family == "clap" else "fusion",
    )  # fmt: skip
    return transformers.ClapModel(config), features


def chirp(seconds: float, rate: int = RATE) -> Tensor:
    """A tone that rises, with a little noise, (samples,)."""
    times = torch.arange(round(seconds * rate)) / rate
    return 0.4 * torch.sin(2 * math.pi * (200 + 900 * times) * times) + 0.01 * torch.randn(len(times))
