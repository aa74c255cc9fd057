"""Answers to requests: their inputs are encoded beside the model, their pieces written whole or as they come."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmattn.encoders.base import TextEncoderBase
from mmattn.errors import ConfigError, MmattnError
from mmattn.pipelines.to_text import ImageToTextPipeline
from mmattn.serving.engine import Engine, Job, Piece
from mmattn.serving.formats import Echo, Format, as_event, error_content
from mmattn.serving.inputs import make_inputs
from mmattn.serving.middleware import Metrics
from mmattn.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from mmattn.tokenization import tokenize

#: Pictures that are encoded at once, so that a slow one does not hold up the others.
PICTURES = 4


class Answering:
    """Answers the requests of both paths with one engine."""

    def __init__(self, engine: Engine, name: str, metrics: Metrics) -> None:
        self.engine, self.name, self.metrics = engine, name, metrics
        # An index is searched by one request at a time.
        self._encoding = asyncio.Semaphore(PICTURES if isinstance(engine.pipe, ImageToTextPipeline) else 1)

    async def answer(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        """Return the response to one request."""
        self.check_model(body.model)
        limits, choices = self.engine.limits, body.n or 1
        answers = choices if isinstance(body, ChatRequest) else choices * len(body.prompts)
        if answers > limits.max_requests:
            raise ConfigError(f"{answers} answers to one request are more than {limits.max_requests}: ask for fewer")
        max_tokens = self._max_tokens(body.token_limits)
        self.engine.enter(answers)
        streams = False
        try:
            deadline = asyncio.get_running_loop().time() + limits.timeout
            jobs, form = await self._in_time(self._begin(body, max_tokens, choices))
            if body.stream:
                usage = bool(body.stream_options and body.stream_options.include_usage)
                streams = True  # the end of the stream leaves
                return Events(self._events(jobs, form, deadline, usage), lambda: self.engine.leave(answers))
            return await self._whole(jobs, form, deadline, request)
        finally:
            if not streams:
                self.engine.leave(answers)

    async def _in_time(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await asyncio.wait_for(work, self.engine.limits.timeout)
        except asyncio.TimeoutError:
            raise self.engine.late() from None

    def check_model(self, name: str) -> None:
        """Raise 404 for the name of another model."""
        if name != self.name:
            message = f"there is no model {name!r} here: this server has {self.name!r}"
            raise HTTPException(404, {"message": message, "param": "model", "code": "model_not_found"})

    async def _encode(self, function: Callable[..., Any], *args: object) -> Any:
        """Return what an encoder or a search returns, beside the model, a few at a time."""
        await self._encoding.acquire()
        running = asyncio.ensure_future(asyncio.to_thread(function, *args))

        def end(done: asyncio.Future[Any]) -> None:
            # A request that is given up leaves its place when its thread ends.
            self._encoding.release()
            done.exception()

        running.add_done_callback(end)
        return await asyncio.shield(running)

    async def embed(self, body: EmbeddingRequest, encoder: TextEncoderBase) -> JSONResponse:
        """Return the vectors of texts by the encoder of an index."""
        self.check_model(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        self.engine.enter()
        try:
            memory = await self._in_time(self._encode(encoder.encode, texts))
        finally:
            self.engine.leave()
        if memory.length != 1:
            raise ConfigError("the encoder of this model turns a text into several vectors: ask another for embeddings")
        rows: Any = memory.tokens[:, 0].float().cpu()
        if body.encoding_format == "base64":
            rows = [base64.b64encode(row.numpy().tobytes()).decode() for row in rows]
        else:
            rows = rows.tolist()
        data = [{"object": "embedding", "index": number, "embedding": row} for number, row in enumerate(rows)]
        tokens = sum(map(len, tokenize(self.engine.pipe.tokenizer, texts)[0]))
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})

    def _max_tokens(self, asked: Sequence[int]) -> int:
        most = self.engine.limits.max_tokens
        if not asked:
            usual = self.engine.pipe.config.generation.get("max_new_tokens")
            return min(most, usual if isinstance(usual, int) else 64)
        if max(asked) > most:
            raise ConfigError(f"max_tokens={max(asked)} is more than the {most} of this server")
        return min(asked)

    async def _begin(
        self, body: ChatRequest | CompletionRequest, max_tokens: int, choices: int
    ) -> tuple[list[Job], Format]:
        """Encode the inputs of a request; return its answers as jobs, and their format."""
        engine, tokenizer = self.engine, self.engine.pipe.tokenizer
        inputs = await self._encode(make_inputs, engine.pipe, body, engine.limits)
        rows = [engine.ids_of(prompt, max_tokens) for prompt, _ in inputs]
        echoes = isinstance(body, CompletionRequest) and bool(body.echo)
        jobs = [
            Job(ids, memory, max_tokens, body.sampling(body.top, choice), body.stops, echoes)
            for ids, (_, memory) in zip(rows, inputs, strict=True)
            for choice in range(choices)
        ]
        form = Format(isinstance(body, ChatRequest), self.name, tokenizer, sum(map(len, rows)), body.top)
        if echoes:
            for number, ids in enumerate(rows):
                echo = Echo(tokenizer.decode(ids), ids)
                if body.top is not None:
                    echo.logprobs = await asyncio.to_thread(engine.score, ids, inputs[number][1], body.top)
                form.echoes |= dict.fromkeys(range(number * choices, (number + 1) * choices), echo)
        return jobs, form

    async def _pieces(self, jobs: Sequence[Job], deadline: float) -> AsyncGenerator[tuple[int, Piece], None]:
        """Yield the pieces of all answers, and count their tokens."""
        if not jobs[0].max_tokens:
            for number in range(len(jobs)):
                yield number, Piece("", 0, "length")
            return
        begin, counts = time.perf_counter(), dict.fromkeys(range(len(jobs)), 0)
        async with contextlib.aclosing(self.engine.answer(jobs, deadline)) as pieces:
            async for number, piece in pieces:
                if not counts[number]:
                    self.metrics.first_token.observe(time.perf_counter() - begin)
                self.metrics.tokens.inc(piece.tokens - counts[number])
                counts[number] = piece.tokens
                yield number, piece

    async def _whole(self, jobs: Sequence[Job], form: Format, deadline: float, request: Request) -> Response:
        async def write() -> dict[int, Piece]:
            answers: dict[int, Piece] = {}
            async for number, piece in self._pieces(jobs, deadline):
                before = answers.get(number, Piece("", 0))
                logprobs = [*before.logprobs, *piece.logprobs]
                answers[number] = replace(piece, text=before.text + piece.text, logprobs=logprobs)
            return answers

        writing = asyncio.ensure_future(write())
        try:
            while not (await asyncio.wait([writing], timeout=0.5))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
            answers = writing.result()
        finally:
            writing.cancel()
            with contextlib.suppress(BaseException):
                await writing
        choices = [
            form.choice(number, replace(answers[number], text=answers[number].text.rstrip()))
            for number in sorted(answers)
        ]
        return JSONResponse(form.response(choices, tokens=sum(answer.tokens for answer in answers.values())))

    async def _events(
        self, jobs: Sequence[Job], form: Format, deadline: float, with_usage: bool
    ) -> AsyncGenerator[str, None]:
        counts: dict[int, int] = {}
        try:
            async for number, piece in self._pieces(jobs, deadline):
                counts[number] = piece.tokens
                yield as_event(form.response([form.choice(number, piece, is_chunk=True)], is_chunk=True))
            if with_usage:
                yield as_event(form.response([], is_chunk=True, tokens=sum(counts.values())))
            yield "data: [DONE]\n\n"
        except MmattnError as error:
            yield as_event(error_content(400, str(error)))
        except HTTPException as error:
            yield as_event(error_content(error.status_code, error.detail))


class Events(StreamingResponse):
    """A stream of events that calls `end` however it ends, also without a reader."""

    def __init__(self, chunks: AsyncGenerator[str, None], end: Callable[[], None]) -> None:
        super().__init__(chunks, media_type="text/event-stream")
        self._chunks, self._end = chunks, end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()
            self._end()
