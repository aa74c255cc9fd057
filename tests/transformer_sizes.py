"""Sizes with which the transformers of diffusers are made tiny, by the name of the class."""

from __future__ import annotations

from typing import Any

_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_SIZES = _HEADS | {"num_layers": 2, "in_channels": 4}
_ALIKE = _SIZES | {"out_channels": 4}
_SQUARE = _SIZES | {"sample_size": 8, "patch_size": 2}
_JOINT = _SIZES | {"joint_attention_dim": 22}
_PACKED = _JOINT | {"patch_size": 1, "num_single_layers": 2, "axes_dims_rope": [4, 4, 8]}
_COG = _SIZES | {"text_embed_dim": 22, "time_embed_dim": 8}
_COG_VIDEO = _COG | {
    "out_channels": 4,
    "sample_width": 8,
    "sample_height": 4,
    "sample_frames": 9,
    "max_text_seq_length": 5,
}
_COG_VIEW = _COG | {"out_channels": 4, "condition_dim": 4, "pos_embed_max_size": 16, "sample_size": 8}
_SANA = _ALIKE | {
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": 22,
    "sample_size": 8,
}
_WAN = _ALIKE | {"text_dim": 22, "freq_dim": 8, "ffn_dim": 16, "rope_max_seq_len": 32}
_HUNYUAN = _ALIKE | {"num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 22}
_TOKENS = _SIZES | {"in_channels": 16}
_JOY = {
    "in_channels": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 22,
    "num_layers": 2,
    "rope_dim_list": [4, 4, 8],
}
_KANDINSKY = {
    "in_text_dim": 22,
    "in_text_dim2": 26,
    "time_dim": 8,
    "model_dim": 32,
    "ff_dim": 16,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 8),
}
_LTX2 = _ALIKE | {
    "cross_attention_dim": 32,
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "caption_channels": 22,
}
_SD3 = _SQUARE | {
    "out_channels": 4,
    "joint_attention_dim": 22,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 26,
    "pos_embed_max_size": 16,
}

#: Sizes by the name of the class.
SIZES: dict[str, dict[str, Any]] = {
    "AllegroTransformer3DModel": _ALIKE
    | {
        "attention_head_dim": 24,
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
    "CogVideoXTransformer3DModel": _COG_VIDEO,
    "CogView3PlusTransformer2DModel": _COG_VIEW,
    "CogView4Transformer2DModel": _COG_VIEW | {"rope_axes_dim": (8, 8)},
    "CosmosTransformer3DModel": _ALIKE
    | {"mlp_ratio": 2, "text_embed_dim": 22, "adaln_lora_dim": 4, "max_size": (4, 32, 32)},
    "DiTTransformer2DModel": _SQUARE | {"out_channels": 4, "norm_num_groups": 4, "num_embeds_ada_norm": 8},
    "EasyAnimateTransformer3DModel": _ALIKE
    | {
        "patch_size": 2,
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
    "LTXVideoTransformer3DModel": _ALIKE | {"cross_attention_dim": 32, "caption_channels": 22},
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
    "StableAudioDiTModel": _ALIKE
    | {
        "sample_size": 8,
        "num_key_value_attention_heads": 1,
        "cross_attention_dim": 32,
        "time_proj_dim": 8,
        "global_states_input_dim": 14,
        "cross_attention_input_dim": 22,
    },
    "AceStepTransformer1DModel": {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "in_channels": 10,
        "audio_acoustic_hidden_dim": 4,
        "encoder_hidden_size": 22,
    },
    "AnyFlowFARTransformer3DModel": _WAN | {"chunk_partition": (1, 2), "compressed_patch_size": (1, 4, 4)},
    "AnyFlowTransformer3DModel": _WAN,
    "BriaFiboTransformer2DModel": _PACKED | {"text_encoder_dim": 18},
    "BriaFibo2Transformer2DModel": {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "cap_feat_dim": 22,
        "injection_layer_ids": (1,),
        "perceiver_num_layers": 1,
        "min_num_gist_tokens": 4,
        "max_num_gist_tokens": 8,
        "gist_step": 2,
        "gist_min_text_len": 2,
        "gist_max_text_len": 16,
        "axes_dims": (4, 4, 8),
        "axes_lens": (64, 64, 64),
    },
    "ConsisIDTransformer3DModel": _COG_VIDEO,
    "ErnieImageTransformer2DModel": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_layers": 2,
        "ffn_hidden_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "text_in_dim": 22,
        "rope_axes_dim": (4, 4, 8),
    },
    "Flux3Transformer2DModel": _TOKENS
    | {
        "cond_in_channels": 16,
        "num_single_layers": 2,
        "joint_attention_dim": 22,
        "timestep_channels": 8,
        "axes_dims_rope": (4, 4, 4, 4),
    },
    "GlmImageTransformer2DModel": _ALIKE
    | {"text_embed_dim": 22, "time_embed_dim": 8, "condition_dim": 4, "prior_vq_quantizer_codebook_size": 16},
    "HeliosTransformer3DModel": _ALIKE | {"text_dim": 22, "freq_dim": 8, "ffn_dim": 16, "rope_dim": (4, 4, 8)},
    "HiDreamImageTransformer2DModel": _ALIKE
    | {
        "patch_size": 2,
        "num_single_layers": 2,
        "caption_channels": [22, 22],
        "text_emb_dim": 26,
        "axes_dims_rope": (4, 4, 8),
        "max_resolution": (16, 16),
        "llama_layers": [0, 1, 2, 3],
    },
    "HunyuanVideo15Transformer3DModel": _ALIKE
    | {
        "num_refiner_layers": 1,
        "text_embed_dim": 22,
        "text_embed_2_dim": 18,
        "image_embed_dim": 14,
        "rope_axes_dim": (4, 4, 8),
    },
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN
    | {"pooled_projection_dim": 26, "rope_axes_dim": (4, 4, 8), "has_clean_x_embedder": True, "has_image_proj": True},
    "Ideogram4Transformer2DModel": {
        "in_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "adaln_dim": 8,
        "llm_features_dim": 22,
        "mrope_section": (4, 2, 2),
    },
    "JoyImageEditTransformer3DModel": _JOY,
    "JoyImageEditPlusTransformer3DModel": _JOY,
    "Kandinsky5Transformer3DModel": _KANDINSKY,
    "Kandinsky6Transformer3DModel": _KANDINSKY
    | {"in_visual_dim": 4, "out_visual_dim": 4, "in_audio_dim": 6, "out_audio_dim": 6},
    "Krea2Transformer2DModel": _TOKENS
    | {
        "num_key_value_heads": 1,
        "intermediate_size": 16,
        "timestep_embed_dim": 8,
        "text_hidden_dim": 22,
        "num_text_layers": 3,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 4, 8),
    },
    "LongCatAudioDiTTransformer": {"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 22, "latent_dim": 6},
    "LTX2VideoTransformer3DModel": _LTX2,
    "MiniMaxMusic3Transformer1DModel": _SIZES
    | {"condition_dim": 22, "ff_inner_dim": 16, "rotary_dim": 8, "fourier_embedding_dim": 8},
    "MotifVideoTransformer3DModel": _ALIKE | {"num_single_layers": 2, "text_embed_dim": 22, "rope_axes_dim": (4, 4, 8)},
    "NucleusMoEImageTransformer2DModel": _TOKENS
    | {
        "out_channels": 4,
        "joint_attention_dim": 22,
        "axes_dims_rope": (4, 4, 8),
        "num_experts": 2,
        "moe_intermediate_dim": 16,
        "capacity_factors": [2.0, 2.0],
        "dense_moe_strategy": "leave_first_block_dense",
    },
    "OmniGenTransformer2DModel": {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_layers": 2,
        "pad_token_id": 0,
        "vocab_size": 16,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "type": "su"},
        "pos_embed_max_size": 16,
        "time_step_dim": 8,
    },
    "QwenImage21Transformer2DModel": _TOKENS | {"out_channels": 16, "context_in_dim": 22, "axes_dims_rope": (4, 4, 8)},
    "StableAudio3DiTModel": {
        "io_channels": 4,
        "embed_dim": 64,
        "depth": 2,
        "num_heads": 2,
        "cond_token_dim": 22,
        "global_cond_dim": 14,
        "local_add_cond_dim": 6,
        "timestep_features_dim": 8,
        "num_memory_tokens": 3,
    },
    "Transformer2DModel": _SQUARE
    | {"out_channels": 4, "cross_attention_dim": 32, "caption_channels": 22, "norm_type": "ada_norm_single"},
    "WanAnimateTransformer3DModel": _WAN
    | {
        "in_channels": 12,
        "latent_channels": 4,
        "image_dim": None,
        "motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4},
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4,
        "dim": 32,
        "n_layers": 2,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 22,
        "axes_dims": [4, 4, 8],
        "axes_lens": [64, 64, 64],
    },
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN | {"vace_layers": [0], "vace_in_channels": 4},
}
