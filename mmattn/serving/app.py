"""The HTTP interface: the paths of OpenAI, /health, /metrics and /openapi.json."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteError

from mmattn import __version__
from mmattn.errors import MmattnError
from mmattn.pipelines.base import Pipeline
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline
from mmattn.pipelines.to_text import ImageToTextPipeline
from mmattn.serving.answers import Answering
from mmattn.serving.engine import Engine
from mmattn.serving.inputs import memory_width
from mmattn.serving.middleware import AccessLog, BodyLimit, Metrics, as_error
from mmattn.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest

_BEARER = HTTPBearer(auto_error=False)
#: A text that is not blank, for Python and for JSON Schema, whose spaces differ.
_TEXT = r"[^\s\u001c-\u001f\u0085]"
#: The largest number that is finite in float32, rounded.
_LARGEST = 3.4028235677973362e38
_BEYOND = (
    "Refused with 400 beyond this schema: more answers than the limit of requests, two memories (a picture, documents, "
    "vectors), passages beside vectors, two pictures, no picture or question where the adapter needs one, a "
    "conversation where the host has no chat template or the adapter reads passages, stream_options without stream, "
    "top_logprobs without logprobs, a prompt that leaves no room for its answer, texts without a token, messages that "
    "the chat template of the host refuses, pictures that are damaged or too large, and vectors with which the model "
    "overflows."
)


def make_app(engine: Engine, name: str, api_key: str | None = None) -> FastAPI:
    """Build the application; its lifespan starts the engine, and ends it after the last answer.

    Args:
        engine: that answers.
        name: of the model, as /v1/models lists it.
        api_key: bearer token of requests; None for any.
    """
    metrics = Metrics(engine)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.manager.start()
        yield
        await engine.stop()

    app = FastAPI(title="mmattn", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=engine.limits.max_body_bytes)
    app.add_middleware(AccessLog, metrics=metrics)
    app.state.engine = engine
    answering = Answering(engine, name, metrics)
    _add_error_handlers(app)
    app.openapi = lambda: served_schema(app, name, engine)  # type: ignore[method-assign]

    def authorise(key: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> None:
        if key is None or not hmac.compare_digest(key.credentials.encode(), str(api_key).encode()):
            detail = {"message": "the bearer token is missing or wrong", "code": "invalid_api_key"}
            raise HTTPException(401, detail, {"WWW-Authenticate": "Bearer"})

    guarded: Any = {"dependencies": [] if api_key is None else [Depends(authorise)]}
    stream: Any = {200: {"content": {"text/event-stream": {}}}}
    answers: Any = guarded | {"responses": errors(400, 401, 404, 413, 429, 500, 503, 504) | stream}
    model = {"id": name, "object": "model", "created": 0, "owned_by": "mmattn"}

    @app.get("/health", responses={503: {"description": "The server has stopped."}})
    async def health() -> JSONResponse:
        ok = engine.healthy()
        return JSONResponse({"status": "ok" if ok else "stopped", "running": engine.running}, 200 if ok else 503)

    @app.get("/metrics", responses=errors(401) | {200: {"content": {"text/plain": {}}}}, **guarded)
    async def figures() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models", responses=errors(401), **guarded)
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [model]})

    @app.get("/v1/models/{model_id:path}", responses=errors(401, 404), **guarded)
    async def model_of(model_id: str) -> JSONResponse:
        answering.check_model(model_id)
        return JSONResponse(model)

    @app.post("/v1/completions", **answers)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await answering.answer(request, body)

    @app.post("/v1/chat/completions", **answers)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await answering.answer(request, body)

    pipe = engine.pipe
    if isinstance(pipe, QuestionAnsweringPipeline) and getattr(pipe.encoder, "pooling", None) != "none":

        @app.post("/v1/embeddings", responses=errors(400, 401, 404, 413, 429, 500, 504), **guarded)
        async def embeddings(body: EmbeddingRequest) -> JSONResponse:
            return await answering.embed(body, pipe.encoder)

    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in the interface of OpenAI, also those of FastAPI itself."""

    @app.exception_handler(StarletteError)
    async def refused(request: Request, error: StarletteError) -> JSONResponse:
        detail: Any = error.detail
        if not isinstance(detail, dict):
            detail = {"message": f"{detail}: {request.method} {request.url.path}"}
        return as_error(error.status_code, headers=error.headers, **detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # Of the alternatives of a field, the error of the deepest is the relevant one.
        wrong = max(error.errors(), key=lambda issue: len(issue["loc"]))
        # Between names stand kinds of values, such as "list[str]".
        place = ".".join(str(part) for part in wrong["loc"][1:] if part != "str" and "[" not in str(part))
        message = str(wrong["msg"]).removeprefix("Value error, ")
        if wrong["type"] == "extra_forbidden":
            place = ".".join(map(str, wrong["loc"][1:]))
            message = "this server knows no such field: leave it out"
        elif wrong["type"] == "none_required" or wrong.get("ctx", {}).get("max_length") == 0:
            message = "this server does not support it: leave it out"
        elif wrong["type"] == "json_invalid":
            place, message = "", f"the body is no JSON: {wrong['ctx']['error']}"
        return as_error(400, f"{place}: {message}" if place else message, param=place or None)

    @app.exception_handler(MmattnError)
    async def wrong(request: Request, error: MmattnError) -> JSONResponse:
        return as_error(400, str(error))

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return as_error(500, "the server failed at this request; its log says why")


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
    # Scores come with the hits of a search alone.
    needs_scores = any(
        getattr(pipe.model.adapter(adapter).config, "score_bias", False) for adapter in pipe.model.active
    )
    read = {
        "documents": bool(_document_fields(pipe)),
        "passages": isinstance(pipe, QuestionAnsweringPipeline),
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
    if "n" in fields:
        whole = fields["n"]["anyOf"][0]
        whole["maximum"] = min(limits.max_requests, whole["maximum"])


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
