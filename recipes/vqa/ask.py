"""Ask a pipeline all test questions of easy-VQA in two spellings, and print the share of right answers.

python -m recipes.vqa.ask assets/vqa [2000]
"""

from __future__ import annotations

import sys

import torch

import mmattn
from mmattn import models, training

from .data import KINDS, spellings
from .report import COLUMNS


def main(folder: str, count: int | None = None) -> str:
    """Return the table of the first `count` questions; None for all."""
    pipe, rows = mmattn.pipeline(folder), models.load_easy_vqa("test")[:count]
    contents = []
    for spelling in (0, -1):
        answers = pipe([row.picture for row in rows], [spellings(row.text)[spelling] for row in rows], progress=True)
        right = torch.tensor([answer.lower() == row.answer for answer, row in zip(answers, rows, strict=True)]).float()
        kinds = [KINDS.get(row.answer, "colour") for row in rows]
        shares = {
            kind: right[[one == kind for one in kinds]].mean().item()
            for kind in dict.fromkeys([*KINDS.values(), "colour"])
        }
        contents.append({"name": f'"{spellings("is it red?")[spelling]}"', "all": right.mean().item(), **shares})
    return training.spread_table("", {name: COLUMNS[name] for name in contents[0] if name != "name"}, [contents])


if __name__ == "__main__":
    print(main(sys.argv[1], *map(int, sys.argv[2:])))
