"""Threads that generate on one host, each with a memory of its own, and whether one ever answers for another.

    python -m tests.stress.threads [GENERATES]

Eight threads, each with its own memory, generate that often on a tiny LLaMA: the memory given as an argument, by a
block around the untouched call, and prepared. A tenth as many tasks go through a pool and through `asyncio.to_thread`,
where a thread has another memory at every task, and eight threads stream their text at once. Every answer is compared
with the one that was given alone. Prints one line and exits with 1 if one differs or fails.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer

from tests import tiny

TEXTS = 5
HOW = {"max_new_tokens": 4, "do_sample": False}


class Readers:
    """One host, a memory for each reader, and what each is answered when it is alone."""

    def __init__(self, count: int) -> None:
        self.model = tiny.attach(tiny.make("llama"))
        self.memories = [tiny.memory(1, m=5 + i, seed=i) for i in range(count)]
        self.prepared = [self.model.prepare(memory) for memory in self.memories]
        self.texts = [tiny.text(1, seed=i) for i in range(TEXTS)]
        self.want = [
            [self.model.generate(text, memory=memory, **HOW) for text in self.texts] for memory in self.memories
        ]
        answers = {tuple(tuple(answer.flatten().tolist()) for answer in one) for one in self.want}
        assert len(answers) == count, "two readers have the same answers: neither could be taken for the other"

    def ask(self, reader: int, number: int) -> Tensor:
        """The answer to a reader's question of this number, in one of three ways."""
        text = self.texts[number % TEXTS]
        if number % 3 == 0:
            with self.model.condition(self.memories[reader]):
                out: Tensor = self.model.host.generate(text, **HOW)
            return out
        memory = self.memories[reader] if number % 3 == 1 else self.prepared[reader]
        return self.model.generate(text, memory=memory, **HOW)

    def is_wrong(self, reader: int, number: int) -> bool:
        """Whether this reader is answered anything but its own answer; an error is no answer."""
        try:
            return not torch.equal(self.ask(reader, number), self.want[reader][number % TEXTS])
        except Exception as error:
            print(f"reader {reader}, question {number}: {error!r}", file=sys.stderr)
            return True

    def streams_wrong(self, reader: int) -> bool:
        """The same of a text that comes piece by piece out of another thread."""
        words, text = tokenizer(), self.texts[reader % TEXTS]
        streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
        more = {"memory": self.memories[reader], "streamer": streamer} | HOW
        thread = threading.Thread(target=self.model.generate, args=(text,), kwargs=more)
        thread.start()
        got = "".join(streamer).split()
        thread.join()
        return bool(got != words.decode(self.want[reader][reader % TEXTS][0, text.shape[1] :]).split())


def tokenizer() -> PreTrainedTokenizerFast:
    """One word for each id."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w2")


def together(works: list[Callable[[], int]]) -> int:
    """The sum of what these return, each in a thread of its own, all begun at once."""
    begin = threading.Barrier(len(works))

    def work(one: Callable[[], int]) -> int:
        begin.wait()
        return one()

    with ThreadPoolExecutor(len(works)) as pool:
        return sum(pool.map(work, works))


def compare(threads: int, generates: int) -> dict[str, tuple[int, int]]:
    """For every way of sharing a host, how many answers were wrong and how many there were."""
    readers, few = Readers(threads), max(1, generates // 10)
    tasks = [(reader, number) for number in range(few) for reader in range(threads)]

    def alone(reader: int) -> int:
        return sum(readers.is_wrong(reader, number) for number in range(generates))

    async def tasks_in_threads() -> list[bool]:
        return await asyncio.gather(*[asyncio.to_thread(readers.is_wrong, *task) for task in tasks])

    wrong: dict[str, Any] = {}
    wrong["threads"] = together([functools.partial(alone, reader) for reader in range(threads)]), threads * generates
    with ThreadPoolExecutor(threads) as pool:
        wrong["pool"] = sum(pool.map(lambda task: readers.is_wrong(*task), tasks)), len(tasks)
    wrong["asyncio"] = sum(asyncio.run(tasks_in_threads())), len(tasks)
    streams: list[Callable[[], int]] = [functools.partial(readers.streams_wrong, reader) for reader in range(threads)]
    wrong["streamers"] = together(streams), threads
    return wrong


def main(generates: int = 200) -> int:
    found = compare(8, generates)
    print("wrong answers: " + ", ".join(f"{name} {wrong} of {count}" for name, (wrong, count) in found.items()))
    return int(any(wrong for wrong, _ in found.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(*map(int, sys.argv[1:])))
