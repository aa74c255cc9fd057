"""A training step on a large host: its time, and the memory of the whole process.

    python -m recipes.benchmarks.large_hosts "Llama 1B" "12,13,14,15" [--nf4]

A host in bfloat16 with random weights (in 4 bit with --nf4, by bitsandbytes), two rows of 256 tokens with 729 slots
each, the loss in chunks, hidden states below the adapters cached. The first step computes these, the others read them.
"""

from __future__ import annotations

import argparse
import time

import torch

from recipes.benchmarks import training_memory
from recipes.benchmarks.host_shapes import SHAPES, make_host
from recipes.benchmarks.training_memory import CACHED, QUICK, Setting, resident, stepping


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.large_hosts")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("layers", help="after which adapters act, such as 12,13,14,15")
    parser.add_argument("--nf4", action="store_true", help="the layers of the host in 4 bit, by bitsandbytes")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    setting = Setting(asked.shape, tuple(map(int, asked.layers.split(","))), (729, 1152))
    (small, *_) = QUICK
    with stepping(small, CACHED, make_host(small.shape)) as (step, _):
        step()  # what is imported at the first step
    before = resident("VmRSS")
    began = time.perf_counter()
    host = make_host(asked.shape, nf4=asked.nf4)
    count = sum(tensor.nbytes for tensor in host.parameters()) / 1e6
    print(f"{setting}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"host: {count:,.0f} MB of weights, made in {time.perf_counter() - began:.0f} s; code {before:,.0f} MB")
    training_memory.forget_peak()
    with stepping(setting, CACHED, host) as (step, trained):
        print(f"trained: {trained / 1e6:.1f} million parameters", flush=True)
        for number in range(asked.steps):
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            print(f"step {number + 1}: {seconds:.1f} s, {resident('VmHWM'):,.0f} MB at most so far", flush=True)


if __name__ == "__main__":
    main()
