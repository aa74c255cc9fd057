"""Language models in the shapes of well-known ones, with random weights that never stand in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
_3B = {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8}
_LARGE = {"intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True}
_SMALL = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
#: Model type and config of transformers by the model of this shape; a Llama 2 has transformers' default sizes.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 small": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Llama 1B": ("llama", {**_1B, **_LARGE}),
    "Llama 3B": ("llama", {**_3B, **_LARGE}),
    "Llama 7B": ("llama", {"vocab_size": 32_000}),
    "small": ("llama", {**_SMALL, "intermediate_size": 256, "vocab_size": 997}),
}


def make_host(shape: str, dtype: torch.dtype = torch.bfloat16, nf4: bool = False) -> Any:
    """Return the model with random weights, made one by one in their dtype; linear layers in 4 bit with `nf4`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, sizes = SHAPES[shape]
    config = CONFIG_MAPPING[family](bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    with torch.device("meta"):
        host = AutoModelForCausalLM.from_config(config)
    if nf4:
        quantise(host, dtype)
    for module in host.modules():
        if nf4 and type(module).__name__ == "Linear4bit":
            continue
        for name, parameter in module.named_parameters(recurse=False):
            weight = torch.zeros(parameter.shape, dtype=dtype) if name == "bias" else random_weight(parameter, dtype)
            setattr(module, name, nn.Parameter(weight, requires_grad=False))
    host.tie_weights()
    # Buffers of the config, such as the frequencies of rotary positions.
    for name, module in list(host.named_modules()):
        if any(buffer.device.type == "meta" for _, buffer in module.named_buffers(recurse=False)):
            host.set_submodule(name, type(module)(config=host.config))
    return host.eval()


def quantise(host: Any, dtype: torch.dtype) -> None:
    """Replace linear layers but the head by NF4 ones (arXiv 2305.14314) with random weights."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = host.get_output_embeddings()
    for name, module in list(host.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            sizes = (module.in_features, module.out_features)
            layer = Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta")
            weight = random_weight(module.weight, dtype)
            layer.weight = Params4bit(weight, requires_grad=False, quant_type="nf4").to("cpu")
            host.set_submodule(name, layer)


def random_weight(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return normal numbers of standard deviation 0.02 for a matrix, ones for a norm."""
    if like.dim() < 2:
        return torch.ones(like.shape, dtype=dtype)
    weight = torch.empty(like.numel(), dtype=dtype)
    some = torch.empty(1 << 20).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(like.numel())).to(dtype)
    for part in weight.split(len(some)):
        part.copy_(some[: len(part)])
    return weight.view(like.shape)
