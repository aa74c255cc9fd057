"""Packed rows: documents in one row answer, lose and learn as they do padded, each with its own memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

import mmattn
from mmattn.errors import ConditionError, ShapeError
from tests import tiny

LENGTHS = (7, 3, 5, 11)
#: Their attention and their positions cannot be told where documents begin.
MIXING = ("bloom", "mamba")
#: They keep documents apart with a mask of four dimensions only.
MASKED = ("falcon", "mpt", "opt")
APART = [family for family in tiny.FAMILIES if family not in MIXING]
families = pytest.mark.parametrize("family", APART)


@dataclass
class Texts:
    """The same documents padded and packed."""

    padded: dict[str, Tensor]
    packed: dict[str, Tensor]

    @property
    def real(self) -> Tensor:
        return self.padded["attention_mask"].bool()


@pytest.fixture(scope="module")
def texts() -> Texts:
    return make_texts(LENGTHS)


def make_texts(lengths: tuple[int, ...]) -> Texts:
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, tiny.VOCAB - 2, (length,), generator=generator) for length in lengths]
    flat = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": one.tolist()} for one in documents])
    ids, keep = tiny.left_padded([one.flip(0) for one in documents])
    ids, keep = ids.flip(1), keep.flip(1)
    padded = {"input_ids": ids, "attention_mask": keep, "labels": ids.masked_fill(keep == 0, -100)}
    padded["labels"][:, 0] = -100
    return Texts(padded, {name: value for name, value in flat.items() if isinstance(value, Tensor)})


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: one.grad for name, one in model.adapters.named_parameters() if one.grad is not None}
    model.zero_grad()
    assert found
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-6)], ids=["32", "64"])
@families
def test_answers_loss_and_gradients_are_those_of_the_padded_batch(
    family: str, dtype: torch.dtype, tolerance: float, texts: Texts
) -> None:
    if (family, dtype) == ("mixtral", torch.float64):
        return  # its experts know no float64
    model = tiny.attach(tiny.make(family).to(dtype)).to(dtype)
    memory = tiny.memory(len(LENGTHS), lengths=[5, 2, 0, 4]).to(dtype)
    padded = model(**texts.padded, memory=memory)
    padded.loss.backward()
    wanted = gradients(model)
    packed = model(**texts.packed, memory=memory)
    packed.loss.backward()
    tiny.assert_close(packed.logits[0], padded.logits[texts.real], tolerance)
    tiny.assert_close(packed.loss, padded.loss, tolerance)
    found = gradients(model)
    # A gate's gradient is a sum of terms that may all but cancel: in float32 only all weights together tell.
    parts = [[*wanted]] if dtype == torch.float32 else [[name] for name in wanted]
    for names in parts:
        got, want = (torch.cat([grads[name].flatten() for name in names]) for grads in (found, wanted))
        tiny.assert_close(got, want, tolerance)


@families
def test_a_document_without_memory_is_the_hosts_own(family: str, texts: Texts) -> None:
    model, host = tiny.attach(tiny.make(family)), tiny.make(family)
    with torch.no_grad():
        found = model(**texts.packed, memory=tiny.memory(4, lengths=[5, 0, 3, 0])).logits[0]
        none = model(**texts.packed, memory=tiny.memory(4, lengths=[0, 0, 0, 0])).logits[0]
        own = host(**texts.packed, use_cache=False).logits[0]
        alone = [
            host(texts.padded["input_ids"][row : row + 1, :length]).logits[0] for row, length in enumerate(LENGTHS)
        ]
    if family not in MASKED:
        assert torch.equal(none, own), "bit for bit"
    parts = found.split(list(LENGTHS))
    for row in (1, 3):
        assert torch.equal(parts[row], none.split(list(LENGTHS))[row]), "bit for bit"
        tiny.assert_close(parts[row], alone[row])
    assert all((parts[row] - alone[row]).abs().max() > 1e-2 for row in (0, 2))


@torch.no_grad()
def test_documents_of_one_token() -> None:
    """Invariant 188: told apart by their positions, which do not rise."""
    texts = make_texts((1, 1, 5, 1))
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(4)
    padded = model(input_ids=texts.padded["input_ids"], attention_mask=texts.padded["attention_mask"], memory=memory)
    packed = {name: texts.packed[name] for name in ("input_ids", "position_ids")}
    assert packed["position_ids"][0, :3].tolist() == [0, 0, 0]
    tiny.assert_close(model(**packed, memory=memory).logits[0], padded.logits[texts.real])


@pytest.mark.parametrize("how", ["condition", "base_model", "checkpointing", "inputs_embeds", "a mask of ones"])
def test_in_every_way_of_calling(how: str, texts: Texts) -> None:
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(len(LENGTHS))
    given = {name: value for name, value in texts.packed.items() if name != "labels"}
    wanted = model(**given, memory=memory).logits
    if how == "condition":
        with model.condition(memory):
            found = model.host(**given).logits
    elif how == "base_model":
        found = model.host.lm_head(model.base_model(**given, memory=memory).last_hidden_state)
    elif how == "checkpointing":
        model(**texts.packed, memory=memory).loss.backward()
        without = gradients(model)
        model.train()
        tiny.checkpoint(model.host, False)
        out = model(**texts.packed, memory=memory)
        out.loss.backward()
        for name, grad in gradients(model).items():
            tiny.assert_close(grad, without[name])
        found = out.logits
    elif how == "inputs_embeds":
        embedded = model.host.get_input_embeddings()(given.pop("input_ids"))
        found = model(**given, inputs_embeds=embedded, memory=memory).logits
    else:
        found = model(**given, attention_mask=torch.ones_like(given["input_ids"]), memory=memory).logits
    tiny.assert_close(found, wanted)


def test_padding_that_seq_idx_numbers_minus_one(texts: Texts) -> None:
    """It belongs to no document: it takes no row of the memory, and is the host's own bit for bit."""
    model, memory, ids = tiny.attach(tiny.make("llama")), tiny.memory(len(LENGTHS)), texts.padded["input_ids"]
    pad = tiny.text(1, 3)[0]
    rows = [torch.cat([pad[:1], ids[0, :7], ids[1, :3], pad[1:]]), torch.cat([ids[2, :5], pad, ids[3, :5]])]
    index = torch.tensor([[-1] + [0] * 7 + [1] * 3 + [-1] * 2, [2] * 5 + [-1] * 3 + [3] * 5])
    positions = torch.tensor([[0, *range(7), *range(3), *range(2)], [*range(5), *range(3), *range(5)]])
    given = {"input_ids": torch.stack(rows), "position_ids": positions}
    with torch.no_grad():
        found = model(**given, seq_idx=index, memory=memory).logits
        wanted = model(**{k: v for k, v in texts.padded.items() if k != "labels"}, memory=memory).logits
        own = tiny.make("llama")(**given, use_cache=False).logits
    for number, length in enumerate((7, 3, 5, 5)):
        tiny.assert_close(found[index == number], wanted[number, :length])
    assert torch.equal(found[index < 0], own[index < 0])


def test_chunks_and_images_are_those_of_their_document() -> None:
    lengths = (9, 4, 13)
    texts, host = make_texts(lengths), tiny.make("llama")
    labels = {"labels"}
    padded = {k: v for k, v in texts.padded.items() if k not in labels}
    packed = {k: v for k, v in texts.packed.items() if k not in labels}
    adapter = mmattn.GatedAdapter(memory_dim=13, every=2, num_heads=2, head_dim=8, visible_segments="latest")
    model = tiny.open_gates(mmattn.attach(host, adapter))
    tokens = torch.randn(3, 6, 13, generator=torch.Generator().manual_seed(5))
    memory = mmattn.Memory(tokens, segments=torch.tensor([[0, 0, 1, 1, 2, 2]] * 3))
    images = (torch.arange(13) // 4).clamp(max=3).expand(3, -1)
    flat = torch.cat([images[row, :length] for row, length in enumerate(lengths)])[None]
    with torch.no_grad():
        wanted = model(**padded, memory=memory, images=images).logits[texts.real]
        tiny.assert_close(model(**packed, memory=memory, images=flat).logits[0], wanted)
    model.unload()


@pytest.mark.parametrize("family", MIXING)
def test_a_host_that_mixes_documents_is_refused(family: str, texts: Texts) -> None:
    """Invariant 50."""
    model = tiny.attach(tiny.make(family))
    with pytest.raises(ConditionError, match=r"mixes the documents of packed rows.*pad instead of packing"):
        model(texts.packed["input_ids"], position_ids=texts.packed["position_ids"], memory=tiny.memory(4))


def test_what_does_not_go_with_packed_rows(texts: Texts) -> None:
    """Invariant 123: a cache is refused by each of its names."""
    model, ids = tiny.attach(tiny.make("llama")), texts.packed["input_ids"]
    given: dict[str, Any] = {"position_ids": texts.packed["position_ids"]}
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    for more, error, says in (
        ({"memory": tiny.memory(3)}, ShapeError, "4 documents .*'default' has 3"),
        ({"use_cache": True}, ConditionError, "cache"),
        *(({name: DynamicCache()}, ConditionError, "cache") for name in ("past_key_values", *tiny.going_on(None))),
        ({"attention_mask": mask}, ConditionError, "mixes the documents"),
    ):
        with pytest.raises(error, match=says):
            model(ids, **given, **{"memory": tiny.memory(4)} | more)
    with torch.no_grad():  # without a memory all is the host's own
        assert torch.equal(model(ids, **given).logits, tiny.make("llama")(ids, **given).logits)
        straight = torch.arange(ids.shape[1])[None]
        found = model(ids, position_ids=straight, memory=tiny.memory(1)).logits
        assert torch.equal(found, model(ids, memory=tiny.memory(1)).logits), "one document"


@pytest.fixture(autouse=True)
def nothing_is_left_in_force() -> Iterator[None]:
    from mmattn.hosts.context import THREAD

    yield
    assert getattr(THREAD, "step", None) is None
