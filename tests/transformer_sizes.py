"""Sizes with which the transformers of diffusers are made tiny: by the names of their settings, and by class."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers

#: By value the settings that have it.
_NAMES: dict[Any, str] = {
    16: "attention_head_dim pos_embed_max_size ffn_dim cross_attention_head_dim intermediate_size ff_dim",
    2: "num_attention_heads num_layers num_single_layers multiple_of num_heads depth num_cross_attention_heads "
    "n_layers n_heads num_visual_blocks",
    4: "in_channels out_channels condition_dim",
    32: "cross_attention_dim caption_projection_dim rope_max_seq_len hidden_size dim model_dim",
    8: "sample_width sample_height sample_size freq_dim time_embed_dim time_dim",
    9: "sample_frames",
    22: "caption_channels joint_attention_dim text_dim text_embed_dim cap_feat_dim context_in_dim in_text_dim",
    (4, 4, 8): "axes_dims_rope rope_axes_dim axes_dims rope_dim_list",
    5: "max_text_seq_length",
    26: "pooled_projection_dim in_text_dim2",
    1: "num_refiner_layers num_kv_heads n_refiner_layers num_text_blocks",
    (64, 64, 64): "axes_lens",
}
_COMMON = {name: value for value, names in _NAMES.items() for name in names.split()}
#: Classes with those alone.
_ALIKE = (
    "ChronoEditTransformer3DModel CogView3PlusTransformer2DModel LTXVideoTransformer3DModel SanaTransformer2DModel "
    "SkyReelsV2Transformer3DModel AnyFlowTransformer3DModel Kandinsky5Transformer3DModel "
    "MotifVideoTransformer3DModel WanTransformer3DModel "
)
#: What a class has beside or instead of them; `...` leaves the default.
# fmt: off
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    "AllegroTransformer3DModel": {"attention_head_dim": 24, "cross_attention_dim": 48, "sample_frames": 3},
    "AuraFlowTransformer2DModel": {
        "num_mmdit_layers": 2, "num_single_dit_layers": 2, "pos_embed_max_size": 64, "out_channels": ...,
    },
    "BriaTransformer2DModel": {"patch_size": 1, "pooled_projection_dim": ...},
    "ChromaTransformer2DModel": {
        "patch_size": 1, "approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1,
        "out_channels": ...,
    },
    "CogVideoXTransformer3DModel": {"sample_height": 4},
    "CogView4Transformer2DModel": {"rope_axes_dim": (8, 8)},
    "CosmosTransformer3DModel": {"mlp_ratio": 2, "adaln_lora_dim": 4, "max_size": (4, 32, 32)},
    "DiTTransformer2DModel": {"patch_size": 2, "norm_num_groups": 4, "num_embeds_ada_norm": 8},
    "EasyAnimateTransformer3DModel": {"patch_size": 2, "mmdit_layers": 1},
    "Flux2Transformer2DModel": {
        "patch_size": 1, "axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 8, "out_channels": ...,
    },
    "FluxTransformer2DModel": {"patch_size": 1, "guidance_embeds": True, "out_channels": ...},
    "HunyuanDiT2DModel": {
        "patch_size": 2, "cross_attention_dim": 24, "cross_attention_dim_t5": 16, "pooled_projection_dim": 14,
        "text_len": 5, "text_len_t5": 5,
    },
    "HunyuanImageTransformer2DModel": {"patch_size": (2, 2), "rope_axes_dim": (8, 8)},
    "HunyuanVideoTransformer3DModel": {"patch_size": 2, "patch_size_t": 1},
    "LatteTransformer3DModel": {"patch_size": 2, "caption_channels": 24, "video_length": 3, "out_channels": ...},
    "LongCatImageTransformer2DModel": {"patch_size": 1, "pooled_projection_dim": 22},
    "Lumina2Transformer2DModel": {"axes_dim_rope": (4, 4, 8), "out_channels": ...},
    "LuminaNextDiT2DModel": {"cross_attention_dim": 22},
    "MochiTransformer3DModel": {
        "pooled_projection_dim": 16, "text_embed_dim": 24, "max_sequence_length": 5, "out_channels": ...,
    },
    "OvisImageTransformer2DModel": {"patch_size": 1},
    "PixArtTransformer2DModel": {"patch_size": 2, "out_channels": 8},
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "QwenImageTransformer2DModel": {"in_channels": 16},
    "SanaVideoTransformer3DModel": {"rope_max_seq_len": ...},
    "SD3Transformer2DModel": {"patch_size": 2},
    "StableAudioDiTModel": {
        "num_key_value_attention_heads": 1, "time_proj_dim": 8, "global_states_input_dim": 14,
        "cross_attention_input_dim": 22,
    },
    "AceStepTransformer1DModel": {
        "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16, "in_channels": 10,
        "audio_acoustic_hidden_dim": 4, "encoder_hidden_size": 22,
    },
    "AnyFlowFARTransformer3DModel": {"chunk_partition": (1, 2), "compressed_patch_size": (1, 4, 4)},
    "BriaFiboTransformer2DModel": {"patch_size": 1, "text_encoder_dim": 18, "pooled_projection_dim": ...},
    "BriaFibo2Transformer2DModel": {
        "injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8,
        "gist_step": 2, "gist_min_text_len": 2, "gist_max_text_len": 16,
    },
    "ConsisIDTransformer3DModel": {"sample_height": 4},
    "ErnieImageTransformer2DModel": {"ffn_hidden_size": 16, "text_in_dim": 22},
    "Flux3Transformer2DModel": {
        "in_channels": 16, "cond_in_channels": 16, "timestep_channels": 8, "axes_dims_rope": (4, 4, 4, 4),
    },
    "GlmImageTransformer2DModel": {"prior_vq_quantizer_codebook_size": 16},
    "HeliosTransformer3DModel": {"rope_dim": (4, 4, 8)},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "caption_channels": [22, 22], "text_emb_dim": 26, "max_resolution": (16, 16),
        "llama_layers": [0, 1, 2, 3],
    },
    "HunyuanVideo15Transformer3DModel": {"text_embed_2_dim": 18, "image_embed_dim": 14},
    "HunyuanVideoFramepackTransformer3DModel": {"has_clean_x_embedder": True, "has_image_proj": True},
    "Ideogram4Transformer2DModel": {
        "in_channels": 16, "adaln_dim": 8, "llm_features_dim": 22, "mrope_section": (4, 2, 2),
    },
    "JoyImageEditTransformer3DModel": {"out_channels": ...},
    "JoyImageEditPlusTransformer3DModel": {"out_channels": ...},
    "Kandinsky6Transformer3DModel": {"in_visual_dim": 4, "out_visual_dim": 4, "in_audio_dim": 6, "out_audio_dim": 6},
    "Krea2Transformer2DModel": {
        "in_channels": 16, "num_key_value_heads": 1, "timestep_embed_dim": 8, "text_hidden_dim": 22,
        "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
        "text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
    },
    "LongCatAudioDiTTransformer": {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 22, "latent_dim": 6},
    "LTX2VideoTransformer3DModel": {
        "audio_in_channels": 6, "audio_out_channels": 6, "audio_num_attention_heads": 2, "audio_attention_head_dim": 8,
        "audio_cross_attention_dim": 16,
    },
    "MiniMaxMusic3Transformer1DModel": {
        "condition_dim": 22, "ff_inner_dim": 16, "rotary_dim": 8, "fourier_embedding_dim": 8,
    },
    "NucleusMoEImageTransformer2DModel": {
        "in_channels": 16, "num_experts": 2, "moe_intermediate_dim": 16, "capacity_factors": [2.0, 2.0],
        "dense_moe_strategy": "leave_first_block_dense",
    },
    "OmniGenTransformer2DModel": {
        "num_key_value_heads": 2, "pad_token_id": 0, "vocab_size": 16, "max_position_embeddings": 64,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "su"}, "time_step_dim": 8,
        "in_channels": ...,
    },
    "QwenImage21Transformer2DModel": {"in_channels": 16, "out_channels": 16},
    "StableAudio3DiTModel": {
        "io_channels": 4, "embed_dim": 64, "cond_token_dim": 22, "global_cond_dim": 14, "local_add_cond_dim": 6,
        "timestep_features_dim": 8, "num_memory_tokens": 3,
    },
    "Transformer2DModel": {"patch_size": 2, "norm_type": "ada_norm_single"},
    "WanAnimateTransformer3DModel": {
        "in_channels": 12, "latent_channels": 4, "image_dim": None,
        "motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4}, "motion_encoder_size": 16, "motion_style_dim": 8,
        "motion_dim": 4, "motion_encoder_dim": 8, "face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    },
    "ZImageTransformer2DModel": {"n_kv_heads": 2},
    "WanVACETransformer3DModel": {"vace_layers": [0], "vace_in_channels": 4},
}
# fmt: on


#: Names of the classes.
NAMES = (*_ALIKE.split(), *_EXCEPTIONS)


def sizes(name: str) -> dict[str, Any]:
    """The sizes of a class."""
    known = inspect.signature(getattr(diffusers, name).__init__).parameters
    common = {setting: value for setting, value in _COMMON.items() if setting in known}
    return {setting: value for setting, value in (common | _EXCEPTIONS.get(name, {})).items() if value is not ...}
