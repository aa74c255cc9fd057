"""Responses in the formats of OpenAI: of texts and of chats, whole or as events of a stream."""

from __future__ import annotations

import functools
import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmattn.serving.engine import Piece
from mmattn.serving.sampling import TokenLogprob
from mmattn.tokenization import special_ids

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream
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
            return choice | {"text": piece.text if echo is None else echo.text + piece.text}
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
        prompt = [] if echo is None else list(echo.ids)
        scored = [*((echo.logprobs or ()) if echo is not None else ()), *logprobs]
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


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> Content:
    """Return an error in the interface of OpenAI."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
