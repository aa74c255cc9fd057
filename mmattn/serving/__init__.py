"""An HTTP server for trained adapters, in the interface of OpenAI."""

from __future__ import annotations

from mmattn.serving.app import make_app
from mmattn.serving.engine import Engine, Limits

__all__ = ["Engine", "Limits", "make_app"]
