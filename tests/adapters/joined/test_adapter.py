"""A joined adapter is rectangular attention over a memory and the text, on every host whose attention is reached."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmattn
from mmattn.adapters import JoinedAdapter, PassageAdapter
from mmattn.errors import AttachError, ConfigError
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance, rectangular

LENGTHS = [5, 0, 2]


def adapted(family: str, opened: bool = True, name: str = "default", **settings: Any) -> Any:
    """A tiny host with a joined adapter on its first and third layer."""
    options = settings.pop("host", {})
    settings = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2)} | settings
    model = mmattn.attach(tiny.make(family, **options), JoinedAdapter(**settings), name)
    return tiny.open_gates(model) if opened else model


@pytest.mark.parametrize(
    "settings",
    [{}, {"gate": "head", "length_norm": 7.0}],
    ids=["plain", "by head, normed"],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "gpt2", "gpt_neox", "qwen3", "cohere", "smollm3"])
def test_against_the_slow_definition(family: str, settings: dict[str, Any]) -> None:
    """The answers are those of one softmax over slots and text, token by token; by either attention of the host."""
    ids, memory = tiny.text(3, 11), tiny.memory(3, lengths=LENGTHS)
    host = tiny.make(family, attn_implementation="eager")
    for implementation in ("eager",) if family == "gemma2" else ("sdpa", "eager"):
        model = adapted(family, **settings)
        if "gate" in settings:
            with torch.no_grad():
                for layer in (0, 2):
                    model.adapter("default").block(layer).gate.gate.copy_(torch.tensor([0.2, -0.7, 1.5, 0.0]))
        model.host.set_attn_implementation(implementation)
        weights: dict[int, torch.Tensor] = {}
        with rectangular(host, model.adapter("default"), memory, weights):
            expected = answer(host, ids)
        result = answer(model, ids, memory=memory)
        assert distance(result, expected) <= CLOSE
        if family not in ("gemma2",):  # scores with a soft cap are not recorded
            with mmattn.inspect.record(model) as recorded:
                assert torch.equal(answer(model, ids, memory=memory), result)
            assert {layer for _, layer in recorded} == {0, 2}
            assert all(distance(one[0], weights[layer]) <= CLOSE for (_, layer), one in recorded.items())
        assert distance(result, answer(host, ids)) > 100 * CLOSE


def test_windows_do_not_hide_slots() -> None:
    """Far after its beginning a text still sees a memory, in layers that see back over a few tokens only."""
    model, ids = adapted("mistral", host={"sliding_window": 3}), tiny.text(1, 20)
    one, other = (answer(model, ids, memory=tiny.memory(1, seed=seed))[:, -1] for seed in (0, 1))
    assert distance(one, other) > 100 * CLOSE


def test_fresh_in_training_with_dropout() -> None:
    """A fresh adapter takes none of the random numbers of a host that drops weights in training."""
    answers = []
    for attached in (False, True):
        host = tiny.make("llama", attention_dropout=0.5)
        model = mmattn.attach(host, JoinedAdapter(tiny.MEMORY_DIM, layers=(0, 2))) if attached else host
        model.train()
        torch.manual_seed(4)
        answers.append(answer(model, tiny.text(2), **({"memory": tiny.memory(2)} if attached else {})))
    assert torch.isfinite(answers[0]).all() and torch.equal(*answers)


def test_beside_others() -> None:
    """A fresh adapter beside passages or a trained one changes nothing; two trained ones add what each does."""
    model = mmattn.attach(tiny.make("llama"), PassageAdapter(), "read")
    passages = mmattn.hosts.PassageCache(model)
    passages.add([[5, 6, 7], [9, 11]], progress=False)
    read, ids, memory = passages.select([[0, 1], []]), tiny.text(2), tiny.memory(2)
    alone = answer(model, ids, memory={"read": read})
    model.add_adapter("joined", JoinedAdapter(tiny.MEMORY_DIM, every=1))
    inputs = {"read": read, "joined": memory}
    assert torch.equal(answer(model, ids, memory=inputs), alone)
    tiny.open_gates(model)
    both = answer(model, ids, memory=inputs)
    assert distance(both, alone) > 100 * CLOSE
    with model.disable_adapter("read"):
        assert distance(answer(model, ids, memory=inputs)[1:], both[1:]) <= CLOSE  # a row without passages
    model.add_adapter("fresh", JoinedAdapter(tiny.MEMORY_DIM, layers=(0,)))
    for order in (["fresh", "read", "joined"], ["joined", "fresh", "read"]):
        model.set_adapter(order)
        assert distance(answer(model, ids, memory=inputs | {"fresh": tiny.memory(2, seed=5)}), both) <= 1e-6
    tiny.open_gates(model)
    result = []
    inputs = {"joined": memory, "fresh": tiny.memory(2, seed=5)}
    for order in (["fresh", "joined"], ["joined", "fresh"]):
        result.append(answer(model, ids, memory={name: inputs[name] for name in order}))
    assert distance(*result) <= CLOSE


def test_what_is_refused() -> None:
    """Settings and layers that cannot be."""
    model = adapted("llama")
    with pytest.raises(ConfigError, match="every or layers"):
        JoinedAdapter(tiny.MEMORY_DIM, every=2, layers=(1,))
    with pytest.raises(AttachError, match="layers 0 to 2"):
        mmattn.attach(model, JoinedAdapter(tiny.MEMORY_DIM, layers=(3,)), "deep")


def test_packed_rows() -> None:
    """Documents of packed rows answer as each does alone with its own row of memory."""
    model, memory = adapted("llama"), tiny.memory(4, lengths=[5, 2, 0, 4])
    ids, lengths = tiny.text(2, 9), ((4, 5), (3, 6))
    positions = torch.stack([torch.cat([torch.arange(one) for one in row]) for row in lengths])
    result = answer(model, ids, position_ids=positions, memory=memory)
    number = 0
    for row, document_lengths in enumerate(lengths):
        start = 0
        for length in document_lengths:
            alone = answer(model, ids[[row], start : start + length], memory=memory[[number]])
            assert distance(result[[row], start : start + length], alone) <= CLOSE
            start, number = start + length, number + 1


def test_slots_that_arrive() -> None:
    """A token sees the slots that had arrived at it."""
    model, ids, memory = adapted("llama", length_norm=2.0), tiny.text(1, 6), tiny.memory(1)
    arrived = torch.tensor([[0, 0, 2, 2, 5, 5]])
    result = answer(model, ids, memory=memory, arrived=arrived)
    assert torch.equal(result[:, :2], answer(model, ids)[:, :2])
    assert distance(result[:, :4], answer(model, ids[:, :4], memory=memory, arrived=arrived[:, :4])) <= CLOSE
    whole = answer(model, ids, memory=memory)
    assert distance(result, whole) > 100 * CLOSE
