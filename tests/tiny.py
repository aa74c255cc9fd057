"""Makers of tiny random hosts, one per family, and of memories for them: nothing is downloaded, nothing is slow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
)

from mmattn.hosts.context import runs_hooks_again

VOCAB = 101
LAYERS = 3
MEMORY_DIM = 13
# Before transformers 5.4 drafts from the prompt need an id that ends the text: one that is never written.
PROMPT_LOOKUP = {"prompt_lookup_num_tokens": 2, "eos_token_id": -1}
#: Ways to generate greedily, as arguments of `generate`.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "drafts from the prompt": PROMPT_LOOKUP,
    "a prompt in chunks": {"prefill_chunk_size": 3},
}
#: Since 5.24 models take their cache as `cache`, and GPT-J attends by what is registered for all.
IS_5_24 = Version(transformers.__version__) >= Version("5.24")
#: Families whose attention nothing can be joined with: a softmax of their own, or none.
NOTHING_JOINED = (*(() if IS_5_24 else ("gptj",)), "gpt_neo", "bloom", "falcon", "mpt", "mamba")

_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 53,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GEMMA = _LLAMA | {"head_dim": 8}
_HEADS = {"hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
_GPT = {
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 128,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

_SETTINGS: dict[str, dict] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 9, "head_dim": 8},
    "mixtral": _LLAMA | {"intermediate_size": 56, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 8},
    "gemma": _GEMMA,
    "gemma2": _GEMMA | {"tie_word_embeddings": False, "sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": _GEMMA
    | {"tie_word_embeddings": False, "sliding_window": 9, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi": _HEADS,
    "phi3": _LLAMA,
    "gpt2": _GPT,
    "gpt_neox": _HEADS,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neo": {
        "hidden_size": 32,
        "num_layers": LAYERS + 1,
        "num_heads": 4,
        "intermediate_size": 53,
        "attention_types": [[["global", "local"], (LAYERS + 1) // 2]],
        "window_size": 9,
        "max_position_embeddings": 128,
    },
    "bloom": {"tie_word_embeddings": False, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4},
    "falcon": {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
    "mpt": {
        "d_model": 32,
        "n_layers": LAYERS,
        "n_heads": 4,
        "max_seq_len": 128,
        "expansion_ratio": 2,
        "use_cache": True,
    },
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 53,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "dropout": 0.0,
        "max_position_embeddings": 128,
    },
    "stablelm": _LLAMA,
    "starcoder2": _LLAMA | {"tie_word_embeddings": False, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "olmo2": _LLAMA,
    "granite": _LLAMA | {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "cohere": _LLAMA | {"tie_word_embeddings": False, "logit_scale": 1.0},
    "glm": _LLAMA | {"head_dim": 8},
    "smollm3": _LLAMA | {"no_rope_layer_interval": 2},
    "mamba": {"hidden_size": 32, "num_hidden_layers": LAYERS, "state_size": 5},
}

FAMILIES = list(_SETTINGS)
"""Names of the families, as transformers spells `model_type`."""

DISTINCT = ("llama", "mistral", "mixtral", "gemma3_text", "gpt2", "gptj", "bloom", "mamba")
"""One of each build: rotary, windows, experts, normed queries, learned positions, parallel branches, ALiBi, a state.

Tests of the others are marked slow.
"""

RUNNING_STATE = ("mamba",)
"""Families without a key/value cache: their state cannot be taken back, so drafts and prefill in chunks are refused."""


def config(family: str, **changes: Any) -> Any:
    """The configuration of the tiny host of `family`: no dropout, special ids inside the vocabulary, no end token."""
    settings = (
        {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None} | _SETTINGS[family] | changes
    )
    return CONFIG_MAPPING[family](**settings)


def make(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A tiny random host in eval mode, the same for the same `seed`; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = AutoModelForCausalLM.from_config(config(family, **changes))
        with torch.no_grad():
            for name, parameter in lm.named_parameters():
                if parameter.ndim >= 2 and not name.endswith(("A_log", "conv1d.weight")):
                    parameter.normal_(0.0, 0.2)
    return lm.eval()


def open_gates(model: Any, value: float = 0.7) -> Any:
    """Open the gates of every adapter of `model` and enlarge its weights, so that memory changes the output visibly."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, parameter in model.adapters.named_parameters():
            if "gate" in name:
                parameter.fill_(value)
            elif parameter.ndim >= 2:
                parameter.normal_(0.0, 0.3)
    return model


def memory(b: int, m: int = 5, e: int = MEMORY_DIM, lengths: list[int] | None = None, seed: int = 0):
    """A random memory (b, m, e); `lengths` says how many slots of each row are real (None = all)."""
    import mmattn

    tokens = torch.randn(b, m, e, generator=torch.Generator().manual_seed(1000 + seed))
    mask = None if lengths is None else torch.arange(m) < torch.tensor(lengths)[:, None]
    return mmattn.Memory(tokens, mask)


def going_on(cache: Any) -> dict[str, Any]:
    """The argument with which a model goes on from a cache, by its name in this version of transformers."""
    return {"cache" if IS_5_24 else "past_key_values": cache}


def paged(new: int, **more: Any) -> dict[str, Any]:
    """Greedy settings of continuous batching, `new` tokens each, with few blocks: the default ones take a minute."""
    from transformers import ContinuousBatchingConfig

    blocks = ContinuousBatchingConfig(**{"num_blocks": 64, "page_size": 16, "max_batch_tokens": 64} | more)
    answers = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    return {"generation_config": answers, "continuous_batching_config": blocks}


def text(b: int, length: int = 7, seed: int = 0) -> Tensor:
    """Random token ids (b, length), free of special ids."""
    return torch.randint(2, VOCAB, (b, length), generator=torch.Generator().manual_seed(2000 + seed))


def attach(lm: nn.Module, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with a small gated adapter on the first and the third layer, its gates open unless told."""
    import mmattn

    settings = {"memory_dim": MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8} | settings
    model = mmattn.attach(lm, mmattn.GatedAdapter(**settings), name=name)
    return open_gates(model) if opened else model


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block tensors are made in this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def counting(*modules: nn.Module) -> Iterator[list[Any]]:
    """A list that grows by a module's inputs each time that one of these runs."""
    ran: list[Any] = []
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(module.register_forward_hook(lambda module, args, output: ran.append(args)))
        yield ran


@torch.no_grad()
def written(model: Any, ids: Tensor, new: int, **how: Any) -> Tensor:
    """What a model writes after a text, greedily unless told: new tokens only (b, new)."""
    out: Tensor = model.generate(ids, **{"max_new_tokens": new, "do_sample": False} | how)
    return out[:, ids.shape[1] :]


def own(ids: Tensor, family: str = "llama") -> Tensor:
    """Logits of the untouched host."""
    with torch.no_grad():
        return make(family)(ids).logits


def decoder_layers(lm: nn.Module) -> nn.ModuleList:
    """The decoder layers of a tiny host: the only list of modules as long as the host is deep."""
    lists = [part for part in lm.modules() if isinstance(part, nn.ModuleList) and len(part) >= LAYERS]
    assert len(lists) == 1, f"{type(lm).__name__} has {len(lists)} lists of layers"
    return lists[0]


def checkpoint(lm: PreTrainedModel, use_reentrant: bool) -> None:
    """Switch activation checkpointing on, by whichever name this version of transformers knows it."""
    name = "activation_checkpointing_enable"
    getattr(lm, name if hasattr(lm, name) else "gradient_checkpointing_enable")({"use_reentrant": use_reentrant})


def without_checkpoints(lm: PreTrainedModel) -> None:
    """Undo `checkpoint`."""
    name = "activation_checkpointing_disable"
    getattr(lm, name if hasattr(lm, name) else "gradient_checkpointing_disable")()


def cache_settings(families: list[str], settings: dict[str, dict[str, Any]]) -> list[Any]:
    """Pairs of a family and one of some settings of `generate`, for a parametrisation: those that transformers has."""
    pairs = []
    for family in families:
        can_be_static = MODEL_FOR_CAUSAL_LM_MAPPING[type(CONFIG_MAPPING[family]())]._can_compile_fullgraph
        for name, how in settings.items():
            needs_cache = {"prefill_chunk_size", "prompt_lookup_num_tokens", "assistant"} & set(how)
            if (family in RUNNING_STATE and needs_cache) or ("cache_implementation" in how and not can_be_static):
                continue
            pairs.append(pytest.param(family, how, id=f"{name}-{family}"))
    return pairs


def ways_of_checkpointing() -> list[Any]:
    """Values of use_reentrant that this version of transformers can combine with adapters, for a parametrisation."""
    plain = pytest.param(False, id="plain")
    if runs_hooks_again(decoder_layers(make("llama"))[0]):
        return [plain]
    return [pytest.param(True, id="reentrant"), plain]


def assert_close(got: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    """max|got - want| <= tolerance * max|want|, and both finite and of one shape."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    assert torch.isfinite(got).all() and torch.isfinite(want).all(), "not finite"
    error = (got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-12)
    assert error <= tolerance, f"relative error {error:.2e} is above {tolerance:.0e}"


def differs(got: Tensor, want: Tensor, least: float = 1e-2) -> bool:
    """Whether every row of `got` (b, ...) is at least `least` (of the size of `want`) away from that of `want`."""
    assert torch.isfinite(got).all() and torch.isfinite(want).all(), "not finite"
    return bool(((got - want).abs().flatten(1).amax(1) > least * want.abs().max()).all())


def left_padded(rows: list[Tensor], pad: int = 0) -> tuple[Tensor, Tensor]:
    """Token ids (l_i,) of several lengths as one left-padded batch: ids (b, l) and attention mask (b, l)."""
    length = max(len(row) for row in rows)
    ids = torch.full((len(rows), length), pad)
    keep = torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = row
        keep[i, length - len(row) :] = 1
    return ids, keep
