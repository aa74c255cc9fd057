"""Prompts and memories of requests: the pipeline's prompt for a question, the chat template for a conversation."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import JsonValue

from mmattn.encoders.images import load_image
from mmattn.errors import ConfigError, ImageError, ShapeError
from mmattn.memory import Memory
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.generation import Prompt, chat_ids, template_ids
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline, build_index
from mmattn.pipelines.to_text import ImageToTextPipeline
from mmattn.retrieval.index import Index
from mmattn.serving.engine import Limits
from mmattn.serving.requests import AssistantMessage, ChatRequest, CompletionRequest, Message


def make_inputs(pipe: Any, body: ChatRequest | CompletionRequest, limits: Limits) -> list[tuple[Prompt, Memory | None]]:
    """Return the prompt of each answer, and its memory: None for the bare host. Documents replace the index."""
    memory = _request_memory(pipe, body, limits.max_pixels)
    index = _request_index(pipe, body.documents, limits.max_documents)
    if body.passages is not None and (memory is not None or not isinstance(pipe, QuestionAnsweringPipeline)):
        raise ConfigError("passages is for answers from an index or from documents: leave it out")
    if isinstance(body, CompletionRequest):
        return [_input(pipe, prompt, memory, index, body.passages) for prompt in body.prompts]
    question = next((message.text for message in reversed(body.messages) if message.role == "user"), "")
    if isinstance(pipe, ImageToTextPipeline) and "{question}" not in pipe.config.prompt:
        return [_input(pipe, "", memory)]  # messages instruct, and the adapter follows no instructions
    prompt, memory = _input(pipe, question, memory, index, body.passages)
    if len(body.messages) > 1 or body.messages[0].role != "user":
        prompt = _chat_ids(pipe, body.messages)
    return [(prompt, memory)]


def _request_memory(pipe: Pipeline, body: ChatRequest | CompletionRequest, max_pixels: int) -> Memory | None:
    """Return the memory that comes with a request, of pictures or of vectors (m, e)."""
    sources = {"a picture": body.pictures, "documents": body.documents, "memory": body.memory}
    named = [name for name, source in sources.items() if source]
    if len(named) > 1:
        raise ConfigError(f"a request has one memory, and this one has {' and '.join(named)}: give one of them")
    if body.memory is not None:
        return _vector_memory(body.memory, pipe)
    if not body.pictures:
        return None
    if not isinstance(pipe, ImageToTextPipeline):
        raise ConfigError("this model reads no pictures: leave image_url out")
    if len(body.pictures) > 1:
        raise ImageError(f"this model reads one picture, and {len(body.pictures)} were given: give one image_url")
    return pipe.make_memory([load_image(decode_data_url(body.pictures[0]), max_pixels=max_pixels)])


def _request_index(pipe: Any, documents: list[dict[str, JsonValue]] | None, max_documents: int) -> Index | None:
    if documents is None:
        return None
    if not isinstance(pipe, QuestionAnsweringPipeline):
        raise ConfigError("this model reads no documents: leave them out")
    if len(documents) > max_documents:
        raise ConfigError(f"{len(documents)} documents are more than the {max_documents} that are allowed")
    # No answer names a document by its id.
    rows = [{key: value for key, value in document.items() if key != "id"} for document in documents]
    return build_index(rows, pipe.config, pipe.encoder)


def _input(
    pipe: Any, prompt: Prompt, memory: Memory | None, index: Index | None = None, passages: int | None = None
) -> tuple[Prompt, Memory | None]:
    """Return the prompt with a question, and the memory of the request, or of the hits of the question."""
    if memory is None and isinstance(pipe, QuestionAnsweringPipeline):
        question = prompt if isinstance(prompt, str) else pipe.tokenizer.decode(prompt, skip_special_tokens=True)
        whole, hits = pipe.inputs(question, index, passages)
        return (whole if isinstance(prompt, str) else prompt), hits
    if memory is None and isinstance(pipe, ImageToTextPipeline) and "{question}" not in pipe.config.prompt:
        raise ImageError("this model describes a picture, and the request has none")
    if isinstance(prompt, str) and not prompt.strip() and "{question}" in pipe.config.prompt:
        return template_ids(pipe.tokenizer, pipe.config.prompt, {"{question}": ""}), memory
    return (pipe.make_prompt(prompt) if isinstance(prompt, str) else prompt), memory


def _chat_ids(pipe: Pipeline, messages: Sequence[Message | AssistantMessage]) -> list[int]:
    """Return the ids of a conversation in the host's chat template, special tokens in its contents as plain text."""
    if pipe.tokenizer.chat_template is None:
        raise ConfigError("the host has no chat template, so it answers one message of a user: give that one only")
    if "{passages}" in pipe.config.prompt:
        raise ConfigError("this model reads passages before one question: give one message of a user")
    rows: list[dict[str, str]] = []
    for message in messages:
        role = "system" if message.role == "developer" else message.role
        rows.append({"role": role, "content": message.text} | ({"name": message.name} if message.name else {}))
    return chat_ids(pipe.tokenizer, rows)


def _vector_memory(vectors: Sequence[Sequence[float]], pipe: Pipeline) -> Memory:
    """Return vectors (m, e) as a memory (1, m, e) of the width that the adapter reads."""
    expected, widths = memory_width(pipe), {len(row) for row in vectors}
    if expected is None:
        raise ConfigError("this model reads passages of its own and no vectors: give documents, or a question")
    if widths != {expected}:
        raise ShapeError(f"memory must be vectors of width {expected}, got widths {sorted(widths)[:5]}")
    return Memory(torch.tensor([list(map(list, vectors))], device=pipe.device))


def memory_width(pipe: Pipeline) -> int | None:
    """Return the width of the vectors that the adapter reads; None if it reads none."""
    if pipe.config.task == "passage-answering":
        return None
    (width,) = {int(pipe.model.adapter(name).config.memory_dim) for name in pipe.model.active}
    return width


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
