"""Real dictionaries: is the right entry found, and is it noticed where there is none?

    python -m recipes.rag.dictionaries [--ask 500]

Entries are what Python ships: its documentation topics, the functions and classes of its standard library, the entities
of HTML and the names of Unicode characters, many of which differ by a letter or its case. Half of the names are fitted
on; of the others each is asked for twice, with its entry in the index and without it. "first": nothing is more like the
question. "refused": without it, the best entry stays below the score that 97 % of the right ones reach.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import unicodedata
import warnings
from html.entities import html5
from pydoc_data.topics import topics
from random import Random

import torch

import mmattn
from mmattn.encoders import HybridEncoder, NameEncoder

#: For each dictionary its question and the title of an entry.
FORMS = {
    "topics": ("What does Python's documentation say about {}?", "Python topic {}"),
    "library": ("What does {} do?", "summary of {}"),
    "entities": ("Which character is the entity {}?", "character of the entity {}"),
    "characters": ("What is the code of {}?", "code of the character {}"),
}
MOST = 1500  # entries of a dictionary


def load_names() -> dict[str, list[str]]:
    """Return the names in each dictionary."""
    library = []
    for name in sorted({"json", "os", "string", "unittest", *sys.stdlib_module_names} - {"antigravity", "this"}):
        if name.startswith("_") or name in ("idlelib", "turtle", "turtledemo", "tkinter", "lib2to3"):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(name)
        except ImportError:
            continue
        library += [
            f"{name}.{one}" for one in dir(module) if not one.startswith("_") and callable(getattr(module, one))
        ]
    named = (unicodedata.name(chr(code), "") for code in range(0x2FFF))
    return {
        "topics": sorted(topics),
        "library": library,
        "entities": sorted({name.rstrip(";") for name in html5}),
        "characters": [name for name in named if name],
    }


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", type=int, default=500, help="questions")
    args = parser.parse_args()
    random, pairs = Random(0), []
    for kind, names in load_names().items():
        names = random.sample(names, min(len(names), MOST))
        pairs += [tuple(form.format(name) for form in FORMS[kind]) for name in names]
        print(f"{kind}: {len(names):,} entries")
    random.shuffle(pairs)
    questions, titles = map(list, zip(*pairs, strict=True))
    asked, half = torch.arange(min(args.ask, len(pairs) // 2)), len(pairs) // 2
    print("| encoder | first | refused |\n|---|---:|---:|")
    for encoder in (mmattn.TextEncoder("minilm"), HybridEncoder(), NameEncoder()):
        if isinstance(encoder, HybridEncoder):
            encoder.fit(questions[half:], titles[half:])
        encode = getattr(encoder, "encode_query", encoder.encode)
        scores = encode(questions[: len(asked)]).tokens[:, 0] @ encoder.encode(titles, batch_size=128).tokens[:, 0].T
        right = scores[asked, asked]
        best = scores.index_put((asked, asked), torch.tensor(-torch.inf)).amax(1)
        first, refused = (right > best).float().mean(), (best < right.quantile(0.03)).float().mean()
        print(f"| {type(encoder).__name__} | {100 * first:.1f} % | {100 * refused:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
