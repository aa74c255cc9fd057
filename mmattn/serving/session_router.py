"""The replica of a request in Ray Serve, which imports this by its name."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):
    """Requests with one `x-session-id` go to one replica, others to the less busy of two."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return candidates in order, those of equal rank in one list."""
        if pending_request is not None and pending_request.metadata.session_id:
            return await super().choose_replicas(candidate_replicas, pending_request)
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
