"""A memory of which one part is shared by all rows, and one whose slots lie in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ShapeError
from mmattn.memory import SharedMemory
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]


def memories(rows: int = 3) -> tuple[mmattn.Memory, mmattn.Memory, mmattn.Memory]:
    """A shared one, one of each row, and both as one memory."""
    torch.manual_seed(2)
    shared = mmattn.Memory(torch.randn(1, 11, tiny.MEMORY_DIM), scores=torch.randn(1, 11))
    mask = torch.arange(5) < torch.tensor([5, 2, 0])[torch.arange(rows) % 3, None]
    own = mmattn.Memory(torch.randn(rows, 5, tiny.MEMORY_DIM), mask=mask, scores=torch.randn(rows, 5))
    return shared, own, mmattn.Memory.cat([shared.expand(rows), own])


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mamba"])
def test_it_answers_as_one_memory(family: str) -> None:
    model, (shared, own, whole), ids = tiny.attach(tiny.make(family)), memories(), tiny.text(3)
    wanted = model(ids, memory=whole).logits
    assert tiny.differs(wanted, model(ids, memory=own).logits)
    tiny.assert_close(model(ids, memory=SharedMemory(shared, own)).logits, wanted, 1e-6)
    tiny.assert_close(model(ids, memory=SharedMemory(shared.tokens, own)).logits, wanted, 1e-6)
    again = SharedMemory(model.prepare(shared), model.prepare(own))
    tiny.assert_close(model(ids, memory=again).logits, wanted, 1e-6)
    prepared = model.prepare(SharedMemory(shared, own))
    tiny.assert_close(model(ids, memory=prepared).logits, wanted, 1e-6)


@pytest.mark.parametrize(
    "setting", [{"null_slot": True, "length_norm": 20.0}, {"score_bias": True}, {"gate": "head", "num_kv_heads": 1}]
)
def test_other_settings(setting: dict[str, Any]) -> None:
    """In float64, where no processor's rounding hides a difference."""
    model, ids = tiny.attach(tiny.make("llama"), **setting).double(), tiny.text(3)
    shared, own, whole = (one.to(torch.float64) for one in memories())
    tiny.assert_close(model(ids, memory=SharedMemory(shared, own)).logits, model(ids, memory=whole).logits, 1e-12)


@pytest.mark.parametrize("ways", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_generating(ways: dict[str, int]) -> None:
    model, (shared, own, whole), ids = tiny.attach(tiny.make("llama")), memories(), tiny.text(3)
    given: dict[str, Any] = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, **ways}
    wanted = model.generate(ids, memory=whole, **given)
    assert torch.equal(model.generate(ids, memory=SharedMemory(shared, own), **given), wanted)


def test_training() -> None:
    """Loss and gradients, those of both parts included."""
    model, (shared, own, _), ids = tiny.attach(tiny.make("llama")), memories(), tiny.text(3)

    def gradients(join: Any) -> list[torch.Tensor]:
        parts = [one.tokens.clone().requires_grad_() for one in (shared, own)]
        first, second = mmattn.Memory(parts[0]), mmattn.Memory(parts[1], own.mask)
        loss = model(ids, labels=ids, memory=join(first, second)).loss
        return [loss, *torch.autograd.grad(loss, [*parts, *model.adapters.parameters()], materialize_grads=True)]

    whole = gradients(lambda first, second: mmattn.Memory.cat([first.expand(3), second]))
    for got, want in zip(gradients(SharedMemory), whole, strict=True):
        tiny.assert_close(got, want, 1e-5)


def test_weights_and_rows_that_see_nothing() -> None:
    model, (shared, own, whole), ids = tiny.attach(tiny.make("llama")), memories(), tiny.text(3)
    with mmattn.inspect.record(model) as weights:
        model(ids, memory=SharedMemory(shared, own))
    with mmattn.inspect.record(model) as wanted:
        model(ids, memory=whole)
    assert weights.keys() == wanted.keys()
    for key, calls in wanted.items():
        tiny.assert_close(weights[key][0], calls[0], 1e-6)
    hidden = mmattn.Memory(shared.tokens, torch.zeros(1, 11, dtype=torch.bool))
    out = model(ids, memory=SharedMemory(hidden, own)).logits
    assert torch.equal(out[2], tiny.own(ids)[2]), "bit for bit the host's own"
    assert tiny.differs(out[0], tiny.own(ids)[0])


def test_nothing_of_the_shared_part_is_copied() -> None:
    model, rows = tiny.attach(tiny.make("llama")), 16
    shared, own = tiny.memory(1, m=512), tiny.memory(rows, m=8)
    with torch.no_grad():
        parts, whole = (
            model.prepare(SharedMemory(shared, own)),
            model.prepare(mmattn.Memory.cat([shared.expand(rows), own])),
        )
        for prepared in (parts, whole):
            model(tiny.text(rows), memory=prepared)
    assert 0 < parts.shared.nbytes() + parts.own.nbytes() < 0.1 * whole.nbytes()


def test_what_is_refused() -> None:
    shared, own, _ = memories()
    with pytest.raises(ShapeError, match="the shared part has one row, got 3"):
        SharedMemory(own, own)
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(ShapeError, match="the text has 4 rows and the memory of adapter 'default' has 3"):
        model(tiny.text(4), memory=SharedMemory(shared, own))
    with pytest.raises(ShapeError, match="memory_dim=13"):
        model(tiny.text(3), memory=SharedMemory(torch.randn(1, 3, 5), own))
    with pytest.raises(ConditionError, match=r"Memory.cat\(\[shared, own\]\)"):
        model.generate_batch([[3, 4]], memory=[SharedMemory(shared, own[:1])])
    model = tiny.attach(tiny.make("llama"), resampler={"num_latents": 3})
    with pytest.raises(ConditionError, match="its resampler mixes all slots"):
        model(tiny.text(3), memory=SharedMemory(shared, own))
    model = tiny.attach(tiny.make("llama"), visible_segments="latest", media_token=5)
    pair = [
        mmattn.Memory(one.tokens, segments=torch.zeros(one.tokens.shape[:2], dtype=torch.long)) for one in (shared, own)
    ]
    with pytest.raises(ConditionError, match="see some segments only"):
        model(tiny.text(3), memory=SharedMemory(*pair))


@pytest.mark.slow
def test_two_processes_are_one(tmp_path: Path) -> None:
    """Invariant 9: each has a part of the slots; outputs, generated tokens and gradients are those of one process
    with all.
    """
    command = [sys.executable, str(Path(__file__).with_name("sharded_memory.py")), f"file://{tmp_path / 'store'}"]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=240)
        assert rank.returncode == 0 and "equal" in out, out
