"""Language models in the shapes of well-known ones, with random weights that never stand in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: As transformers spells them, by the model whose shape it is.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 small": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Llama 1B": (
        "llama",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 3B": (
        "llama",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "vocab_size": 128_256,
            "tie_word_embeddings": True,
        },
    ),
    "Llama 7B": ("llama", {"vocab_size": 32_000}),  # that of Llama 2, transformers' own default
    "small": (
        "llama",
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 997,
        },
    ),
}


def config_of(shape: str) -> Any:
    """The config of a shape, without special tokens."""
    from transformers import CONFIG_MAPPING

    family, sizes = SHAPES[shape]
    return CONFIG_MAPPING[family](bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)


def empty_host(shape: str) -> Any:
    """The model without weights, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(shape))


def make_host(shape: str, dtype: torch.dtype = torch.bfloat16, nf4: bool = False) -> Any:
    """The model with random weights, made one by one in their dtype; linear layers in 4 bit where that is asked for."""
    host = empty_host(shape)
    if nf4:
        quantise(host, dtype)
    for module in host.modules():
        if nf4 and type(module).__name__ == "Linear4bit":
            continue
        for name, parameter in module.named_parameters(recurse=False):
            made = torch.zeros(parameter.shape, dtype=dtype) if name == "bias" else random_weight(parameter, dtype)
            setattr(module, name, nn.Parameter(made, requires_grad=False))
    host.tie_weights()
    return with_buffers(host).eval()


def quantise(host: Any, dtype: torch.dtype) -> None:
    """Linear layers but the head become NF4 ones (arXiv 2305.14314), each of a random weight of its own."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    head = host.get_output_embeddings()
    for name, module in list(host.named_modules()):
        if isinstance(module, nn.Linear) and module is not head:
            layer = Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=dtype,
                quant_type="nf4",
                device="meta",
            )
            made = random_weight(module.weight, dtype)
            layer.weight = Params4bit(made, requires_grad=False, quant_type="nf4").to("cpu")
            host.set_submodule(name, layer)


def random_weight(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers of standard deviation 0.02 for a matrix, ones for a norm."""
    if like.dim() < 2:
        return torch.ones(like.shape, dtype=dtype)
    made = torch.empty(like.numel(), dtype=dtype)
    some = torch.empty(1 << 20).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(like.numel())).to(dtype)
    for part in made.split(len(some)):
        part.copy_(some[: len(part)])
    return made.view(like.shape)


def with_buffers(host: Any) -> Any:
    """The model with the buffers that its config says, such as the frequencies of rotary positions."""
    for name, module in list(host.named_modules()):
        if any(buffer.device.type == "meta" for _, buffer in module.named_buffers(recurse=False)):
            parent = host.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], type(module)(config=host.config))
    return host
