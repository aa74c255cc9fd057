"""How well vectors alone tell questions that have an answer in an index from those that have none.

    python -m recipes.rag.separation [--entries 10000] [--made-up 90000]

Held-out questions, each asked twice: with its entry in the index, and without it. "right entry first": with it, nothing
is more like the question. "refused": without it, the most alike entry stays below the threshold that keeps 97 % of the
right ones. For the text encoder alone, beside n-grams of letters, and each with a map fitted to the facts of training.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmattn.encoders import HybridEncoder

from .entries import embed
from .settings import Config
from .train import load_entries

ASKED, KEPT, BLOCK = 1500, 0.97, 256


def separation(questions: Tensor, titles: Tensor, own: Sequence[int]) -> tuple[float, float]:
    """The shares of questions (n, e) whose own title of (m, e) is found first, and that are refused without it."""
    right, first, other = [], [], []
    for start in range(0, len(questions), BLOCK):
        scores = questions[start : start + BLOCK] @ titles.T
        rows = torch.tensor(own[start : start + BLOCK])[:, None]
        right.append(scores.gather(1, rows)[:, 0])
        first.append(scores.argmax(1) == rows[:, 0])
        other.append(scores.scatter(1, rows, -torch.inf).amax(1))
    threshold = torch.cat(right).quantile(1 - KEPT)
    return float(torch.cat(first).float().mean()), float((torch.cat(other) < threshold).float().mean())


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000, help="real ones")
    parser.add_argument("--made-up", type=int, default=0, help="near misses beside them: as training has, of its names")
    parser.add_argument("--cache", type=Path, default=Path(Config().data.cache), help="folder of the vectors of texts")
    given = parser.parse_args()
    data = Config().data.model_copy(
        update={"sizes": (given.entries,), "made_up": given.made_up, "cache": str(given.cache)}
    )
    known, entries, held_out = load_entries(Config(data=data))
    plain, learned = HybridEncoder(), len(known.questions)
    asked = Random(0).sample(range(held_out), min(ASKED, held_out))
    texts = [fact.question for fact in known.facts[:learned]], [fact.question for fact in entries.facts[:held_out]]
    seen, held = (embed(plain, one, given.cache) for one in texts)
    titles = torch.cat([entries.titles, known.titles[learned:]])
    print("| vectors | right entry first | refused |\n|---|---|---|")
    for name, width in (("all-MiniLM-L6-v2", plain.dense.dim), ("and n-grams of letters", plain.dim)):
        part = torch.arange(plain.dim) < width
        for fitted in (False, True):
            encoder = HybridEncoder()
            if fitted:
                encoder.fit_queries(normalize(seen * part, dim=1), normalize(known.titles[:learned] * part, dim=1))
            questions = encoder.project_queries(normalize(held[asked] * part, dim=1))
            first, refused = separation(questions, normalize(titles * part, dim=1), asked)
            print(f"| {name}{', fitted' if fitted else ''} | {100 * first:.1f} % | {100 * refused:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
