"""Invariant 21: ten thousand retrieved slots in one memory."""

from __future__ import annotations

import torch
from torch.profiler import profile

import mmattn

SLOTS, QUERIES, HEADS, WIDTH = 10_240, 3, 2, 7


def chunked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int = 1021) -> torch.Tensor:
    """Softmax attention in float64, chunk by chunk with a running maximum: never all scores at once."""
    q, k, v = q.double(), k.double(), v.double()
    top = torch.full((*q.shape[:3], 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(size, 2), v.split(size, 2), strict=True):
        scores = q @ keys.transpose(-1, -2) / WIDTH**0.5
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = (scores - new).exp()
        keep = (top - new).exp()
        total, out, top = total * keep + weights.sum(-1, keepdim=True), out * keep + weights @ values, new
    return out / total


def test_ten_thousand_slots_equal_the_chunked_reference():
    """Invariant 21."""
    q, k, v = (torch.randn(1, HEADS, length, WIDTH) for length in (QUERIES, SLOTS, SLOTS))
    out = mmattn.attend(q, k, v)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), chunked(q, k, v), rtol=0, atol=5e-6)


def test_memory_grows_with_queries_times_slots_and_no_faster():
    """Invariant 21."""
    layer = mmattn.CrossAttention(23, memory_dim=19, num_heads=HEADS, head_dim=WIDTH)
    memory, mask = torch.randn(1, SLOTS, 19), torch.rand(1, SLOTS) > 0.5
    with torch.no_grad(), profile(profile_memory=True) as profiled:
        layer(torch.randn(1, QUERIES, 23), memory, mask=mask)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events())
    floats = SLOTS * (2 * 19 + 4 * HEADS * WIDTH + 4 * HEADS * QUERIES + 8)
    assert 0 < taken < 4 * floats
