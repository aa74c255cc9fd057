"""Decoupled cross-attention for diffusion models (IP-Adapter, arXiv 2308.06721)."""

from mmattn.adapters.decoupled.config import (
    DecoupledAdapter,
    DecoupledLayout,
    JointDecoupledAdapter,
    TimedResampler,
)
from mmattn.adapters.decoupled.joint import JointDecoupledLayers
from mmattn.adapters.decoupled.unet import DecoupledLayers
from mmattn.adapters.registry import register_adapter

__all__ = ["DecoupledAdapter", "DecoupledLayout", "JointDecoupledAdapter", "TimedResampler"]

register_adapter(DecoupledAdapter, DecoupledLayers)
register_adapter(JointDecoupledAdapter, JointDecoupledLayers)
