"""Decoupled cross-attention for diffusion models (IP-Adapter, arXiv 2308.06721)."""

from mmattn.adapters.decoupled.joint import JointDecoupledAdapter, TimedResampler
from mmattn.adapters.decoupled.unet import DecoupledAdapter, DecoupledLayout

__all__ = ["DecoupledAdapter", "DecoupledLayout", "JointDecoupledAdapter", "TimedResampler"]
