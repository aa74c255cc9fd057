"""Make `assets/diffusion` and `assets/digits` from the folders of a finished stage A and stage B.

python assets/diffusion/make_assets.py --text runs/diffusion --style runs/diffusion-style
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import yaml
from PIL import Image

from mmattn.pipelines import PipelineConfig
from mmattn.recipes import find_recipe, load_recipe

HERE = Path(__file__).parent

CARD = """# Handwritten digits: a UNet, a text encoder, and an adapter for style

Made by the recipe `diffusion` from scikit-learn's digits (Alpaydin and Kaynak, CC BY 4.0), in half precision.

| folder | what | by `mmattn train` with | took |
|---|---|---|---|
| `unet`, `text` | stage A, in the formats of diffusers and transformers | `config.yaml` | {text} |
| `adapter`, `style.safetensors` | stage B: decoupled adapter, style encoder | `config_style.yaml` | {style} |

Put together by `assets/diffusion/make_assets.py`. Two x86 cores; the recipe's README has what they reach.
"""


def took(run: Path) -> str:
    """Steps, seconds and seed of a run."""
    done = json.loads((run / "table.json").read_text(encoding="utf-8"))
    seed = yaml.safe_load((run / "config.resolved.yaml").read_text(encoding="utf-8"))["seed"]
    first = next(iter(done["training"].values()))
    return f"seed {seed}, {first['steps']} steps, {first['seconds']} s"


def main() -> None:
    """Copy what the command line needs, and a few held-out digits to follow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--style", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE.parent, help="the folder with diffusion/ and digits/")
    given = parser.parse_args()
    folder = given.out / "diffusion"
    for run, name in ((given.text, "unet"), (given.text, "text"), (given.style, "adapter")):
        shutil.copytree(run / name, folder / name, dirs_exist_ok=True)
    shutil.copy(given.style / "style.safetensors", folder)
    described = PipelineConfig.load(folder / "adapter")
    host = described.host.model_copy(update={"name": "assets/diffusion"})
    results = (given.style / "table.md").read_text(encoding="utf-8")
    described.model_copy(update={"host": host, "results": results}).save(folder / "adapter")
    (folder / "README.md").write_text(CARD.format(text=took(given.text), style=took(given.style)), encoding="utf-8")
    examples(given.out / "digits")


def examples(folder: Path) -> None:
    """The most slanted, the boldest and the widest of the held-out digits as pictures of dark ink on light paper."""
    folder.mkdir(exist_ok=True)
    _, held_out, _ = load_recipe(find_recipe("diffusion").folder, "data").load_data()
    most = held_out.measures.argmax(0).tolist()
    for name, row in zip(("bold", "slanted", "wide"), most, strict=True):
        pixels = ((1 - held_out.pictures[row, 0]) * 127.5).round().byte().numpy()
        Image.fromarray(pixels).resize((128, 128), Image.Resampling.BICUBIC).save(folder / f"{name}.png")


if __name__ == "__main__":
    main()
