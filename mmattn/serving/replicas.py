"""Replicas of the server behind one address, by Ray Serve."""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmattn.errors import ConfigError, check_int, import_extra
from mmattn.serving.engine import Limits
from mmattn.serving.middleware import as_error

#: Of the application in Ray Serve.
NAME = "mmattn"
#: Sends requests of one `x-session-id` to one replica, and others to any.
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
#: Environment of a Ray instance that this process starts, where the user has set nothing else.
LOCAL = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.proxy_middleware",
    # Ray takes the loopback address as a node's only where it expects no cluster.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def serve_replicas(
    build: Callable[[], FastAPI],
    limits: Limits,
    address: dict[str, Any],
    least: int,
    most: int,
    gpu: bool,
) -> None:
    """Serve replicas on the cluster of `RAY_ADDRESS`, or a local one, until Ctrl-C or SIGTERM; then finish what runs.

    `build` makes the application of a replica, in its process. With `gpu` replicas need a GPU, which
    several share where there are fewer.
    """
    check_int("max_replicas", most, at_least=least)
    cluster = os.environ.get("RAY_ADDRESS")
    if not cluster:
        os.environ.update({**LOCAL, "RAY_AUTH_TOKEN": secrets.token_hex(32), **os.environ})
    ray, serve = import_extra("ray", "scale"), import_extra("ray.serve", "scale")

    @serve.ingress(build)
    class Replica:
        def check_health(self) -> None:
            if not self.app.state.engine.healthy():  # type: ignore[attr-defined]
                raise RuntimeError("the engine has stopped")

    logs = {"log_level": "WARNING", "enable_access_log": False}
    # Paths of sockets are short.
    root = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory(prefix="mmattn-", dir=root, ignore_cleanup_errors=True) as folder:
        options: dict[str, Any] = {} if cluster else {"include_dashboard": False, "_temp_dir": folder}
        try:
            ray.init(cluster or "local", logging_level="WARNING", **options)
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            has = ray.cluster_resources()
            cpus = 1 if cluster else _share(has["CPU"], most)
            gpus = min(1, _share(has.get("GPU", 0), most)) if gpu else 0
            target = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": limits.max_requests / 2}
            deployment = serve.deployment(
                Replica,
                num_replicas="auto",
                autoscaling_config=target,
                ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
                max_ongoing_requests=2 * limits.max_requests,  # beyond its limit the engine answers 429
                request_router_config={"request_router_class": ROUTER},
                health_check_period_s=1,
                graceful_shutdown_wait_loop_s=0.5,
                graceful_shutdown_timeout_s=limits.timeout,
                max_constructor_retry_count=1,
                logging_config=logs,
            )
            try:
                serve.start(http_options=address, logging_config=logs)
                serve.run(deployment.bind(), name=NAME)
            except RuntimeError as error:
                (*_, last) = str(error).splitlines()
                raise ConfigError(f"the replicas do not start, and their log says why: {last}") from None
            try:
                while True:
                    time.sleep(60)
            except KeyboardInterrupt:
                serve.delete(NAME, _blocking=False)
                while NAME in serve.status().applications:
                    time.sleep(0.2)
        finally:
            ray.shutdown()


def _share(total: float, replicas: int) -> float:
    """Return whole units of a resource for each replica, or a fraction with which all start."""
    return total // replicas or (1 / -(-replicas // total) if total else 0)


def proxy_middleware() -> list[Middleware]:
    """Return the middleware of Ray's proxy, which calls this by its name."""
    return [Middleware(ProxyErrors)]


class ProxyErrors:
    """ASGI middleware that answers 503 in OpenAI's interface where no replica has begun to answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answered = scope["type"] != "http"

        async def send_unless_refused(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                # Ray's own errors are plain text, those of a replica JSON.
                kind = dict(message["headers"]).get(b"content-type", b"")
                answered = message["status"] < 400 or not kind.startswith(b"text/plain")
            if answered:
                await send(message)

        await self.app(scope, receive, send_unless_refused)
        if not answered:
            message = "no replica answers, or it ended before its answer: try again"
            await as_error(503, message, {"Retry-After": "1"})(scope, receive, send)
