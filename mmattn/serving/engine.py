"""One adapted model that answers many requests at once, by the continuous batching of transformers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mmattn.data.text_batches import check_prompt
from mmattn.errors import ConditionError, ConfigError, check_float, check_int
from mmattn.memory import Memory
from mmattn.pipelines.generation import Prompt, end_ids, prompt_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.generation.continuous_batching import GenerationOutput

    from mmattn.pipelines.image_to_text import ImageToTextPipeline
    from mmattn.pipelines.question_answering import QuestionAnsweringPipeline

PAGE = 16


class BusyError(Exception):
    """The server has as many requests as it takes."""


@dataclass(frozen=True)
class Limits:
    """Limits of a server; a request beyond them is refused with a status code.

    Args:
        max_requests: requests that run or wait; another gets 429 with Retry-After.
        max_body_bytes: of a request, pictures included; 413.
        max_tokens: new tokens of an answer; 400.
        max_documents: documents of a request; 400.
        timeout: seconds until an unfinished request is given up; 504.

    Raises:
        ConfigError: a number below its range.
    """

    max_requests: int = 64
    max_body_bytes: int = 20_000_000
    max_tokens: int = 256
    max_documents: int = 256
    timeout: float = 120.0

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_tokens", "max_documents"):
            check_int(name, getattr(self, name))
        check_float("timeout", self.timeout, at_least=0.001)


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str
    tokens: int  # generated so far
    finish_reason: str | None = None  # "stop" or "length", of the last piece


class Engine:
    """A pipeline whose model answers requests as they come, each with its own memory.

    Args:
        pipe: what answers.
        limits: of the server.

    Raises:
        ConfigError: a pipeline of another task.
        ConditionError: an adapter whose tokens attend to a part of their memory only.
    """

    def __init__(self, pipe: ImageToTextPipeline | QuestionAnsweringPipeline, limits: Limits) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if pipe.config.task != "image-to-text" and not pipe.config.answers_questions:
            raise ConfigError(
                f"the adapter is for {pipe.config.task}, and a server answers questions or describes pictures"
            )
        self.pipe, self.limits = pipe, limits
        self.running = 0
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        self.ends = end_ids(pipe.model, pipe.tokenizer)
        host: PreTrainedModel = pipe.model.host
        text = host.config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", 2048))
        rows = limits.max_requests * -(-self.context // PAGE)
        device = pipe.device.type
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            # On a GPU transformers fills the free memory.
            num_blocks=min(rows, 4096) if device == "cpu" else None,
            max_batch_tokens=max(256, self.context) if device == "cpu" else None,
        )
        answers = GenerationConfig(do_sample=False, eos_token_id=self.ends, pad_token_id=self.ends[0])
        self.manager = host.init_continuous_batching(generation_config=answers, continuous_batching_config=config)

    def start(self) -> None:
        """Start to answer."""
        self.manager.start()

    async def stop(self) -> None:
        """Finish the requests that were taken, then end."""
        await self._idle.wait()
        await asyncio.to_thread(self.manager.stop, block=True)

    def healthy(self) -> bool:
        """Return True while requests are answered."""
        return bool(self.manager.is_running())

    def nbytes(self) -> int:
        """Return the bytes of keys and values of the memories in use."""
        return int(self.manager.memories.nbytes())

    def enter(self) -> None:
        """Take a request; `leave` must follow. BusyError at the limit."""
        if self.running >= self.limits.max_requests:
            raise BusyError
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        """Note the end of a request that was taken."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    def ids_of(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """Return the ids of a prompt; TextError if they leave no room for `max_tokens`."""
        (ids,) = prompt_rows(self.pipe.tokenizer, [prompt])
        input_ids = torch.tensor([ids])
        check_prompt(input_ids, torch.ones_like(input_ids), self.pipe.model.config, max_tokens)
        return ids

    async def answer(self, ids: list[int], memory: Memory, max_tokens: int) -> AsyncGenerator[Piece, None]:
        """Yield the text generated after prompt ids piece by piece; leaving the loop cancels the request."""
        name = f"request-{next(self._numbers)}"
        results: asyncio.Queue[GenerationOutput] = asyncio.Queue()
        self.manager.register_result_handler(name, results.put_nowait)
        done, sent = False, ""
        try:
            await asyncio.to_thread(
                self.manager.add_request, ids, name, memory=memory, max_new_tokens=max_tokens, streaming=True
            )
            while not done:
                result = await results.get()
                if result.error is not None:
                    raise ConditionError(f"the request failed: {result.error}")
                done, tokens = result.is_finished(), list(result.generated_tokens)
                text = self.pipe.tokenizer.decode(tokens, skip_special_tokens=True).lstrip()
                # Wait for the rest of a character of several tokens.
                if text.endswith("\N{REPLACEMENT CHARACTER}") and not done:
                    continue
                reason = ("stop" if tokens and tokens[-1] in self.ends else "length") if done else None
                yield Piece(text[len(sent) :], len(tokens), reason)
                sent = text
        finally:
            if not done:
                self.manager.cancel_request(name)
                self.manager.output_router.result_handlers.pop(name, None)
            # Tokens that were generated before the cancellation arrived have no handler.
            while self.manager.get_result(timeout=0) is not None:
                pass
