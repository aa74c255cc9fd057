"""What the shipped adapter draws: a page of digits for `mmattn demo`."""

from __future__ import annotations

from pathlib import Path

import torch

import mmattn
from mmattn import inspect
from mmattn.recipes import assets_folder

from .pictures import grid
from .sampling import draw, traces


def demo(out: Path, steps: int = 20) -> Path:
    """A grid of the ten digits: without an example, in the style of each shipped one; the attention of two drawings."""
    pipe = mmattn.pipeline("assets/diffusion/adapter")
    model, host, encoder = pipe.model, pipe.host, pipe.encoder
    sentences, labels, rows = [f"a {digit}" for digit in range(10)], ["no example"], []
    size = host.size
    rows.append(torch.cat([-torch.ones(1, 1, size, size), draw(model, host, sentences, steps, 2.0, seed=0)]))
    for path in sorted((assets_folder() / "digits").glob("*.png")):
        shown, memory = encoder.image_processor([path]), encoder(path)
        made = draw(model, host, sentences, steps, 2.0, seed=0, memory=memory.expand(len(sentences)))
        rows.append(torch.cat([shown, made]))
        labels.append(f"like {path.stem}.png")
    grid(torch.cat(rows), len(sentences) + 1, out / "digits.png", labels, ["example", *map(str, range(10))])
    (out / "digits").mkdir(exist_ok=True)
    # The last example stays in use.
    found = traces(model, host, "a thick seven", steps, seed=0)
    found += traces(model, host, "a 3", steps, seed=0, memory=memory, example=shown[0])
    inspect.save_traces(found, out / "digits")
    return out / "digits.png"
