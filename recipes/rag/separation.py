"""Questions with an answer in an index and without one, told apart by vectors alone.

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

QUESTIONS, KEPT, BLOCK = 1500, 0.97, 256


def separation(questions: Tensor, titles: Tensor, right: Sequence[int]) -> tuple[float, float]:
    """Return the shares of questions (n, e) most like their right title of (m, e), and that are refused without it."""
    scores_of_right, first, best_other = [], [], []
    for start in range(0, len(questions), BLOCK):
        scores = questions[start : start + BLOCK] @ titles.T
        rows = torch.tensor(right[start : start + BLOCK])[:, None]
        scores_of_right.append(scores.gather(1, rows)[:, 0])
        first.append(scores.argmax(1) == rows[:, 0])
        best_other.append(scores.scatter(1, rows, -torch.inf).amax(1))
    threshold = torch.cat(scores_of_right).quantile(1 - KEPT)
    return float(torch.cat(first).float().mean()), float((torch.cat(best_other) < threshold).float().mean())


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000, help="real ones")
    parser.add_argument("--made-up", type=int, default=0, help="near misses beside them: as training has, of its names")
    parser.add_argument("--cache", type=Path, default=Path(Config().data.cache), help="folder of the vectors of texts")
    args = parser.parse_args()
    data = {"sizes": (args.entries,), "made_up": args.made_up, "cache": str(args.cache)}
    known, entries, held_out = load_entries(Config(data=Config().data.model_copy(update=data)))
    plain, learned = HybridEncoder(), len(known.questions)
    rows = Random(0).sample(range(held_out), min(QUESTIONS, held_out))
    train_questions = embed(plain, [fact.question for fact in known.facts[:learned]], args.cache)
    test_questions = embed(plain, [fact.question for fact in entries.facts[:held_out]], args.cache)[rows]
    titles = torch.cat([entries.titles, known.titles[learned:]])
    print("| vectors | right entry first | refused |\n|---|---|---|")
    for name, width in (("all-MiniLM-L6-v2", plain.model.dim), ("and n-grams of letters", plain.dim)):
        part = torch.arange(plain.dim) < width
        for fitted in (False, True):
            encoder = HybridEncoder()
            if fitted:
                pairs = (normalize(one * part, dim=1) for one in (train_questions, known.titles[:learned]))
                encoder.fit_queries(*pairs)
            questions = encoder.project_queries(normalize(test_questions * part, dim=1))
            first, refused = separation(questions, normalize(titles * part, dim=1), rows)
            print(f"| {name}{', fitted' if fitted else ''} | {100 * first:.1f} % | {100 * refused:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
