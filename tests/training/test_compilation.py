"""Compiled blocks of adapters: the same numbers, few graphs for memories of any length, and no stale weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

import mmattn
from mmattn import training
from mmattn.errors import ConfigError
from mmattn.training.optimization import compiled_blocks
from tests import tiny, tiny_unets

# What the compiler does itself when it goes on behind the attention.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
#: Tokens of the text, slots of the memory, and how many of them are real.
SHAPES: list[tuple[int, int, list[int] | None]] = [
    (7, 5, None), (7, 9, [3, 9, 2]), (11, 13, [13, 0, 1]), (5, 17, [1, 2, 3]), (5, 1, None), (23, 31, None),
]  # fmt: skip
KINDS: dict[str, Any] = {
    "gated": mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(1, 2), num_heads=2, head_dim=8),
    "joined": mmattn.adapters.JoinedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(1, 2)),
}


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was compiled before, and what is compiled here, serves nobody else."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def attach(kind: str = "gated") -> Any:
    model = tiny.open_gates(mmattn.attach(tiny.make("llama"), KINDS[kind]))
    model.train()
    return model


def step(model: Any, length: int, slots: int, lengths: list[int] | None) -> dict[str, Tensor]:
    """The logits, and the gradient of each trained parameter."""
    model.zero_grad()
    logits = model(tiny.text(3, length), memory=tiny.memory(3, slots, lengths=lengths)).logits
    logits.square().mean().backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    assert found
    return {**found, "logits": logits.detach()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_whatever_the_lengths(kind: str) -> None:
    """Bit for bit where torch runs the graphs as they are traced; a number of graphs that lengths do not change."""
    model = attach(kind)
    want = [step(model, *shape) for shape in SHAPES]
    with compiled_blocks(model, "aot_eager"):
        got = [step(model, *shape) for shape in SHAPES]
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0, "nothing was compiled"
        for slots in range(2, 20):
            step(model, slots + 3, slots, [slots, 1, slots // 2])
        assert counters["stats"]["unique_graphs"] == graphs
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())
    assert not any("forward" in part.__dict__ or "attend" in part.__dict__ for part in model.adapters.modules())


def test_no_stale_weights() -> None:
    """A step of the optimizer, and weights assigned anew, are seen by the same graphs."""
    model = attach()
    with compiled_blocks(model, "eager"):
        first = step(model, *SHAPES[0])
        with torch.no_grad():
            for parameter in model.adapters.parameters():
                parameter.mul_(1.25)
        edited = step(model, *SHAPES[0])
        for parameter in model.adapters.parameters():
            parameter.data = parameter.data * 0.75
        assigned = step(model, *SHAPES[0])
    assert all(torch.equal(value, assigned[name]) for name, value in step(model, *SHAPES[0]).items())
    assert tiny.differs(edited["logits"], first["logits"]) and tiny.differs(assigned["logits"], edited["logits"])


@pytest.mark.slow
def test_with_recomputed_activations() -> None:
    """Beside gradient checkpointing of the same blocks; bit for bit what is not compiled."""
    model = attach()
    want = step(model, *SHAPES[1])
    with compiled_blocks(model, "aot_eager"), training.gradient_checkpointing(model):
        got = step(model, *SHAPES[1])
    assert all(torch.equal(got[name], value) for name, value in want.items())


@pytest.mark.slow
def test_by_inductor() -> None:
    """The default backend, which rounds otherwise."""
    model = attach()
    want = step(model, *SHAPES[2])
    with compiled_blocks(model):
        got = step(model, *SHAPES[2])
    for name, value in want.items():
        tiny.assert_close(got[name], value, 1e-3)


def test_what_has_no_blocks() -> None:
    refused = pytest.raises(ConfigError, match="torch_compile is for adapters, and Linear has none")
    with refused, compiled_blocks(torch.nn.Linear(3, 5)):
        pass
    unet = tiny_unets.attach(tiny_unets.make())
    refused = pytest.raises(ConfigError, match="DecoupledBlock of this adapter is attention over the memory alone")
    with refused, compiled_blocks(unet):
        pass
    with pytest.raises(ConfigError, match="torch_compile must be true or false"):
        training.TrainingConfig(max_steps=3, torch_compile="yes")  # type: ignore[arg-type]
