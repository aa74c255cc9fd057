"""A decoding step beside transformers' own Mllama text model with the same weights.

    python -m recipes.benchmarks decoding --beside mllama [--dtype float32 bfloat16]

Twelve layers of self-attention and three of gated cross-attention, once as `MllamaForCausalLM` and once as the Llama of
its other layers with the adapter that `load_published` reads. Both have computed the keys and values of the memory
before, and Mllama is given the mask that its own model gives it.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import mmattn
from recipes.benchmarks.decoding import going_on
from recipes.benchmarks.timing import interleaved, ratio

SIZES = ((1, 257), (1, 1601), (1, 6404), (8, 257), (8, 1601))
QUICK = ((1, 257),)
CROSS = (3, 8, 13)
PROMPT = 16


@dataclass
class Pair:
    """Their model and ours, and one step of each.

    Args:
        model: the Llama of its other layers, with the adapter.
        memory: what it reads.
        steps: the logits of a step of decoding, by name; caches are cut back, so that every step is the same.
    """

    model: Any
    memory: Any
    steps: dict[str, Callable[[], torch.Tensor]]


def make_models(width: int, dtype: torch.dtype, cross: tuple[int, ...] = CROSS, others: int = 12) -> tuple[Any, Any]:
    """A random Mllama with open gates, and ours with its weights.

    Args:
        width: d, of heads of 64 or four.
        dtype: of all weights.
        cross: the numbers of its cross-attention layers.
        others: how many layers of self-attention there are.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.mllama.configuration_mllama import MllamaTextConfig
    from transformers.models.mllama.modeling_mllama import MllamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "vocab_size": 4096, "rms_norm_eps": 1e-5}
    sizes |= {"num_attention_heads": max(4, width // 64), "num_key_value_heads": max(4, width // 64)}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 1024}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    config = MllamaTextConfig(
        num_hidden_layers=others + len(cross), cross_attention_layers=list(cross), **sizes, **special
    )
    theirs = MllamaForCausalLM(config).eval()
    for name, weight in theirs.named_parameters():
        if name.endswith("gate"):
            weight.data.fill_(0.5)
    host = LlamaForCausalLM(LlamaConfig(num_hidden_layers=others, **sizes, **special)).eval()
    own = [layer for layer in range(others + len(cross)) if layer not in cross]
    state, given = {}, theirs.state_dict()
    for name in host.state_dict():
        there = name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            there = f"model.layers.{own[int(number)]}.{rest}"
        state[name] = given[there][:4096] if "embed_tokens" in name else given[there]
    host.load_state_dict(state)
    model = mmattn.load_published(host.to(dtype), "mllama", given, visible_segments="all")
    model.adapters.to(dtype)
    return theirs.to(dtype), model


def make_pair(rows: int, slots: int, dtype: torch.dtype, width: int = 768) -> Pair:
    """Both models, with a prompt and a memory read.

    Args:
        rows: b.
        slots: m; without any both pass over their cross-attention.
        dtype: of all weights.
        width: d.
    """
    from transformers import DynamicCache

    theirs, model = make_models(width, dtype)
    tokens, ids = torch.randn(rows, slots, width, dtype=dtype), torch.ones(rows, PROMPT, dtype=torch.long)
    prepared = model.prepare(mmattn.Memory(tokens))
    caches = {"mllama": DynamicCache(config=theirs.config), "mmattn": DynamicCache(config=model.host.config)}

    def their_step(ids: torch.Tensor, **more: Any) -> Any:
        masks = {}
        if slots:
            masks["cross_attention_mask"] = torch.zeros(rows, 1, ids.shape[1], slots, dtype=dtype)
            masks["full_text_row_masked_out_mask"] = torch.ones(rows, 1, ids.shape[1], 1, dtype=dtype)
        return theirs(input_ids=ids, **going_on(theirs, caches["mllama"]), use_cache=True, **masks, **more)

    def our_step(ids: torch.Tensor) -> Any:
        return model.host(input_ids=ids, **going_on(model.host, caches["mmattn"]), use_cache=True)

    def cut(name: str) -> None:
        for number, layer in enumerate(caches[name].layers):
            if name == "mmattn" or number not in CROSS:
                layer.crop(-1)

    def theirs_once() -> torch.Tensor:
        logits: torch.Tensor = their_step(ids[:, :1]).logits
        cut("mllama")
        return logits

    def ours_once() -> torch.Tensor:
        logits: torch.Tensor = our_step(ids[:, :1]).logits
        cut("mmattn")
        return logits

    their_step(ids, **({"cross_attention_states": tokens} if slots else {}))
    with model.condition(prepared) if slots else contextlib.nullcontext():
        our_step(ids)
    return Pair(model, prepared, {"mmattn": ours_once, "mllama": theirs_once})


@torch.no_grad()
def measure(rows: int, slots: int, dtype: torch.dtype, seconds: float = 8.0) -> float:
    """Our time of a step for each unit of Mllama's."""
    pair = make_pair(rows, slots, dtype)
    with pair.model.condition(pair.memory):  # for all steps, as in `generate`
        furthest = (pair.steps["mmattn"]() - pair.steps["mllama"]()).abs().max()
        assert furthest < (1e-4 if dtype == torch.float32 else 0.2), f"the models differ by {furthest}"
        return ratio(interleaved(pair.steps, seconds=seconds, least=15), "mmattn", "mllama")


@torch.no_grad()
def measure_layer(seconds: float = 12.0) -> dict[str, float]:
    """Microseconds of a cross-attention layer of width 64 on one thread: what a step takes longer with a memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seeing, blind = make_pair(1, 17, torch.float32, 64), make_pair(1, 0, torch.float32, 64)
        with seeing.model.condition(seeing.memory):
            times = interleaved(
                seeing.steps | {f"{name} without": step for name, step in blind.steps.items()},
                seconds=seconds,
                most=4000,
            )
    finally:
        torch.set_num_threads(threads)
    middle = {name: statistics.median(found) for name, found in times.items()}
    return {name: 1e3 * (middle[name] - middle[f"{name} without"]) / len(CROSS) for name in seeing.steps}
