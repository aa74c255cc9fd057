"""Answers to requests: their inputs are encoded beside the model, their pieces written whole or as they come."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mmattn.encoders.base import TextEncoderBase
from mmattn.errors import ConfigError, MmattnError
from mmattn.pipelines.to_text import ImageToTextPipeline
from mmattn.serving.engine import Engine, Job, Piece, TokenLogprob
from mmattn.serving.inputs import make_inputs
from mmattn.serving.middleware import Metrics, error_content
from mmattn.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from mmattn.tokenization import special_ids, tokenize

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream
    from transformers import PreTrainedTokenizerBase

Content = dict[str, Any]

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
        usual = self.engine.pipe.config.generation.get("max_new_tokens")
        max_tokens = min(limits.max_tokens, *(body.token_limits or [usual if isinstance(usual, int) else 64]))
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

    async def _begin(
        self, body: ChatRequest | CompletionRequest, max_tokens: int, choices: int
    ) -> tuple[list[Job], Format]:
        """Encode the inputs of a request; return its answers as jobs, and their format."""
        engine, tokenizer = self.engine, self.engine.pipe.tokenizer
        inputs = await self._encode(make_inputs, engine.pipe, body, engine.limits)
        rows = [engine.fit(prompt, max_tokens) for prompt, _ in inputs]
        echoes = isinstance(body, CompletionRequest) and bool(body.echo)
        jobs = [
            Job(ids, memory, room, body.sampling(body.top, choice), body.stops, echoes)
            for (ids, room), (_, memory) in zip(rows, inputs, strict=True)
            for choice in range(choices)
        ]
        form = Format(isinstance(body, ChatRequest), self.name, tokenizer, sum(len(ids) for ids, _ in rows), body.top)
        if echoes:
            for number, (ids, _) in enumerate(rows):
                echo = Echo(ids)
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


@dataclass
class Echo:
    """A prompt that stands before its answers, and the log-probabilities of its ids but the first."""

    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] = ()


@dataclass
class Format:
    """The answers of one response."""

    chat: bool  # in the format of /v1/chat/completions, not of /v1/completions
    model: str
    tokenizer: PreTrainedTokenizerBase
    prompt_tokens: int  # of all prompts
    logprobs: int | None  # the most likely tokens at each place; None for no log-probabilities
    echoes: dict[int, Echo] = field(default_factory=dict)  # by answer

    def __post_init__(self) -> None:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": self.model}
        self._begun: set[int] = set()
        self._decoded: dict[int, tuple[DecodeStream, str]] = {}
        # The text of an answer has no special tokens.
        self._special = set() if self.logprobs is None else set(special_ids(self.tokenizer).values())
        self._bytes_of = functools.cache(functools.partial(token_bytes, self.tokenizer))

    def response(self, choices: Sequence[Content], is_chunk: bool = False, tokens: int | None = None) -> Content:
        """Return a response, or an event of a stream; with the usage after so many new tokens."""
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.chat else "text_completion"
        content = {**self._head, "object": kind, "choices": choices}
        if tokens is not None:
            prompt = self.prompt_tokens
            content["usage"] = {
                "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens
            }  # fmt: skip
        return content

    def choice(self, number: int, piece: Piece, is_chunk: bool = False) -> Content:
        """Return a choice of a response, or of an event."""
        is_first = number not in self._begun
        self._begun.add(number)
        choice: Content = {"index": number, "finish_reason": piece.finish_reason, "logprobs": None}
        if not self.chat:
            echo = self.echoes.get(number) if is_first else None
            if self.logprobs is not None:
                choice["logprobs"] = self._text_logprobs(number, piece.logprobs, echo)
            return choice | {"text": ("" if echo is None else self.tokenizer.decode(echo.ids)) + piece.text}
        if self.logprobs is not None:
            content = [
                self._token(token.token, token.logprob) | {"top_logprobs": [self._token(*other) for other in token.top]}
                for token in piece.logprobs
            ]
            choice["logprobs"] = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
        return choice | ({"delta": message} if is_chunk else {"message": message | {"refusal": None}})

    def _text_of(self, token: int) -> str:
        return self._bytes_of(token).decode(errors="replace")

    def _token(self, token: int, logprob: float) -> Content:
        return {"token": self._text_of(token), "logprob": logprob, "bytes": list(self._bytes_of(token))}

    def _text_logprobs(self, number: int, logprobs: Sequence[TokenLogprob], echo: Echo | None) -> Content:
        prompt, scored = ([], logprobs) if echo is None else (echo.ids, [*echo.logprobs, *logprobs])
        new, unscored = [token.token for token in logprobs], [None] * bool(prompt)
        return {
            "tokens": [self._text_of(token) for token in (*prompt, *new)],
            "token_logprobs": [*unscored, *(token.logprob for token in scored)],
            "top_logprobs": [*unscored, *map(self._top_texts, scored)],
            "text_offset": self._offsets(number, prompt, new),
        }

    def _offsets(self, number: int, prompt: Sequence[int], new: Sequence[int]) -> list[int]:
        """Return where tokens begin in the text of an answer; parts of a character begin where it does."""
        from tokenizers.decoders import DecodeStream

        stream, text = self._decoded.get(number) or (DecodeStream(skip_special_tokens=False), "")
        backend: Any = self.tokenizer.backend_tokenizer
        offsets = []
        for place, token in enumerate((*prompt, *new)):
            offsets.append(len(text if number in self.echoes else text.lstrip()))
            if place < len(prompt) or token not in self._special:
                text += stream.step(backend, token) or ""  # None within a character
        self._decoded[number] = stream, text
        return offsets

    def _top_texts(self, token: TokenLogprob) -> Content:
        """Return the most likely tokens by their texts, or by their bytes where parts of characters look alike."""
        texts: Content = {}
        for number, logprob in token.top:
            text = self._text_of(number)
            if text in texts:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes_of(number))
            texts.setdefault(text, logprob)
        return texts


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """Return the bytes that a token stands for within a text, also if it is a part of a character."""
    spelled = tokenizer.convert_ids_to_tokens(token)
    if spelled is None:  # an embedding without a token
        return b""
    if token in tokenizer.all_special_ids:
        return spelled.encode()
    decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
    letters = _byte_letters()
    if "ByteLevel" in decoder and all(letter in letters for letter in spelled):
        return bytes(letters[letter] for letter in spelled)
    byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", spelled)
    if byte and "ByteFallback" in decoder:
        return bytes([int(byte[1], 16)])
    # The first token of a text may lose its blank, the second does not.
    once, twice = (str(tokenizer.decode([token] * count)) for count in (1, 2))
    return twice[len(once) :].encode()


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the letters with which GPT-2 and later byte-level vocabularies spell bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def as_event(content: Content) -> str:
    """Return a line of a stream."""
    return f"data: {json.dumps(content)}\n\n"
