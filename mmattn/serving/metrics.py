"""Figures of a server in the format of Prometheus."""

from __future__ import annotations

from typing import Any

from mmattn.errors import import_extra


class Metrics:
    """Counts and times of one server.

    Args:
        engine: whose requests and memories are counted when asked.
    """

    def __init__(self, engine: Any) -> None:
        prometheus = import_extra("prometheus_client", "serve")
        self._prometheus, self.registry = prometheus, prometheus.CollectorRegistry()
        more = {"registry": self.registry}
        self.requests = prometheus.Counter(
            "mmattn_requests", "Requests by path and status.", ["path", "status"], **more
        )
        self.tokens = prometheus.Counter("mmattn_tokens", "Tokens that were written.", **more)
        buckets = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
        self.first_token = prometheus.Histogram(
            "mmattn_first_token_seconds", "Time to the first token.", buckets=buckets, **more
        )
        running = prometheus.Gauge("mmattn_running_requests", "Requests that run or wait.", **more)
        running.set_function(lambda: engine.running)
        held = prometheus.Gauge("mmattn_memory_bytes", "Bytes of keys and values of memories in use.", **more)
        held.set_function(engine.nbytes)

    def text(self) -> bytes:
        """All of them."""
        found: bytes = self._prometheus.generate_latest(self.registry)
        return found
