"""Real dictionaries: is the right entry found, and is it noticed where there is none?

    python -m recipes.rag.dictionaries [--ask 500] [--answers 200]

Entries are what Python ships: its documentation topics, the functions and classes of its standard library, the entities
of HTML and the names of Unicode characters, many of which differ by a letter or its case. Half of the names are fitted
on; of the others each is asked for twice, with its entry in the index and without it. "first": nothing is more like the
question. "refused": without it, the best entry stays below the score that 97 % of the right ones reach.

With --answers SmolLM2 then answers so many of the questions from the best entry of the last encoder, from that of
another question and from none. An answer is right if it has the value of the right entry as words of its own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import unicodedata
import warnings
from html.entities import html5
from pydoc_data.topics import topics
from random import Random

import torch

import mmattn
from mmattn import pipelines
from mmattn.encoders import NameEncoder

from .topics import is_right

#: For each dictionary its question, the title of an entry, and its sentence.
FORMS = {
    "topics": (
        "What does Python's documentation say about {}?",
        "Python topic {}",
        "Python's documentation about {} says: {value}.",
    ),
    "library": ("What does {} do?", "summary of {}", "{} does the following: {value}"),
    "entities": (
        "Which character is the entity {}?",
        "character of the entity {}",
        "The character of the entity {} is {value}.",
    ),
    "characters": ("What is the code of {}?", "code of the character {}", "The code of the character {} is {value}."),
}
MOST = 1500  # entries of a dictionary
BATCH = 25


def load_values() -> dict[str, dict[str, str]]:
    """Return the names in each dictionary, with their values."""
    library = {}
    for name in sorted({"json", "os", "string", "unittest", *sys.stdlib_module_names} - {"antigravity", "this"}):
        if name.startswith("_") or name in ("idlelib", "turtle", "turtledemo", "tkinter", "lib2to3"):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                module = importlib.import_module(name)
        except ImportError:
            continue
        for one in dir(module):
            text = inspect.getdoc(getattr(module, one)) if callable(getattr(module, one)) else None
            if text and not one.startswith("_"):
                library[f"{name}.{one}"] = " ".join(text.split("\n\n")[0].split())
    named = {unicodedata.name(chr(code), ""): f"U+{code:04X}" for code in range(0x2FFF)}
    return {
        "topics": {name: text.strip().split("\n")[0] for name, text in topics.items()},
        "library": library,
        "entities": {name.rstrip(";"): character for name, character in html5.items()},
        "characters": {name: code for name, code in named.items() if name},
    }


@torch.no_grad()
def answer(questions: list[tuple[str, str, str]], entries: list[str]) -> None:
    """Print the shares of right answers to questions (dictionary, text, value) from an entry for each."""
    pipe = mmattn.pipeline(host="smollm2", dtype=torch.bfloat16)
    ways: dict[str, list[list[str]]] = {
        "the best entry": [[one] for one in entries],
        "that of another question": [[one] for one in [*entries[1:], entries[0]]],
        "none": [[] for _ in entries],
    }
    for name, passages in ways.items():
        right: dict[str, list[bool]] = {"all": []}
        for begin in range(0, len(questions), BATCH):
            part = questions[begin : begin + BATCH]
            memory = pipe.passages.select([pipe.read(texts) for texts in passages[begin : begin + BATCH]])
            prompts = [pipe.make_prompt(text) for _, text, _ in part]
            options = pipe.config.generation
            replies = pipelines.generate_texts(pipe.model, pipe.tokenizer, prompts, memory, options=options)
            for (kind, _, value), reply in zip(part, replies, strict=True):
                for key in (kind, "all"):
                    right.setdefault(key, []).append(is_right(value, reply))
        shares = ", ".join(f"{key} {sum(one)} of {len(one)}" for key, one in right.items())
        print(f"SmolLM2 from {name}: {shares}", flush=True)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", type=int, default=500, help="questions")
    parser.add_argument("--answers", type=int, default=0, help="questions that SmolLM2 answers")
    args = parser.parse_args()
    random, rows = Random(0), []
    for kind, values in load_values().items():
        names = random.sample(sorted(values), min(len(values), MOST))
        for name in names:
            rows.append((kind, *(form.format(name, value=values[name]) for form in FORMS[kind]), values[name]))
        print(f"{kind}: {len(names):,} entries")
    random.shuffle(rows)
    kinds, questions, titles, sentences, values = map(list, zip(*rows, strict=True))
    asked, half = torch.arange(min(args.ask, len(rows) // 2)), len(rows) // 2
    print("| encoder | first | refused |\n|---|---:|---:|")
    for encoder in (mmattn.TextEncoder("minilm"), NameEncoder()):
        if isinstance(encoder, NameEncoder):
            encoder.fit(questions[half:], titles[half:])
        encode = getattr(encoder, "encode_query", encoder.encode)
        scores = encode(questions[: len(asked)]).tokens[:, 0] @ encoder.encode(titles, batch_size=128).tokens[:, 0].T
        right, best = scores[asked, asked], scores.argmax(1)
        others = scores.index_put((asked, asked), torch.tensor(-torch.inf)).amax(1)
        first, refused = (right > others).float().mean(), (others < right.quantile(0.03)).float().mean()
        print(f"| {type(encoder).__name__} | {100 * first:.1f} % | {100 * refused:.1f} % |", flush=True)
    if args.answers:
        entries = [sentences[row] for row in best[: args.answers].tolist()]
        answer(list(zip(kinds, questions, values, strict=True))[: len(entries)], entries)


if __name__ == "__main__":
    main()
