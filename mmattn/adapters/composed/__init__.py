"""Composition with another language model (CALM, arXiv 2401.02412)."""

from mmattn.adapters.composed.augmenting_model import AugmentedPrompt, AugmentingModel
from mmattn.adapters.composed.config import ComposedAdapter
from mmattn.adapters.composed.layers import ComposedLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["AugmentedPrompt", "AugmentingModel", "ComposedAdapter"]

register_adapter(ComposedAdapter, ComposedLayers)
