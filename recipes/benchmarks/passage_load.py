"""Passages under load: time to the first token of SmolLM2 over thousands of requests, and its answers.

    python -m recipes.benchmarks.passage_load [--queries 10000] [--passages 2000] [--top-k 6]
    python -m recipes.benchmarks.passage_load --answers 400

Passages of 64 to 256 tokens are read beforehand: sentences of Python's documentation, and somewhere among them a fact
about a territory. Memory holds a quarter of their keys and values, a folder all of them. Each request asks for passages
drawn by Zipf's law, always in a new combination, and a question about one of their facts follows them. First tokens are
computed in windows; of requests between them the passages are fetched, which is all that the cache sees of a request.
Files are dropped from the operating system's cache after their use, so that each is read from the disk again. Some
requests of each window are answered from the prompt, too, right after: the speed without a cache, and the median of the
ratios.

Beside ours stands the curve that was published of CacheBlend under novel requests (LMCache issue 4663, two sizes of its
cache; its batches are taken as 30 requests): the speed over no cache, which falls to 1 within 60 to 90 requests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

import mmattn
from recipes.benchmarks.timing import timed
from recipes.rag.data import Fact, load_facts
from recipes.rag.documents import load_topics
from recipes.rag.reading import is_right, write_replies

#: LMCache issue 4663: speed of prefilling over no cache, by batches of novel requests, with 100 GB and with 20 GB.
PUBLISHED = {"100 GB": (4.48, 2.33, 1.32, 1.07), "20 GB": (1.49, 1.08, 1.07, 1.07, 1.12, 1.06)}
BATCH = 30
LENGTHS = 64, 256
AGAIN = 0.15
FROM_PROMPT = 10  # requests of a window that are answered from the prompt, too


def make_passages(tokenizer: Any, count: int) -> list[tuple[str, Fact]]:
    """Return sentences of documentation around a fact each, of a length in tokens drawn from LENGTHS."""
    random, facts = Random(0), [fact for part in load_facts() for fact in part]
    texts = [" ".join(text.split()) for part in load_topics() for text in part.values()]
    sentences = [f"{one}." for text in texts for one in text.split(". ") if 20 < len(one) < 300]
    passages = []
    for fact in random.sample(facts, count):
        length, begin, some = random.randint(*LENGTHS), random.randrange(len(sentences) - LENGTHS[1]), [fact.sentence]
        for sentence in sentences[begin:]:
            if len(tokenizer(" ".join([*some, sentence]))["input_ids"]) > length:
                break
            some.append(sentence)
        some.insert(random.randrange(len(some)), some.pop(0))
        passages.append((" ".join(some) + "\n\n", fact))
    return passages


class Load:
    """SmolLM2 with passages in memory for a share, and in files; requests drawn by Zipf's law."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.pipe = mmattn.pipeline(host="smollm2", dtype=torch.bfloat16)
        self.model, tokenizer, prefix = self.pipe.model, self.pipe.tokenizer, self.pipe.passages.prefix
        texts, self.facts = map(list, zip(*make_passages(tokenizer, options.passages), strict=True))
        one = mmattn.hosts.PassageCache(self.model, tokenizer, prefix=prefix)
        one.add(texts[:1], progress=False)
        tokens = sum(map(len, tokenizer(texts)["input_ids"]))
        size = tokens * one.nbytes() // one.lengths[0]
        self.folder = Path(folder)
        self.cache = mmattn.hosts.PassageCache(
            self.model, tokenizer, prefix=prefix, max_bytes=int(size * options.memory), folder=folder
        )
        self.pipe.passages, start = self.cache, time.perf_counter()
        self.numbers = self.cache.add(texts, progress=False)
        seconds, held = time.perf_counter() - start, self.cache.nbytes() / 1e9
        about = f"{len(self.cache)} passages, {tokens:,} tokens, {size / 1e9:.2f} GB, of which {held:.2f} in memory"
        print(f"{about}; read in {seconds:.0f} s", flush=True)
        self.random = np.random.default_rng(0)
        self.popularity = 1 / np.arange(1, options.passages + 1)
        self.popularity /= self.popularity.sum()
        self.ranks = self.random.permutation(options.passages)
        self.top_k, self.swept = options.top_k, 0.0

    def draw(self) -> tuple[list[int], Fact]:
        """Return the passages of a request, and the fact in them that it asks for."""
        rows = self.ranks[self.random.choice(len(self.ranks), self.top_k, replace=False, p=self.popularity)]
        return [self.numbers[row] for row in rows], self.facts[self.random.choice(rows)]

    def question(self, fact: Fact) -> torch.Tensor:
        """Return the ids of a question (1, l), behind the passages in the chat template."""
        return torch.tensor([self.pipe.make_prompt(fact.question)])

    def in_prompt(self, row: Sequence[int], question: torch.Tensor) -> torch.Tensor:
        """Return the ids of a prompt (1, l) that has the passages."""
        passages = [token for number in row for token in self.cache.ids(number)]
        return torch.cat([torch.tensor([[*self.cache.prefix, *passages]]), question], 1)

    def drop_files(self) -> None:
        """Drop files that were used since the last time from the cache of the operating system."""
        last, self.swept = self.swept, time.time()
        for shard in os.scandir(self.folder):
            for entry in os.scandir(shard):
                if entry.stat().st_mtime >= last:
                    with open(entry.path, "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def first_token(model: Any, ids: torch.Tensor, **memory: Any) -> float:
    """Return the seconds of one call, to the logits of the first token."""
    return timed(lambda: model(ids, use_cache=True, logits_to_keep=1, **memory)) / 1e3


@torch.no_grad()
def first_tokens(load: Load, options: argparse.Namespace) -> None:
    """Print the time to the first token by windows of requests, beside the published curve."""
    os.sync()
    load.drop_files()
    ends = [end for end in (1000, 5000, 10_000) if end <= options.queries]
    windows = [(begin, begin + BATCH) for begin in range(0, 5 * BATCH, BATCH)] + [(50, 150)]
    windows += [(end - 100, end) for end in ends]
    ours: dict[int, float] = {}
    beside: dict[int, tuple[float, float]] = {}  # seconds from the prompt, and with tokens read again
    queue: list[Any] = []
    for number in range(options.queries):
        while len(queue) < 2:  # a request waits while another one is answered
            row, fact = load.draw()
            queue.append((row, load.question(fact), load.cache.select([row])))
        row, question, memory = queue.pop(0)
        sizes = [end - begin for begin, end in windows if begin <= number < end]
        if sizes:
            ours[number] = first_token(load.model, question, memory=memory)
            if number % max(min(sizes) // FROM_PROMPT, 1) == 0:
                more = load.cache.select([row], recomputed_tokens=again(load))
                seconds = first_token(load.model.host, load.in_prompt(row, question))
                beside[number] = seconds, first_token(load.model, question, memory=more)
        else:
            load.cache.passages(memory.rows)
        if number % 5 == 4:
            load.drop_files()
    columns = ["requests", "ms", "of the prompt's", "15 % read again", "times as fast"]
    columns += [f"published, {size}" for size in PUBLISHED]
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for begin, end in windows:
        mean = statistics.mean(ours[number] for number in range(begin, end))
        inside = [(ours[number], *one) for number, one in beside.items() if begin <= number < end]
        share, more = (statistics.median(one[place] / one[1] for one in inside) for place in (0, 2))
        place, is_batch = begin // BATCH, end - begin == BATCH
        cells = [f"{mean * 1e3:.0f}", f"{share:.3f}", f"{more:.3f}", f"{1 / share:.1f}"]
        cells += [f"{curve[place]:.2f}" if is_batch and place < len(curve) else "" for curve in PUBLISHED.values()]
        print(f"| {begin}–{end} | {' | '.join(cells)} |")


def again(load: Load) -> int:
    """Return the tokens of each passage that are read again."""
    return round(AGAIN * statistics.mean(load.cache.lengths))


def answers(load: Load, count: int) -> None:
    """Print how many questions are answered right in each way."""
    requests = [load.draw() for _ in range(count)]
    rows, facts = [row for row, _ in requests], [fact for _, fact in requests]
    prompts = [load.pipe.make_prompt(fact.question) for fact in facts]
    ways: dict[str, tuple[list[list[int]], int | None]] = {
        "passages in the prompt": (rows, None),
        "passages read beforehand": (rows, 0),
        f"{AGAIN:.0%} of their tokens read again": (rows, again(load)),
        "passages of another question": ([*rows[1:], rows[0]], 0),
        "no passages": ([[] for _ in rows], 0),
    }
    for name, (chosen, recomputed) in ways.items():
        replies = write_replies(load.pipe, prompts, chosen, recomputed, max_new_tokens=16)
        right = statistics.mean(is_right(fact.value, reply) for fact, reply in zip(facts, replies, strict=True))
        print(f"| {name} | {right:.1%} right |", flush=True)


def main() -> None:
    """Parse the command line, read the passages, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=10_000, help="requests, 180 or more")
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--top-k", type=int, default=6, help="passages of a request")
    parser.add_argument("--memory", type=float, default=0.25, help="share of keys and values that memory holds")
    parser.add_argument("--answers", type=int, help="questions to answer, instead of timing first tokens")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        load = Load(options, temporary)
        first_tokens(load, options) if options.answers is None else answers(load, options.answers)


if __name__ == "__main__":
    main()
