"""A host that is not a transformers model."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmattn.extend import AdaptedModel, Site, register_host


class Prediction(NamedTuple):
    """Logits (b, l, v) of the next token."""

    logits: Tensor


class MeanLayer(nn.Module):
    """A layer in which each token reads the mean of all tokens up to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (b, l, d) to (b, l, d)."""
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return x + self.mix(torch.cat([x, mean], -1)).tanh()


class MeanDecoder(nn.Module):
    """A causal language model of these layers."""

    def __init__(self, vocabulary: int = 89, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.stack = nn.ModuleList(MeanLayer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Prediction:
        """Return the logits of the next token after each of the ids (b, l)."""
        x = self.embedding(input_ids)
        for layer in self.stack:
            x = layer(x)
        return Prediction(self.head(x))


@register_host
class AdaptedMeanDecoder(AdaptedModel):
    """The decoder with adapters before or after its layers."""

    kind: ClassVar[str] = "mean_decoder"
    positions: ClassVar[tuple[str, ...]] = ("after", "before")
    predicts_tokens: ClassVar[bool] = True

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Return whether a model is this decoder."""
        return isinstance(model, MeanDecoder)

    def sites(self, position: str) -> list[Site]:
        """Return a site for every layer."""
        table: Tensor = self.host.embedding.weight
        depth = len(self.host.stack)
        return [Site(index, position, f"stack.{index}", table.shape[1], table.device) for index in range(depth)]

    def example_batch(self, generator: torch.Generator, config: Any, rows: int) -> dict[str, Any]:
        """Return random ids."""
        ids = torch.randint(self.host.embedding.num_embeddings, (rows, 7), generator=generator)
        return {"input_ids": ids.to(self.host.embedding.weight.device)}
