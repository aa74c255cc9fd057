"""The speed of a training's steps, and of a card's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from mmattn.adapters.host_models import text_config
from mmattn.training.lower_layers import count_below

#: Dense bfloat16 operations a second, as NVIDIA states them, of cards by the name that torch gives them.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


class StepClock:
    """The time of the steps since `begin`; that of evaluations and checkpoints does not count."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self._began, self._aside, self._tokens, self._flops = time.perf_counter(), 0.0, 0, 0.0

    def count(self, tokens: int, flops: float) -> None:
        """Count tokens of a step, and its floating-point operations on this process's device."""
        self._tokens, self._flops = self._tokens + tokens, self._flops + flops

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += time.perf_counter() - began

    def metrics(self, device: torch.device) -> dict[str, float]:
        """Return tokens a second where there are any, and on a known card the share of what it can do."""
        seconds = max(time.perf_counter() - self._began - self._aside, 1e-9)
        peak, metrics = peak_flops(device), dict[str, float]()
        if self._tokens:
            metrics["tokens_per_second"] = round(self._tokens / seconds, 3)
        if peak and self._flops:
            metrics["mfu"] = round(self._flops / seconds / peak, 4)
        return metrics


# Floating-point operations --------------------------------------------------------------------------------------------


def peak_flops(device: torch.device) -> float | None:
    """Return the floating-point operations a second of a known card, dense and in bfloat16; else None."""
    return PEAKS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def flops_per_token(model: Any) -> float:
    """Return the floating-point operations of a training step of an adapted language model, per token.

    As in PaLM's model FLOPs utilization (arXiv 2204.02311, appendix B): 2 for each weight in the forward pass and 2 for
    each gradient, of the inputs of layers above the lowest adapter, and of the inputs and weights of trained layers.
    Attention scores and slots of a memory are not counted.

    Returns:
        0 if this is not a measure: for other models, mixtures of experts, and packed quantised weights.
    """
    if not getattr(model, "predicts_tokens", False) or not model.adapters or model.config.is_encoder_decoder:
        return 0.0
    head = model.host.get_output_embeddings()
    uncountable = getattr(model, "is_quantized", False) or getattr(text_config(model.host), "num_experts_per_tok", None)
    if uncountable or not isinstance(head, nn.Linear):
        return 0.0
    tables = {id(part.weight) for part in model.host.modules() if isinstance(part, nn.Embedding)}
    host = {id(weight): weight for weight in (*model.host.parameters(), *head.parameters())}
    trained = {id(weight): weight for weight in model.parameters() if weight.requires_grad}
    upper = {id(weight): weight for part in (*model.layers[count_below(model) :], head) for weight in part.parameters()}
    products = {id(head.weight), *(host.keys() - tables)}
    numbers = (products, upper.keys() | trained.keys(), trained.keys() - host.keys(), trained.keys())
    every = host | trained | upper
    return 2.0 * sum(every[key].numel() for group in numbers for key in group)
