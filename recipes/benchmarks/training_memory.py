"""Time and peak memory of a training step: adapters above the middle of a host, beside a LoRA of equal size.

    python -m recipes.benchmarks training [--quick]

Hosts in bfloat16 with random weights, two rows of 256 tokens, all of them labels. Times are measured in one process,
all candidates in turn; each memory in a separate process, because a peak never falls again.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mmattn
from mmattn import training
from recipes.benchmarks.timing import Rows, Tables, interleaved, megabytes, ratio

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS, TOKENS, CHUNK = 2, 256, 256
LORA, LORA_CHUNKS = "LoRA", "LoRA, loss in chunks"
ADAPTERS, CHUNKS, CACHED = "adapters", "adapters, loss in chunks", "adapters, loss in chunks, hidden states cached"
CANDIDATES = (LORA, LORA_CHUNKS, ADAPTERS, CHUNKS, CACHED)


@dataclass(frozen=True)
class Setting:
    """A host, the layers of its adapters, slots and width of a row's memory, and gradient checkpointing of the host."""

    shape: str
    layers: tuple[int, ...]
    memory: tuple[int, int]
    checkpointing: bool = False

    def __str__(self) -> str:
        where = f"layers {', '.join(map(str, self.layers))}"
        return f"{self.shape}, adapters after {where}{', gradient checkpointing' * self.checkpointing}"


_1B = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
_SMALL = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
#: Model type and config of transformers by the model of this shape.
SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "GPT-2 small": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "Llama 1B": ("llama", {**_1B, "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True}),
    "small": ("llama", {**_SMALL, "intermediate_size": 256, "vocab_size": 997}),
}
SETTINGS = [
    Setting(shape, layers, memory, checkpointing)
    for shape, layers, memory in (
        ("GPT-2 small", (6, 8, 10, 11), (64, 768)),
        ("Llama 1B", (8, 10, 12, 14), (729, 1152)),
        ("Llama 1B", (12, 13, 14, 15), (729, 1152)),
    )
    for checkpointing in (False, True)
]
QUICK = [Setting("small", (3, 5), (7, 64), checkpointing) for checkpointing in (False, True)]


def make_host(shape: str) -> PreTrainedModel:
    """Return the model with random weights in bfloat16."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family, sizes = SHAPES[shape]
    config = CONFIG_MAPPING[family](bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).requires_grad_(False).eval()


def trained_model(setting: Setting, name: str, host: Any) -> tuple[Any, training.TextBatch, int | None]:
    """Return a candidate on a host, its batch, and the chunk size of its loss."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(5, host.config.vocab_size, (ROWS, TOKENS), generator=random)
    model = mmattn.attach(host, mmattn.GatedAdapter(setting.memory[1], layers=setting.layers, num_heads=8, head_dim=64))
    memory = mmattn.Memory(torch.randn(ROWS, *setting.memory, generator=random))
    if name in (LORA, LORA_CHUNKS):
        parameters, _ = model.trainable_parameters()
        model, memory = training.matched_lora(model.unload(), parameters), None
    if setting.checkpointing:
        enable = getattr(host, "activation_checkpointing_enable", host.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        # Gradients of the embedded text would pass every frozen layer for nothing.
        host.disable_input_require_grads()
    model.train()
    batch = training.TextBatch(ids, torch.ones_like(ids), ids, memory)
    return model, batch, None if name in (LORA, ADAPTERS) else CHUNK


@contextlib.contextmanager
def stepping(setting: Setting, name: str, host: Any) -> Iterator[tuple[Callable[[], None], int]]:
    """Give a step of a candidate, with its optimizer, and the number of its trained parameters."""
    model, batch, chunk_size = trained_model(setting, name, host)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def step() -> None:
        loss, _ = training.sum_nats(model, batch, chunk_size)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with contextlib.ExitStack() as contexts:
        if name == CACHED:
            folder = contexts.enter_context(tempfile.TemporaryDirectory())
            contexts.enter_context(training.cached_hidden_states(model, folder))
        yield step, sum(parameter.numel() for parameter in trained)


def times(setting: Setting, seconds: float, least: int) -> Rows:
    """Return the time of a step for each unit of LoRA's, and with cached hidden states of the step without."""
    host = make_host(setting.shape)
    weights = {id(tensor): tensor for tensor in (*host.parameters(), *host.buffers())}
    with contextlib.ExitStack() as contexts:
        steps = {
            # Separate hosts, with the same weights in memory.
            name: contexts.enter_context(stepping(setting, name, copy.deepcopy(host, dict(weights))))
            for name in CANDIDATES
        }
        measured = interleaved({name: step for name, (step, _) in steps.items()}, seconds=seconds, least=least)
    rows = {
        name: {
            "trained, millions": steps[name][1] / 1e6,
            "seconds": min(measured[name]) / 1e3,
            "time of LoRA's": ratio(measured, name, LORA),
        }
        for name in CANDIDATES
    }
    rows[CACHED]["time of the step without"] = ratio(measured, CACHED, CHUNKS)
    return rows


def peak_of(setting: Setting, name: str) -> float:
    """Return the peak resident memory of two steps above the loaded host, in MB; for a fresh process."""
    (small, *_) = QUICK
    with stepping(small, name, make_host(small.shape)) as (step, _):
        step()  # what is imported at the first step is no part of it
    host = make_host(setting.shape)
    with stepping(setting, name, host) as (step, _):
        gc.collect()
        before = megabytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of this process
        for _ in range(2):
            step()
        return megabytes("VmHWM") - before


def peaks(setting: Setting) -> Rows:
    """Return the peak of every candidate, each in a separate process, and for each unit of LoRA's."""
    peak = {}
    for name in CANDIDATES:
        command = [sys.executable, "-m", "recipes.benchmarks.training_memory", json.dumps([vars(setting), name])]
        peak[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    return {name: {"peak MB above the host": peak[name], "memory of LoRA's": peak[name] / peak[LORA]} for name in peak}


def measure(setting: Setting, seconds: float = 60.0, least: int = 4) -> Rows:
    """Return the time and peak memory of every candidate."""
    measured, memory = times(setting, seconds, least), peaks(setting)
    return {name: {**measured[name], **memory[name]} for name in CANDIDATES}


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield a training step of adapters above the middle of a host, beside a LoRA of equal size."""
    for setting in QUICK if quick else SETTINGS:
        rows = measure(setting, *((1.0, 2) if quick else ()))
        yield f"Training, {setting}: a step of two rows of 256 tokens in bfloat16", "what is trained", rows


if __name__ == "__main__":
    setting, candidate = json.loads(sys.argv[1])
    print(peak_of(Setting(**{name: tuple(v) if isinstance(v, list) else v for name, v in setting.items()}), candidate))
