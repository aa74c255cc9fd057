"""The HTTP interface: /v1/models, /v1/completions, /v1/chat/completions, /health and /metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmattn.errors import MmattnError
from mmattn.memory import Memory
from mmattn.serving.engine import BusyError, Engine, Piece
from mmattn.serving.middleware import AccessLog, BodyLimit, Metrics, as_error
from mmattn.serving.requests import ChatRequest, CompletionRequest, GenerationRequest, make_inputs


def make_app(engine: Engine, name: str, api_key: str | None = None) -> FastAPI:
    """Build the application; its lifespan starts the engine, and ends it after the last answer.

    Args:
        engine: that answers.
        name: of the model, as /v1/models lists it.
        api_key: bearer token of requests; None for any.
    """
    metrics = Metrics(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(title="mmattn", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=engine.limits.max_body_bytes)
    app.add_middleware(AccessLog, metrics=metrics)
    answering = Answering(engine, name, metrics)

    def authorise(request: Request) -> None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(token.encode(), api_key.encode()):
            raise HTTPException(401, "the bearer token is missing or wrong")

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        return as_error(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return as_error(400, f"{where}: {first['msg']}" if where else str(first["msg"]), param=where or None)

    @app.exception_handler(MmattnError)
    async def wrong(request: Request, error: MmattnError) -> JSONResponse:
        return as_error(400, str(error))

    @app.get("/health")
    async def health() -> JSONResponse:
        ok = engine.healthy()
        return JSONResponse({"status": "ok" if ok else "stopped", "running": engine.running}, 200 if ok else 503)

    @app.get("/metrics", dependencies=[Depends(authorise)])
    async def figures() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", dependencies=[Depends(authorise)])
    async def models() -> JSONResponse:
        model = {"id": name, "object": "model", "created": 0, "owned_by": "mmattn"}
        return JSONResponse({"object": "list", "data": [model]})

    @app.post("/v1/completions", dependencies=[Depends(authorise)])
    async def completions(body: CompletionRequest, request: Request) -> Response:
        pictures = [] if body.image is None else [body.image]
        return await answering.answer(request, body, body.prompt, pictures, body.max_tokens, chat=False)

    @app.post("/v1/chat/completions", dependencies=[Depends(authorise)])
    async def chat(body: ChatRequest, request: Request) -> Response:
        try:
            text, pictures = body.user_content()
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        max_tokens = body.max_completion_tokens or body.max_tokens
        return await answering.answer(request, body, text, pictures, max_tokens, chat=True)

    return app


@dataclass(frozen=True)
class Job:
    """A request as the engine takes it."""

    ids: list[int]
    memory: Memory
    max_tokens: int
    deadline: float  # in seconds of `time.perf_counter`
    chat: bool  # the format is that of /v1/chat/completions, not of /v1/completions
    head: dict[str, object]  # first fields of the response

    def choice(self, text: str, reason: str | None, whole: bool = False, first: bool = False) -> dict[str, object]:
        """Return a whole answer, or a part of one."""
        if not self.chat:
            return {"index": 0, "text": text, "finish_reason": reason, "logprobs": None}
        message = {"role": "assistant", "content": text} if whole or first else {"content": text}
        return {"index": 0, "message" if whole else "delta": message, "finish_reason": reason}

    def response(self, choices: list[dict[str, object]], whole: bool = False, **fields: object) -> dict[str, object]:
        """Return a response, or an event of a stream."""
        kind = ("chat.completion" if whole else "chat.completion.chunk") if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, **fields}

    def usage(self, tokens: int) -> dict[str, int]:
        """Return the counts of tokens after `tokens` new ones."""
        prompt = len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


class Answering:
    """Answers the requests of both paths with one engine."""

    def __init__(self, engine: Engine, name: str, metrics: Metrics) -> None:
        self.engine, self.name, self.metrics = engine, name, metrics
        # Encoders and searches run one at a time, beside the model.
        self._encoding = asyncio.Semaphore(1)

    async def answer(
        self,
        request: Request,
        body: GenerationRequest,
        text: str,
        pictures: list[str],
        max_tokens: int | None,
        chat: bool,
    ) -> Response:
        """Return the response to one request; `pictures` are data URLs."""
        limits = self.engine.limits
        if body.model != self.name:
            raise HTTPException(404, f"there is no model {body.model!r} here: this server has {self.name!r}")
        if max_tokens is None:
            usual = self.engine.pipe.config.generation.get("max_new_tokens")
            max_tokens = min(limits.max_tokens, usual if isinstance(usual, int) else 64)
        if max_tokens > limits.max_tokens:
            raise HTTPException(400, f"max_tokens={max_tokens} is more than the {limits.max_tokens} of this server")
        try:
            self.engine.enter()
        except BusyError:
            message = f"{limits.max_requests} requests run or wait already: try again"
            raise HTTPException(429, message, {"Retry-After": "1"}) from None
        streams = False
        try:
            deadline = time.perf_counter() + limits.timeout
            async with self._encoding:
                prompt, memory = await asyncio.to_thread(
                    make_inputs,
                    self.engine.pipe,
                    limits.max_documents,
                    text,
                    pictures,
                    body.documents,
                    body.memory,
                )
            ids = self.engine.ids_of(prompt, max_tokens)
            number = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
            head = {"id": number, "created": int(time.time()), "model": self.name}
            job = Job(ids, memory, max_tokens, deadline, chat, head)
            if body.stream:
                usage = bool((body.stream_options or {}).get("include_usage"))
                streams = True  # the end of the stream leaves
                return Events(self._chunks(job, usage), self.engine.leave)
            return await self._whole(job, request)
        finally:
            if not streams:
                self.engine.leave()

    async def _pieces(self, job: Job) -> AsyncGenerator[Piece, None]:
        begin, count = time.perf_counter(), 0
        pieces = self.engine.answer(job.ids, job.memory, job.max_tokens)
        try:
            while True:
                try:
                    piece = await asyncio.wait_for(anext(pieces), job.deadline - time.perf_counter())
                except StopAsyncIteration:
                    return
                if not count:
                    self.metrics.first_token.observe(time.perf_counter() - begin)
                self.metrics.tokens.inc(piece.tokens - count)
                count = piece.tokens
                yield piece
        finally:
            await pieces.aclose()

    async def _whole(self, job: Job, request: Request) -> Response:
        async def write() -> tuple[str, Piece]:
            text, last = "", Piece("", 0, "length")
            async for piece in self._pieces(job):
                text, last = text + piece.text, piece
            return text, last

        writing = asyncio.ensure_future(write())
        try:
            while not (await asyncio.wait([writing], timeout=0.5))[0]:
                if await request.is_disconnected():
                    return Response(status_code=499)
            text, last = writing.result()
        except asyncio.TimeoutError:
            raise HTTPException(504, f"no answer within {self.engine.limits.timeout:g} s") from None
        finally:
            writing.cancel()
            with contextlib.suppress(BaseException):
                await writing
        choice = job.choice(text.rstrip(), last.finish_reason, whole=True)
        return JSONResponse(job.response([choice], whole=True, usage=job.usage(last.tokens)))

    async def _chunks(self, job: Job, with_usage: bool) -> AsyncGenerator[str, None]:
        count = 0
        try:
            async for piece in self._pieces(job):
                choice = job.choice(piece.text, piece.finish_reason, first=not count)
                count = piece.tokens
                yield as_event(job.response([choice]))
            if with_usage:
                yield as_event(job.response([], usage=job.usage(count)))
            yield "data: [DONE]\n\n"
        except (MmattnError, asyncio.TimeoutError) as error:
            message = str(error) or f"no answer within {self.engine.limits.timeout:g} s"
            yield as_event({"error": {"message": message, "type": "server_error", "param": None, "code": None}})


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


def as_event(content: dict[str, object]) -> str:
    """Return a line of a stream."""
    return f"data: {json.dumps(content)}\n\n"
