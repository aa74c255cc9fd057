"""Clients of a server that ask in any order, and compare what they are told with what is right."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import openai


@dataclass(frozen=True)
class Asked:
    """A question, what it is to be answered from, and the answer."""

    question: str
    documents: list[dict[str, str]] | None
    answer: str


class Client:
    """One client, that asks until a time; a context, which ends with its connections closed."""

    def __init__(self, url: str, asked: list[Asked], number: int) -> None:
        self.url, self.asked, self.chance = url, asked, random.Random(number)
        self.found: Counter[str] = Counter()
        self.http = httpx.Client(verify=False, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, http_client=self.http)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def run(self, seconds: float) -> Counter[str]:
        """What became of its requests."""
        end = time.monotonic() + seconds
        with self:
            while time.monotonic() < end:
                ask = self.chance.choice([*3 * [self.whole], *3 * [self.stream], self.vanish, self.broken])
                try:
                    ask(self.chance.choice(self.asked))
                except openai.RateLimitError:
                    self.found["busy"] += 1
        return self.found

    def whole(self, one: Asked) -> None:
        """An answer at once."""
        made = self._completion(one, stream=False)
        self._compare(made.choices[0].text, one)

    def stream(self, one: Asked) -> None:
        """An answer in pieces."""
        self._compare("".join(piece.choices[0].text for piece in self._completion(one, stream=True)), one)

    def vanish(self, one: Asked) -> None:
        """Leaves after the first piece."""
        pieces = self._completion(one, stream=True)
        next(iter(pieces))
        pieces.close()
        self.found["left"] += 1

    def broken(self, one: Asked) -> None:
        """A body that is none, or vectors that are no numbers."""
        bad = self.chance.choice([b"{", b"[]", b'{"model": "tiny", "prompt": "a", "memory": [[NaN]]}'])
        made = self.http.post(f"{self.url}/v1/completions", content=bad, headers={"content-type": "application/json"})
        self.found[{400: "refused", 429: "busy"}.get(made.status_code, "wrong")] += 1

    def _completion(self, one: Asked, stream: bool) -> Any:
        more = {} if one.documents is None else {"documents": one.documents}
        return self.openai.completions.create(model="tiny", prompt=one.question, stream=stream, extra_body=more)

    def _compare(self, text: str, one: Asked) -> None:
        self.found["right" if text.rstrip() == one.answer else "wrong"] += 1


def ask_all(url: str, asked: list[Asked], clients: int, seconds: float) -> Counter[str]:
    """What became of the requests of many clients at once."""
    everyone = [Client(url, asked, number) for number in range(clients)]
    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(lambda one: one.run(seconds), everyone), Counter())
