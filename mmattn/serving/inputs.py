"""From a request to a prompt and a memory: pictures as data, documents, vectors, or what an index holds."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import torch

from mmattn.errors import ConfigError, ImageError, ShapeError
from mmattn.memory import Memory
from mmattn.pipelines.passage_answering import PassageAnsweringPipeline
from mmattn.serving.limits import Limits


def make_inputs(
    pipe: Any,
    limits: Limits,
    text: str,
    pictures: Sequence[str] = (),
    documents: Sequence[dict[str, Any]] | None = None,
    vectors: Sequence[Sequence[float]] | None = None,
) -> tuple[str, Memory]:
    """The prompt of a request, and its memory of one row.

    Args:
        pipe: an `ImageToTextPipeline` or a `QuestionAnsweringPipeline`.
        limits: what is taken.
        text: the question, or how the caption begins.
        pictures: data URLs.
        documents: what to answer from, in the place of the index.
        vectors: (m, e), in the place of both.

    Raises:
        ConfigError: something that this adapter does not read, or too much of it.
        ImageError: a picture that is no data URL, or cannot be read.
        TextError: an empty question, or a document without a field.
        ShapeError: vectors of another width.
        NonFiniteError: NaN or infinity among them.
    """
    given = [name for name, one in (("a picture", pictures), ("documents", documents), ("memory", vectors)) if one]
    if len(given) > 1:
        raise ConfigError(f"a request has one memory, and this one has {' and '.join(given)}: give one of them")
    answers = pipe.config.task == "question-answering"
    if answers and pictures:
        raise ConfigError("this model answers questions and sees no pictures: leave image_url out")
    if not answers and documents is not None:
        raise ConfigError("this model describes pictures and reads no documents: give image_url")
    if vectors is not None:
        memory = vectors_as_memory(vectors, pipe)
        return pipe.config.prompt.replace("{question}", text.strip()) if answers else pipe.config.prompt + text, memory
    if not answers:
        if len(pictures) != 1:
            raise ImageError(f"this model describes one picture, and {len(pictures)} were given as image_url")
        prompt, memory = pipe.inputs(decode_data_url(pictures[0]))
        return prompt + text, memory
    if documents is None:
        found: tuple[str, Memory] = pipe.inputs(text)
        return found
    if len(documents) > limits.max_documents:
        raise ConfigError(f"{len(documents)} documents are more than the {limits.max_documents} that are taken")
    if not documents:
        raise ConfigError("documents is empty: give some, or leave it out")
    made: tuple[str, Memory] = pipe.inputs(text, pipe.make_index(documents))
    return made


def vectors_as_memory(vectors: Sequence[Sequence[float]], pipe: Any) -> Memory:
    """Vectors (m, e) as a memory (1, m, e).

    Args:
        vectors: as the encoder of the adapter makes them.
        pipe: whose adapter reads them.

    Raises:
        ConfigError: an adapter that reads no vectors.
        ShapeError: rows of different widths, or of another one than the adapter's.
        NonFiniteError: NaN or infinity.
    """
    widths = {len(row) for row in vectors}
    if isinstance(pipe, PassageAnsweringPipeline):
        raise ConfigError(
            "this model reads passages that it has read itself, no vectors: give documents, or a question"
        )
    (wanted,) = {pipe.model.adapter(name).config.memory_dim for name in pipe.model.active}
    if widths != {wanted}:
        raise ShapeError(f"memory must be vectors of width {wanted}, got widths {sorted(widths)[:5]}")
    return Memory(torch.tensor([list(map(list, vectors))], device=pipe.device))


def decode_data_url(url: str) -> bytes:
    """The bytes of a picture that is given as data; addresses are not fetched.

    Args:
        url: "data:image/png;base64,…".

    Raises:
        ImageError: it is none.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not head.endswith(";base64") or not comma:
        raise ImageError(
            f"image_url must be data, 'data:image/png;base64,…', got {url[:30]!r}: this server fetches no addresses"
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ImageError(f"the data of image_url is no base64: {error}") from error
