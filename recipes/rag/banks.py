"""Answers from a bank of held-out facts whose keys and values are cached in fewer bits, by the shipped adapter.

    python -m recipes.rag.banks [--ask 600] [--sizes 100 1000 10000]

For each size of the index the same questions, half of them without an answer there, with every format of pages.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import mmattn
from mmattn.recipes import resolve_asset

from .answering import load_lm, write_answers
from .entries import Entries, World, worlds
from .facts import UNKNOWN, prompt
from .measure import count
from .settings import Config
from .train import load_entries

FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.int8},
}
BATCH = 64


def answers(
    model: Any, tokenizer: Any, entries: Entries, world: World, view: int, form: Mapping[str, Any]
) -> tuple[list[str], int]:
    """What is said to the questions of a world, and the bytes of keys and values.

    Args:
        view: entries that are attended to.
        form: of the pages, as `model.bank` takes it.
    """
    bank = model.bank(mmattn.Memory(entries.slots(world.rows)[:, None]), **form)
    found = entries.index(world.rows).search(entries.questions[world.asked], min(view, len(world.rows)))
    places = {row: place for place, row in enumerate(world.rows)}
    rows = torch.tensor([[places[row] for row in hits] for hits in found.ids])
    said: list[str] = []
    for start in range(0, len(rows), BATCH):
        part = slice(start, start + BATCH)
        prompts = [prompt(entries.facts[row]) for row in world.asked[part]]
        with model.condition(bank.gather(rows[part], scores=found.scores[part])):
            said += write_answers(model, tokenizer, prompts, None, BATCH)
    return said, bank.page_nbytes()


def measure(
    model: Any, tokenizer: Any, entries: Entries, asked_of: Sequence[World], view: int
) -> dict[str, dict[str, float]]:
    """For each format the shares of right answers and refusals, of answers that float32 gives too, and bytes."""
    table, first = {}, []
    for name, form in FORMATS.items():
        made = [answers(model, tokenizer, entries, world, view, form) for world in asked_of]
        said = [text for texts, _ in made for text in texts]
        rows = [(row, here) for world in asked_of for row, here in zip(world.asked, world.present, strict=True)]
        lines = [
            {"right": entries.facts[row].value if here else UNKNOWN, "said": text, "looked_right": None}
            for (row, here), text in zip(rows, said, strict=True)
        ]
        shares, first = count(lines), first or said
        table[name] = {
            "right": shares["accuracy"],
            "refused": shares["recall"],
            "same": sum(map(str.__eq__, said, first)) / len(said),
            "bytes": sum(size for _, size in made),
        }
    return table


def main() -> None:
    """Parse the command line, measure, print."""
    config = Config()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", type=int, default=600, help="questions for each size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10_000], help="entries of an index")
    parser.add_argument("--cache", type=Path, default=Path(config.data.cache), help="folder of the vectors of texts")
    given = parser.parse_args()
    lm, tokenizer = load_lm(config.lm)
    model = mmattn.load(lm, resolve_asset("assets/rag/adapter"))
    data = config.data.model_copy(
        update={"ask": given.ask, "sizes": tuple(given.sizes), "made_up": 0, "cache": str(given.cache)}
    )
    _, entries, held_out = load_entries(config.model_copy(update={"data": data}))
    print("| entries | pages | answers right | unanswerable refused | answers as with float32 | bytes of K and V |")
    print("|---|---|---|---|---|---|")
    for size in given.sizes:
        asked_of = worlds(entries, held_out, size, given.ask, config.seed)
        table = measure(model, tokenizer, entries, asked_of, config.data.per_query)
        for name, row in table.items():
            shares = " | ".join(f"{100 * row[key]:.2f} %" for key in ("right", "refused", "same"))
            part = row["bytes"] / table["float32"]["bytes"]
            print(f"| {size:,} | {name} | {shares} | {part:.3f} |", flush=True)


if __name__ == "__main__":
    main()
