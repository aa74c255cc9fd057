"""The plug-in of vLLM, which serves gated adapters; found by its entry point `vllm.general_plugins`."""

from __future__ import annotations


def register() -> None:
    """Make vLLM know adapted models, and folders of adapters as `--model`."""
    from vllm import ModelRegistry

    from mmattn.serving.vllm.engine import ARCHITECTURE, patch_engine

    ModelRegistry.register_model(ARCHITECTURE, "mmattn.serving.vllm.model:AdaptedForCausalLM")
    patch_engine()
