"""FiLM (arXiv 1709.07871): scale and shift the input x of a layer by values that each token reads from the memory M.

With D (d, r) and U (r, 2d), U = 0 in a fresh adapter:

    a = attend(x D, M),    γ, β = a U,    y = x ⊙ (1 + γ) + β
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mmattn import extend


@dataclass(frozen=True)
class FilmAdapter(extend.AdapterConfig):
    """Settings: the width of the memory, the layers (every n-th or a list), the rank and the heads of the attention."""

    memory_dim: int
    every: int | None = None
    layers: tuple[int, ...] | None = None
    rank: int = 8
    num_heads: int = 2

    kind: ClassVar[str] = "film"
    positions: ClassVar[tuple[str, ...]] = ("before",)
    default_every: ClassVar[int] = 1
    example_call: ClassVar[str] = "model(input_ids=input_ids, memory=memory)"

    def __post_init__(self) -> None:
        extend.settle_layers(self)


class FilmBlock(nn.Module):
    """The modulation of a layer."""

    def __init__(self, config: FilmAdapter, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, config.rank, bias=False)
        self.attention = extend.CrossAttention(config.rank, config.memory_dim, config.num_heads)
        self.up = nn.Linear(config.rank, 2 * width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(
        self,
        x: Tensor,
        memory: extend.KeyValue,
        *,
        attention_mask: Tensor | None,
        has_memory: Tensor | None,
        adapter_scale: extend.Scale,
    ) -> Tensor:
        """Modulate x (b, l, d); tokens that attend to no slot pass through bit for bit."""
        hidden = x.to(self.up.weight.dtype)
        attended = self.attention(self.down(hidden), memory, attention_mask=attention_mask)
        gamma, beta = self.up(attended).chunk(2, -1)
        modulated = (hidden + adapter_scale * (gamma * hidden + beta)).to(x.dtype)
        return modulated if has_memory is None else torch.where(has_memory, modulated, x)


class FilmLayers(extend.AdapterLayers):
    """The trainable part on one host: a block for each site."""

    def __init__(self, config: FilmAdapter, sites: list[extend.Site]) -> None:
        super().__init__(config, sites)
        self.blocks = nn.ModuleDict({str(site.layer): FilmBlock(config, site.width) for site in sites})

    def attention(self, layer: int) -> nn.Module:
        """Return the module that attends to the memory: its keys and values are cached, its weights recorded."""
        return self.block(layer).attention


extend.register_adapter(FilmAdapter, FilmLayers)
