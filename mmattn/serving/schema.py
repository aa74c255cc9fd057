"""The schema of a server's interface: what its pipeline reads, its limits, and errors as OpenAI has them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mmattn import __version__
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline
from mmattn.pipelines.to_text import ImageToTextPipeline
from mmattn.serving.engine import Engine
from mmattn.serving.inputs import memory_width

#: A text that is not blank, for Python and for JSON Schema, whose spaces differ.
_TEXT = r"[^\s\u001c-\u001f\u0085]"
#: The largest number that is finite in float32, rounded.
_LARGEST = 3.4028235677973362e38
_BEYOND = (
    "Refused with 400 beyond this schema: more answers than the limit of requests, two memories (a picture, documents, "
    "vectors), two pictures, no picture or question where the adapter needs one, a conversation where the host has no "
    "chat template or the adapter reads passages, stream_options without stream, top_logprobs without logprobs, a "
    "prompt that leaves no room for its answer, texts without a token, messages that the chat template of the host "
    "refuses, pictures that are damaged or too large, and vectors with which the model overflows."
)


class ErrorDetail(BaseModel):
    """The content of an error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(BaseModel):
    """An error in the interface of OpenAI."""

    error: ErrorDetail


def served_schema(app: FastAPI, name: str, engine: Engine) -> dict[str, Any]:
    """Return the schema of the interface of this server; bodies that do not fit get 400, and not FastAPI's 422."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=__version__, description=_BEYOND, routes=app.routes)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        kinds = schema["components"]["schemas"]
        for kind in kinds.values():
            _narrow_fields(kind.get("properties", {}), name, engine)
        if not isinstance(engine.pipe, ImageToTextPipeline):
            kinds["Message"]["properties"]["content"]["anyOf"][1]["items"] = {"$ref": "#/components/schemas/TextPart"}
            del kinds["PicturePart"], kinds["ImageUrl"]
        if "EmbeddingRequest" in kinds:
            single, several = kinds["EmbeddingRequest"]["properties"]["input"]["anyOf"]
            single["pattern"] = several["items"]["pattern"] = _TEXT
        app.openapi_schema = schema
    return app.openapi_schema


def _narrow_fields(fields: dict[str, Any], name: str, engine: Engine) -> None:
    """Narrow the fields of a kind of body to what this server takes, and remove those that it does not."""
    pipe, limits, width = engine.pipe, engine.limits, memory_width(engine.pipe)
    most = {"max_tokens": limits.max_tokens, "max_completion_tokens": limits.max_tokens, "n": limits.max_requests}
    # Scores come with the hits of a search alone.
    needs_scores = any(
        getattr(pipe.model.adapter(adapter).config, "score_bias", False) for adapter in pipe.model.active
    )
    read = {
        "documents": bool(_document_fields(pipe)),
        "image": isinstance(pipe, ImageToTextPipeline),
        "memory": width is not None and not needs_scores,
    }
    for field in read.keys() & fields.keys():
        if not read[field]:
            del fields[field]
    if "model" in fields:
        fields["model"]["enum"] = [name]
    if "documents" in fields:
        documents, required = fields["documents"]["anyOf"][0], _document_fields(pipe)
        documents["maxItems"] = limits.max_documents
        texts = {"text": {"type": ["string", "null"]}} | dict.fromkeys(required, {"type": "string", "pattern": _TEXT})
        documents["items"] |= {"properties": texts, "required": required}
    vocabulary = getattr(pipe.model.config, "vocab_size", None)
    if "prompt" in fields and vocabulary is not None:
        ids = fields["prompt"]["anyOf"][2]
        ids["items"]["maximum"] = vocabulary - 1
        fields["prompt"]["anyOf"][3]["items"] = ids
    if "memory" in fields:
        numbers = {"type": "number", "minimum": -_LARGEST, "maximum": _LARGEST}
        fields["memory"]["anyOf"][0]["items"] |= {"minItems": width, "maxItems": width, "items": numbers}
    for url in fields.keys() & {"image", "url"}:
        fields[url] |= {"pattern": "^data:[^,]*;base64,"}
    for field in most.keys() & fields.keys():
        whole = fields[field]["anyOf"][0]
        whole["maximum"] = min(most[field], whole.get("maximum", most[field]))


def _document_fields(pipe: Pipeline) -> list[str]:
    """Return the fields that the documents of a request must have; none where no documents are read."""
    if not isinstance(pipe, QuestionAnsweringPipeline):
        return []
    if pipe.config.task == "passage-answering":
        return ["text"]
    return list((pipe.config.memory.fields if pipe.config.memory else None) or [])


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a path that has errors of these statuses."""
    return {status: {"model": Error} for status in statuses}
