"""The demo (`make demo`, `mmattn demo`): train a small adapter and caption the shipped pictures."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn.recipes import read_settings, resolve_asset

from . import flora
from .report import draw_captions
from .train import main as train

HERE = Path(__file__).parent


def main(out: str = "runs/demo") -> Path:
    """Train a short run on drawn flowers, caption the shipped pictures, and print where the files are."""
    start = time.perf_counter()
    settings = read_settings(HERE / "config_demo.yaml")
    settings.pop("recipe", None)
    run = train({**settings, "out": out})
    if not (run / "table.md").is_file():
        return run
    pipe: Any = mmattn.pipeline(run / "adapter")
    folder = Path(resolve_asset("assets/flora"))
    entries = [json.loads(line) for line in (folder / "captions.jsonl").read_text(encoding="utf-8").splitlines()]
    pictures = [str(folder / one["file"]) for one in entries]
    memory = pipe.encoder(pictures).to(torch.float32)
    options = {"species": [one["species"] for one in entries], "names": [one.name for one in flora.species()]}
    out_file, grid = run / "shipped.png", pipe.encoder.grid
    captions = draw_captions(out_file, pipe.model, pipe.tokenizer, pictures, memory, grid, **options)
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


if __name__ == "__main__":
    main()
