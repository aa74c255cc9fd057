"""A training step on a large host: its time, and the memory of the whole process.

    python -m recipes.benchmarks.large_hosts "Llama 1B" 12,13,14,15 [--nf4 | --offload]

A host in bfloat16 with random weights (in 4 bit with --nf4, by bitsandbytes), two rows of 256 tokens with 729 slots
each, the loss in chunks, hidden states below the adapters cached. The first step computes these, the others read them,
and need no weights of these layers: with --offload accelerate leaves them on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recipes.benchmarks.host_shapes import SHAPES, make_host
from recipes.benchmarks.timing import megabytes
from recipes.benchmarks.training_memory import CACHED, QUICK, Setting, forget_peak, stepping


def main() -> None:
    """Run one host, with the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.large_hosts")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("layers", help="after which adapters act, such as 12,13,14,15")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--nf4", action="store_true", help="the layers of the host in 4 bit, by bitsandbytes")
    ways.add_argument("--offload", action="store_true", help="layers below the adapters stay on the disk")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    setting = Setting(options.shape, tuple(map(int, options.layers.split(","))), (729, 1152))
    (small, *_) = QUICK
    with stepping(small, CACHED, make_host(small.shape)) as (step, _):
        step()  # what is imported at the first step
    print(f"{setting}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"code: {megabytes('VmRSS'):,.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        if options.offload:
            host = offloaded(make_host(options.shape), setting.layers[0] + 1, Path(folder))
        else:
            host = make_host(options.shape, nf4=options.nf4)
        measure(setting, host, options.steps)


def offloaded(host: Any, below: int, folder: Path) -> Any:
    """Return the same Llama with its first layers on the disk."""
    from transformers import AutoModelForCausalLM

    host.save_pretrained(folder / "host")
    count, dtype = host.config.num_hidden_layers, host.dtype
    del host
    where: dict[str, Any] = {f"model.layers.{number}": "disk" if number < below else "cpu" for number in range(count)}
    where |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    settings = {"device_map": where, "offload_folder": folder / "disk", "dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(folder / "host", **settings).requires_grad_(False).eval()


def measure(setting: Setting, host: Any, steps: int) -> None:
    """Print the time and the peak memory of each step."""
    loaded = (tensor for tensor in host.parameters() if tensor.device.type != "meta")
    print(f"host: {sum(tensor.nbytes for tensor in loaded) / 1e6:,.0f} MB of weights in memory")
    forget_peak()
    with stepping(setting, CACHED, host) as (step, trained):
        print(f"trained: {trained / 1e6:.1f} million parameters", flush=True)
        for number in range(steps):
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            print(f"step {number + 1}: {seconds:.1f} s, {megabytes('VmHWM'):,.0f} MB at most so far", flush=True)


if __name__ == "__main__":
    main()
