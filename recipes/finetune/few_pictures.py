"""How far a few pictures of each class take an adapter, beside a linear probe on the same features.

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

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.recipes import read_settings

from .language import load_lm, write_texts
from .settings import Config
from .train import main as train


def split(source: Path, target: Path, each: int, held_out: int) -> None:
    """Class folders in train and test, of links to the first pictures of each class of `source`."""
    for label in sorted(folder for folder in source.iterdir() if folder.is_dir()):
        files = sorted(label.iterdir())[: each + held_out]
        for number, file in enumerate(files):
            place = target / ("train" if number < each else "test") / label.name
            place.mkdir(parents=True, exist_ok=True)
            os.symlink(file.resolve(), place / file.name)


def probe(features: torch.Tensor, labels: Sequence[str], new: torch.Tensor, truth: Sequence[str]) -> float:
    """The share of new pictures that a logistic regression on these features (n, e) names."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(max_iter=5000).fit(features.numpy(), labels)
    return float(fitted.score(new.numpy(), truth))


def named(texts: Sequence[str], truth: Sequence[str]) -> float:
    """The share of texts that are, but for case and points, those of the pictures' classes."""

    def plain(text: str) -> str:
        return re.sub(r"[^\w ]", "", text).lower().strip()

    return sum(plain(a) == plain(b) for a, b in zip(texts, truth, strict=True)) / len(truth)


def measure(source: Path, out: Path, encoder: str, each: int, held_out: int, seeds: int, changes: list[str]) -> str:
    """The table of the adapter of each seed and of the probes."""
    config = read_settings(Path(__file__).with_name("config.yaml"), changes)
    del config["recipe"]
    with tempfile.TemporaryDirectory() as folder:
        split(source, Path(folder), each, held_out)
        parts = [training.read_rows(folder, split=name) for name in ("train", "test")]
        texts = [[row.text for row in part] for part in parts]
        eye = pipelines.load_image_encoder(encoder)
        cache = str(out / "cache")
        memories = training.RowMemories(cache, pictures=eye)
        seen = [_features(memories, part) for part in parts]
        rows = [["logistic regression, mean of the patches", _percent(probe(seen[0], texts[0], seen[1], texts[1]))]]
        if hasattr(eye, "tokenizer"):
            whole = mmattn.OpenCLIPEncoder(eye.name, pooled=True)
            pooled = [whole([row.images[0] for row in part]).tokens[:, 0] for part in parts]
            rows.append(["logistic regression, pooled", _percent(probe(pooled[0], texts[0], pooled[1], texts[1]))])
        shares = []
        for seed in range(seeds):
            asked: dict[str, Any] = config | {"out": str(out / f"seed-{seed}"), "seed": seed, "encoder": encoder}
            asked |= {"data": config["data"] | {"path": folder, "cache": cache}, "resume": False}
            train(asked)
            lm, tokenizer = load_lm(Config(lm=config["lm"]), "cpu")
            model = mmattn.load(lm, out / f"seed-{seed}" / "adapter").eval()
            written = [text for row in parts[1] for text in write_texts(model, tokenizer, memories.of([row]))]
            shares.append(named(written, texts[1]))
            rows.append([f"adapter, seed {seed}", _percent(shares[-1])])
        rows.append([f"adapter, mean of {seeds}", _percent(sum(shares) / seeds)])
    title = f"{len(texts[0])} pictures in {len(set(texts[0]))} classes; of {len(texts[1])} new ones named right"
    return f"{title}\n\n{training.markdown_table(['', 'named'], rows)}"


def _features(memories: training.RowMemories, rows: Sequence[training.Row]) -> torch.Tensor:
    memory = memories.of(rows)
    assert memory is not None
    return memory.tokens.mean(1)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder with a folder of pictures for each class")
    parser.add_argument("--out", type=Path, default=Path("runs/few-pictures"))
    parser.add_argument("--encoder", default="assets/clip")
    parser.add_argument("--each", type=int, default=15, help="pictures of a class to train on")
    parser.add_argument("--held-out", type=int, default=5, help="pictures of a class to measure on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("changes", nargs="*", help="settings of the recipe, such as optim.max_steps=200")
    given = parser.parse_intermixed_args()
    print(measure(given.source, given.out, given.encoder, given.each, given.held_out, given.seeds, given.changes))
