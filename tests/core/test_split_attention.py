"""Attention over a memory in parts is that over one memory, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn import CrossAttention
from mmattn.core.attention import Options, Rule, attend_by_rule, merge
from mmattn.core.split_attention import KeyValueParts, KeyValueRows
from tests.core.random_inputs import DTYPES, D, E
from tests.reference import TARGETS, assert_close, attend_reference

SHARED, OWN, L = 11, 7, 5


@dataclass
class Parts:
    """A layer, and what it attends to, in two parts and as one."""

    layer: CrossAttention
    x: Tensor
    shared: Tensor
    own: Tensor
    masks: tuple[Tensor | None, Tensor | None]
    scores: tuple[Tensor | None, Tensor | None]

    def split(self, queries: int | None = None, **more: Any) -> Any:
        (shared, own), (of_shared, of_own) = self.masks, self.scores
        first = self.layer.project(self.shared, mask=shared, scores=of_shared, queries=queries)
        second = self.layer.project(self.own, mask=own, scores=of_own, queries=queries)
        return self.layer(self.x, KeyValueParts((first, second)), **more)

    def whole(self, **more: Any) -> Any:
        b = len(self.own)
        given: dict[str, Any] = {}
        if self.masks[0] is not None and self.masks[1] is not None:
            given["mask"] = torch.cat([self.masks[0].expand(b, -1), self.masks[1]], 1)
        if self.scores[0] is not None and self.scores[1] is not None:
            given["scores"] = torch.cat([self.scores[0].expand(b, -1), self.scores[1]], 1)
        return self.layer(self.x, torch.cat([self.shared.expand(b, -1, -1), self.own], 1), **given, **more)

    def gradients(self, out: Tensor, upstream: Tensor) -> list[Tensor]:
        inputs = [self.x, self.shared, self.own, *self.layer.parameters()]
        return list(torch.autograd.grad(out, inputs, upstream, allow_unused=True, materialize_grads=True))


def make(
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
    rows: int = 6,
    length: int = L,
    scores: bool = False,
    **settings: Any,
) -> Parts:
    torch.manual_seed(5)
    settings = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "bias": True} | settings
    layer = CrossAttention(D, E, score_bias=scores, dtype=dtype, **settings)
    if settings.get("null_slot"):
        torch.nn.init.normal_(layer.kv_proj.null_value)  # type: ignore[arg-type]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(dtype).requires_grad_()

    masks: tuple[Tensor | None, Tensor | None] = None, None
    if masked:
        masks = torch.rand(1, SHARED) > 0.3, torch.rand(3, OWN) > 0.5
        masks[1][1] = False
    of = (torch.randn(1, SHARED).to(dtype), torch.randn(3, OWN).to(dtype)) if scores else (None, None)
    return Parts(layer, random(rows, length, D), random(1, SHARED, E), random(3, OWN, E), masks, of)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"masked": True},
    {"null_slot": True, "masked": True},
    {"null_slot": True, "length_norm": 10.0, "masked": True},
    {"null_slot": True, "length_norm": 10.0},
    {"scores": True, "masked": True},
    {"qk_norm": True, "null_slot": True},
    {"num_kv_heads": 4, "rows": 3},
    {"num_kv_heads": 1, "rows": 3, "length": 1},
    {"backend": "eager"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("queries", [None, 0])
def test_parts_are_the_whole(settings: dict[str, Any], queries: int | None) -> None:
    """Invariants 9, 185."""
    parts = make(torch.float64, **settings)
    upstream = torch.randn_like(parts.x)
    (found, shown), (wanted, weights) = parts.split(queries, return_weights=True), parts.whole(return_weights=True)
    assert_close(found, wanted, torch.float64)
    assert_close(shown, weights, torch.float64)
    out = parts.split(queries)
    assert_close(out, wanted, torch.float64)
    size = max(one.abs().max() for one in parts.gradients(wanted, upstream))
    for got, want in zip(parts.gradients(out, upstream), parts.gradients(parts.whole(), upstream), strict=True):
        assert_close(got, want, torch.float64, "grad", size=size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_dtype(dtype: torch.dtype) -> None:
    parts = make(dtype, masked=True, num_kv_heads=4)
    wide = make(torch.float64, masked=True, num_kv_heads=4)
    wide.layer.load_state_dict(parts.layer.state_dict())
    wide.masks = parts.masks
    for name in ("x", "shared", "own"):
        setattr(wide, name, getattr(parts, name).detach().double().requires_grad_())
    upstream = torch.randn_like(parts.x)
    found, wanted = parts.split(), wide.whole()
    assert_close(found, wanted, dtype)
    for got, want in zip(
        parts.gradients(found, upstream)[:3], wide.gradients(wanted, upstream.double())[:3], strict=True
    ):
        assert_close(got, want, dtype, "grad")


@pytest.mark.parametrize("backend", [None, "eager"])
def test_the_log_sum_exp_and_its_gradients(backend: str | None) -> None:
    """Of each kernel, against the definition: a query's scores, written out."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, n, 8, dtype=torch.float64, requires_grad=True) for n in (L, OWN, OWN))
    allowed = torch.rand(2, 1, L, OWN) > 0.4
    allowed[1, 0, 2] = False
    result = attend_by_rule(q, k, v, Rule(allowed), Options(0.3, backend=backend, return_log_sum_exp=True))
    out, total = result.output, result.log_sum_exp
    assert total is not None
    scores = (0.3 * q @ k.transpose(-1, -2)).masked_fill(~allowed, float("-inf"))
    want = scores.exp().sum(-1, keepdim=True).log()
    assert total[1, :, 2].eq(float("-inf")).all() and not out[1, :, 2].any()
    wanted, _ = attend_reference(q, k, v, attention_mask=allowed.expand(2, 4, L, OWN), scale=0.3)
    assert_close(out, wanted, torch.float32)
    seen = allowed.any(-1, keepdim=True).expand_as(total)
    assert_close(total[seen], want[seen], torch.float32)
    up, of = torch.randn_like(out), torch.randn_like(total)
    got = torch.autograd.grad((out * up).sum() + (total * of)[seen].sum(), (q, k, v))
    slow = torch.autograd.grad((wanted * up).sum() + (want * of)[seen].sum(), (q, k, v))
    for one, other in zip(got, slow, strict=True):
        assert_close(one, other, torch.float32, "grad")


def test_merging_is_exact_where_one_part_outweighs_the_other() -> None:
    outs = [torch.full((1, 1, 1, 2), value) for value in (1.0, 2.0, 3.0)]
    totals = [torch.full((1, 1, 1, 1), value) for value in (1000.0, -1000.0, float("-inf"))]
    out, total = merge(outs, totals)
    assert out.flatten().tolist() == [1.0, 1.0] and total.item() == 1000.0
    assert TARGETS[torch.float32]["forward"][0] < 1e-5


@pytest.mark.parametrize(
    "setting", [{}, {"null_slot": True, "length_norm": 9.0}, {"out_bias": True, "num_kv_heads": 2}], ids=str
)
def test_rows_apart_are_rows_of_one_memory(setting: dict[str, Any]) -> None:
    """Each row over keys and values of its own, of its own length, one of them hidden altogether."""
    torch.manual_seed(0)
    layer = CrossAttention(D, E, num_heads=4, head_dim=6, dtype=torch.float64, **setting)
    lengths, x = (7, 3, 5, 2), torch.randn(4, L, D, dtype=torch.float64, requires_grad=True)
    tokens, mask = torch.randn(4, 7, E, dtype=torch.float64), torch.arange(7) < torch.tensor(lengths)[:, None]
    mask[2] = False
    rows = [layer.project(tokens[row : row + 1, :m], mask=mask[row : row + 1, :m]) for row, m in enumerate(lengths)]
    wanted, of_wanted = layer(x, tokens, mask=mask, return_weights=True)
    found, of_found = layer(x, KeyValueRows(tuple(rows)), return_weights=True)
    assert_close(found, wanted, torch.float64)
    assert_close(of_found, of_wanted, torch.float64)
    assert not found[2].any()
    assert_close(layer(x, KeyValueRows(tuple(rows))), wanted, torch.float64)
    upstream = torch.randn_like(wanted)
    inputs = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        assert_close(one, other, torch.float64, "grad")
