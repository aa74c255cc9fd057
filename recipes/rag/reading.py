"""A frozen language model answers from passages in the prompt or read beforehand, without training.

    python -m recipes.rag.reading [--host smollm2] [--top-k 4] [--questions 100] [--again 5 15 30] [--dtype bfloat16]

The topics of `pydoc_data.topics` are cut as `mmattn index build FOLDER` cuts them, and asked as `mmattn ask` asks. Each
row answers the same questions in the same words, from the same passages: an answer is right if the string of
`topics.tsv` stands in it as a word of its own. Defaults were chosen on every other question, the first of two.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.retrieval import chunk

SIZE, OVERLAP = 96, 12  # words of a chunk, as in `mmattn index build`
BATCH = 25
TIMED = 2  # questions, one by one, in seconds of one core


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
    from pydoc_data.topics import topics

    return topics


def is_right(answer: str, text: str) -> bool:
    """Return True if a text has an answer as separate words, in any case and with any line breaks."""
    wanted, text = (" ".join(one.lower().split()) for one in (answer, text))
    before, after = (r"(?<!\w)" if wanted[0].isalnum() else "", r"(?!\w)" if wanted[-1].isalnum() else "")
    return re.search(before + re.escape(wanted) + after, text) is not None


def find_passages(pipe: Any, questions: Sequence[str]) -> tuple[list[list[int]], list[list[str]]]:
    """Return the prompt of each question behind its passages, and the passages, the best last."""
    inputs = [pipe.inputs(question) for question in questions]
    return [prompt for prompt, _ in inputs], [[source.text for source in memory.sources[0]] for _, memory in inputs]


def write_replies(
    pipe: Any, prompts: Sequence[Any], numbers: Sequence[Sequence[int]], again: int | None, **options: int
) -> list[str]:
    """Return answers from passages by number: in the prompt if `again` is None, or read beforehand.

    `again` tokens of each passage are read again after the passages before it.
    """
    passages, replies, options = pipe.passages, list[str](), {**pipe.config.generation, **options}
    for first in range(0, len(prompts), BATCH):
        part, chosen, memory = prompts[first : first + BATCH], numbers[first : first + BATCH], None
        if again is None:
            texts = [[token for number in row for token in passages.ids(number)] for row in chosen]
            part = [[*passages.prefix, *text, *prompt] for text, prompt in zip(texts, part, strict=True)]
        else:
            memory = passages.select(chosen, recomputed_tokens=again)
        replies += pipelines.generate_texts(pipe.model, pipe.tokenizer, part, memory, options=options)
    return replies


def time_tokens(pipe: Any, prompts: Sequence[Any], numbers: Sequence[Any], again: int | None) -> tuple[float, float]:
    """Return seconds of one core to the first token, and tokens a second after it, of questions one by one."""
    seconds = []
    for count in (1, 17):
        start = time.process_time()
        for row in range(TIMED):
            lengths = {"max_new_tokens": count, "min_new_tokens": count}
            write_replies(pipe, prompts[row : row + 1], numbers[row : row + 1], again, **lengths)
        seconds.append((time.process_time() - start) / TIMED)
    return seconds[0], 16 / (seconds[1] - seconds[0])


def main() -> None:
    """Parse the command line, ask, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="smollm2", help="the language model")
    parser.add_argument("--top-k", type=int, default=4, help="passages of a question")
    parser.add_argument("--again", type=int, nargs="*", default=[], help="percent of tokens read again")
    parser.add_argument("--questions", type=int, default=100, help="how many of them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    topics, questions = load_topics(), load_questions()[: args.questions]
    texts = [one.text for one in chunk(list(topics.values()), SIZE, OVERLAP, sources=list(topics))]
    index = mmattn.Index.build(texts, encoder=mmattn.TextEncoder())
    pipe: Any = mmattn.pipeline(host=args.host, index=index, dtype=getattr(torch, args.dtype))
    memory = pipe.config.memory.model_copy(update={"top_k": args.top_k, "margin": None})
    pipe.config = pipe.config.model_copy(update={"memory": memory})
    start = time.process_time()
    prompts, found = find_passages(pipe, [question.text for question in questions])
    numbers = [pipe.read(row) for row in found]
    lengths, tokens = pipe.passages.lengths, sum(pipe.passages.lengths)
    size, seconds = pipe.passages.nbytes(), time.process_time() - start
    print(f"{len(lengths)} passages, {tokens} tokens, {size / tokens:,.0f} bytes each, read in {seconds:.0f} s")
    # Which of the passages, the best first, has the answer; 0 for none.
    places = [
        next((place for place, text in enumerate(row[::-1], 1) if is_right(question.answer, text)), 0)
        for question, row in zip(questions, found, strict=True)
    ]
    ways: dict[str, tuple[Sequence[Sequence[int]], int | None]] = {
        "passages in the prompt": (numbers, None),
        "passages read beforehand": (numbers, 0),
    }
    for share in args.again:
        ways[f"passages, {share} % of tokens again"] = numbers, round(share / 100 * tokens / len(lengths))
    ways["closed book"] = [[] for _ in questions], 0
    ways["passages of another question"] = [*numbers[1:], numbers[0]], 0
    rows = []
    for name, (chosen, again) in ways.items():
        replies = write_replies(pipe, prompts, chosen, again)
        right = [is_right(one.answer, reply) for one, reply in zip(questions, replies, strict=True)]
        by_place = Counter(place for place, is_ok in zip(places, right, strict=True) if is_ok)
        print(f"{name}: right by the passage that has the answer (0 for none) {by_place} of {Counter(places)}")
        first, speed = time_tokens(pipe, prompts, chosen, again)
        shares = [f"{100 * sum(half) / max(len(half), 1):.0f} %" for half in (right[::2], right[1::2], right)]
        words = sum(len(reply.split()) for reply in replies) / len(replies)
        rows.append((name, *shares, f"{words:.0f}", f"{first:.2f}", f"{speed:.1f}"))
    shares = ["right, chosen on", "right, others", "right, all"]
    print(training.markdown_table(["", *shares, "words", "seconds to first token", "tokens/s"], rows))


if __name__ == "__main__":
    main()
