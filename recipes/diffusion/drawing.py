"""Draw with the shipped models: what `mmattn draw` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import mmattn
from mmattn import inspect
from mmattn.errors import ImageError
from mmattn.recipes import assets_folder

from .data import away_from_paper
from .models import load_models
from .sampling import as_image, draw as sample, traces
from .style import load_encoder

SCALE = 16  # pixels of the file for each pixel drawn


def draw(
    sentence: str,
    out: str | Path,
    *,
    like: Any = None,
    adapter_scale: float = 1.0,
    steps: int = 30,
    guidance_scale: float = 2.0,
    seed: int = 0,
    folder: Path | None = None,
    progress: bool = True,
) -> Path:
    """Write a digit as the sentence asks, in the style of an example where there is one, to a PNG file.

    Args:
        sentence: such as "a thick seven".
        out: the file.
        like: a picture of one character whose style to follow, of any kind that `mmattn.load_image` reads.
        adapter_scale: how closely to follow it; 0 is not at all.
        steps: of DDIM.
        guidance_scale: as in diffusers; 1 is no guidance.
        seed: of the noise.
        folder: of the models; the shipped ones by default.
        progress: show a bar.

    Raises:
        TextError: words that the model was not trained on.
        ImageError: an example that cannot be read or shows nothing.
        ConfigError: no steps.
    """
    pen = Pen(folder)
    options = {"adapter_scale": adapter_scale, "steps": steps, "guidance_scale": guidance_scale, "seed": seed}
    pen(sentence, like=like, progress=progress, **options).save(out)
    return Path(out)


class Pen:
    """The shipped models, or those of a folder, loaded once for many drawings."""

    def __init__(self, folder: Path | None = None) -> None:
        folder = assets_folder() / "diffusion" if folder is None else folder
        self.models = load_models(folder)
        self.model = mmattn.load(self.models.unet, folder / "adapter").use_core()
        self.encoder = load_encoder(folder / "style.safetensors")

    def __call__(
        self,
        sentence: str,
        *,
        like: Any = None,
        adapter_scale: float = 1.0,
        steps: int = 30,
        guidance_scale: float = 2.0,
        seed: int = 0,
        progress: bool = False,
    ) -> Any:
        """A digit as an image of Pillow; arguments and errors are those of `draw`."""
        memory = None if like is None else self.encoder.encode(example(like, self.models.size))
        given = {"memory": memory, "adapter_scale": adapter_scale, "progress": progress}
        (made,) = sample(self.model, self.models, [sentence], steps, guidance_scale, seed=seed, **given)
        drawn = as_image(made)
        return drawn.resize((SCALE * drawn.width, SCALE * drawn.height))


def demo(out: Path, steps: int = 20) -> Path:
    """A grid of the ten digits: without an example, in the style of each shipped one; the attention of two drawings."""
    from .pictures import grid

    pen = Pen()
    models, model, encoder = pen.models, pen.model, pen.encoder
    sentences, labels, rows = [f"a {digit}" for digit in range(10)], ["no example"], []
    size = models.size
    rows.append(torch.cat([-torch.ones(1, 1, size, size), sample(model, models, sentences, steps, 2.0, seed=0)]))
    for path in sorted((assets_folder() / "digits").glob("*.png")):
        shown = example(str(path), size)
        memory = encoder.encode(shown).expand(len(sentences))
        rows.append(torch.cat([shown, sample(model, models, sentences, steps, 2.0, seed=0, memory=memory)]))
        labels.append(f"like {path.stem}.png")
    grid(torch.cat(rows), len(sentences) + 1, out / "digits.png", labels, ["example", *map(str, range(10))])
    (out / "digits").mkdir(exist_ok=True)
    # The last example stays in use.
    found = traces(model, models, "a thick seven", steps, seed=0)
    found += traces(model, models, "a 3", steps, seed=0, memory=encoder.encode(shown), example=shown[0])
    inspect.save_traces(found, out / "digits")
    return out / "digits.png"


def example(source: Any, size: int) -> Tensor:
    """A picture of one character as the models know them: (1, 1, size, size), ink 1 on paper -1, filling the frame.

    Raises:
        ImageError: there is nothing on it.
    """
    import numpy as np

    grey = torch.tensor(np.asarray(mmattn.load_image(source).convert("L")), dtype=torch.float32) / 255
    ink = away_from_paper(grey)
    if ink.max() < 0.1:
        raise ImageError(f"{source} shows nothing: its brightness hardly changes; give dark ink on light paper")
    ink = ink / ink.max()
    rows, columns = (ink > 0.15).any(1).nonzero()[:, 0], (ink > 0.15).any(0).nonzero()[:, 0]
    ink = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    # scikit-learn's digits fill the height of their frame and stand in the middle of its width.
    side = max(ink.shape)
    before = (side - ink.shape[1]) // 2, (side - ink.shape[0]) // 2
    after = side - ink.shape[1] - before[0], side - ink.shape[0] - before[1]
    square = F.pad(ink, (before[0], after[0], before[1], after[1]))[None, None]
    return 2 * F.interpolate(square, size=(size, size), mode="area") - 1
