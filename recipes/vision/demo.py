"""The demo (`make demo`, `mmattn demo`): train a small adapter and caption the shipped pictures."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import mmattn
from mmattn.recipes import asset_path, read_settings

from . import flora
from .measure import write_captions
from .report import draw_captions, trace_captions
from .train import main as train


def main(out: str = "runs/demo") -> Path:
    """Train a short run on drawn flowers, caption the shipped pictures, and print where the files are."""
    start = time.perf_counter()
    settings = read_settings(flora.FOLDER / "config_demo.yaml", [f"out={out}"])
    settings.pop("recipe", None)
    run = train(settings)
    if not (run / "table.md").is_file():
        return run
    pipe: Any = mmattn.pipeline(run / "adapter")
    folder = asset_path("assets/flora")
    entries = [json.loads(line) for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines()]
    pictures, species = [str(folder / one["file"]) for one in entries], [one["species"] for one in entries]
    memory = pipe.encoder(pictures)
    captions = write_captions(pipe.model, pipe.tokenizer, memory)
    traces = trace_captions(pipe.model, pipe.tokenizer, pictures, memory, captions, pipe.encoder.grid)
    names = [one.name for one in flora.species()]
    draw_captions(run / "shipped.png", pictures, captions, traces, species, names)
    print("\nthe shipped pictures, in the words of the model:")
    for one, text in zip(entries, captions, strict=True):
        print(f"  {one['file']}: {text}")
    print(f"\ntable                         {run / 'table.md'}")
    print(f"captions and attended patches {run / 'shipped.png'} (shipped), {run / 'captions.png'} (held out)")
    print(f"adapter                       {run / 'adapter'}")
    command = shlex.join(["mmattn", "caption", pictures[0], "--adapter", str(run / "adapter")])
    print(f"try                           {command}")
    print(f"{time.perf_counter() - start:.0f} s")
    return run
