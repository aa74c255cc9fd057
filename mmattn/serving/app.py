"""The HTTP interface: the paths of OpenAI, /health, /metrics and /openapi.json."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteError

from mmattn.errors import MmattnError
from mmattn.pipelines.question_answering import QuestionAnsweringPipeline
from mmattn.serving.answers import Answering
from mmattn.serving.engine import Engine
from mmattn.serving.middleware import AccessLog, BodyLimit, Metrics, as_error
from mmattn.serving.requests import ChatRequest, CompletionRequest, EmbeddingRequest
from mmattn.serving.schema import errors, served_schema

_BEARER = HTTPBearer(auto_error=False)


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
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(title="mmattn", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(BodyLimit, max_bytes=engine.limits.max_body_bytes)
    app.add_middleware(AccessLog, metrics=metrics)
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
