"""Adapters from a few pictures of each class, beside a linear probe on the same features.

    python -m recipes.finetune.few_pictures FLOWERS           # folders of classes, 20 or more pictures in each
    python -m recipes.finetune.few_pictures FLOWERS --encoder torchvision:mobilenet_v2:WEIGHTS optim.max_steps=200

The recipe is trained with its defaults on the first 15 pictures of each class, for each of three seeds, and captions
the next 5. The probe is scikit-learn's logistic regression on the
mean of the patch tokens, and on the pooled embedding of the encoder.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmattn
from mmattn import pipelines, training
from mmattn.recipes import read_settings

from .train import main as train


def split(source: Path, target: Path, each: int, held_out: int) -> None:
    """Make class folders in train and test, of links to the first pictures of each class of `source`."""
    for label in sorted(folder for folder in source.iterdir() if folder.is_dir()):
        for number, file in enumerate(sorted(label.iterdir())[: each + held_out]):
            place = target / ("train" if number < each else "test") / label.name
            place.mkdir(parents=True, exist_ok=True)
            os.symlink(file.resolve(), place / file.name)


def share_named(texts: Sequence[str], labels: Sequence[str]) -> float:
    """Return the share of texts that are, but for case and points, those of the pictures' classes."""

    def plain(text: str) -> str:
        return re.sub(r"[^\w ]", "", text).lower().strip()

    return sum(plain(a) == plain(b) for a, b in zip(texts, labels, strict=True)) / len(labels)


def measure(source: Path, out: Path, encoder: str, each: int, held_out: int, seeds: int, changes: list[str]) -> str:
    """Return the table of the adapter of each seed and of the probes."""
    from sklearn.linear_model import LogisticRegression

    config = read_settings(Path(__file__).with_name("config.yaml"), changes)
    del config["recipe"]
    shares: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        split(source, Path(folder), each, held_out)
        parts = [training.read_rows(folder, split=name) for name in ("train", "test")]
        labels, new_labels = ([row.text for row in part] for part in parts)
        images, new_images = ([row.images[0] for row in part] for part in parts)
        patches = pipelines.load_image_encoder(encoder)
        features = {"mean of the patches": [patches(one).tokens.mean(1) for one in (images, new_images)]}
        if hasattr(patches, "tokenizer"):
            pooled = mmattn.OpenCLIPEncoder(patches.name, pooled=True)
            features["pooled"] = [pooled(one).tokens[:, 0] for one in (images, new_images)]
        for name, (known, new) in features.items():
            probe = LogisticRegression(max_iter=5000).fit(known.numpy(), labels)
            shares[f"logistic regression, {name}"] = float(probe.score(new.numpy(), new_labels))
        for seed in range(seeds):
            run = out / f"seed-{seed}"
            settings: dict[str, Any] = {"out": str(run), "seed": seed, "encoder": encoder, "resume": False}
            settings["data"] = config["data"] | {"path": folder, "cache": str(out / "cache")}
            train(config | settings)
            captions = mmattn.pipeline(run / "adapter", device="cpu")(new_images)
            shares[f"adapter, seed {seed}"] = share_named(captions, new_labels)
    shares[f"adapter, mean of {seeds}"] = sum(shares[f"adapter, seed {seed}"] for seed in range(seeds)) / seeds
    title = f"{len(labels)} pictures in {len(set(labels))} classes; of {len(new_labels)} new ones named right"
    rows = [[name, f"{100 * share:.1f} %"] for name, share in shares.items()]
    return f"{title}\n\n{training.markdown_table(['', 'named'], rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder with a folder of pictures for each class")
    parser.add_argument("--out", type=Path, default=Path("runs/few-pictures"))
    parser.add_argument("--encoder", default="assets/clip")
    parser.add_argument("--each", type=int, default=15, help="pictures of a class to train on")
    parser.add_argument("--held-out", type=int, default=5, help="pictures of a class to measure on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("changes", nargs="*", help="settings of the recipe, such as optim.max_steps=200")
    args = parser.parse_intermixed_args()
    print(measure(args.source, args.out, args.encoder, args.each, args.held_out, args.seeds, args.changes))
