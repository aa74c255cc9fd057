"""An adapter that begins as a look-up in passages, as `mmattn.pipelines.read_passages` has them."""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def begin_as_lookup(adapter: Any, sharpness: float = 6.0) -> None:
    """Make a fresh adapter over such slots begin as a look-up: it still adds nothing until its gate opens.

    Queries and keys are the same map of states, so that like finds like, and what is attended to goes out through the
    transpose of the map it came in by, so that a word found is the word said. From random maps 250 steps
    learned little of it.
    """
    for block in adapter.blocks.values():
        attention = block.attention
        width = attention.q_proj.in_features
        attention.q_proj.weight.mul_(sharpness**0.5)
        attention.kv_proj.k_proj.weight.zero_()[:, :width] = attention.q_proj.weight
        attention.kv_proj.v_proj.weight.zero_()[:, width:] = attention.out_proj.weight.T
