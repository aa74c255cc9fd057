"""`TensorVersion`: whether tensors are still what they were; `KeyValue.gather`: rows of several as one."""

import pytest
import torch

from mmattn.core.cross_attention import CrossAttention
from mmattn.core.key_values import KeyValue
from mmattn.storage.tensor_cache import TensorVersion


@pytest.mark.parametrize(
    "now",
    [
        lambda x: x.add_(1),
        lambda x: x.clone(),
        lambda x: x[:1],
        lambda x: x.view(5, 3),
        lambda x: x.as_strided((3, 5), (1, 3)),
        lambda x: x.view(torch.int32),
    ],
    ids=["edited", "copied", "fewer rows", "other shape", "other strides", "other dtype"],
)
def test_another_reading_of_the_same_storage_is_another_tensor(now):
    x = torch.randn(3, 5)
    snapshot = TensorVersion([x])
    assert snapshot.holds([x])
    assert not snapshot.holds([now(x)])
    assert not snapshot.holds([x, x])


def projected(kind: str, batch: int, m: int, monkeypatch: pytest.MonkeyPatch) -> tuple[CrossAttention, KeyValue]:
    """A layer, and keys and values of a random memory in each layout."""
    torch.manual_seed(7)
    options = {
        "null slot": {"null_slot": True},
        "null slot, whole": {"null_slot": True},
        "scored": {"score_bias": True},
        "packed and scored": {"score_bias": True},
    }
    layer = CrossAttention(13, 11, 3, head_dim=7, bias=kind == "packed", **options.get(kind, {}))
    torch.manual_seed(100 * batch + m)
    memory = torch.randn(batch, m, 11)
    mask = torch.rand(batch, m) > 0.3 if "whole" not in kind else None
    scores = torch.randn(batch, m) if "scored" in kind else None
    monkeypatch.setattr("mmattn.core.projection.PACK_SAVES", 0 if "packed" in kind else 1 << 40)
    return layer, layer.project(memory, mask=mask, scores=scores)


@pytest.mark.parametrize(
    "kind",
    [
        "whole",
        "padded",
        "packed",
        "null slot",
        "null slot, whole",
        "scored",
        "packed and scored",
    ],
)
@torch.no_grad()
def test_gathered_rows_are_the_rows(kind, monkeypatch):
    layer, first = projected(kind, 3, 5, monkeypatch)
    layer, second = projected(kind, 2, 17, monkeypatch)
    assert ("packed" in kind) == (first.lengths is not None), first.lengths
    holders = [(second, 1), (first, 2), (first, 0), (second, 1)]
    gathered = KeyValue.gather(holders)
    assert gathered.batch == 4 and gathered.slots <= 17
    x = torch.randn(4, 19, 13)
    out = layer(x, gathered)
    for row, (holder, number) in enumerate(holders):
        every = layer(x[row : row + 1].expand(holder.batch, -1, -1), holder)
        assert torch.isfinite(out).all()
        torch.testing.assert_close(out[row], every[number])
    assert KeyValue.gather([(first, number) for number in range(3)]) is first


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_of_an_optimizer_is_an_edit_of_what_it_moves(fused: bool, compiled: bool):
    """Invariant 197: kernels of fused optimizers do not count what they write; a parameter without gradients stays."""
    moved, still = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)
    versions = [TensorVersion(part.parameters()) for part in (moved, still)]
    optimizer = torch.optim.AdamW([*moved.parameters(), *still.parameters()], fused=fused)
    moved(torch.ones(2, 3)).sum().backward()
    (torch.compile(optimizer.step) if compiled else optimizer.step)()
    assert [version.holds(part.parameters()) for version, part in zip(versions, (moved, still), strict=True)] == [
        False,
        True,
    ]
