"""Questions that SmolLM2 answers from passages without training: of Python's documentation, and of two passages.

    python -m recipes.rag.topics [--host smollm2] [--top-k 4] [--questions 100]
    python -m recipes.rag.topics --two-passages --again 5 15 30 100

The topics of `pydoc_data.topics` are cut as `mmattn index build FOLDER` cuts them, and asked as `mmattn ask` asks. Each
row answers the same questions in the same words, from the same passages: an answer is right if the string of
`topics.tsv` stands in it as a word of its own. Defaults were chosen on every other question, the first of two.
"""

from __future__ import annotations

import argparse
import importlib
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

import mmattn
from mmattn import pipelines, training
from mmattn.retrieval import chunk

from .territories import PROPERTIES, load_facts, territory_values

SIZE, OVERLAP = 96, 12  # words, as in `mmattn index build`
BATCH = 25
TIMED = 2  # questions, one by one, in seconds of one core


class Question(NamedTuple):
    """A question, the string that its answer must have, and a topic where it stands, or its own passages."""

    topic: str
    text: str
    answer: str
    passages: tuple[str, ...] = ()


def load_questions() -> list[Question]:
    """Return the questions of `topics.tsv`."""
    lines = Path(__file__).with_name("topics.tsv").read_text(encoding="utf-8").splitlines()
    return [Question(*line.split("\t")) for line in lines]


def load_topics() -> dict[str, str]:
    """Return the topics of Python's documentation by name."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return topics


def two_passage_questions(count: int, others: int = 3, seed: int = 0) -> list[Question]:
    """Return questions whose answer needs both passages: a foreign name in English, and the currency there.

    Args:
        count: how many.
        others: facts about other territories in each passage.
        seed: of the choice.
    """
    from babel import Locale

    random = Random(seed)
    named = {values["name"]: values for values in territory_values(Locale("en")).values() if "currency" in values}
    foreign = [one for one in load_facts()[1] if one.property == "name" and one.value in named]
    questions: list[Question] = []
    while len(questions) < count:
        facts = random.sample(foreign, others + 1)
        asked, currencies = facts[0], {named[one.value]["currency"] for one in facts}
        if len({one.value for one in facts}) < len(facts) or len(currencies) < len(facts):
            continue
        random.shuffle(facts)
        names = " ".join(one.sentence for one in facts)
        random.shuffle(facts)
        sentence = PROPERTIES["currency"][2]
        money = " ".join(sentence.format(key=one.value, value=named[one.value]["currency"]) for one in facts)
        question = PROPERTIES["currency"][1].format(key=asked.key)
        questions.append(Question("", question, named[asked.value]["currency"], (names, money)))
    return questions


def is_right(answer: str, text: str) -> bool:
    """Return True if a text has an answer as a word of its own, whatever its capitals and line breaks."""
    wanted, text = (" ".join(one.lower().split()) for one in (answer, text))
    before, after = (r"(?<!\w)" if wanted[0].isalnum() else "", r"(?!\w)" if wanted[-1].isalnum() else "")
    return re.search(before + re.escape(wanted) + after, text) is not None


def time_tokens(reply: Callable[[int], object], questions: int = 1) -> tuple[float, float]:
    """Return seconds of one core to the first token of replies of so many tokens, and tokens a second after it."""
    seconds = []
    for count in (1, 17):
        start = time.process_time()
        reply(count)
        seconds.append((time.process_time() - start) / questions)
    return seconds[0], 16 / (seconds[1] - seconds[0])


class Asked:
    """Questions with their passages, and the answers from them in each way."""

    def __init__(self, pipe: Any, questions: Sequence[Question], show: bool = False) -> None:
        self.pipe, self.questions, self.show = pipe, questions, show
        self.prompts: list[list[int]] = []
        self.texts: list[list[str]] = []
        for question in questions:
            rows = [{"text": text} for text in question.passages]
            index = pipelines.build_index(rows, pipe.config, pipe.encoder) if rows else None
            prompt, memory = pipe.inputs(question.text, index)
            self.prompts.append(prompt)
            self.texts.append(list(question.passages) or [source.text for source in memory.sources[0]])
        self.numbers = [pipe.read(texts) for texts in self.texts]
        self.from_prompt: list[str] = []  # replies, which those of the other ways are compared with

    def places(self) -> list[int]:
        """Return for each question which of its passages, the best first, has the answer; 0 for none."""
        pairs = zip(self.questions, self.texts, strict=True)
        return [
            next((place for place, text in enumerate(texts[::-1], 1) if is_right(question.answer, text)), 0)
            for question, texts in pairs
        ]

    def row(self, name: str, numbers: Sequence[Sequence[int]], again: int | None) -> tuple[str, ...]:
        """Return a row of the table; `again` tokens of each passage are read again, None for passages in the prompt."""
        replies = self.all_replies(numbers, again)
        if again is None:
            self.from_prompt = replies
        same = sum(a == b for a, b in zip(replies, self.from_prompt, strict=True)) / len(replies)
        right = [is_right(one.answer, reply) for one, reply in zip(self.questions, replies, strict=True)]
        places = self.places()
        by_place = Counter(place for place, is_ok in zip(places, right, strict=True) if is_ok)
        print(f"{name}: right by the passage that has the answer (0 for none) {by_place} of {Counter(places)}")
        if self.show:
            for one, reply, is_ok in zip(self.questions, replies, right, strict=True):
                print(name, is_ok, one.text, one.answer, repr(reply), sep="\t")
        first, speed = self.time(numbers, again)
        halves = [f"{100 * sum(half) / max(len(half), 1):.0f} %" for half in (right[::2], right[1::2], right)]
        words = sum(len(reply.split()) for reply in replies) / len(replies)
        row = (name, *halves, f"{100 * same:.0f} %", f"{words:.0f}", f"{first:.2f}", f"{speed:.1f}")
        print(row, flush=True)
        return row

    def time(self, numbers: Sequence[Sequence[int]], again: int | None) -> tuple[float, float]:
        """Return seconds to the first token, and tokens a second, of the first questions one by one."""
        rows = range(min(TIMED, len(numbers)))
        return time_tokens(
            lambda count: [
                self.replies([row], numbers, again, max_new_tokens=count, min_new_tokens=count) for row in rows
            ],
            len(rows),
        )

    def all_replies(self, numbers: Sequence[Sequence[int]], again: int | None) -> list[str]:
        """Return the answers to all questions, in batches."""
        rows = range(len(numbers))
        return [
            reply
            for first in range(0, len(rows), BATCH)
            for reply in self.replies(rows[first : first + BATCH], numbers, again)
        ]

    def replies(
        self, rows: Sequence[int], numbers: Sequence[Sequence[int]], again: int | None, **options: int
    ) -> list[str]:
        """Return answers from passages that were read beforehand, or stand in the prompt."""
        passages, memory = self.pipe.passages, None
        prompts, chosen = [self.prompts[row] for row in rows], [numbers[row] for row in rows]
        if again is None:
            texts = [[token for one in row for token in passages.ids(one)] for row in chosen]
            prompts = [[*passages.prefix, *text, *prompt] for text, prompt in zip(texts, prompts, strict=True)]
        else:
            memory = passages.select(chosen, recomputed_tokens=again)
        options = {**self.pipe.config.generation, **options}
        return pipelines.generate_texts(self.pipe.model, self.pipe.tokenizer, prompts, memory, options=options)


def main() -> None:
    """Parse the command line, ask, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="smollm2", help="the language model")
    parser.add_argument("--top-k", type=int, default=None, help="passages of a question; the pipeline's by default")
    parser.add_argument("--again", type=int, nargs="*", default=[], help="percent of tokens read again")
    parser.add_argument("--questions", type=int, default=None, help="how many of them; 100, or 60 of two passages")
    parser.add_argument("--two-passages", action="store_true", help="questions that need two passages")
    parser.add_argument("--show", action="store_true", help="print every reply")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    index = None
    if args.two_passages:
        questions = two_passage_questions(args.questions or 60)
    else:
        topics, questions = load_topics(), load_questions()[: args.questions]
        texts = [one.text for one in chunk(list(topics.values()), SIZE, OVERLAP, sources=list(topics))]
        index = mmattn.Index.build(texts, encoder=mmattn.TextEncoder())
    pipe = mmattn.pipeline(host=args.host, index=index, dtype=getattr(torch, args.dtype))
    if args.top_k is not None:
        memory = pipe.config.memory.model_copy(update={"top_k": args.top_k})
        pipe.config = pipe.config.model_copy(update={"memory": memory})
    start = time.process_time()
    asked = Asked(pipe, questions, args.show)
    lengths, tokens = pipe.passages.lengths, sum(pipe.passages.lengths)
    size, seconds = pipe.passages.nbytes(), time.process_time() - start
    print(f"{len(lengths)} passages, {tokens} tokens, {size / tokens:,.0f} bytes each, read in {seconds:.0f} s")
    empty: list[list[int]] = [[] for _ in questions]
    counts = {
        share: max(lengths) if share == 100 else round(share / 100 * tokens / len(lengths)) for share in args.again
    }
    rows = [
        asked.row("passages in the prompt", asked.numbers, None),
        asked.row("passages read beforehand", asked.numbers, 0),
        *(asked.row(f"passages, {share} % of tokens again", asked.numbers, count) for share, count in counts.items()),
        asked.row("closed book", empty, 0),
        asked.row("passages of another question", [*asked.numbers[1:], asked.numbers[0]], 0),
    ]
    shares = ("right, chosen on", "right, others", "right, all", "same reply as from the prompt")
    header = ("", *shares, "words", "seconds to first token", "tokens/s")
    print(training.markdown_table(header, rows))


if __name__ == "__main__":
    main()
