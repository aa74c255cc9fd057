"""Passages before a text are one call of the host in which they do not see each other, and stay as they were read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmattn
from mmattn.adapters.joined import rotation
from mmattn.errors import AdapterFileError, ConditionError, ConfigError, ShapeError
from mmattn.testing.case import no_trace, traces
from tests import tiny, tiny_texts
from tests.adapters.composed import composed_hosts as composing
from tests.adapters.joined_hosts import CLOSE, LEARNED, ROTARY, answer, distance
from tests.kv_store.passage_hosts import PASSAGES, TEXT, blocks, reader, text

READING = [*ROTARY, *LEARNED]


@pytest.mark.parametrize("family", READING)
def test_a_leading_passage_is_a_prefill(family: str) -> None:
    """Invariant 103: one leading passage is what it is in the prompt, within 1e-5."""
    model, passages = reader(family)
    for number, passage in enumerate(PASSAGES):
        whole = torch.tensor([[*passage, *TEXT]])
        wanted = answer(tiny.make(family), whole)[:, len(passage) :]
        assert distance(answer(model, text(), memory=passages.select([[number]])), wanted) <= CLOSE
        # the passage matters, or nothing was shown
        assert distance(answer(model, text()), wanted) > 100 * CLOSE


@pytest.mark.parametrize("family", READING)
def test_passages_do_not_see_each_other(family: str) -> None:
    """Invariant 103: several passages, in any order and twice, are one call in which they do not see each other."""
    model, passages = reader(family)
    host = tiny.make(family)
    for row in ([0, 1, 2], [2, 0], [1, 1], [1, 2, 0]):
        wanted = blocks(host, row, parallel=family in LEARNED)
        assert distance(answer(model, text(), memory=passages.select([row])), wanted) <= CLOSE
    seen = answer(host, torch.tensor([[*PASSAGES[0], *PASSAGES[1], *TEXT]]))[:, -len(TEXT) :]
    assert distance(blocks(host, [0, 1], parallel=family in LEARNED), seen) > 100 * CLOSE


@pytest.mark.parametrize("family", ROTARY)
def test_keys_are_turned(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 104: keys are turned to where their passage stands: without that, the answer is another."""
    model, passages = reader(family)
    wanted = blocks(tiny.make(family), [2, 0])
    monkeypatch.setattr(rotation.KeyRotation, "rotate_layers_", lambda self, keys, distance: None)
    assert distance(answer(model, text(), memory=passages.select([[2, 0]])), wanted) > 100 * CLOSE


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 4.0}
BY_LENGTH = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 50, **LONGROPE},
    "longrope within the probe": {"rope_type": "longrope", "original_max_position_embeddings": 16, **LONGROPE},
    "longrope from 4096": {"rope_type": "longrope", "original_max_position_embeddings": 4096, **LONGROPE},
}


def by_length(rope: str, family: str = "llama") -> nn.Module:
    settings = {"rope_theta": 10000.0, **BY_LENGTH[rope]}
    return tiny.make(family, rope_parameters=settings, max_position_embeddings=8192 if "4096" in rope else 128)


@pytest.mark.parametrize("rope", BY_LENGTH)
@pytest.mark.parametrize("kind", ["passages", "prefix", "inserted", "fused"])
def test_frequencies_that_follow_the_length_of_the_text_are_refused(kind: str, rope: str) -> None:
    """Invariant 137: keys that were read before a text would keep the frequencies of a short one."""
    adapters = {
        "passages": mmattn.adapters.PassageAdapter,
        "prefix": lambda: mmattn.adapters.PrefixAdapter(num_virtual_tokens=3),
        "inserted": lambda: mmattn.adapters.InsertedAdapter(memory_dim=13),
        "fused": lambda: mmattn.adapters.FusedCacheAdapter(memory_dim=composing.along().cache_dim),
    }
    host, ids = by_length(rope), torch.arange(3, 3 + 60)[None]
    short, long, before = answer(host, ids[:, :7]), answer(host, ids), traces(host)
    with pytest.raises(mmattn.errors.AttachError, match="frequencies of LlamaForCausalLM change with the length"):
        mmattn.attach(host, adapters[kind]())
    no_trace(host, before, "a refused host")
    assert torch.equal(answer(host, ids[:, :7]), short) and torch.equal(answer(host, ids), long)


@pytest.mark.parametrize("rope", BY_LENGTH)
def test_a_second_model_whose_frequencies_follow_the_length_is_refused(rope: str) -> None:
    """Invariant 137: its cache of a long prompt could not be turned to where a host has it."""
    with pytest.raises(mmattn.errors.AttachError, match="change with the length"):
        mmattn.AugmentingModel(by_length(rope)).prefill(torch.arange(3, 9)[None])


@pytest.mark.parametrize("kind", [mmattn.adapters.JoinedAdapter, mmattn.GatedAdapter])
def test_what_has_no_position_is_not_refused(kind: Callable[..., Any]) -> None:
    model = tiny.open_gates(mmattn.attach(by_length("dynamic"), kind(memory_dim=13, every=1)))
    assert answer(model, torch.arange(3, 3 + 60)[None], memory=tiny.memory(1)).isfinite().all()


def test_another_attention_function_is_refused() -> None:
    """Invariant 105: attention without a mask is refused when a passage is read or given, with what to do."""
    model, passages = reader("llama")
    wanted = answer(model, text(), memory=passages.select([[0]]))
    model.host.config._attn_implementation = "flash_attention_2"
    with pytest.raises(mmattn.errors.ConditionError, match="set_attn_implementation"):
        answer(model, text(), memory=passages.select([[0]]))
    model.host.set_attn_implementation("eager")
    assert distance(answer(model, text(), memory=passages.select([[0]])), wanted) <= CLOSE


@pytest.mark.parametrize("family", ["llama", "glm", "phi", "cohere", "smollm3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    """The keys of half precision are told apart, turned in single precision, and answer as the host does."""
    model = mmattn.attach(tiny.make(family).to(dtype), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model)
    passages.add(PASSAGES, progress=False)
    exact = blocks(tiny.make(family), [2, 1, 0])
    host = distance(blocks(tiny.make(family).to(dtype), [2, 1, 0]).float(), exact)
    found = distance(answer(model, text(), memory=passages.select([[2, 1, 0]])).float(), exact)
    assert found <= 3 * host


def test_rope_scaling() -> None:
    """Invariant 104: frequencies and attention scaling of other rotary kinds (yarn, llama3, linear) are those of the
    host.
    """
    base = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    kinds = [
        {"rope_type": "yarn", **base},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **base},
    ]
    for rope in kinds:
        model, passages = reader("llama", rope_parameters=rope, max_position_embeddings=128)
        host = tiny.make("llama", rope_parameters=rope, max_position_embeddings=128)
        assert distance(answer(model, text(), memory=passages.select([[1, 0]])), blocks(host, [1, 0])) <= CLOSE
        assert distance(blocks(host, [1, 0]), blocks(tiny.make("llama"), [1, 0])) > 100 * CLOSE


PREFIX = (30, 31, 4, 66)


@pytest.mark.parametrize("family", READING)
def test_a_prefix_stands_before_the_passages(family: str) -> None:
    """Invariant 103: prefix, one passage and text are what they are in the prompt, and so are prefix and text."""
    model, passages = reader(family, PREFIX)
    host = tiny.make(family)
    for row in ([0], [1], []):
        before = [*PREFIX, *(token for number in row for token in PASSAGES[number])]
        wanted = answer(host, torch.tensor([[*before, *TEXT]]))[:, len(before) :]
        assert distance(answer(model, text(), memory=passages.select([row])), wanted) <= CLOSE


def test_passages_see_the_prefix_and_not_each_other() -> None:
    """Invariant 103: several passages in a row are one call of the host in which each sees the prefix and itself."""
    model, passages = reader("gpt2", PREFIX)
    parts = [PREFIX, PASSAGES[2], PASSAGES[0], TEXT]
    ids = torch.tensor([[token for part in parts for token in part]])
    starts = [0, len(PREFIX), len(PREFIX), len(PREFIX) + max(map(len, parts[1:3]))]
    positions = torch.cat([start + torch.arange(len(part)) for start, part in zip(starts, parts, strict=True)])
    owner = torch.tensor([number for number, part in enumerate(parts) for _ in part])
    order = torch.arange(len(owner))
    seen = ((owner[:, None] == owner) | (owner == 0) | (owner == 3)[:, None]) & (order[:, None] >= order)
    wanted = answer(tiny.make("gpt2"), ids, attention_mask=seen[None, None], position_ids=positions[None])
    found = answer(model, text(), memory=passages.select([[2, 0]]))
    assert distance(found, wanted[:, -len(TEXT) :]) <= CLOSE


def test_a_prefix_is_saved_and_stays_when_tokens_are_read_again(tmp_path: Path) -> None:
    """A file has the prefix; passages whose tokens are all read again after it are the prompt."""
    model, passages = reader("llama", PREFIX)
    passages.save(tmp_path / "passages.safetensors")
    loaded = mmattn.hosts.PassageCache.load(model, tmp_path / "passages.safetensors", mapped=True)
    assert loaded.prefix == PREFIX and len(loaded) == 3
    rows = [[2, 0]]
    assert torch.equal(
        answer(model, text(), memory=loaded.select(rows)), answer(model, text(), memory=passages.select(rows))
    )
    ids = torch.tensor([[*PREFIX, *PASSAGES[2], *PASSAGES[0], *TEXT]])
    prompt = answer(tiny.make("llama"), ids)[:, -len(TEXT) :]
    assert distance(answer(model, text(), memory=loaded.select(rows)), prompt) > 100 * CLOSE
    assert distance(answer(model, text(), memory=loaded.select(rows, recomputed_tokens=100)), prompt) <= CLOSE


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
