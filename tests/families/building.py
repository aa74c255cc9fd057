"""Tiny random models of every family that transformers has: sizes by the names that configs give them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 101
LAYERS = 4
LARGEST = 40_000_000  # weights
MEMORY_DIM = 13

_NAMES: dict[Any, str] = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size n_embd d_model embedding_size word_embed_proj_dim lru_width dim attn_hidden_size embed_dim",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dff d_ff ffn_hidden_size ffn_intermediate_size "
    "n_inner",
    LAYERS: "num_hidden_layers n_layer n_layers decoder_layers encoder_layers num_layers num_decoder_layers "
    "speech_encoder_layers",
    "4 heads": "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads",
    "2 heads": "num_key_value_heads linear_num_key_heads num_key_heads index_n_heads",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim linear_value_head_dim state_size "
    "mamba_d_state d_kv query_pre_attn_scalar hidden_size_per_layer_input ssm_state_size",
    16: "qk_head_dim q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim mamba_chunk_size chunk_size index_head_dim",
    128: "max_position_embeddings n_positions max_seq_len",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size",
    9: "sliding_window attention_window_size",
    "4 of them": "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads mamba_n_heads "
    "mamba_num_heads mamba_dt_rank laurel_rank rotary_dim",
    "2 of them": "num_experts_per_tok moe_k moe_topk mamba_expand type_vocab_size",
    "1 of them": "n_group topk_group n_shared_experts mamba_n_groups n_groups zero_expert_num decoder_sparse_step "
    "first_k_dense_replace",
    0.0: "resid_pdrop embd_pdrop attn_pdrop hidden_dropout attention_dropout activation_dropout dropout dropout_rate "
    "hidden_dropout_prob attention_probs_dropout_prob residual_dropout embedding_dropout layerdrop decoder_layerdrop "
    "encoder_layerdrop classifier_dropout",
    0.1: "initializer_range init_std",
}
SIZES: dict[str, Any] = {
    name: int(value[0]) if isinstance(value, str) else value
    for value, names in _NAMES.items()
    for name in names.split()
}
SIZES |= {"index_topk": 64, "num_kv_shared_layers": 0, "mlp_only_layers": []}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "scale_embedding": False}
SIZES |= {"image_size": 32, "patch_size": 8, "num_mel_bins": 16, "conv_dim": [32, 32], "conv_kernel": [10, 4]}
SIZES |= {"conv_stride": [5, 4], "num_feat_extract_layers": 2, "projection_dim": 24, "num_conv_pos_embeddings": 16}
SIZES |= {"num_conv_pos_embedding_groups": 4}
SIZES |= {"image_token_id": 99, "image_token_index": 99, "video_token_id": 98, "video_token_index": 98}
SIZES |= {"audio_token_id": 97, "boi_token_id": 96, "eoi_token_id": 95, "vision_start_token_id": 94}
SIZES |= {"vision_end_token_id": 93, "eoa_token_id": 92, "boa_token_id": 91, "decoder_start_token_id": 1}

_OWN_HEADS = {"num_key_value_heads": 4}
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_NO_TYPES = {"layer_types": None}
#: What is not to be told by the names of settings; None leaves one out.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash"]
        + ["minicpm3", "youtu", "dots3_note_text", "sarvam_mla"],
        _OWN_HEADS,
    ),
    **dict.fromkeys(
        ["qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm46v_text", "glm4v_moe_text", "paddleocr_vl_text"]
        + ["glm_ocr_text", "qwen3_vl_text", "qwen3_vl_moe_text"],
        _THREE_AXES,
    ),
    "bailing_hybrid": _OWN_HEADS | {"group_norm_size": 1, "partial_rotary_factor": 1.0},
    "bamba": _NO_TYPES | {"attn_layer_indices": [1, 3]},
    "falcon_h1": _NO_TYPES | {"mamba_d_ssm": 64},
    "recurrent_gemma": _NO_TYPES,
    "jamba": _NO_TYPES | {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "zamba": _NO_TYPES | {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": _NO_TYPES | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "cohere_compass_text": {"layer_types": ["full_attention"] * LAYERS},
    "kimi_linear": _OWN_HEADS | {"num_expert_group": 1, "num_experts_per_token": 2},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "xlstm": {"num_heads": 2, "head_dim": None, "chunk_size": None},
    "reformer": {"axial_pos_embds": False},
    "whisper": {"max_source_positions": 30},
    "xlm": {"emb_dim": 32, "n_words": VOCABULARY},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
#: Parts of a model of several, whose configs are made small, too.
_PARTS = ("text", "decoder", "encoder", "vision", "audio", "vq", "llm", "thinker")


def tiny_config(family: str, writes: bool = True) -> Any:
    """The config of a tiny model."""
    kind, exceptions = CONFIG_MAPPING[family], EXCEPTIONS.get(family, {})
    try:
        made = _tiny(kind, exceptions, lists=False)
    except Exception:  # a size for each stage, as pyramids have
        made = _tiny(kind, exceptions, lists=True)
    if writes and hasattr(made, "is_decoder"):
        made.is_decoder = True
    return made


def _tiny(kind: Any, exceptions: Mapping[str, Any], lists: bool) -> Any:
    usual = kind()
    aliases = getattr(kind, "attribute_map", None) or {}
    known = set(usual.to_dict()) | set(inspect.signature(kind.__init__).parameters)
    chosen = {name: value for name, value in SIZES.items() if name in known and name not in aliases}
    given = {name: _as_usual(value, getattr(usual, name, None), lists) for name, value in chosen.items()}
    types = getattr(usual, "layer_types", None)
    if isinstance(types, (list, tuple)) and not isinstance(getattr(kind, "layer_types", None), property):
        given["layer_types"] = (list(dict.fromkeys(types)) * LAYERS)[:LAYERS]
    for name in getattr(kind, "sub_configs", None) or {}:
        part = getattr(usual, name, None)
        if part is not None and any(word in name for word in _PARTS):
            given[name] = _tiny(type(part), EXCEPTIONS.get(part.model_type, {}), lists).to_dict()
    given |= exceptions
    return kind(**{name: value for name, value in given.items() if value is not None or name == "eos_token_id"})


def _as_usual(value: Any, usual: Any, lists: bool) -> Any:
    """A size; a list of them where the setting is one and `lists` are asked for."""
    if isinstance(value, list):
        return usual if isinstance(usual, int) else value
    several = lists and isinstance(value, int) and isinstance(usual, (list, tuple)) and usual
    return [value] * len(usual) if several else value


def tiny_model(family: str, auto: Any) -> PreTrainedModel:
    """A tiny random model of a family, in evaluation mode, the same each time."""
    made = tiny_config(family, auto is AutoModelForCausalLM)
    with torch.device("meta"):
        try:
            size = weights(auto.from_config(made))
        except (RuntimeError, NotImplementedError):  # something computes as it is made
            size = 0
    if size > LARGEST:
        raise MemoryError(f"{size:,} weights")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(made)
        if weights(model) > LARGEST:
            raise MemoryError(f"{weights(model):,} weights")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim >= 2 and not any(part in name for part in ("A_log", "conv", "norm", ".D", "dt_")):
                    parameter.normal_(0.0, 0.15)
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.pad_token_id, settings.bos_token_id, settings.eos_token_id = 0, 1, None
        settings.forced_bos_token_id = settings.forced_eos_token_id = None
        settings.suppress_tokens = settings.begin_suppress_tokens = None
    return model.eval()


def weights(model: nn.Module) -> int:
    """How many a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
