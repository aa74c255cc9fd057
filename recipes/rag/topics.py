"""A hundred questions about Python's documentation, which SmolLM2 answers from passages without training.

    python -m recipes.rag.topics [--host smollm2] [--top-k 4] [--again 0 8 24 1000] [--questions 100]

The topics of `pydoc_data.topics` are cut as `mmattn index build FOLDER` cuts them. Each row answers the same questions
in the same words, from the same passages: an answer is right if the string of `topics.tsv` stands in it.
"""

from __future__ import annotations

import argparse
import importlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.retrieval import chunk

SIZE, OVERLAP = 96, 12  # words, as in `mmattn index build`
NEW_TOKENS = 32
BATCH = 10


class Question(NamedTuple):
    """A question, the string that its answer must have, and a topic where it stands."""

    topic: str
    text: str
    answer: str


def load_questions() -> list[Question]:
    """Return the questions of `topics.tsv`."""
    lines = Path(__file__).with_name("topics.tsv").read_text(encoding="utf-8").splitlines()
    return [Question(*line.split("\t")) for line in lines]


def load_topics() -> dict[str, str]:
    """Return the topics of Python's documentation by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return topics


def is_right(answer: str, text: str) -> bool:
    """Return True if a text has an answer as a word of its own, whatever its capitals and line breaks."""
    wanted, text = (" ".join(one.lower().split()) for one in (answer, text))
    before, after = (r"(?<!\w)" if wanted[0].isalnum() else "", r"(?!\w)" if wanted[-1].isalnum() else "")
    return re.search(before + re.escape(wanted) + after, text) is not None


class Asked:
    """Questions with their passages, and the answers from them in each way."""

    def __init__(self, pipe: Any, questions: Sequence[Question]) -> None:
        self.pipe, self.questions = pipe, questions
        self.prompts, self.texts = [], []
        for question in questions:
            prompt, memory = pipe.inputs(question.text)
            self.prompts.append(prompt)
            self.texts.append([source.text for source in memory.sources[0]])
        self.numbers = [pipe.read(texts) for texts in self.texts]

    def found(self) -> int:
        """Return how many questions have a passage with the answer."""
        pairs = zip(self.questions, self.texts, strict=True)
        return sum(any(is_right(question.answer, text) for text in texts) for question, texts in pairs)

    def row(self, name: str, numbers: Sequence[Sequence[int]], again: int | None) -> dict[str, Any]:
        """Return how many answers are right from the passages of each question; `again` is None in the prompt."""
        start, right = time.perf_counter(), 0
        for first in range(0, len(numbers), BATCH):
            part = slice(first, first + BATCH)
            answers = self.answers(self.prompts[part], numbers[part], again)
            right += sum(is_right(one.answer, text) for one, text in zip(self.questions[part], answers, strict=True))
        row = {"name": name, "right": right, "seconds": (time.perf_counter() - start) / len(numbers)}
        print(row, flush=True)
        return row

    def answers(self, prompts: Sequence[list[int]], numbers: Sequence[Sequence[int]], again: int | None) -> list[str]:
        """Return answers from passages that were read beforehand, or stand in the prompt."""
        passages, memory = self.pipe.passages, None
        if again is None:
            texts = [[token for one in row for token in passages.ids(one)] for row in numbers]
            prompts = [[*passages.prefix, *text, *prompt] for text, prompt in zip(texts, prompts, strict=True)]
        else:
            memory = passages.select(numbers, recomputed_tokens=again)
        options = {"max_new_tokens": NEW_TOKENS}
        return pipelines.generate_texts(self.pipe.model, self.pipe.tokenizer, prompts, memory, options=options)


def main() -> None:
    """Parse the command line, ask, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="smollm2", help="the language model")
    parser.add_argument("--top-k", type=int, default=None, help="passages of a question; the pipeline's by default")
    parser.add_argument("--again", type=int, nargs="*", default=[8, 24, 1000], help="first tokens read again")
    parser.add_argument("--questions", type=int, default=100, help="how many of them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    topics, questions = load_topics(), load_questions()[: args.questions]
    texts = [one.text for one in chunk(list(topics.values()), SIZE, OVERLAP, sources=list(topics))]
    index = mmattn.Index.build(texts, encoder=mmattn.TextEncoder())
    pipe = mmattn.pipeline(host=args.host, index=index, dtype=getattr(torch, args.dtype))
    if args.top_k is not None:
        memory = pipe.config.memory.model_copy(update={"top_k": args.top_k})
        pipe.config = pipe.config.model_copy(update={"memory": memory})
    asked = Asked(pipe, questions)
    tokens = sum(pipe.passages.lengths)
    print(f"{len(texts)} passages; of {asked.found()} of {len(questions)} questions one of those found has the answer")
    print(f"{len(pipe.passages)} read, {tokens} tokens, {pipe.passages.nbytes() / tokens:,.0f} bytes a token")
    empty: list[list[int]] = [[] for _ in questions]
    rows = [
        asked.row("closed book", empty, 0),
        asked.row("passages in the prompt", asked.numbers, None),
        asked.row("passages read beforehand", asked.numbers, 0),
        *(asked.row(f"…, {count} first tokens of each read again", asked.numbers, count) for count in args.again),
        asked.row("passages of another question", [*asked.numbers[1:], asked.numbers[0]], 0),
    ]
    header = ("", f"right of {len(questions)}", "seconds a question")
    print(training.markdown_table(header, [(row["name"], str(row["right"]), f"{row['seconds']:.2f}") for row in rows]))


if __name__ == "__main__":
    main()
