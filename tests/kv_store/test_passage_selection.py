"""Invariant 103: passages before a text are one call of the host in which passages do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mmattn
from mmattn.adapters.joined import rotation
from mmattn.testing.case import no_trace, traces
from tests import tiny
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


def test_alibi_and_chunks_are_refused() -> None:
    """Invariant 105: positions that cannot be moved are refused, whatever a short text would show."""
    host = tiny.make("falcon", alibi=True)
    with pytest.raises(mmattn.errors.AttachError, match="Falcon"):
        mmattn.attach(host, mmattn.adapters.PassageAdapter())
    host = tiny.make("llama")
    host.config.layer_types = ["chunked_attention"] * tiny.LAYERS
    with pytest.raises(mmattn.errors.AttachError, match="within chunks"):
        mmattn.attach(host, mmattn.adapters.PassageAdapter())


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


def prefixed(family: str) -> tuple[Any, mmattn.hosts.PassageCache]:
    """A tiny host that has read the passages after a prefix."""
    model = mmattn.attach(tiny.make(family), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model, prefix=PREFIX)
    passages.add(PASSAGES, progress=False)
    return model, passages


@pytest.mark.parametrize("family", READING)
def test_a_prefix_stands_before_the_passages(family: str) -> None:
    """Invariant 103: prefix, one passage and text are what they are in the prompt, and so are prefix and text."""
    model, passages = prefixed(family)
    host = tiny.make(family)
    for row in ([0], [1], []):
        before = [*PREFIX, *(token for number in row for token in PASSAGES[number])]
        wanted = answer(host, torch.tensor([[*before, *TEXT]]))[:, len(before) :]
        assert distance(answer(model, text(), memory=passages.select([row])), wanted) <= CLOSE


def test_passages_see_the_prefix_and_not_each_other() -> None:
    """Invariant 103: several passages in a row are one call of the host in which each sees the prefix and itself."""
    model, passages = prefixed("gpt2")
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
    model, passages = prefixed("llama")
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
