"""Invariant 107: what a host has read is kept as it was read: files, changed weights, tokens read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, ShapeError
from tests import tiny, tiny_texts
from tests.adapters.joined_hosts import CLOSE, answer, distance
from tests.kv_store.passage_hosts import PASSAGES, TEXT, blocks, reader, text


def test_a_passage_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages are read once, in batches, and are what they are when each is read alone."""
    model, passages = reader("llama")
    wanted = answer(model, text(), memory=passages.select([[0, 1, 2]]))
    monkeypatch.setattr(model.host, "forward", _never)
    assert passages.add([PASSAGES[1], torch.tensor(PASSAGES[0])], progress=False) == [1, 0]
    monkeypatch.undo()
    assert len(passages) == 3 and passages.lengths == [7, 11, 5] and passages.ids(2) == list(PASSAGES[2])
    other, singly = reader("llama")[0], mmattn.hosts.PassageCache(reader("llama")[0])
    for passage in PASSAGES:
        singly.add([passage], progress=False)
    assert distance(answer(singly.model, text(), memory=singly.select([[0, 1, 2]])), wanted) <= CLOSE
    assert other is not singly.model
    per_token = 2 * 2 * 8 * 4 * tiny.LAYERS  # K and V, two heads of 8 in single precision
    assert passages.nbytes() == per_token * 23


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("the host was called")


def test_texts_need_a_tokenizer() -> None:
    """Passages given as texts become the ids that the tokenizer makes."""
    model, passages = reader("llama")
    with pytest.raises(ConfigError, match="tokenizer"):
        passages.add(["a b"], progress=False)
    with pytest.raises(ShapeError, match="no tokens"):
        passages.add([[]], progress=False)
    assert len(passages) == 3
    tokenizer = tiny_texts.tiny_tokenizer()
    with pytest.raises(ShapeError, match="vocabulary"):
        mmattn.hosts.PassageCache(model, tokenizer).add(["b a"], progress=False)
    model = mmattn.attach(tiny.make("llama", vocab_size=len(tokenizer)), mmattn.adapters.PassageAdapter())
    named = mmattn.hosts.PassageCache(model, tokenizer)
    (number,) = named.add(["b a"], progress=False)
    assert named.ids(number) == tokenizer("b a")["input_ids"]


def test_what_cannot_be_selected() -> None:
    """Numbers and rows that are not there are refused."""
    _, passages = reader("llama")
    for rows in ([[3]], [[0], [-1]]):
        with pytest.raises(IndexError, match="no passage"):
            passages.select(rows)
    with pytest.raises(ShapeError, match="no rows"):
        passages.select([])
    with pytest.raises(ConditionError, match="one passage adapter"):
        mmattn.hosts.PassageCache(tiny.attach(tiny.make("llama")))


def test_changed_weights_are_noticed() -> None:
    """Invariant 107: after an edit of the host's weights, or with another LoRA, what it read is refused, not used."""
    model, passages = reader("llama")
    memory = passages.select([[0]])
    answer(model, text(), memory=memory)
    with torch.no_grad():
        model.host.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    for use in (lambda: answer(model, text(), memory=memory), lambda: passages.add([[7, 8]]), passages.check_current):
        with pytest.raises(ConditionError, match="have changed since"):
            use()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_another_lora_is_noticed() -> None:
    """Invariant 107: what was read with a LoRA is refused without it."""
    from peft import LoraConfig, get_peft_model

    host = get_peft_model(tiny.make("llama"), LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model = mmattn.attach(host, mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model)
    passages.add(PASSAGES, progress=False)
    memory = passages.select([[0]])
    with_lora = answer(model, text(), memory=memory)
    with host.disable_adapter(), pytest.raises(ConditionError, match="LoRA"):
        answer(model, text(), memory=memory)
    assert torch.equal(answer(model, text(), memory=memory), with_lora)


def test_another_host_is_noticed() -> None:
    """Invariant 107: passages that one host has read are refused by another."""
    _, passages = reader("llama")
    other, _ = reader("llama")
    with pytest.raises(ConditionError, match="another host"):
        answer(other, text(), memory=passages.select([[0]]))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_files(family: str, mapped: bool, tmp_path: Path) -> None:
    """A file gives back the passages, in memory or mapped; more can be added, and written again."""
    model, passages = reader(family)
    wanted = answer(model, text(), memory=passages.select([[2, 0]]))
    path = tmp_path / "passages.safetensors"
    passages.save(path)
    other = mmattn.attach(tiny.make(family), mmattn.adapters.PassageAdapter())
    read = mmattn.hosts.PassageCache.load(other, path, mapped=mapped)
    assert read.lengths == passages.lengths and read.ids(1) == list(PASSAGES[1])
    assert torch.equal(answer(other, text(), memory=read.select([[2, 0]])), wanted)
    assert read.add([PASSAGES[0], [44, 45]], progress=False) == [0, 3]
    read.save(path)
    again = mmattn.hosts.PassageCache.load(other, path, mapped=mapped)
    wanted = answer(other, text(), memory=read.select([[3, 1]]))
    assert torch.equal(answer(other, text(), memory=again.select([[3, 1]])), wanted)


def test_bad_files(tmp_path: Path) -> None:
    """Invariant 107: a torn file, one of another kind, another host's, or none: refused, and nothing is changed."""
    model, passages = reader("llama")
    path = tmp_path / "passages.safetensors"
    with pytest.raises(AdapterFileError, match="no passages to write"):
        mmattn.hosts.PassageCache(model).save(path)
    passages.save(path)
    whole = path.read_bytes()
    bank, _ = tmp_path / "memory.safetensors", tiny.memory(1).save(tmp_path / "memory.safetensors")
    other = mmattn.attach(tiny.make("llama", seed=1), mmattn.adapters.PassageAdapter())
    deeper = mmattn.attach(tiny.make("llama", num_hidden_layers=2), mmattn.adapters.PassageAdapter())
    for host, file in ((other, path), (deeper, path), (model, bank)):
        with pytest.raises(AdapterFileError):
            mmattn.hosts.PassageCache.load(host, file)
    with pytest.raises((AdapterFileError, FileNotFoundError)):
        mmattn.hosts.PassageCache.load(model, tmp_path / "none.safetensors")
    for damaged in (whole[:-9], whole[:400] + bytes([whole[400] ^ 1]) + whole[401:], whole[:-3] + b"abc"):
        path.write_bytes(damaged)
        with pytest.raises(AdapterFileError):
            mmattn.hosts.PassageCache.load(model, path)
    path.write_bytes(whole)
    assert len(mmattn.hosts.PassageCache.load(model, path)) == 3


# Tokens read again where they stand -----------------------------------------------------------------------------------

ROWS = [[0, 1, 2], [2], [1, 0], []]


@pytest.mark.parametrize("family", ["llama", "glm", "smollm3", "granite"])
def test_recomputing_everything_is_the_prompt(family: str) -> None:
    """Invariant 108: where all tokens are read again, the answer is that to the passages in the prompt."""
    model, passages = reader(family)
    found = answer(model, text(4), memory=passages.select(ROWS, recomputed_tokens=100))
    for number, row in enumerate(ROWS):
        ids = torch.tensor([[*(one for passage in row for one in PASSAGES[passage]), *TEXT]])
        wanted = answer(tiny.make(family), ids)[:, -len(TEXT) :]
        assert distance(found[[number]], wanted) <= CLOSE


def test_recomputing_some_is_between() -> None:
    """Invariant 108: few tokens read again change a part of it; none, nothing."""
    model, passages = reader("llama")
    whole = torch.tensor([[*PASSAGES[0], *PASSAGES[1], *PASSAGES[2], *TEXT]])
    prompt = answer(tiny.make("llama"), whole)[:, -len(TEXT) :]
    found = {
        count: distance(answer(model, text(), memory=passages.select([[0, 1, 2]], recomputed_tokens=count)), prompt)
        for count in (0, 1, 4, 100)
    }
    assert found[0] > 100 * CLOSE and found[1] != found[0] and found[4] != found[1] and found[100] <= CLOSE
    plain = answer(model, text(), memory=passages.select([[0, 1, 2]]))
    assert distance(plain, blocks(tiny.make("llama"), [0, 1, 2])) <= CLOSE, "what was read is as it was"


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_read_again_see_nothing_that_comes_later(count: int) -> None:
    """Invariant 180: their keys and values are the same whatever comes after them in their passage and after it."""
    model, passages = reader("llama")
    begin = PASSAGES[1][:count]
    other, longer = passages.add([[*begin, 17, 29, 41, 2, 19], [*begin, 47, 53, 3, 59, 37, 83]], progress=False)
    place = slice(len(PASSAGES[0]), len(PASSAGES[0]) + count)
    rows = [[0, 1, 2], [0, other, 2], [0, longer, 1]]
    found = [passages.select([row], recomputed_tokens=count).slots(model.adapter("default")) for row in rows]
    plain = passages.select(rows[:1]).slots(model.adapter("default"))
    for layer in range(1, tiny.LAYERS):
        for name in ("keys", "values"):
            wanted, *others = (getattr(one, name)[layer][0, :, place] for one in found)
            assert distance(wanted, getattr(plain, name)[layer][0, :, place]) > 100 * CLOSE
            assert all(distance(one, wanted) <= CLOSE for one in others)


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_recomputing_is_refused(family: str) -> None:
    """Learned positions and windows cannot be read again: refused in words."""
    model, passages = reader(family)
    with pytest.raises(ConditionError, match="recomputed_tokens"):
        answer(model, text(), memory=passages.select([[0, 1]], recomputed_tokens=2))


def test_training_mode_is_left_as_it_was() -> None:
    """Passages are read in eval mode, and the host is in its own mode after."""
    host = tiny.make("llama", attention_dropout=0.5).train()
    model = mmattn.attach(host, mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model)
    passages.add(PASSAGES, progress=False)
    assert host.training and all(module.training for module in host.modules())
    wanted, others = reader("llama")
    host.eval()
    found: Any = answer(model, text(), memory=passages.select([[0]]))
    assert torch.equal(found, answer(wanted, text(), memory=others.select([[0]])))
