"""Time and peak memory of a training step: adapters above the middle of a host, beside a LoRA of equal size.

    python -m recipes.benchmarks training [--quick]

Hosts in bfloat16 with random weights, two rows of 256 tokens, all of them labels. Times are measured in one process,
all candidates in turn; each memory in a separate process, because a peak never falls again, or by the allocator of a
card.
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
from typing import Any

import torch

import mmattn
from mmattn import training
from recipes.benchmarks.hosts import make_host
from recipes.benchmarks.timing import Rows, Tables, interleaved, megabytes, ratio, synchronize

LORA, LORA_CHUNKS = "LoRA", "LoRA, loss in chunks"
ADAPTERS, CHUNKS, CACHED = "adapters", "adapters, loss in chunks", "adapters, loss in chunks, hidden states cached"
CANDIDATES = (LORA, LORA_CHUNKS, ADAPTERS, CHUNKS, CACHED)
CHUNK = 256


@dataclass(frozen=True)
class Setting:
    """A host, the layers of its adapters, slots and width of a row's memory, and gradient checkpointing of the host."""

    shape: str
    layers: tuple[int, ...]
    memory: tuple[int, int]
    checkpointing: bool = False
    rows: int = 2
    tokens: int = 256

    def __str__(self) -> str:
        where = f"layers {', '.join(map(str, self.layers))}"
        return f"{self.shape}, adapters after {where}{', gradient checkpointing' * self.checkpointing}"

    def make_host(self) -> Any:
        """Return the host, without adapters."""
        return make_host(torch.bfloat16, 1024, self.shape)


SETTINGS = [
    Setting(shape, layers, memory, checkpointing)
    for shape, layers, memory in (
        ("GPT-2 small", (6, 8, 10, 11), (64, 768)),
        ("Llama 1B", (12, 13, 14, 15), (729, 1152)),
    )
    for checkpointing in (False, True)
]
QUICK = [Setting("small", (3, 5), (7, 64), checkpointing) for checkpointing in (False, True)]


@contextlib.contextmanager
def stepping(setting: Setting, name: str, host: Any) -> Iterator[tuple[Callable[[], None], int]]:
    """Give a step of a candidate on a host, with its optimizer, and the number of its trained parameters."""
    random = torch.Generator(torch.get_default_device()).manual_seed(0)
    ids = torch.randint(5, host.config.vocab_size, (setting.rows, setting.tokens), generator=random)
    memory = mmattn.Memory(torch.randn(setting.rows, *setting.memory, generator=random))
    model = mmattn.attach(host, mmattn.GatedAdapter(setting.memory[1], layers=setting.layers, num_heads=8, head_dim=64))
    if name in (LORA, LORA_CHUNKS):
        parameters, _ = model.trainable_parameters()
        model, memory = training.matched_lora(model.unload(), parameters), None
    if setting.checkpointing:
        enable = getattr(host, "activation_checkpointing_enable", host.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
        # Gradients of the embedded text would pass every frozen layer for nothing.
        host.disable_input_require_grads()
    batch = training.TextBatch(ids, torch.ones_like(ids), ids, memory)
    chunk_size = None if name in (LORA, ADAPTERS) else CHUNK
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
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


def peak_of(setting: Setting, name: str) -> float:
    """Return the peak resident memory of two steps above the loaded host, in MB; for a fresh process."""
    (small, *_) = QUICK
    with stepping(small, name, small.make_host()) as (step, _):
        step()  # what is imported at the first step is no part of it
    with stepping(setting, name, setting.make_host()) as (step, _):
        gc.collect()
        before = megabytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of this process
        for _ in range(2):
            step()
        return megabytes("VmHWM") - before


def peak_on_card(step: Callable[[], None]) -> float:
    """Return the peak memory of a step in MB, above the memory before it."""
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def measure(setting: Setting, seconds: float = 60.0, least: int = 4) -> Rows:
    """Return the time and peak memory of every candidate, and both for each unit of LoRA's."""
    host, peaks = setting.make_host(), dict[str, float]()
    weights = {id(tensor): tensor for tensor in (*host.parameters(), *host.buffers())}
    with contextlib.ExitStack() as contexts:
        steps = {
            # Separate hosts, with the same weights in memory.
            name: contexts.enter_context(stepping(setting, name, copy.deepcopy(host, dict(weights))))
            for name in CANDIDATES
        }
        times = interleaved({name: step for name, (step, _) in steps.items()}, seconds=seconds, least=least)
        for name, (step, _) in steps.items():
            if torch.cuda.is_available():
                peaks[name] = peak_on_card(step)
    for name in CANDIDATES if not peaks else ():
        command = [sys.executable, "-m", "recipes.benchmarks.training_memory", json.dumps([vars(setting), name])]
        peaks[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    rows = {
        name: {
            "trained, millions": steps[name][1] / 1e6,
            "seconds": min(times[name]) / 1e3,
            "time of LoRA's": ratio(times, name, LORA),
            "peak MB above the host": peaks[name],
            "memory of LoRA's": peaks[name] / peaks[LORA],
        }
        for name in CANDIDATES
    }
    rows[CACHED]["time of the step without"] = ratio(times, CACHED, CHUNKS)
    return rows


def tables(dtypes: list[torch.dtype], quick: bool) -> Tables:
    """Yield a training step of adapters above the middle of a host, beside a LoRA of equal size."""
    for setting in QUICK if quick else SETTINGS:
        rows = measure(setting, *((1.0, 2) if quick else ()))
        yield f"Training, {setting}: a step of two rows of 256 tokens in bfloat16", "what is trained", rows


if __name__ == "__main__":
    setting, candidate = json.loads(sys.argv[1])
    print(peak_of(Setting(**{name: tuple(v) if isinstance(v, list) else v for name, v in setting.items()}), candidate))
