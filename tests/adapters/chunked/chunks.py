"""What the tests of the chunked adapter share: hosts with one, texts in chunks, neighbours, and the slow definition."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmattn
from tests import tiny
from tests.reference import cross_attention_reference

SIZE = 5  # s
ROWS, LENGTH = 3, 17  # three chunks, and two tokens of a fourth
SLOTS = 7  # of a chunk's neighbours, all together


def attach(lm: nn.Module, *, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """`mmattn.attach` with a small chunked adapter on the first and the third layer, its gates open unless told."""
    settings = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8} | settings
    model = mmattn.attach(lm, mmattn.ChunkedAdapter(**{"chunk_size": SIZE} | settings), name=name)
    return tiny.open_gates(model) if opened else model


def neighbours(b: int = ROWS, chunks: int = 3, *, seed: int = 0) -> mmattn.Memory:
    """Neighbours (b, chunks · SLOTS, e) of every chunk, in an order of their own in each row."""
    generator = torch.Generator().manual_seed(3000 + seed)
    segments = torch.arange(chunks).repeat_interleave(SLOTS)
    shuffled = torch.stack([segments[torch.randperm(len(segments), generator=generator)] for _ in range(b)])
    tokens = torch.randn(b, chunks * SLOTS, tiny.MEMORY_DIM, generator=generator)
    return mmattn.Memory(tokens, segments=shuffled)


def ragged(scores: bool = False) -> mmattn.Memory:
    """Neighbours of some chunks only: none of row 1's first chunk, none at all for row 2 but in masked slots."""
    full = neighbours()
    segments = full.segments.clone()
    segments[1][segments[1] == 0] = -1
    mask = torch.rand(segments.shape, generator=torch.Generator().manual_seed(3)) > 0.3
    mask[2] = False
    assert not mask.all() and (segments[1][mask[1]] == 1).any()
    tokens = full.tokens.masked_fill(~mask[..., None], float("nan"))
    opinion = torch.randn(segments.shape, generator=torch.Generator().manual_seed(5)) if scores else None
    return mmattn.Memory(tokens, mask, segments, opinion)


class Library:
    """Finds neighbours by the ids of a chunk: different for different chunks, and it remembers what it was asked."""

    def __init__(self, lengths: Callable[[int], int] = lambda total: 2 + total % 5) -> None:
        self.asked: list[Tensor] = []
        self.lengths = lengths

    def __call__(self, ids: Tensor) -> mmattn.Memory:
        self.asked.append(ids.clone())
        rows = []
        for row in ids.tolist():
            generator = torch.Generator().manual_seed(hash(tuple(row)) % (1 << 31))
            rows.append(torch.randn(self.lengths(sum(row)), tiny.MEMORY_DIM, generator=generator))
        return mmattn.Memory.pad(rows)

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """Every chunk asked for, in order."""
        return [tuple(row) for ids in self.asked for row in ids.tolist()]


def complete_chunks(text: Tensor) -> set[tuple[int, ...]]:
    """The complete chunks of the rows of a text (b, l)."""
    return {tuple(chunk) for row in text.tolist() for chunk in zip(*[iter(row)] * SIZE, strict=False)}


def slow(
    block: nn.Module, memory_norm: nn.Module, x: Tensor, memory: mmattn.Memory, real: Tensor, **how: Any
) -> Tensor:
    """The definition, token by token, in float64: hidden states x (b, l, d) to what the block makes of them.

    Args:
        real: (b, l) bool. how: of `cross_attention_reference`.
    """
    weights = block.attention.state_dict(keep_vars=True)
    state = {name.removeprefix("kv_proj."): value.double() for name, value in weights.items()}
    scored, how = how.pop("scored", False), {"num_heads": 2} | how
    out = []
    for row in range(x.shape[0]):
        so_far = 0
        for token in range(x.shape[1]):
            hidden_state = x[row, token].double()
            so_far += int(real[row, token])
            chunk = so_far // SIZE - 1
            slots = memory.segments[row] == chunk if real[row, token] and chunk >= 0 else torch.zeros(1, dtype=bool)
            if memory.mask is not None:
                slots = slots & memory.mask[row]
            slots = slots.nonzero().flatten().tolist()
            if slots:
                slot_vectors = normalised(memory_norm, memory.tokens[row, slots].double())[None]
                scores = memory.scores[row, slots].double()[None] if scored else None
                query = normalised(block.norm, hidden_state)[None, None]
                result, _ = cross_attention_reference(state, query, slot_vectors, scores=scores, **how)
                hidden_state = hidden_state + block.gate.gate.double().tanh() * result[0, 0]
                feed = block.feed_forward
                hidden = F.gelu(normalised(feed.norm, hidden_state) @ feed.up.weight.double().T)
                hidden_state = hidden_state + block.feed_forward_gate.gate.double().tanh() * (
                    hidden @ feed.down.weight.double().T
                )
            out.append(hidden_state)
    return torch.stack(out).view_as(x)


def normalised(norm: nn.Module, x: Tensor) -> Tensor:
    """LayerNorm in float64."""
    return F.layer_norm(x, x.shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps)


@functools.cache
def scene(family: str) -> SimpleNamespace:
    """A host with an open chunked adapter and what its untouched twin says, for tests that change neither."""
    ids = tiny.text(ROWS, LENGTH)
    return SimpleNamespace(model=attach(tiny.make(family)), ids=ids, own=tiny.own(ids, family))
