"""Peak memory and time of a training step: adapters in the upper half of the host, LoRA in all layers, the whole host.

    python -m recipes.benchmarks training

Each variant runs in a process of its own, because the peak of a process never falls again.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

import mmattn
from recipes.benchmarks.decoding import WIDTH, make_host

VARIANTS = ("gated adapters, upper half", "LoRA, all layers", "the whole host")


def trained_model(variant: str) -> tuple[torch.nn.Module, dict[str, object]]:
    """The model of a variant and what a call of it is given besides text; adapters and LoRA train as many numbers."""
    torch.manual_seed(0)
    host = make_host(torch.float32)
    if variant == VARIANTS[2]:
        return host, {}
    model = mmattn.attach(
        host, mmattn.GatedAdapter(memory_dim=WIDTH, layers=(6, 11), num_heads=8, head_dim=64, feed_forward=0)
    )
    if variant == VARIANTS[0]:
        return model, {"memory": mmattn.Memory(torch.randn(2, 64, WIDTH))}
    wanted, _ = model.trainable_parameters()
    model.unload()
    from peft import LoraConfig, get_peft_model

    per_rank = 12 * (WIDTH + 3 * WIDTH + WIDTH + WIDTH)
    config = LoraConfig(r=round(wanted / per_rank), target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)
    return get_peft_model(host, config), {}


def one_variant(variant: str) -> dict[str, float]:
    """Peak resident memory (MB) above the loaded model, seconds per step, and trained parameters (millions)."""
    model, given = trained_model(variant)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.randint(0, 50000, (2, 128))
    begin, loaded = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(3):
        if step == 1:
            begin = time.perf_counter()
        model(input_ids=ids, labels=ids, **given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak MB above the loaded model": (peak - loaded) / 1024,
        "seconds per step": (time.perf_counter() - begin) / 2,
        "trained parameters, millions": sum(parameter.numel() for parameter in trained) / 1e6,
    }


def measure() -> dict[str, dict[str, float]]:
    """Every variant, each in its own process."""
    made = {}
    for variant in VARIANTS:
        command = [sys.executable, "-m", "recipes.benchmarks.training_memory", variant]
        made[variant] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return made


if __name__ == "__main__":
    print(json.dumps(one_variant(sys.argv[1])))
