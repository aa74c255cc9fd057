"""Middleware and metrics: a limit of bodies, one log line for each request, figures for Prometheus."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmattn.errors import import_extra
from mmattn.serving.engine import Engine

log = logging.getLogger("mmattn.serving")
PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/health", "/metrics")


class Metrics:
    """Prometheus counts and times of one server."""

    def __init__(self, engine: Engine) -> None:
        prometheus = import_extra("prometheus_client", "serve")
        self._prometheus, self.registry = prometheus, prometheus.CollectorRegistry()
        options = {"registry": self.registry}
        self.requests = prometheus.Counter(
            "mmattn_requests", "Requests by path and status.", ["path", "status"], **options
        )
        self.tokens = prometheus.Counter("mmattn_tokens", "Generated tokens.", **options)
        buckets = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
        self.first_token = prometheus.Histogram(
            "mmattn_first_token_seconds", "Time to the first token.", buckets=buckets, **options
        )
        running = prometheus.Gauge("mmattn_running_requests", "Requests that run or wait.", **options)
        running.set_function(lambda: engine.running)
        held = prometheus.Gauge("mmattn_memory_bytes", "Bytes of keys and values of memories in use.", **options)
        held.set_function(engine.manager.memories.nbytes)

    def text(self) -> bytes:
        """Return all figures in the format of Prometheus."""
        return self._prometheus.generate_latest(self.registry)


def error_content(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in the interface of OpenAI."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def as_error(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """Return an error in the interface of OpenAI."""
    return JSONResponse(error_content(status, message, param, code), status, headers=dict(headers or {}))


class BodyLimit:
    """ASGI middleware that answers 413 if a body is longer than `max_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = 0

        async def receive_counted() -> Message:
            nonlocal length
            message = await receive()
            length += len(message.get("body", b""))
            if length > self.max_bytes:  # FastAPI answers with what middleware raises while it reads a body
                raise HTTPException(413, f"the body is longer than {self.max_bytes} bytes", {"connection": "close"})
            return message

        await self.app(scope, receive_counted, send)


class AccessLog:
    """ASGI middleware that counts each request and logs its path, status and time as a line of JSON."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, status = time.perf_counter(), 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.requests.labels(path, status).inc()
            seconds = round(time.perf_counter() - begin, 4)
            log.info(json.dumps({"path": path, "status": status, "seconds": seconds}))
