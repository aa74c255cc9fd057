"""Tiny random Idefics, Mllama and OpenFlamingo: their models or equations, their text parts, and what they answer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import (
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

from tests import tiny

ROWS, LENGTH, PATCHES, IMAGES = 3, 7, 5, 2
SLOTS = IMAGES * PATCHES
HOST = {"hidden_size": 32, "intermediate_size": 53, "num_attention_heads": 4, "vocab_size": tiny.VOCAB}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
# How many images began at or before each token: from the middle on, from the start, and never.
BEGUN = torch.tensor([[0, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
ALWAYS = torch.tensor([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 2, 2, 2]])


def randomised(model, seed=3):
    """The model with weights that matter: matrices large, norms around 1, gates open."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 0.7)
    return model.eval()


def states(e, seed=0):
    """States of images (b, m, e), of which the second row has one image only and the third none, and their memory."""
    tokens = torch.randn(ROWS, SLOTS, e, generator=torch.Generator().manual_seed(seed))
    segments = torch.arange(SLOTS).expand(ROWS, SLOTS) // PATCHES
    return tokens, segments


def seen(begun):
    """Which images (b, l, i) each token sees: the latest."""
    return begun[..., None] == torch.arange(1, IMAGES + 1)


def idefics(alpha="float", interval=1, layers=4, **changes):
    config = IdeficsConfig(
        **HOST,
        **SPECIAL,
        num_hidden_layers=layers,
        cross_layer_interval=interval,
        alpha_type=alpha,
        rms_norm_eps=1e-3,
        vision_config={
            "embed_dim": tiny.MEMORY_DIM,
            "intermediate_size": 17,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 8,
            "patch_size": 4,
        },
        **changes,
    )
    return randomised(IdeficsForVisionText2Text(config))


def text_part(model, layers, **changes):
    """The Llama that a published model is built around, on copies of its weights."""
    config = LlamaConfig(**(HOST | SPECIAL | {"num_hidden_layers": len(layers), "rms_norm_eps": 1e-3} | changes))
    lm = LlamaForCausalLM(config).eval()
    theirs = {name.replace("model.language_model.", "model."): value for name, value in model.state_dict().items()}
    state = {}
    for name in lm.state_dict():
        there = name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            there = f"model.layers.{layers[int(number)]}.{rest}"
        state[name] = theirs[there][: tiny.VOCAB] if "embed_tokens" in name else theirs[there]
    lm.load_state_dict(state)
    return lm


def by_idefics(model, ids, tokens, begun):
    given = tokens.unflatten(1, (IMAGES, PATCHES))
    with torch.no_grad():
        return model(ids, image_encoder_embeddings=given, image_attention_mask=seen(begun).long()).logits


def mllama(cross=(1, 3), layers=5, kv_heads=2):
    text = HOST | SPECIAL | {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-3}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 17,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "max_num_tiles": 1,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    config = MllamaConfig(text_config=text | {"cross_attention_layers": list(cross)}, vision_config=vision)
    return randomised(MllamaForConditionalGeneration(config))


def around(theirs, cross):
    """The Llama made of the layers that are not cross-attention."""
    text = theirs.config.text_config
    layers = [layer for layer in range(text.num_hidden_layers) if layer not in cross]
    kv_heads = text.num_key_value_heads
    return text_part(theirs, layers, num_key_value_heads=kv_heads, rope_parameters=text.rope_parameters)


def by_mllama(model, ids, tokens, begun):
    # Without a mask its SDPA is causal in the slots; everything is said by ones.
    mask = torch.ones(ROWS, LENGTH, IMAGES, 1) if begun is None else seen(begun).long()[..., None]
    with torch.no_grad():
        return model(ids, cross_attention_states=tokens, cross_attention_mask=mask).logits


def open_flamingo(at, e=tiny.MEMORY_DIM, heads=2, head_dim=8, d=32, prefix="lang_encoder.model.layers."):
    """Random weights of its blocks before some decoder layers, in its names."""
    generator, inner = torch.Generator().manual_seed(5), heads * head_dim

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"perceiver.latents": random(7, e), "lang_encoder.lm_head.weight": random(tiny.VOCAB, d)}
    for layer in at:
        block = {
            "attn_gate": random(1) + 0.7,
            "attn.norm.weight": 1 + random(d),
            "attn.norm.bias": random(d),
            "attn.to_q.weight": random(inner, d),
            "attn.to_kv.weight": random(2 * inner, e),
            "attn.to_out.weight": random(d, inner),
            "ff_gate": random(1) - 0.7,
            "ff.0.weight": 1 + random(d),
            "ff.0.bias": random(d),
            "ff.1.weight": random(4 * d, d),
            "ff.3.weight": random(d, 4 * d),
        }
        tensors |= {f"{prefix}{layer}.gated_cross_attn_layer.{name}": value for name, value in block.items()}
    return tensors


def flamingo_block(w, x, media, begun, heads, immediate):
    """Its equations: x (b, l, d), media (b, i, n, e), begun (b, l) images so far; text sees the last or all of them."""
    b, images, n, _ = media.shape
    media = media.reshape(b, images * n, -1)
    q = F.layer_norm(x, x.shape[-1:], w["attn.norm.weight"], w["attn.norm.bias"]) @ w["attn.to_q.weight"].T
    k, v = (media @ w["attn.to_kv.weight"].T).chunk(2, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    scores = q / q.shape[-1] ** 0.5 @ k.transpose(-1, -2)
    time = torch.arange(1, images + 1).repeat_interleave(n)
    looks = begun[..., None] == time if immediate else begun[..., None] >= time
    weights = scores.masked_fill(~looks[:, None], -torch.finfo(scores.dtype).max).softmax(-1)
    if immediate:
        weights = weights.masked_fill((begun == 0)[:, None, :, None], 0)
    found = (weights @ v).transpose(1, 2).flatten(2) @ w["attn.to_out.weight"].T
    x = found * w["attn_gate"].tanh() + x
    hidden = F.gelu(F.layer_norm(x, x.shape[-1:], w["ff.0.weight"], w["ff.0.bias"]) @ w["ff.1.weight"].T)
    return hidden @ w["ff.3.weight"].T * w["ff_gate"].tanh() + x


def by_open_flamingo(tensors, at, ids, tokens, begun, immediate=True, heads=2):
    lm = tiny.make("llama")
    media = tokens.unflatten(1, (IMAGES, PATCHES))
    for layer in at:
        mark = f".{layer}.gated_cross_attn_layer."
        w = {name.split(mark)[1]: value for name, value in tensors.items() if mark in name}

        def before(_, args, w=w):
            return flamingo_block(w, args[0], media, begun, heads, immediate), *args[1:]

        lm.model.layers[layer].register_forward_pre_hook(before)
    with torch.no_grad():
        return lm(ids).logits
