"""The schema of a server's interface: what its pipeline reads, its limits, and errors as OpenAI has them."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mmattn import __version__
from mmattn.pipelines.image_to_text import ImageToTextPipeline
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline
from mmattn.serving.engine import Engine
from mmattn.serving.inputs import memory_width


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
        schema = get_openapi(title=app.title, version=__version__, routes=app.routes)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        pipe, limits, width = engine.pipe, engine.limits, memory_width(engine.pipe)
        most = {"max_tokens": limits.max_tokens, "max_completion_tokens": limits.max_tokens, "n": limits.max_requests}
        read = {
            "documents": isinstance(pipe, QuestionAnsweringPipeline),
            "image": isinstance(pipe, ImageToTextPipeline),
            "memory": width is not None,
        }
        for kind in schema["components"]["schemas"].values():
            fields = kind.get("properties", {})
            for field in read.keys() & fields.keys():
                if not read[field]:
                    del fields[field]
            if "model" in fields:
                fields["model"]["enum"] = [name]
            if "documents" in fields and pipe.config.memory is not None and pipe.config.memory.fields:
                text = {"type": "string", "pattern": r"\S"}
                fields["documents"]["anyOf"][0]["items"] |= {
                    "properties": dict.fromkeys(pipe.config.memory.fields, text),
                    "required": list(pipe.config.memory.fields),
                }
            if "memory" in fields:
                fields["memory"]["anyOf"][0]["items"] |= {"minItems": width, "maxItems": width}
            for field in most.keys() & fields.keys():
                fields[field]["anyOf"][0]["maximum"] = most[field]
        app.openapi_schema = schema
    return app.openapi_schema


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a path that has errors of these statuses."""
    return {status: {"model": Error} for status in statuses}
