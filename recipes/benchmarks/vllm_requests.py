"""64 requests with memories on vLLM, on vLLM with the bare host, and by `generate_batch`: tokens a second.

    .venv-vllm/bin/python -m recipes.benchmarks.vllm_requests [--dtype float32 bfloat16] [--rounds 3]

SmolLM2 with a gated adapter at every fourth layer; prompts of 20 tokens, 32 new ones, 49 slots for each request. The
three run in processes of their own, in turn within a round; the median of the rounds counts. `make vllm` installs vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

COUNT, PROMPT, NEW, SLOTS, WIDTH = 64, 20, 32, 49, 112
KINDS = ("vLLM, bare host", "vLLM, adapted", "generate_batch, adapted")


def draw() -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return prompts and memories."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 40_000, (COUNT, PROMPT), generator=generator).tolist()
    return rows, list(torch.randn(COUNT, SLOTS, WIDTH, generator=generator))


def adapted(dtype: torch.dtype) -> Any:
    """Return SmolLM2 with an adapter whose gates are open a little."""
    import mmattn
    from mmattn import pipelines

    torch.manual_seed(0)
    reference = pipelines.ModelReference(name="smollm2")
    host, _ = pipelines.load_host(reference, Path(), torch.device("cpu"), dtype)
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=WIDTH, every=4, feed_forward=0.5)).eval()
    with torch.no_grad():
        for name, parameter in model.adapters.named_parameters():
            if "gate" in name:
                parameter.fill_(0.01)
    return model


def by_vllm(folder: Path, dtype: str, with_adapter: bool) -> float:
    """Return tokens a second of vLLM after a round to warm up."""
    import vllm

    from mmattn.models import resolve

    overrides = {"hf_overrides": {"mmattn_adapter": str(folder)}} if with_adapter else {}
    llm = vllm.LLM(str(resolve("smollm2")), dtype=dtype, max_model_len=256, max_num_seqs=COUNT, **overrides)
    rows, memories = draw()
    asked = [
        {"prompt_token_ids": ids} | ({"multi_modal_data": {"memory": memory}} if with_adapter else {})
        for ids, memory in zip(rows, memories, strict=True)
    ]
    greedy = vllm.SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    llm.generate(asked, greedy, use_tqdm=False)
    begin = time.perf_counter()
    outputs = llm.generate(asked, greedy, use_tqdm=False)
    seconds = time.perf_counter() - begin
    return sum(len(one.outputs[0].token_ids) for one in outputs) / seconds


def by_transformers(dtype: str) -> float:
    """Return tokens a second of `generate_batch` after a round to warm up."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    import mmattn

    model, (rows, memories) = adapted(getattr(torch, dtype)), draw()
    options = {
        "memory": [mmattn.Memory(memory[None].to(getattr(torch, dtype))) for memory in memories],
        "generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=512, page_size=16, max_batch_tokens=512),
    }
    model.generate_batch(rows, **options)
    begin = time.perf_counter()
    outputs = model.generate_batch(rows, **options)
    seconds = time.perf_counter() - begin
    return sum(len(one.generated_tokens) for one in outputs.values()) / seconds


def measure(kind: str, dtype: str, folder: str) -> float:
    """Return tokens a second of one kind in a process of its own."""
    command = [sys.executable, "-m", "recipes.benchmarks.vllm_requests", "--one", kind, dtype, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{kind} failed:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measure all kinds in turn, print a table for each dtype."""
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.vllm_requests", description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, dtype, folder = options.one
        is_vllm = kind != KINDS[2]
        print(json.dumps(by_vllm(Path(folder), dtype, kind == KINDS[1]) if is_vllm else by_transformers(dtype)))
        return
    with tempfile.TemporaryDirectory() as folder:
        adapted(torch.float32).save_adapter(folder)
        print(f"{COUNT} requests of {PROMPT} + {NEW} tokens, {SLOTS} slots each, torch {torch.__version__}")
        for dtype in options.dtype:
            rounds = [{kind: measure(kind, dtype, folder) for kind in KINDS} for _ in range(options.rounds)]
            print(f"\n| {dtype} | tokens/s | of the bare host on vLLM | of generate_batch |\n|---|---|---|---|")
            for kind in KINDS:
                ratios = [statistics.median(row[kind] / row[KINDS[base]] for row in rounds) for base in (0, 2)]
                speed = statistics.median(row[kind] for row in rounds)
                print(f"| {kind} | {speed:.0f} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
