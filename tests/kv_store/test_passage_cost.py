"""What passages before a text cost on a device: few operations, and no wait for a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mmattn
from mmattn.adapters.joined.host_attention import HostAttention
from mmattn.adapters.passages import LayerGroup, PassageLayers
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance
from tests.device import act_as_device, beyond
from tests.kv_store.passage_hosts import PASSAGES, TEXT, blocks, reader, text


def test_operations_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 208: 16 passages on 8 layers are selected in 100 operations; selected before, in 32."""
    host, model = (tiny.make("llama", num_hidden_layers=8) for _ in range(2))
    model = mmattn.attach(model, mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5 + number, *range(3, 9 + number % 3)] for number in range(16)], progress=False)
    rows, ids = [list(range(16))], text()
    act_as_device(monkeypatch)
    kept = passages.select(rows)
    assert beyond(lambda: model(ids, memory=passages.select(rows)), lambda: host(ids)) <= 100
    assert beyond(lambda: model(ids, memory=kept), lambda: host(ids)) <= 32


@pytest.mark.parametrize("rows", [[[0, 2, 1]], [[1], [0, 2], []]])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral", "glm", "gpt2"])
def test_no_values_are_read(family: str, rows: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 208: whatever the host's positions, windows and rows; and answers are those of other devices."""
    model, passages = reader(family)
    host, ids = tiny.make(family), text(len(rows))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    wanted = (
        answer(model, ids, memory=passages.select(rows)),
        answer(model, ids, attention_mask=mask, memory=passages.select(rows)),
    )
    act_as_device(monkeypatch)
    memory = passages.select(rows)
    beyond(lambda: model(ids, memory=passages.select(rows)), lambda: host(ids))
    beyond(lambda: model(ids, memory=memory), lambda: host(ids))
    padded = {"attention_mask": mask}
    beyond(lambda: model(ids, **padded, memory=memory), lambda: host(ids, **padded))
    found = answer(model, ids, memory=memory), answer(model, ids, **padded, memory=memory)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["prefix", "joined", "padded"])
def test_other_slots_are_not_read_either(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 208: neither of prefixes, nor of vectors in the host's attention."""
    config: Any = mmattn.adapters.PrefixAdapter(num_virtual_tokens=3)
    memory: Any = [[0], []]
    if kind != "prefix":
        config = mmattn.adapters.JoinedAdapter(memory_dim=13, every=1)
        memory = mmattn.Memory(torch.randn(2, 5, 13), (torch.arange(5) < torch.tensor([[3], [0]])) | (kind == "joined"))
    model, host, ids = mmattn.attach(tiny.make("llama"), config), tiny.make("llama"), text(2)
    tiny.open_gates(model)
    wanted = answer(model, ids, memory=memory)
    assert distance(wanted, answer(host, ids)) > 100 * CLOSE
    act_as_device(monkeypatch)
    beyond(lambda: model(ids, memory=memory), lambda: host(ids))
    found = answer(model, ids, memory=memory)
    assert distance(found, wanted) <= CLOSE
    if kind != "joined":
        assert distance(found[1], answer(host, ids)[1]) <= CLOSE, "the second row has no slots"


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_mask_of_a_forward_is_not_that_of_another(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 209: layers share a mask only in one forward, and where they see as much of the text."""
    changes = {"sliding_window": 4, "num_hidden_layers": 7} if family == "gemma3_text" else {}
    model = mmattn.attach(tiny.make(family, **changes), mmattn.adapters.JoinedAdapter(memory_dim=13, every=1))
    tiny.open_gates(model)
    prepared, ids = model.prepare(tiny.memory(2)), text(2)
    masks = [torch.ones_like(ids) for _ in range(3)]
    masks[1][0, :3], masks[2][1, :5] = 0, 0
    with monkeypatch.context() as patch:
        patch.setattr(HostAttention, "_mask_with", HostAttention._make_mask)  # each layer makes its mask
        wanted = [answer(model, ids, attention_mask=one, memory=prepared) for one in masks]
    for number in (0, 1, 2, 1, 0):
        assert torch.equal(answer(model, ids, attention_mask=masks[number], memory=prepared), wanted[number])
    assert distance(wanted[0], wanted[1]) > CLOSE and distance(wanted[0], wanted[2]) > CLOSE


def test_masks_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 209: in a deeper host a layer costs the concatenation of its keys and values, and no mask."""
    act_as_device(monkeypatch)
    operations = {}
    for layers in (2, 7):
        model = mmattn.attach(tiny.make("llama", num_hidden_layers=layers), mmattn.adapters.PassageAdapter())
        passages = mmattn.hosts.PassageCache(model)
        passages.add(PASSAGES, progress=False)
        ids, memory, bare = text(2), passages.select([[0, 1], [2]]), tiny.make("llama", num_hidden_layers=layers)
        operations[layers] = beyond(lambda: model(ids, memory=memory), lambda: bare(ids))  # noqa: B023
    assert operations[7] - operations[2] <= 2 * (7 - 2)


def alone(self: PassageLayers) -> list[LayerGroup]:
    """Each layer in a group of its own, as on a host whose layers are on several devices."""
    return [
        LayerGroup(
            [site.layer], site.device, site.sizes, None if self.rotations is None else self.rotations[site.layer]
        )
        for site in self.sites
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_file_does_not_depend_on_the_groups(family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 210: a file that was written where layers are one tensor is read where they are not, and back."""
    model, passages = reader(family)
    rows = [[1, 0], [2]]
    wanted = answer(model, text(2), memory=passages.select(rows))
    passages.save(tmp_path / "together")
    monkeypatch.setattr(PassageLayers, "groups", alone)
    apart = mmattn.hosts.PassageCache.load(model, tmp_path / "together", mapped=True)
    assert torch.equal(answer(model, text(2), memory=apart.select(rows)), wanted)
    apart.save(tmp_path / "apart")
    monkeypatch.undo()
    again = mmattn.hosts.PassageCache.load(model, tmp_path / "apart")
    assert torch.equal(answer(model, text(2), memory=again.select(rows)), wanted)
    assert (tmp_path / "apart").read_bytes() == (tmp_path / "together").read_bytes()


def test_a_passage_like_the_prefix() -> None:
    """A passage with the ids of the prefix is not the prefix: it was read after it."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model, prefix=PASSAGES[2])
    passages.add([PASSAGES[2]], progress=False)
    whole = torch.tensor([[*PASSAGES[2], *PASSAGES[2], *TEXT]])
    wanted = answer(tiny.make("llama"), whole)[:, -len(TEXT) :]
    assert distance(answer(model, text(), memory=passages.select([[0]])), wanted) <= CLOSE


def test_selecting_changes_no_passage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are moved in what was selected, not in what is kept; also where few numbers are rotated at once."""
    model, passages = reader("llama")
    first = answer(model, text(), memory=passages.select([[2, 0, 1]]))
    assert distance(first, blocks(tiny.make("llama"), [2, 0, 1])) <= CLOSE
    monkeypatch.setattr("mmattn.adapters.joined.rotation.AT_ONCE", 1)
    assert torch.equal(answer(model, text(), memory=passages.select([[2, 0, 1]])), first)
    one = answer(model, text(), memory=passages.select([[1]]))
    assert distance(one, blocks(tiny.make("llama"), [1])) <= CLOSE


def test_grouped_heads_are_trained_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients through the kernel that takes keys of groups are those through the host's own function."""

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PrefixAdapter(num_virtual_tokens=3, num_prefixes=2))
        model(text(3), memory=[[0], [1, 0], []], labels=text(3)).loss.backward()
        return [one.grad for one in model.adapters.parameters() if one.grad is not None]

    found = gradients()
    monkeypatch.setattr(HostAttention, "_is_plain_sdpa", False)
    wanted = gradients()
    assert found and len(found) == len(wanted)
    assert all(distance(*pair) <= CLOSE for pair in zip(found, wanted, strict=True))
