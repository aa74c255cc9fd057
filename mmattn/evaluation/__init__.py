"""Evaluation by lm-evaluation-harness; `python -m mmattn.evaluation` is its command with the model `mmattn`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.evaluation.harness import AdaptedLM

__all__ = ["AdaptedLM"]

__getattr__, __dir__ = lazy_exports(__name__)
