"""Composition with another language model (CALM, arXiv 2401.02412)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.composed.adapter import ComposedAdapter, ComposedLayers
from mmattn.adapters.composed.augmenting_model import AugmentedPrompt, AugmentingModel

__all__ = ["AugmentedPrompt", "AugmentingModel", "ComposedAdapter"]

register_adapter(ComposedAdapter, ComposedLayers)
