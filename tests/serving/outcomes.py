"""Clients of a server of an adapter that reads pictures, whose processes may be killed."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections import Counter
from pathlib import Path

import httpx

import mmattn

PICTURES = sorted((Path(__file__).resolve().parents[2] / "assets" / "flora").glob("*.png"))


def captions(folder: str = "assets/vision/adapter", text: str = "") -> dict[str, str]:
    """Return what a pipeline says to each picture, by its data URL."""
    answers = mmattn.pipeline(folder, device="cpu")(PICTURES, text)
    urls = [f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in PICTURES]
    return dict(zip(urls, answers, strict=True))


class Outcomes:
    """Clients that ask until the block ends, and counts of what became of their requests."""

    def __init__(self, url: str, answers: dict[str, str], clients: int, text: str = "") -> None:
        self.url, self.answers, self.text = url, list(answers.items()), text
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Outcomes:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "a request was not answered"

    def wait_for(self, answers: int, seconds: float = 120.0) -> None:
        """Wait until so many more answers were right."""
        end, enough = time.monotonic() + seconds, self.counts["right"] + answers
        while self.counts["right"] < enough:
            assert time.monotonic() < end, f"{self.counts}, and {enough} right answers do not come"
            time.sleep(0.05)

    def _run(self, number: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not self.stop.is_set():
                number += 1
                self.counts[self._ask(client, *self.answers[number % len(self.answers)], number % 3 > 0)] += 1

    def _ask(self, client: httpx.Client, picture: str, answer: str, stream: bool) -> str:
        body = {"model": "adapter", "prompt": self.text, "image": picture, "stream": stream}
        begun = False
        try:
            with client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    return outcome_of_error(response)
                begun = True
                if not stream:
                    return "right" if json.loads(response.read())["choices"][0]["text"] == answer else "wrong"
                text = ""
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        return "right" if text.rstrip() == answer else "wrong"
                    if line:
                        text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                return "a stream that ends without [DONE]"
        except httpx.RemoteProtocolError:
            return "answer cut" if begun else "no response"


def outcome_of_error(response: httpx.Response) -> str:
    """Return "told to retry" if an error has OpenAI's shape and says so."""
    error = json.loads(response.read())["error"]
    told = response.status_code == 503 and "try again" in error["message"] and response.headers["retry-after"] == "1"
    return "told to retry" if told and error["type"] == "server_error" else f"{response.status_code}: {error}"
