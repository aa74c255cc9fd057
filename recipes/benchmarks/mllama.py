"""A decoding step beside transformers' own Mllama text model with the same weights.

    python -m recipes.benchmarks mllama [--dtype float32 bfloat16]

Twelve layers of self-attention and three of gated cross-attention, once as `MllamaForCausalLM` and once as the Llama of
its other layers with the adapter that `load_published` reads. Both have computed the keys and values of the memory
before, and Mllama is given the mask that its own model gives it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import mmattn
from recipes.benchmarks.hosts import from_cache
from recipes.benchmarks.timing import Tables, interleaved, name_of, ratio

SIZES = ((1, 257), (1, 1601), (1, 6404), (8, 257), (8, 1601))
CROSS = (3, 8, 13)
PROMPT = 16


def make_models(width: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return a random Mllama of this width with open gates, and ours with its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

    torch.manual_seed(0)
    others = 12
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 4096, "rms_norm_eps": 1e-5}
    sizes |= {"num_attention_heads": max(4, width // 64), "num_key_value_heads": max(4, width // 64)}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 1024}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = MllamaTextConfig(
        num_hidden_layers=others + len(CROSS), cross_attention_layers=list(CROSS), **sizes, **special
    )
    theirs = MllamaForCausalLM(config).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith("gate"):
            weight.data.fill_(0.5)
    host = LlamaForCausalLM(LlamaConfig(num_hidden_layers=others, **sizes, **special)).eval()
    layers = [layer for layer in range(others + len(CROSS)) if layer not in CROSS]
    state, weights = {}, theirs.state_dict()
    for name in host.state_dict():
        source = name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            source = f"model.layers.{layers[int(number)]}.{rest}"
        state[name] = weights[source][:4096] if "embed_tokens" in name else weights[source]
    host.load_state_dict(state)
    model = mmattn.load_published(host.to(dtype), "mllama", weights, visible_segments="all")
    model.adapters.to(dtype)
    return theirs.to(dtype), model


def make_steps(
    rows: int, slots: int, dtype: torch.dtype, width: int = 768
) -> tuple[Any, Any, dict[str, Callable[[], torch.Tensor]]]:
    """Return our model, its memory, and a decoding step of both models after a prompt; every step is the same."""
    from transformers import DynamicCache

    theirs, model = make_models(width, dtype)
    tokens, ids = torch.randn(rows, slots, width, dtype=dtype), torch.ones(rows, PROMPT, dtype=torch.long)
    prepared = model.prepare(mmattn.Memory(tokens))
    caches = {"mllama": DynamicCache(config=theirs.config), "mmattn": DynamicCache(config=model.host.config)}

    def step(name: str, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        lm = theirs if name == "mllama" else model.host
        if name == "mllama":
            more["cross_attention_mask"] = tokens.new_zeros(rows, 1, ids.shape[1], slots)
            more["full_text_row_masked_out_mask"] = tokens.new_ones(rows, 1, ids.shape[1], 1)
        logits: torch.Tensor = lm(input_ids=ids, **from_cache(lm, caches[name]), use_cache=True, **more).logits
        return logits

    def step_again(name: str) -> torch.Tensor:
        logits = step(name, ids[:, :1])
        for number, layer in enumerate(caches[name].layers):
            if name == "mmattn" or number not in CROSS:
                layer.crop(-1)
        return logits

    step("mllama", ids, cross_attention_states=tokens)
    with model.condition(prepared):
        step("mmattn", ids)
    return model, prepared, {name: partial(step_again, name) for name in ("mmattn", "mllama")}


@torch.no_grad()
def measure(rows: int, slots: int, dtype: torch.dtype, seconds: float = 8.0) -> float:
    """Return our time of a step for each unit of Mllama's."""
    model, memory, steps = make_steps(rows, slots, dtype)
    with model.condition(memory):  # for all steps, as in `generate`
        furthest = (steps["mmattn"]() - steps["mllama"]()).abs().max()
        assert furthest < (1e-4 if dtype == torch.float32 else 0.2), f"the models differ by {furthest}"
        return ratio(interleaved(steps, seconds=seconds, least=15), "mmattn", "mllama")


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield our time of a step for each unit of Mllama's."""
    seconds = 1.0 if quick else 12.0
    rows = {
        name_of(dtype): {f"{b} × {m}": measure(b, m, dtype, seconds) for b, m in SIZES[: 1 if quick else None]}
        for dtype in dtypes
    }
    yield "Decoding beside Mllama: our time of a step for each unit of its", "rows × slots", rows
