"""`Engine`: one adapted model that answers many requests at once, by transformers' continuous batching."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch

from mmattn.data.text_batches import bos_and_eos, check_prompt
from mmattn.errors import ConditionError, ConfigError
from mmattn.memory import Memory
from mmattn.pipelines.generation import prompt_rows
from mmattn.serving.limits import Limits

PAGE = 16


class BusyError(Exception):
    """As many requests run and wait as the server takes."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Args:
        text: what was written since the last piece.
        tokens: how many tokens were written so far.
        finish_reason: "stop" or "length" with the last piece.
    """

    text: str
    tokens: int
    finish_reason: str | None = None


class Engine:
    """A pipeline whose model answers requests as they come, each with its own memory.

    Args:
        pipe: an `ImageToTextPipeline` or a `QuestionAnsweringPipeline`.
        limits: what is taken.

    Raises:
        ConfigError: a pipeline that writes no texts after prompts.
        ConditionError: an adapter whose tokens see a part of their memory only.
    """

    def __init__(self, pipe: Any, limits: Limits) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        if pipe.config.task not in ("image-to-text", "question-answering"):
            raise ConfigError(
                f"the adapter is for {pipe.config.task}, and a server answers questions or describes pictures"
            )
        self.pipe, self.limits = pipe, limits
        self.running = 0
        self._numbers = itertools.count()
        self._idle = asyncio.Event()
        self._idle.set()
        _, self.end = bos_and_eos(pipe.tokenizer)
        text = pipe.model.config.get_text_config()
        self.context = int(getattr(text, "max_position_embeddings", 2048))
        rows = limits.max_requests * -(-self.context // PAGE)
        device = pipe.device.type
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            # On a GPU as many as there is room for, as transformers finds out.
            num_blocks=min(rows, 4096) if device == "cpu" else None,
            max_batch_tokens=max(256, self.context) if device == "cpu" else None,
        )
        answers = GenerationConfig(do_sample=False, eos_token_id=self.end, pad_token_id=self.end)
        self.manager = pipe.model.host.init_continuous_batching(
            generation_config=answers, continuous_batching_config=config
        )

    def start(self) -> None:
        """Begin to answer."""
        self.manager.start()

    async def stop(self) -> None:
        """Answer what has been taken, then end."""
        await self._idle.wait()
        await asyncio.to_thread(self.manager.stop, block=True)

    def healthy(self) -> bool:
        """Whether requests are answered."""
        return bool(self.manager.is_running())

    def nbytes(self) -> int:
        """Bytes of keys and values of the memories in use."""
        return int(self.manager.memories.nbytes())

    def enter(self) -> None:
        """Take a request; `leave` must follow.

        Raises:
            BusyError: there are as many as the server takes.
        """
        if self.running >= self.limits.max_requests:
            raise BusyError
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request that was taken has ended, in whatever way."""
        self.running -= 1
        if not self.running:
            self._idle.set()

    def ids_of(self, prompt: str, max_tokens: int) -> list[int]:
        """The ids of a prompt.

        Args:
            prompt: as the model is to continue it.
            max_tokens: new ones, for which there must be room.

        Raises:
            TextError: it is too long.
        """
        (ids,) = prompt_rows(self.pipe.tokenizer, [prompt])
        given = torch.tensor([ids])
        check_prompt(given, torch.ones_like(given), self.pipe.model.config, max_tokens)
        return ids

    async def answer(self, ids: list[int], memory: Memory, max_tokens: int) -> AsyncIterator[Piece]:
        """What is written after a prompt, piece by piece; whoever leaves the loop cancels the request.

        Args:
            ids: of the prompt.
            memory: of one row.
            max_tokens: at most so many new ones.

        Raises:
            ConditionError: the request failed in the model.
        """
        name, results = f"request-{next(self._numbers)}", asyncio.Queue[Any]()
        self.manager.register_result_handler(name, results.put_nowait)
        done, shown = False, ""
        try:
            await asyncio.to_thread(
                self.manager.add_request, ids, name, memory=memory, max_new_tokens=max_tokens, streaming=True
            )
            while not done:
                result = await results.get()
                if result.error is not None:
                    raise ConditionError(f"the request failed: {result.error}")
                done, written = result.is_finished(), list(result.generated_tokens)
                text = self.pipe.tokenizer.decode(written, skip_special_tokens=True).lstrip()
                # A character of several tokens is shown once it is whole.
                if text.endswith("\N{REPLACEMENT CHARACTER}") and not done:
                    continue
                reason = ("stop" if written and written[-1] == self.end else "length") if done else None
                yield Piece(text[len(shown) :], len(written), reason)
                shown = text
        finally:
            if not done:
                self.manager.cancel_request(name)
                self.manager.output_router.result_handlers.pop(name, None)
            # What the model writes before it sees a cancellation has no handler any more: nobody reads it.
            while self.manager.get_result(timeout=0) is not None:
                pass
