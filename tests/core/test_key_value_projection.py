"""`KeyValueProjection` on its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmattn.core.projection import KeyValueProjection
from mmattn.errors import ShapeError
from tests.core.random_inputs import MASK, B, E, L, M
from tests.reference import assert_close, attend_reference


def alone(h: int = 6, g: int = 2, k: int = 11) -> KeyValueProjection:
    linears = (nn.Linear(E, g * k, bias=False) for _ in range(2))
    return KeyValueProjection(*linears, num_heads=h, num_kv_heads=g, head_dim=k, memory_dim=E).double()


@pytest.mark.parametrize("queries", [None, 0])
def test_queries_of_another_layer(queries: int | None) -> None:
    """Queries of anyone over K = M Wk and V = M Wv; a row that sees nothing gives exactly 0."""
    projection, memory = alone(), torch.randn(B, M, E, dtype=torch.float64)
    q = torch.randn(B, 6, L, 11, dtype=torch.float64)
    keys, values = projection.keys_and_values(memory)
    expected, expected_weights = attend_reference(q, keys.detach(), values.detach(), mask=MASK)
    for given in ({"memory": memory, "mask": MASK}, {"memory": projection.project(memory, mask=MASK, queries=queries)}):
        out, weights = projection(q, **given, return_weights=True)
        assert_close(out, expected, torch.float64)
        assert_close(weights, expected_weights, torch.float64)
        assert not out[1].any() and torch.equal(projection(q, **given), projection(q, **given))
    assert projection(q.float(), memory).dtype == torch.float32, "the dtype of the queries"
    with pytest.raises(ShapeError, match="memory must be a tensor"):
        projection(q, memory[..., 1:])
