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
from mmattn.serving.token_texts import Alignment, text_offsets, token_bytes
from mmattn.tokenization import special_ids

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
        self._bytes: dict[int, bytes] = {}
        self._alignments: dict[int, Alignment] = {}
        self._special = set() if self.logprobs is None else set(special_ids(self.tokenizer).values())

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
            text = piece.text if echo is None else echo.text + piece.text
            if self.logprobs is not None:
                choice["logprobs"] = self._text_logprobs(number, text, piece.logprobs, echo)
            return choice | {"text": text}
        if self.logprobs is not None:
            content = [self._token(one.token, one.logprob) | {"top_logprobs": self._top(one)} for one in piece.logprobs]
            choice["logprobs"] = {"content": content, "refusal": None}
        message = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
        return choice | ({"delta": message} if is_chunk else {"message": message | {"refusal": None}})

    def _top(self, one: TokenLogprob) -> list[Content]:
        return [self._token(token, logprob) for token, logprob in one.top]

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = token_bytes(self.tokenizer, token)
        return self._bytes[token]

    def _text_of(self, token: int) -> str:
        return self._bytes_of(token).decode(errors="replace")

    def _token(self, token: int, logprob: float) -> Content:
        return {"token": self._text_of(token), "logprob": logprob, "bytes": list(self._bytes_of(token))}

    def _text_logprobs(self, number: int, text: str, logprobs: Sequence[TokenLogprob], echo: Echo | None) -> Content:
        prompt = [] if echo is None else list(echo.ids)
        scored = [*(echo.logprobs or () if echo is not None else ()), *logprobs]
        # The text of an answer has no special tokens.
        spelled = [*map(self._bytes_of, prompt)]
        spelled += [b"" if one.token in self._special else self._bytes_of(one.token) for one in logprobs]
        alignment = self._alignments.setdefault(number, Alignment())
        return {
            "tokens": [self._text_of(token) for token in (*prompt, *(one.token for one in logprobs))],
            "token_logprobs": [*([None] * bool(prompt)), *(one.logprob for one in scored)],
            "top_logprobs": [*([None] * bool(prompt)), *map(self._top_texts, scored)],
            "text_offset": text_offsets(alignment, text, spelled),
        }

    def _top_texts(self, one: TokenLogprob) -> Content:
        """Return the most likely tokens by their texts; of parts of characters that look alike the bytes tell more."""
        texts: Content = {}
        for token, logprob in one.top:
            text = self._text_of(token)
            if text in texts:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes_of(token))
            texts.setdefault(text, logprob)
        return texts


def as_event(content: Content) -> str:
    """Return a line of a stream."""
    return f"data: {json.dumps(content)}\n\n"


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> Content:
    """Return an error in the interface of OpenAI."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
