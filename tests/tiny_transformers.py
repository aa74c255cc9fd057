"""Makers of tiny random diffusion transformers, one for each family of diffusers: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

import mmattn
from mmattn.testing.case import stir
from tests.tiny import MEMORY_DIM

TEXT_LENGTH = 5
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_SIZES = _HEADS | {"num_layers": 2, "in_channels": 4}
_SQUARE = _SIZES | {"sample_size": 8, "patch_size": 2}
_JOINT = _SIZES | {"joint_attention_dim": 22}
_PACKED = _JOINT | {"patch_size": 1, "num_single_layers": 2, "axes_dims_rope": [4, 4, 8]}
_COG = _SIZES | {"text_embed_dim": 22, "time_embed_dim": 8}
_SANA = _SIZES | {
    "out_channels": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 22,
    "sample_size": 8,
}
_WAN = _SIZES | {"text_dim": 22, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 32, "out_channels": 4}
_HUNYUAN = _SIZES | {"out_channels": 4, "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 22}
_SD3 = _SQUARE | {
    "out_channels": 4,
    "joint_attention_dim": 22,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 26,
    "pos_embed_max_size": 16,
}

#: Sizes by the name of the class.
SIZES: dict[str, dict[str, Any]] = {
    "AllegroTransformer3DModel": _SIZES
    | {
        "attention_head_dim": 24,
        "out_channels": 4,
        "cross_attention_dim": 48,
        "sample_width": 8,
        "sample_height": 8,
        "sample_frames": 3,
        "caption_channels": 22,
    },
    "AuraFlowTransformer2DModel": _HEADS
    | {
        "sample_size": 8,
        "in_channels": 4,
        "num_mmdit_layers": 2,
        "num_single_dit_layers": 2,
        "joint_attention_dim": 22,
        "caption_projection_dim": 32,
        "pos_embed_max_size": 64,
    },
    "BriaTransformer2DModel": _PACKED,
    "ChromaTransformer2DModel": _PACKED
    | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
    "ChronoEditTransformer3DModel": _WAN,
    "CogVideoXTransformer3DModel": _COG
    | {"out_channels": 4, "sample_width": 8, "sample_height": 4, "sample_frames": 9, "max_text_seq_length": 5},
    "CogView3PlusTransformer2DModel": _COG
    | {"out_channels": 4, "condition_dim": 4, "pos_embed_max_size": 16, "sample_size": 8},
    "CogView4Transformer2DModel": _COG
    | {"out_channels": 4, "condition_dim": 4, "pos_embed_max_size": 16, "sample_size": 8, "rope_axes_dim": (8, 8)},
    "CosmosTransformer3DModel": _SIZES
    | {"out_channels": 4, "mlp_ratio": 2, "text_embed_dim": 22, "adaln_lora_dim": 4, "max_size": (4, 32, 32)},
    "DiTTransformer2DModel": _SQUARE | {"out_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 8},
    "EasyAnimateTransformer3DModel": _SIZES
    | {
        "patch_size": 2,
        "out_channels": 4,
        "sample_width": 8,
        "sample_height": 8,
        "mmdit_layers": 1,
        "time_embed_dim": 8,
        "text_embed_dim": 22,
    },
    "Flux2Transformer2DModel": _PACKED | {"timestep_guidance_channels": 8, "axes_dims_rope": [4, 4, 4, 4]},
    "FluxTransformer2DModel": _PACKED | {"pooled_projection_dim": 26, "guidance_embeds": True},
    "HunyuanDiT2DModel": _SQUARE
    | {
        "hidden_size": 32,
        "cross_attention_dim": 24,
        "cross_attention_dim_t5": 16,
        "pooled_projection_dim": 14,
        "text_len": 5,
        "text_len_t5": 5,
    },
    "HunyuanImageTransformer2DModel": _HUNYUAN | {"patch_size": (2, 2), "rope_axes_dim": (8, 8)},
    "HunyuanVideoTransformer3DModel": _HUNYUAN
    | {"patch_size": 2, "patch_size_t": 1, "pooled_projection_dim": 26, "rope_axes_dim": (4, 4, 8)},
    "LatteTransformer3DModel": _SQUARE | {"caption_channels": 24, "cross_attention_dim": 32, "video_length": 3},
    "LongCatImageTransformer2DModel": _PACKED | {"pooled_projection_dim": 22},
    "LTXVideoTransformer3DModel": _SIZES | {"out_channels": 4, "cross_attention_dim": 32, "caption_channels": 22},
    "Lumina2Transformer2DModel": {
        "sample_size": 8,
        "in_channels": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "multiple_of": 2,
        "cap_feat_dim": 22,
        "axes_dim_rope": (4, 4, 8),
        "axes_lens": (64, 64, 64),
    },
    "LuminaNextDiT2DModel": {
        "sample_size": 8,
        "in_channels": 4,
        "hidden_size": 32,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "cross_attention_dim": 22,
        "multiple_of": 2,
    },
    "MochiTransformer3DModel": _SIZES
    | {"pooled_projection_dim": 16, "text_embed_dim": 24, "time_embed_dim": 8, "max_sequence_length": 5},
    "OvisImageTransformer2DModel": _PACKED | {"axes_dims_rope": (4, 4, 8), "out_channels": 4},
    "PixArtTransformer2DModel": _SQUARE | {"out_channels": 8, "cross_attention_dim": 32, "caption_channels": 22},
    "PRXTransformer2DModel": {
        "in_channels": 4,
        "context_in_dim": 22,
        "hidden_size": 32,
        "num_heads": 2,
        "depth": 2,
        "axes_dim": [8, 8],
    },
    "QwenImageTransformer2DModel": _JOINT | {"in_channels": 16, "out_channels": 4, "axes_dims_rope": (4, 4, 8)},
    "SanaTransformer2DModel": _SANA,
    "SanaVideoTransformer3DModel": _SANA,
    "SD3Transformer2DModel": _SD3,
    "SkyReelsV2Transformer3DModel": _WAN,
    "StableAudioDiTModel": _SIZES
    | {
        "sample_size": 8,
        "num_key_value_attention_heads": 1,
        "out_channels": 4,
        "cross_attention_dim": 32,
        "time_proj_dim": 8,
        "global_states_input_dim": 14,
        "cross_attention_input_dim": 22,
    },
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN | {"vace_layers": [0], "vace_in_channels": 4},
}


def make(family: str = "SD3Transformer2DModel", seed: int = 0, **changes: Any) -> nn.Module:
    """A tiny random transformer in eval mode, the same for the same `seed`; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        host: nn.Module = getattr(diffusers, family)(**SIZES[family] | changes).eval()
        with torch.no_grad():
            for parameter in host.parameters():
                if not bool(parameter.isfinite().all()) or bool((parameter == 0).all()):
                    parameter.normal_(0, 0.1)  # left empty, or begun as nothing
    return host


def attach(host: Any, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with an adapter, its values random unless told."""
    model = mmattn.attach(host, mmattn.DecoupledAdapter(**{"memory_dim": MEMORY_DIM} | settings), name)
    if opened:
        stir(model.adapter(name))
    return model


def given(model: Any, rows: int = 3, seed: int = 0) -> dict[str, Any]:
    """What a transformer is called with: picture, time step, text and whatever else it takes."""
    batch: dict[str, Any] = model.example_batch(torch.Generator().manual_seed(seed), None, rows)
    return batch


@torch.no_grad()
def run(model: Any, batch: dict[str, Any], **more: Any) -> Tensor:
    """What it predicts."""
    answer = model(**batch, **more)
    found: Tensor = answer if isinstance(answer, Tensor) else answer[0]
    return found
