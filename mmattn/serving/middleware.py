"""Around every request: no more of its body is read than the server takes, and one line is logged, without contents."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

log = logging.getLogger("mmattn.serving")
PATHS = ("/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/metrics")


class BodyLimit:
    """ASGI middleware that answers 413 where a body is longer than it may be, announced or not.

    Args:
        app: what it is around.
        most: bytes.
    """

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.most:
            return await self._refuse(send)
        seen, refused = 0, False

        async def counted() -> Any:
            nonlocal seen, refused
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                refused = True
                return {"type": "http.disconnect"}
            return message

        async def answer(message: Any) -> None:
            if not refused:
                await send(message)

        try:
            await self.app(scope, counted, answer)
        except Exception:
            if not refused:
                raise
        if refused:
            await self._refuse(send)

    async def _refuse(self, send: Any) -> None:
        message = f"the body is longer than the {self.most} bytes that are taken"
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None, "param": None}})
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body.encode()})


class AccessLog:
    """ASGI middleware that counts each request and logs its path, status and time as a line of JSON.

    Args:
        app: what it is around.
        metrics: counted into.
    """

    def __init__(self, app: Any, metrics: Any) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begin, status = time.perf_counter(), 500

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = scope["path"] if scope["path"] in PATHS else "other"
            self.metrics.requests.labels(path, status).inc()
            seconds = round(time.perf_counter() - begin, 4)
            log.info(json.dumps({"path": path, "status": status, "seconds": seconds}))
