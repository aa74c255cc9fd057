"""Requests and answers in the interface of OpenAI, with what it has no words for: documents, vectors, pictures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Request(BaseModel):
    # Sampling that the server does not do is refused rather than dropped.
    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    temperature: Literal[0] | None = None  # answers are greedy
    n: Literal[1] = 1
    user: str | None = None
    stream_options: dict[str, bool] | None = None
    documents: list[dict[str, Any]] | None = None  # what an index would hold: the fields that the adapter reads
    memory: list[list[float]] | None = None  # or vectors (m, e), as the adapter's encoder makes them


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str = ""
    image: str | None = None  # a data URL


class ImageUrl(BaseModel):
    """A picture as data."""

    model_config = ConfigDict(extra="forbid")
    url: str
    detail: str | None = None


class Part(BaseModel):
    """A part of a message: words or a picture."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(BaseModel):
    """A message; the adapters answer the last one of a user."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "system", "assistant"]
    content: str | list[Part]
    name: str | None = None


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def last(self) -> tuple[str, list[str]]:
        """Words and pictures (data URLs) of the only message.

        Raises:
            ValueError: there are several, which these models were not trained on, or it is no user's.
        """
        if len(self.messages) != 1 or self.messages[0].role != "user":
            raise ValueError("the model answers one message of a user: give messages with that one only")
        content = self.messages[0].content
        if isinstance(content, str):
            return content, []
        words = [part.text for part in content if part.type == "text" and part.text]
        urls = [part.image_url.url for part in content if part.type == "image_url" and part.image_url is not None]
        return "\n".join(words), urls
