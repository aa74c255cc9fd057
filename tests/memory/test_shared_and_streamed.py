"""Memories in parts, shared by rows, or growing while text is written: a token sees what had arrived."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import mmattn
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError, MaskError, NonFiniteError, ShapeError
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


def test_parts_that_are_refused() -> None:
    shared, own, _ = memories()
    plain, read = tiny.attach(tiny.make("llama")), tiny.attach(tiny.make("llama"), resampler={"num_latents": 3})
    latest = tiny.attach(tiny.make("llama"), visible_segments="latest", media_token=5)
    pair = [
        mmattn.Memory(one.tokens, segments=torch.zeros(one.tokens.shape[:2], dtype=torch.long)) for one in (shared, own)
    ]
    both, narrow = SharedMemory(shared, own), SharedMemory(torch.randn(1, 3, 5), own)
    of_a_row = [SharedMemory(shared, own[:1])]
    for call, error, words in (
        (lambda: SharedMemory(own, own), ShapeError, "the shared part has one row, got 3"),
        (lambda: plain(tiny.text(4), memory=both), ShapeError, "4 rows and the memory of adapter 'default' has 3"),
        (lambda: plain(tiny.text(3), memory=narrow), ShapeError, "memory_dim=13"),
        (lambda: plain.generate_batch([[3, 4]], memory=of_a_row), ConditionError, r"Memory.cat\(\[shared, own\]\)"),
        (lambda: read(tiny.text(3), memory=both), ConditionError, "its resampler mixes all slots"),
        (lambda: latest(tiny.text(3), memory=SharedMemory(*pair)), ConditionError, "see some segments only"),
    ):
        with pytest.raises(error, match=words):
            call()


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


E, NEW = tiny.MEMORY_DIM, 11
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}


def frames(count: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, count, E, generator=torch.Generator().manual_seed(4))


class Camera(LogitsProcessor):
    """Slots arrive between tokens: one, none, two, …"""

    def __init__(self, stream: mmattn.MemoryStream, slots: Tensor) -> None:
        self.stream, self.slots, self.counts, self.logits = stream, slots, [], []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.counts.append(self.stream.arrived)
        self.logits.append(scores)
        more = len(self.counts) % 3
        begin = self.stream.arrived
        self.stream.append(self.slots[:, begin : begin + more])
        return scores


@pytest.mark.parametrize("window", [None, 4, 1])
@pytest.mark.parametrize("setting", [{}, {"null_slot": True, "length_norm": 9.0}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_streamed_is_offline(family: str, setting: dict[str, Any], window: int | None) -> None:
    """Invariant 51: every token, with host caches, against one forward under the same boundaries."""
    model, slots = tiny.attach(tiny.make(family), **setting), frames(40)
    stream = mmattn.MemoryStream(E, window=window, rows=2)
    stream.append(slots[:, :3])
    camera, prompt = Camera(stream, slots), tiny.text(2)
    with torch.no_grad():
        written = model.generate(prompt, memory=stream, logits_processor=[camera], **GREEDY)
        counts = torch.tensor(camera.counts)
        assert len(set(camera.counts)) > 5
        # The prompt was read at once, before anything more had arrived; each new token one forward later.
        arrived = torch.cat([counts[:1].expand(prompt.shape[1]), counts[1:]]).expand(2, -1)
        whole = model(written[:, :-1], memory=slots, arrived=arrived, window=window).logits
        other = model(written[:, :-1], memory=slots, arrived=arrived + 1, window=window).logits
    streamed = torch.stack(camera.logits, 1)
    tiny.assert_close(streamed, whole[:, prompt.shape[1] - 1 :], 1e-5)
    assert tiny.differs(whole, other), "a boundary that is off by one is another answer"
    assert torch.equal(written[:, prompt.shape[1] :], streamed.argmax(-1))


def test_training_under_boundaries() -> None:
    """Against forwards of each prefix with what had arrived; gradients reach the slots that were seen."""
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(2)
    slots = frames(9).requires_grad_()
    arrived = torch.tensor([[0, 0, 2, 2, 3, 5, 5], [1, 2, 3, 4, 5, 6, 7]])
    out = model(ids, labels=ids, memory=slots, arrived=arrived).logits
    assert torch.equal(out[0, :2], tiny.own(ids)[0, :2]), "before anything arrives it is the host's own, bit for bit"
    grad = torch.autograd.grad(out[0].sum(), slots)[0]
    assert grad[0, :5].abs().sum((1,)).gt(0).all() and not grad[0, 5:].any() and not grad[1].any()
    # Another slot that arrives later changes nothing before.
    changed = slots.detach().clone()
    changed[1, 4] = changed[1, 4].flip(0)
    later = model(ids, memory=changed, arrived=arrived).logits
    assert torch.equal(later[1, :4], out[1, :4]) and tiny.differs(later[1, 4:], out[1, 4:])
    with torch.no_grad():
        forgotten = model(ids, memory=slots, arrived=arrived, window=2).logits
    assert tiny.differs(forgotten[1, 3:], out[1, 3:]) and torch.equal(forgotten[1, :2], out[1, :2].detach())


def test_the_doctor_finds_what_comes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 51."""
    model, ids = tiny.attach(tiny.make("llama")), tiny.text(2)
    batch = {"input_ids": ids, "memory": frames(6), "arrived": torch.arange(ids.shape[1]).clamp(max=6).expand(2, -1)}
    report = mmattn.doctor(model, batch)
    assert report.ok, report
    assert any(ok for ok, name, _ in report.lines if name == "slots for later tokens"), report
    own = TextState.arrived_slots

    def leak(text: TextState, count: int, device: torch.device) -> Tensor:
        seen = own(text, count, device)
        return seen.roll(1, -1) | seen  # one slot too early

    monkeypatch.setattr(TextState, "arrived_slots", leak)
    assert mmattn.doctor(model, batch).failed == ["slots for later tokens"]


def test_each_slot_is_projected_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    model, slots = tiny.attach(tiny.make("llama")), frames(200)
    stream = mmattn.MemoryStream(E, window=8, rows=2)
    projected: list[int] = []
    for attention in model.attentions().values():
        own = attention.kv_proj.project
        monkeypatch.setattr(
            attention.kv_proj, "project", lambda m, *a, own=own, **k: projected.append(m.shape[1]) or own(m, *a, **k)
        )
    sizes = set()
    with torch.no_grad():
        for number in range(200):
            stream.append(slots[:, number : number + 1])
            model(tiny.text(2, length=1), memory=stream)
            sizes.add(stream.computed.nbytes())
    assert sum(projected) == 200 * len(model.attentions())
    assert max(sizes) < 4 * 2 * 2 * 16 * 4 * 40, "keys and values of some windows, not of all that came"
    with pytest.raises(ConditionError, match="are forgotten"):
        stream.tokens(0, 8)
    whole = model(tiny.text(2, length=1), memory=slots[:, -8:]).logits
    tiny.assert_close(model(tiny.text(2, length=1), memory=stream).logits, whole, 1e-6)


def test_another_host() -> None:
    stream, slots, ids = mmattn.MemoryStream(E, rows=2), frames(6), tiny.text(2)
    stream.append(slots)
    with torch.no_grad():
        for seed in (0, 1):
            model = tiny.attach(tiny.make("llama", seed=seed))
            tiny.assert_close(model(ids, memory=stream).logits, model(ids, memory=slots).logits, 1e-6)


def test_nothing_has_arrived_yet() -> None:
    model, ids = tiny.attach(tiny.make("llama"), null_slot=True), tiny.text(2)
    with torch.no_grad():
        assert torch.equal(model(ids, memory=mmattn.MemoryStream(E, rows=2)).logits, tiny.own(ids))


def test_a_thread_that_appends() -> None:
    model, slots = tiny.attach(tiny.make("llama")), frames(400)
    stream = mmattn.MemoryStream(E, window=16, rows=2)

    @torch.no_grad()
    def read() -> None:
        for _ in range(60):
            assert model(tiny.text(2, length=1), memory=stream).logits.isfinite().all()

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        for number in range(400):
            stream.append(slots[:, number : number + 1])
        for one in reading:
            one.result()
    last = model(tiny.text(2, length=1), memory=slots[:, -16:]).logits
    tiny.assert_close(model(tiny.text(2, length=1), memory=stream).logits, last, 1e-6)


def test_what_is_refused() -> None:
    plain, ids, slots = tiny.attach(tiny.make("llama")), tiny.text(2), frames(5)
    read = tiny.attach(tiny.make("llama"), resampler={"num_latents": 3})
    scored = tiny.attach(tiny.make("llama"), score_bias=True)
    stream, narrow, ones = mmattn.MemoryStream(E, rows=2), mmattn.MemoryStream(5, rows=2), torch.ones(2, 7).long()
    hidden = mmattn.Memory(slots, torch.zeros(2, 5, dtype=torch.bool))
    one_by_one = "does not read its slots one by one"
    for call, error, words in (
        (lambda: stream.append(slots[:1]), ShapeError, r"b = 2 and e = 13, got \(1, 5, 13\)"),
        (lambda: stream.append(hidden), ShapeError, "without padding"),
        (lambda: stream.append(slots * float("nan")), NonFiniteError, "row 0"),
        (lambda: stream.append(slots.clone().requires_grad_()), ConditionError, "arrived=counts"),
        (lambda: plain(tiny.text(3), memory=stream), ShapeError, "the text has 3 rows"),
        (lambda: plain(ids, memory=narrow), ShapeError, "memory_dim=13"),
        (lambda: plain.prepare(stream), ConditionError, "belongs to one call"),
        (lambda: plain(ids, memory=slots, window=3), ConditionError, "give arrived="),
        (lambda: plain(ids, arrived=ones), ConditionError, "without memory="),
        (lambda: plain(ids, memory=slots, arrived=ones[[0, 0, 1]]), ShapeError, r"arrived must be \(b, l\) with b = 2"),
        (lambda: plain(ids, memory=slots, arrived=torch.ones(2, 7)), MaskError, "must hold integers"),
        (lambda: plain(ids, memory=stream, arrived=ones), ConditionError, one_by_one),
        (lambda: read(ids, memory=stream), ConditionError, "its resampler mixes all slots"),
        (lambda: read(ids, memory=slots, arrived=ones), ConditionError, one_by_one),
        (lambda: scored(ids, memory=stream), ShapeError, "has no scores"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert stream.arrived == 0
