"""Answers from a bank of held-out facts whose keys and values are cached in fewer bits, by the shipped adapter.

    python -m recipes.rag.banks [--ask 600] [--sizes 100 1000 10000]

For each size of the index the same questions, half of them without an answer there, with every format of pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn.recipes import resolve_asset

from .answering import load_lm, write_answers
from .entries import Entries, EntrySet, entry_sets
from .facts import UNKNOWN, prompt
from .measure import shares
from .settings import Config
from .train import load_entries

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
}
BATCH = 64


def answers(
    model: Any, tokenizer: Any, entries: Entries, one: EntrySet, view: int, form: Mapping[str, Any]
) -> tuple[list[str], int]:
    """Answer the questions of a set from a bank with `view` entries in view; return the bytes of its pages, too."""
    bank = model.bank(mmattn.Memory(entries.slots(one.rows)[:, None]), **form)
    hits = entries.index(one.rows).search(entries.questions[one.questions], min(view, len(one.rows)))
    places = {row: place for place, row in enumerate(one.rows)}
    rows = torch.tensor([[places[row] for row in ids] for ids in hits.ids])
    texts: list[str] = []
    for start in range(0, len(rows), BATCH):
        part = slice(start, start + BATCH)
        with model.condition(bank.gather(rows[part], scores=hits.scores[part])):
            texts += write_answers(model, tokenizer, [prompt(entries.facts[row]) for row in one.questions[part]])
    return texts, bank.page_nbytes()


def main() -> None:
    """Parse the command line, measure, print."""
    config = Config()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", type=int, default=600, help="questions for each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000], help="entries of an index")
    parser.add_argument("--cache", type=Path, default=Path(config.data.cache), help="folder of the vectors of texts")
    args = parser.parse_args()
    lm, tokenizer = load_lm(config.lm)
    model = mmattn.load(lm, resolve_asset("assets/rag/adapter"))
    data = {"ask": args.ask, "sizes": tuple(args.sizes), "made_up": 0, "cache": str(args.cache)}
    _, entries, held_out = load_entries(config.model_copy(update={"data": config.data.model_copy(update=data)}))
    print("| entries | pages | answers right | unanswerable refused | answers as with float32 | bytes of K and V |")
    print("|---|---|---|---|---|---|")
    for size in args.sizes:
        sets = entry_sets(entries, held_out, size, args.ask, config.seed)
        rows = [(row, here) for one in sets for row, here in zip(one.questions, one.present, strict=True)]
        right = [entries.facts[row].value if here else UNKNOWN for row, here in rows]
        plain: list[str] = []
        for name, form in FORMATS.items():
            parts = [answers(model, tokenizer, entries, one, config.data.per_query, form) for one in sets]
            texts, size_in_bytes = [text for part, _ in parts for text in part], sum(nbytes for _, nbytes in parts)
            if not plain:
                plain, plain_bytes = texts, size_in_bytes
            lines = [{"right": a, "answer": b, "attended_right": None} for a, b in zip(right, texts, strict=True)]
            share, same = shares(lines), sum(map(str.__eq__, texts, plain)) / len(texts)
            cells = [f"{100 * value:.2f} %" for value in (share["accuracy"], share["recall"], same)]
            print(f"| {size:,} | {name} | {' | '.join(cells)} | {size_in_bytes / plain_bytes:.3f} |", flush=True)


if __name__ == "__main__":
    main()
