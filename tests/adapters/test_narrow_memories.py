"""Few numbers are a memory, too: every kind learns from them, and a default adapter is small beside its host."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mmattn
from mmattn.adapters import InsertedAdapter, JoinedAdapter
from mmattn.adapters.settings import NARROW, default_heads
from mmattn.errors import ShapeError
from mmattn.inspect.doctor.checks import shuffled
from tests import tiny, tiny_unets

FEW = mmattn.Resampler(num_latents=2, depth=1)
KINDS: dict[str, Callable[[int], Any]] = {
    "gated": lambda e: mmattn.GatedAdapter(e, every=1),
    "gated, resampled": lambda e: mmattn.GatedAdapter(e, every=1, resampler=FEW),
    "joined": lambda e: JoinedAdapter(e, every=1),
    "inserted": lambda e: InsertedAdapter(e),
    "inserted, resampled": lambda e: InsertedAdapter(e, resampler=FEW),
    "chunked": lambda e: mmattn.ChunkedAdapter(e, every=1, chunk_size=1),
}


def small_host(**sizes: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    given = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**given | {"num_attention_heads": 4} | sizes)).eval()


def learned(adapter: Any, e: int, steps: int) -> float:
    """The loss of a text whose second token is the sign of one number: a vector for each row, `x[:, None]`."""
    host = small_host()
    with torch.no_grad():
        host.lm_head.weight.mul_(20)
    model = mmattn.attach(host, adapter).train()
    optimizer = torch.optim.AdamW(model.adapters.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        x = torch.randn(64, 1, generator=generator)
        tokens = torch.cat([x, torch.ones(64, e - 1)], 1)[:, None]
        target = 5 + (x[:, 0] > 0).long()
        ids = torch.stack([torch.full_like(target, 3), target], 1)
        segments = torch.zeros(64, 1, dtype=torch.long) if adapter.kind == "chunked" else None
        memory = mmattn.Memory(tokens, segments=segments)
        loss = model(ids, labels=torch.stack([torch.full_like(target, -100), target], 1), memory=memory).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize(
    ("kind", "e"),
    [
        *(pytest.param(kind, 1, marks=[pytest.mark.slow] * ("inserted" in kind)) for kind in KINDS),
        *(("gated", 3), ("joined", 3)),
    ],
)
def test_every_kind_learns_from_few_numbers(kind: str, e: int) -> None:
    """Invariant 138: chance is 0.693, and a norm over one number leaves nothing but that."""
    slow = kind == "inserted"  # with vectors of any width
    assert learned(KINDS[kind](e), e, 200 if slow else 100) < (0.5 if slow else 0.4)


@pytest.mark.parametrize("e", [1, 2, 5])
def test_a_diffusion_model_sees_the_size_of_few_numbers(e: int) -> None:
    """Invariant 138."""
    model = mmattn.attach(tiny_unets.make(), mmattn.DecoupledAdapter(e, resampler=FEW))
    tiny_unets.open_values(model)
    x = torch.randn(tiny_unets.ROWS, e)
    with torch.no_grad():
        one, twice = (tiny_unets.run(model, mmattn.Memory(scale * x[:, None])) for scale in (1.0, 2.0))
    assert tiny.differs(one, twice, 1e-4)


def test_a_wide_memory_is_normalised_and_a_narrow_one_is_not_unless_asked() -> None:
    """Invariant 138."""
    for e, given, norm in ((NARROW, None, True), (NARROW - 1, None, False), (3, True, True), (40, False, False)):
        layout = {} if given is None else {"memory_norm": given}
        gated = mmattn.attach(small_host(), mmattn.GatedAdapter(e, every=1, layout=layout)).adapter("default")
        joined = mmattn.attach(small_host(), JoinedAdapter(e, every=1, memory_norm=given)).adapter("default")
        assert (gated.memory_norm is not None, joined.memory_norm is not None) == (norm, norm)
        assert (gated.config.layout.memory_norm, joined.config.memory_norm) == (norm, norm)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_keeps_its_norms(kind: str, norm: bool, tmp_path: Path) -> None:
    """Invariant 139."""
    adapter = KINDS[kind](3)
    given: dict[str, Any] = {"layout": {"memory_norm": norm}} if hasattr(adapter, "layout") else {"memory_norm": norm}
    if getattr(adapter, "resampler", None) is not None:
        given["resampler"] = replace(FEW, norm=norm)
    model = mmattn.attach(small_host(), replace(adapter, **given))
    model.save_adapter(tmp_path)
    again = mmattn.load(small_host(), tmp_path).adapter("default")
    assert again.config == model.adapter("default").config
    assert set(again.state_dict()) == set(model.adapter("default").state_dict())


@pytest.mark.parametrize("d", [16, 32, 64, 128, 256, 512, 768, 2048])
@pytest.mark.parametrize("ratio", [0.1, 1, 10])
def test_the_default_attention_of_a_block_is_no_larger_than_the_hosts(d: int, ratio: float) -> None:
    """Invariant 140."""
    e = max(1, round(ratio * d))
    h, k = default_heads(d, e)
    assert h * k <= 512 and k % 8 == 0
    assert 2 * h * k * (d + e) <= max(4 * d * d, 2 * 8 * (d + e))


def test_a_default_adapter_is_small_beside_its_host() -> None:
    """Invariant 140: with a block at every layer less than half of the host, with a wide encoder, too."""
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    for e in (1, 24, 128, 768, 1280):
        for make in (mmattn.GatedAdapter, mmattn.ChunkedAdapter, mmattn.ComposedAdapter):
            host = small_host(**sizes)
            count = sum(parameter.numel() for parameter in host.parameters())
            model = mmattn.attach(host, make(memory_dim=e, every=1))
            assert model.trainable_parameters()[0] < count / 2, (make.__name__, e)


def test_files_have_the_numbers_of_heads(tmp_path: Path) -> None:
    """Invariant 140: and so a later default changes none of them."""
    model = mmattn.attach(small_host(), mmattn.GatedAdapter(24, every=1, resampler=FEW))
    model.save_adapter(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())["adapter"]
    attention = model.adapter("default").attention(0)
    assert (written["num_heads"], written["head_dim"]) == (attention.num_heads, attention.head_dim) == (2, 16)
    assert (written["resampler"]["num_heads"], written["resampler"]["head_dim"]) == (1, 24)
    assert mmattn.load(small_host(), tmp_path).adapter("default").config == model.adapter("default").config


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((5,), r"one number for each row is tokens\[:, None, None\]"),
        ((5, 3), r"each row is tokens\[:, None\], .*\[None\]"),
    ],
)
def test_vectors_without_an_axis_say_both_ways(shape: tuple[int, ...], words: str) -> None:
    """Invariant 138: a vector for each row, and the vectors of a single row, are two things."""
    for give in (mmattn.Memory, lambda x: mmattn.attach(small_host(), mmattn.GatedAdapter(3, every=1)).prepare(x)):
        with pytest.raises(ShapeError, match=words):
            give(torch.randn(shape))


@pytest.mark.parametrize("tokens", [torch.ones(2, 3, 1), torch.zeros(2, 3, 4), torch.ones(2, 3, 5)])
def test_another_memory_of_the_doctor_is_another_one(tokens: torch.Tensor) -> None:
    """Invariant 138: however few numbers a vector has, or if all of them are equal."""
    assert (shuffled(mmattn.Memory(tokens)).tokens != tokens).any(-1).all()
