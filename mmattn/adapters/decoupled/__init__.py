"""Decoupled cross-attention for diffusion models (IP-Adapter, arXiv 2308.06721)."""

from mmattn.adapters.base import register_adapter
from mmattn.adapters.decoupled.adapter import DecoupledAdapter, DecoupledLayers, DecoupledLayout
from mmattn.adapters.decoupled.joint import JointDecoupledAdapter, JointDecoupledLayers, TimedResampler

__all__ = ["DecoupledAdapter", "DecoupledLayout", "JointDecoupledAdapter", "TimedResampler"]

register_adapter(DecoupledAdapter, DecoupledLayers)
register_adapter(JointDecoupledAdapter, JointDecoupledLayers)
