"""Responses in the formats of OpenAI: of texts and of chats, whole or as events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmattn.serving.engine import Piece
from mmattn.serving.sampling import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Content = dict[str, Any]


@dataclass
class Echo:
    """A prompt that stands before its answers, and the log-probabilities of its ids."""

    text: str
    ids: Sequence[int]
    logprobs: Sequence[TokenLogprob] | None = None  # of all ids but the first


@dataclass
class Format:
    """The answers of one response.

    Args:
        chat: the format is that of /v1/chat/completions, not of /v1/completions.
        model: its name.
        tokenizer: of the model.
        prompt_tokens: of all prompts.
        logprobs: the most likely tokens at each place; None for no log-probabilities.
        echoes: by answer.
    """

    chat: bool
    model: str
    tokenizer: PreTrainedTokenizerBase
    prompt_tokens: int
    logprobs: int | None
    echoes: dict[int, Echo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": number, "created": int(time.time()), "model": self.model}
        self._begun: set[int] = set()
        self._offsets: dict[int, int] = {}

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
            return choice | {"text": piece.text if echo is None else echo.text + piece.text}
        if self.logprobs is not None:
            content = [self._token(one.token, one.logprob) | {"top_logprobs": self._top(one)} for one in piece.logprobs]
            choice["logprobs"] = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
        return choice | ({"delta": message} if is_chunk else {"message": message | {"refusal": None}})

    def _top(self, one: TokenLogprob) -> list[Content]:
        return [self._token(token, logprob) for token, logprob in one.top]

    def _token(self, token: int, logprob: float) -> Content:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text_logprobs(self, number: int, logprobs: Sequence[TokenLogprob], echo: Echo | None) -> Content:
        first = [] if echo is None else [self.tokenizer.decode([echo.ids[0]])]
        scored = [*(echo.logprobs or () if echo is not None else ()), *logprobs]
        tokens = [*first, *(self.tokenizer.decode([one.token]) for one in scored)]
        top = [{self.tokenizer.decode([token]): value for token, value in one.top} for one in scored]
        offset, offsets = self._offsets.get(number, 0), list[int]()
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[number] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [*([None] * len(first)), *(one.logprob for one in scored)],
            "top_logprobs": [*([None] * len(first)), *top],
            "text_offset": offsets,
        }


def as_event(content: Content) -> str:
    """Return a line of a stream."""
    return f"data: {json.dumps(content)}\n\n"


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> Content:
    """Return an error in the interface of OpenAI."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
