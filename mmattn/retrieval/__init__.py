"""Retrieval: entries found by their vectors, and what was found as memory. faiss is imported by its engines only."""

from __future__ import annotations

from mmattn.retrieval.hits import Hits
from mmattn.retrieval.index import Index

__all__ = ["Hits", "Index"]
