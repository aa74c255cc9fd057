"""Requests in the interface of OpenAI, extended by documents and vectors, and the prompt and memory of each."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from mmattn.errors import ConfigError, ImageError, ShapeError
from mmattn.memory import Memory
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline

if TYPE_CHECKING:
    from mmattn.pipelines.generation import Prompt
    from mmattn.pipelines.image_to_text import ImageToTextPipeline


class GenerationRequest(BaseModel):
    """Fields of both paths. Sampling parameters are refused, not ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    temperature: Literal[0] | None = None  # answers are greedy
    n: Literal[1] = 1
    user: str | None = None
    stream_options: dict[str, bool] | None = None
    documents: list[dict[str, JsonValue]] | None = None  # entries with the fields that the adapter reads
    memory: list[list[float]] | None = None  # or vectors (m, e) of the adapter's encoder


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str = ""
    image: str | None = None  # a data URL


class ImageUrl(BaseModel):
    """A picture as data."""

    model_config = ConfigDict(extra="forbid")
    url: str
    detail: str | None = None


class Part(BaseModel):
    """A part of a message: text or a picture."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class Message(BaseModel):
    """A message; only a single one of a user is answered."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["user", "system", "assistant"]
    content: str | list[Part]
    name: str | None = None


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    def user_content(self) -> tuple[str, list[str]]:
        """Return text and pictures (data URLs) of the only message; ValueError if it is not a single user message."""
        if len(self.messages) != 1 or self.messages[0].role != "user":
            raise ValueError("the model answers one message of a user: give messages with that one only")
        content = self.messages[0].content
        if isinstance(content, str):
            return content, []
        texts = [part.text for part in content if part.type == "text" and part.text]
        urls = [part.image_url.url for part in content if part.type == "image_url" and part.image_url is not None]
        return "\n".join(texts), urls


def make_inputs(
    pipe: ImageToTextPipeline | QuestionAnsweringPipeline,
    max_documents: int,
    text: str,
    pictures: Sequence[str] = (),
    documents: Sequence[dict[str, JsonValue]] | None = None,
    vectors: Sequence[Sequence[float]] | None = None,
) -> tuple[Prompt, Memory]:
    """Return prompt and memory (one row) of a request; documents replace the index, vectors (m, e) are the memory."""
    sources = {"a picture": pictures, "documents": documents, "memory": vectors}
    named = [name for name, source in sources.items() if source]
    if len(named) > 1:
        raise ConfigError(f"a request has one memory, and this one has {' and '.join(named)}: give one of them")
    answers = isinstance(pipe, QuestionAnsweringPipeline)
    if answers and pictures:
        raise ConfigError("this model answers questions and reads no pictures: leave image_url out")
    if not answers and documents is not None:
        raise ConfigError("this model describes pictures and reads no documents: give image_url")
    if vectors is not None:
        return pipe.make_prompt(text), _vector_memory(vectors, pipe)
    if not isinstance(pipe, QuestionAnsweringPipeline):
        if len(pictures) != 1:
            raise ImageError(f"this model describes one picture, and {len(pictures)} were given as image_url")
        return pipe.inputs(decode_data_url(pictures[0]), text)
    index = None
    if documents is not None:
        if len(documents) > max_documents:
            raise ConfigError(f"{len(documents)} documents are more than the {max_documents} that are allowed")
        if not documents:
            raise ConfigError("documents is empty: give some, or leave it out")
        index = pipe.make_index(documents)
    return pipe.inputs(text, index)


def _vector_memory(vectors: Sequence[Sequence[float]], pipe: ImageToTextPipeline | QuestionAnsweringPipeline) -> Memory:
    """Return vectors (m, e) as a memory (1, m, e) of the width that the adapter reads."""
    if pipe.config.task == "passage-answering":
        raise ConfigError("this model reads passages of its own and no vectors: give documents, or a question")
    widths = {len(row) for row in vectors}
    (expected,) = {pipe.model.adapter(name).config.memory_dim for name in pipe.model.active}
    if widths != {expected}:
        raise ShapeError(f"memory must be vectors of width {expected}, got widths {sorted(widths)[:5]}")
    return Memory(torch.tensor([list(map(list, vectors))], device=pipe.device))


def decode_data_url(url: str) -> bytes:
    """Return the bytes of a "data:image/png;base64,…" URL; addresses are not fetched."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise ImageError(
            f"image_url must be data, 'data:image/png;base64,…', got {url[:30]!r}: this server fetches no addresses"
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ImageError(f"the data of image_url is no base64: {error}") from error
