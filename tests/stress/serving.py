"""Sixty-four clients of one server, and whether one is ever answered from the memory of another.

    python -m tests.stress.serving [SECONDS] [CLIENTS]

The facts adapter that ships is served on 127.0.0.1 with an index of facts that it was not trained on. Clients in a
process of their own ask for a minute, in any order: a question of the index, a question with documents that say
something else, the same as a stream, a stream that is left after the first words, and bodies that are broken. Every
answer is compared with what the pipeline says to that question alone. Then nothing may be left: no request, no
output, no memory, no tensor. Prints one line and exits with 1 otherwise.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import resource
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from mmattn.pipelines.question_answering import build_index
from tests.serving.clients import Asked, Client, ask_all
from tests.serving.servers import FACTS, QUESTIONS, answering_pipe, serving


def make_questions(pipe: Any) -> list[Asked]:
    """Each question with the index, and where a document of another value changes the answer, with that."""
    found = [Asked(question, None, pipe(question).text) for question in QUESTIONS]
    for number, question in enumerate(QUESTIONS):
        documents = [{"title": FACTS[number]["title"], "value": FACTS[(number + 3) % len(FACTS)]["value"]}]
        answer = pipe(question, index=build_index(documents, pipe.config, pipe.encoder)).text
        if answer != found[number].answer:
            found.append(Asked(question, documents, answer))
    return found


def tensors() -> int:
    """How many tensors there are."""
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def load(seconds: float, clients: int) -> tuple[Counter[str], dict[str, int]]:
    """What became of the requests, and what is left behind."""
    pipe = answering_pipe()
    asked = make_questions(pipe)
    apart = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with apart, serving(pipe, max_requests=clients, max_tokens=40) as server:
        apart.submit(ask_all, server.url, asked, clients, 0.5).result()  # everything that stays is made
        assert server.until(server.is_idle, 60)
        before = tensors()
        found = apart.submit(ask_all, server.url, asked, clients, seconds).result()
        server.until(server.is_idle, 60)
        # What a request wrote that was left is dropped with the end of the next.
        with Client(server.url, asked, 0) as last:
            last.whole(asked[0])
        found += last.found
        server.until(server.is_idle, 60)
        server.until(lambda: tensors() <= before)  # the thread that generates lets go of its last step a moment later
        left = {
            "requests": server.engine.running + len(server.engine.manager.output_router.result_handlers),
            "outputs": server.unread(),
            "memories": len(server.engine.manager.memories),
            "tensors": max(0, tensors() - before),
        }
    return found, left


def main(seconds: float = 60.0, clients: int = 64) -> int:
    """Print one line; 1 if an answer was wrong or something is left."""
    logging.disable(logging.INFO)
    found, left = load(seconds, clients)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    told = ", ".join(f"{found[name]} {name}" for name in ("right", "wrong", "left", "refused", "busy"))
    print(f"{clients} clients for {seconds:g} s: {told}; left behind: {left}; at most {peak} MB")
    return int(bool(found["wrong"] or any(left.values()) or not found["right"]))


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:3])))
