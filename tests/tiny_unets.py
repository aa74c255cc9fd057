"""Makers of tiny random UNets, one per kind of attention block, and of what is given to them: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import Tensor

import mmattn
from tests.tiny import MEMORY_DIM

ROWS = 3
CHANNELS, HEIGHT, WIDTH = 5, 8, 12
TEXT_DIM, TEXT_LENGTH = 17, 7
TIME = 11

_STABLE = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (14, 22),
    "attention_head_dim": 2,
    "norm_num_groups": 2,
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "stable": _STABLE,
    "linear": _STABLE | {"use_linear_projection": True, "upcast_attention": True},
    "sdxl": _STABLE
    | {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "attention_head_dim": (1, 2),
        "transformer_layers_per_block": (1, 2),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 19,
    },
    "simple": _STABLE
    | {
        "down_block_types": ("SimpleCrossAttnDownBlock2D", "DownBlock2D"),
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "up_block_types": ("UpBlock2D", "SimpleCrossAttnUpBlock2D"),
        "attention_head_dim": 2,
    },
    "k": {
        "down_block_types": ("KDownBlock2D", "KCrossAttnDownBlock2D", "KCrossAttnDownBlock2D"),
        "mid_block_type": None,
        "up_block_types": ("KCrossAttnUpBlock2D", "KCrossAttnUpBlock2D", "KUpBlock2D"),
        "block_out_channels": (32, 64, 64),
        "attention_head_dim": 16,
        "norm_num_groups": None,
        "act_fn": "gelu",
        "resnet_time_scale_shift": "scale_shift",
        "time_embedding_type": "fourier",
        "timestep_post_act": "gelu",
        "conv_in_kernel": 1,
        "conv_out_kernel": 1,
    },
    "only_cross": _STABLE | {"only_cross_attention": (True, False)},
}

KINDS = list(_SETTINGS)
"""Names of the kinds: what their blocks are, or the model that they are like."""

CORE_KINDS = [kind for kind in KINDS if kind != "simple"]
"""Those whose text has a softmax of its own, so that it can go through the core."""


def make(kind: str = "stable", seed: int = 0, **changes: Any) -> UNet2DConditionModel:
    """A tiny random UNet in eval mode, the same for the same `seed`; the caller's random state is left alone."""
    settings = {
        "sample_size": (HEIGHT, WIDTH),
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "layers_per_block": 1,
        "cross_attention_dim": TEXT_DIM,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(**settings | _SETTINGS[kind] | changes)
        with torch.no_grad():
            for name, parameter in unet.named_parameters():
                if ".attn" in name or "attentions" in name:
                    # Also the output biases: what an adapter adds must not be confused with them.
                    parameter.normal_(1.0 if parameter.ndim == 1 and "norm" in name else 0.0, 0.3)
    return unet.eval()


def adapter(**settings: Any) -> mmattn.DecoupledAdapter:
    """The settings of a small adapter."""
    return mmattn.DecoupledAdapter(**{"memory_dim": MEMORY_DIM} | settings)


def attach(unet: Any, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with an adapter beside every cross-attention layer, its values random unless told."""
    model = mmattn.attach(unet, adapter(**settings), name)
    return open_values(model, name) if opened else model


def open_values(model: Any, name: str = "default", seed: int = 7) -> Any:
    """Enlarge the weights of an adapter, so that memory changes the output visibly."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for key, parameter in model.adapters[name].named_parameters():
            parameter.normal_(1.0 if key.endswith("norm.weight") else 0.0, 0.6)
    return model


def picture(b: int = ROWS, seed: int = 0) -> Tensor:
    """A random noisy picture (b, channels, height, width)."""
    return torch.randn(b, CHANNELS, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(3000 + seed))


def text(b: int = ROWS, length: int = TEXT_LENGTH, seed: int = 0) -> Tensor:
    """Random vectors of a text (b, length, width)."""
    return torch.randn(b, length, TEXT_DIM, generator=torch.Generator().manual_seed(4000 + seed))


def given(kind: str = "stable", b: int = ROWS) -> tuple[tuple[Tensor, int, Tensor], dict[str, Any]]:
    """What a UNet of this kind is called with: sample, time step and text, and its keywords."""
    args = picture(b), TIME, text(b)
    if kind != "sdxl":
        return args, {}
    pooled = torch.randn(b, 19, generator=torch.Generator().manual_seed(5000))
    return args, {"added_cond_kwargs": {"text_embeds": pooled, "time_ids": torch.arange(6.0).expand(b, 6)}}


def row_of(value: Any, i: int) -> Any:
    """Row i of every tensor in `value`, the row dimension kept."""
    if isinstance(value, dict):
        return {name: row_of(inner, i) for name, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(row_of(inner, i) for inner in value)
    return value[i : i + 1] if isinstance(value, Tensor) else value


def run(model: Any, memory: Any = None, kind: str = "stable", b: int = ROWS, **more: Any) -> Tensor:
    """What a UNet of this kind with adapters answers, given this memory."""
    args, kwargs = given(kind, b)
    return model(*args, memory=memory, **kwargs, **more).sample


def own(kind: str = "stable", b: int = ROWS) -> Tensor:
    """What the untouched UNet answers."""
    args, kwargs = given(kind, b)
    with torch.no_grad():
        return make(kind)(*args, **kwargs).sample


def lora(unet: Any, seed: int = 5, **settings: Any) -> None:
    """Put a LoRA on the attention of a UNet, its weights random."""
    targets = ["to_out.0"] if settings.get("lora_bias") else ["to_q", "to_k", "to_v", "to_out.0"]
    unet.add_adapter(LoraConfig(r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, **settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in unet.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)


@contextmanager
def listening(model: Any, place: int) -> Iterator[dict[str, Tensor]]:
    """What goes into the cross-attention layer of this number and what comes out, adapters included."""
    heard: dict[str, Tensor] = {}

    def note(attn: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        heard.update(x=args[0], out=output)

    with model.layer(place).register_forward_hook(note):
        yield heard


def share(model: Any, place: int, x: Tensor, memory: mmattn.Memory, name: str = "default") -> Tensor:
    """By hand, what an adapter adds to the output of a layer that was given x: no row of the memory is padded."""
    attn, adapter = model.layer(place), model.adapters[name]
    block, size = adapter.attention(place), x.shape
    x = x if attn.group_norm is None else attn.group_norm(x)
    x = x.flatten(2).transpose(1, 2) if x.dim() == 4 else x
    slots = adapter.read(memory).tokens
    made = attn.to_q(x), block.k_proj(slots), block.v_proj(slots)
    q, k, v = (one.unflatten(2, (attn.heads, -1)).transpose(1, 2) for one in made)
    weights = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1)
    found = (weights @ v).transpose(1, 2).flatten(2)
    out = attn.to_out[0](found) - attn.to_out[0](torch.zeros_like(found))
    out = out.transpose(1, 2).reshape(size) if len(size) == 4 else out
    return out / attn.rescale_output_factor
