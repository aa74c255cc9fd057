"""Continuous batching: whatever transformers schedules together, each request answers as it does alone."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import CompileConfig

import mmattn
from mmattn.errors import ConditionError, ShapeError
from mmattn.hosts.causal_lm import continuous_batching as requests
from tests import tiny

NEW = 7
settings = functools.partial(tiny.paged, NEW)


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, tiny.VOCAB - 2, (length,), generator=generator).tolist() for length in lengths]


def one_by_one(model: Any, inputs: list[list[int]], memories: Sequence[Any]) -> list[list[int]]:
    answers = []
    for ids, memory in zip(inputs, memories, strict=True):
        out = model.generate(torch.tensor([ids]), memory=memory, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        answers.append(out[0, len(ids) :].tolist())
    return answers


def all_freed(manager: Any) -> bool:
    """Wait for the next turn of the manager's loop, which lets go of memories that no request has."""
    end = time.monotonic() + 30
    while len(manager.memories) and time.monotonic() < end:
        time.sleep(0.02)
    return len(manager.memories) == 0 and manager.memories.nbytes() == 0


def tokens(outputs: dict[str, Any]) -> list[list[int]]:
    return [one.generated_tokens for one in outputs.values()]


@pytest.fixture(params=["row by row", "put together"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How requests that write attend: as on the CPU, and as on an accelerator."""
    if request.param == "put together":
        monkeypatch.setattr(requests, "ROW_BY_ROW", set())


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize(
    "family", ["llama", "gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "qwen3"))]
)
def test_each_request_answers_as_it_does_alone(family: str) -> None:
    """Invariant 51: memories of several lengths, one shared, none, and two prompts that are alike but for their
    memory.
    """
    model, inputs = tiny.attach(tiny.make(family)), prompts((4, 9, 2, 6, 4, 11))
    inputs[4] = list(inputs[0])
    memories = [tiny.memory(1, m=3 + row, seed=row) for row in range(6)]
    memories[2], memories[3] = None, memories[1]
    wanted = one_by_one(model, inputs, memories)
    assert wanted[0] != wanted[4] and wanted[1] != one_by_one(model, inputs, [None] * 6)[1]
    assert tokens(model.generate_batch(inputs, memory=memories, **settings())) == wanted


def test_nothing_is_computed_on_padding() -> None:
    """A long prompt beside requests that write: the adapters see each token once, and keys and values as they lie."""
    model, inputs = tiny.attach(tiny.make("llama"), layers=(0,)), prompts((3, 3, 3, 40))
    memories = [tiny.memory(1, m=3 + row, seed=row) for row in range(4)]
    wanted, seen = one_by_one(model, inputs, memories), []
    block = model.adapter("default").block(0)
    block.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2].numel()))
    given = settings(max_batch_tokens=16)
    assert tokens(model.generate_batch(inputs, memory=memories, **given)) == wanted
    # A token for each of the prompts and of the answers but the last, which nobody reads.
    assert sum(seen) == sum(map(len, inputs)) + 4 * (NEW - 1)


@pytest.mark.usefixtures("layout")
def test_a_memory_that_is_visible_from_a_place_on() -> None:
    """Invariant 220: as in `generate` with `arrived=`, also where a prompt is read in parts."""
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 41, 9, 3, 5))
    memories, places = [tiny.memory(1, m=3 + row, seed=row) for row in range(5)], [3, 40, 5, 0, 4]
    memories[4] = memories[0]
    wanted = []
    for ids, memory, place in zip(inputs, memories, places, strict=True):
        arrived = memory.length * (torch.arange(len(ids))[None] >= place)
        given = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        out = model.generate(torch.tensor([ids]), memory=memory, arrived=arrived, **given)
        wanted.append(out[0, len(ids) :].tolist())
    assert sum(a != b for a, b in zip(wanted, one_by_one(model, inputs, memories), strict=True)) > 1
    with model.host.continuous_batching_context_manager(**settings(max_batch_tokens=16)) as manager:
        for name, (ids, memory, place) in enumerate(zip(inputs, memories, places, strict=True)):
            manager.add_request(ids, str(name), memory=memory, visible_from=place)
        assert gathered(manager, 5) == {str(name): answer for name, answer in enumerate(wanted)}


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize(
    "setting", [{"null_slot": True}, {"score_bias": True}, {"resampler": {"num_latents": 3}}], ids=str
)
def test_other_adapters(setting: dict[str, Any]) -> None:
    model, inputs = tiny.attach(tiny.make("llama"), **setting), prompts((4, 7, 3))
    memories: list[Any] = [
        mmattn.Memory(tiny.memory(1, m=m, seed=m).tokens, scores=torch.linspace(-1, 1, m)[None]) for m in (3, 5, 4)
    ]
    memories[1] = None
    wanted = one_by_one(model, inputs, memories)
    assert tokens(model.generate_batch(inputs, memory=memories, **settings())) == wanted


def test_rows_of_one_memory_and_several_answers() -> None:
    model, inputs, memory = tiny.attach(tiny.make("llama")), prompts((4, 7)), tiny.memory(2, lengths=[5, 2])
    wanted = one_by_one(model, inputs, [memory[:1], memory[1:]])
    given = settings()
    given["generation_config"].num_return_sequences = 2
    assert tokens(model.generate_batch(inputs, memory=memory, **given)) == [wanted[0], wanted[0], wanted[1], wanted[1]]


def test_streams_cancelled_requests_and_what_is_left() -> None:
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 9, 6))
    shared, own = tiny.memory(1, seed=3), tiny.memory(1, seed=4)
    wanted = one_by_one(model, inputs, [shared, own, shared])
    freed = weakref.ref(own.tokens)
    with model.host.continuous_batching_context_manager(**settings()) as manager:
        names = [
            manager.add_request(ids, memory=memory, streaming=True, max_new_tokens=count)
            for ids, memory, count in zip(inputs, (shared, own, shared), (NEW, 10_000, NEW), strict=True)
        ]
        with pytest.raises(ShapeError, match="memory_dim=13"):
            manager.add_request(inputs[0], memory=torch.randn(1, 3, 5))
        with pytest.raises(ShapeError, match="a request has one row of memory, got 2"):
            manager.add_request(inputs[0], memory=tiny.memory(2))
        pieces: dict[str, list[list[int]]] = {name: [] for name in names}
        ended: set[str] = set()
        while ended < {names[0], names[2]}:
            result = manager.get_result(timeout=60)
            assert result is not None and result.error is None
            pieces[result.request_id].append(list(result.generated_tokens))
            if result.request_id == names[1] and len(result.generated_tokens) == 2:
                manager.cancel_request(names[1])
            if result.is_finished():
                ended.add(result.request_id)
        assert len(pieces[names[0]]) > 2, "piece by piece"
        assert [pieces[name][-1] for name in (names[0], names[2])] == [wanted[0], wanted[2]]
        assert pieces[names[1]][1] == wanted[1][:2]
        del own
        assert all_freed(manager) and freed() is None, "the memory of a cancelled request is let go"
        again = manager.add_request(inputs[0], memory=shared)
        result = manager.get_result(timeout=60)
        while result.request_id != again:  # what was written before it was cancelled
            result = manager.get_result(timeout=60)
        assert result.generated_tokens == wanted[0]


def test_prompts_that_begin_alike_share_their_cache_only_without_a_memory() -> None:
    """Requests one after the other, so that each could read what those before have left."""
    model, (begin, *ends) = tiny.attach(tiny.make("llama")), prompts((37, 3, 2, 5, 4))
    inputs = [[*begin, *end] for end in (*ends, *ends)]
    shared = tiny.memory(1, seed=3)
    memories = [None, shared, None, shared, tiny.memory(1, seed=4), None, shared, None]
    wanted = one_by_one(model, inputs, memories)
    manager = model.host.init_continuous_batching(**settings())
    manager.memories.share_prompts()
    manager.start()
    read: list[int] = []
    model.host.get_input_embeddings().register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    try:
        for number, (ids, memory) in enumerate(zip(inputs, memories, strict=True)):
            read.clear()
            manager.add_request(ids, memory=memory)
            assert manager.get_result(timeout=60).generated_tokens == wanted[number]
            # Two pages of 16 lie in the cache since the first request; the last token of an answer is not read.
            cached = 32 if memory is None and number else 0
            assert sum(read) == len(ids) - cached + NEW - 1
    finally:
        manager.stop(block=True)


@pytest.mark.usefixtures("quiet")
def test_what_fails_leaves_no_memory() -> None:
    """Invariant 51."""
    model, (ids, other), memory = tiny.attach(tiny.make("llama")), prompts((4, 3)), tiny.memory(1)
    with model.host.continuous_batching_context_manager(**settings()) as manager:
        manager.add_request(ids, "first", memory=memory, max_new_tokens=500)
        with pytest.raises(ConditionError, match="'first' has not ended"):
            manager.add_request(other, "first", memory=tiny.memory(1, seed=5))
        with pytest.raises(TypeError):
            manager.add_request(None, "second", memory=memory)
        assert len(manager.memories) == 1
        manager.add_request(other, "third", memory=memory, no_such_argument=1)
        failed = manager.get_result("third", timeout=60)
        assert "no_such_argument" in failed.error
        manager.cancel_request("first")
        assert all_freed(manager)


def test_what_continuous_batching_cannot_give() -> None:
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 9))
    with model.condition(tiny.memory(2)), pytest.raises(ConditionError, match=r"model.generate_batch\(inputs, memory="):
        model.host.generate_batch(inputs, **settings())
    with pytest.raises(ShapeError, match="2 requests need 2 memories, got 3"):
        model.generate_batch(inputs, memory=[None] * 3, **settings())
    with pytest.raises(ConditionError, match="would leave the adapters out"):
        model.generate_batch(inputs, **settings(varlen_compile_config=CompileConfig()))
    model.unload()
    latest = mmattn.GatedAdapter(memory_dim=13, every=2, visible_segments="latest", media_token=5, num_heads=2)
    model = mmattn.attach(tiny.make("llama"), latest)
    memory = mmattn.Memory(torch.randn(1, 2, 13), segments=torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ConditionError, match="continuous batching does not tell it: use generate"):
        model.generate_batch(inputs[:1], memory=[memory], **settings())
    joined = mmattn.attach(tiny.make("llama"), mmattn.adapters.JoinedAdapter(memory_dim=13))
    with joined.host.continuous_batching_context_manager(**settings()) as manager:
        with pytest.raises(ConditionError, match="cannot hide the memory of a request from its first tokens"):
            manager.add_request(inputs[0], memory=tiny.memory(1), visible_from=3)
        with pytest.raises(ConditionError, match="visible_from= is for a memory, and this request has none"):
            manager.add_request(inputs[0], visible_from=3)
    needs = mmattn.attach(tiny.make("gpt2"), mmattn.GatedAdapter(memory_dim=13, every=2), require_memory=True)
    with pytest.raises(ConditionError, match="memory"):
        needs.generate_batch(inputs, **settings())


def gathered(manager: Any, count: int) -> dict[Any, list[int]]:
    """What so many answers are, by the name of the request."""
    found: dict[Any, list[int]] = {}
    while len(found) < count:
        result = manager.get_result(timeout=60)
        assert result is not None and result.error is None
        if result.is_finished():
            found[result.request_id] = result.generated_tokens
    return found


@pytest.mark.parametrize("names", [("a", "a__child#7", "", 7), ("a__child#0", "a", "b__child#0__child#1", "__child#0")])
def test_the_name_of_a_request_says_nothing_of_its_memory(names: tuple[Any, ...]) -> None:
    """Invariant 117."""
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 9, 2, 6))
    memories = [tiny.memory(1, m=3 + row, seed=row) for row in range(4)]
    wanted, plain = one_by_one(model, inputs, memories), one_by_one(model, inputs[:1], [None])
    with model.host.continuous_batching_context_manager(**settings()) as manager:
        for ids, name, memory in zip(inputs, names, memories, strict=True):
            manager.add_request(ids, name, memory=memory)
        assert gathered(manager, 4) == dict(zip(names, wanted, strict=True))
        assert all_freed(manager)
        # A name whose request has ended is free, also for one without a memory.
        manager.add_request(inputs[0], names[0])
        assert gathered(manager, 1) == {names[0]: plain[0]}


@pytest.mark.slow
def test_names_that_are_taken() -> None:
    """Invariant 117."""
    model, inputs = tiny.attach(tiny.make("llama")), prompts((4, 3))
    given, memory = settings(), tiny.memory(1)
    with model.host.continuous_batching_context_manager(**given) as manager:
        manager.add_request(inputs[0], "req_0", max_new_tokens=500)
        for name in ("req_0", None):  # the name that transformers would choose
            with pytest.raises(ConditionError, match="'req_0' has not ended"):
                manager.add_request(inputs[1], name, memory=memory)
        manager.cancel_request("req_0")
    given["generation_config"].num_return_sequences = 2
    for first, second in (("a", "a__child#0"), ("a__child#0", "a")):
        with model.host.continuous_batching_context_manager(**given) as manager:
            manager.add_request(inputs[0], first, memory=memory, max_new_tokens=500)
            with pytest.raises(ConditionError, match="has not ended"):
                manager.add_request(inputs[1], second, memory=memory)
            manager.cancel_request(first)


def test_a_further_answer_goes_on_where_the_first_is_cancelled() -> None:
    """Invariant 117: the memory of a forked answer is not let go with that of the prompt that it comes from."""
    model, (ids,), memory = tiny.attach(tiny.make("llama")), prompts((4,)), tiny.memory(1)
    given, wanted = settings(), one_by_one(model, prompts((4,)), [tiny.memory(1)])[0]
    given["generation_config"].num_return_sequences = 2
    with model.host.continuous_batching_context_manager(**given) as manager:
        name = manager.add_request(ids, memory=memory, streaming=True)
        while (result := manager.get_result(timeout=60)).request_id == name:
            pass
        other = result.request_id
        manager.cancel_request(name)
        while not (result.request_id == other and result.is_finished()):
            result = manager.get_result(timeout=60)
        assert result.generated_tokens == wanted


@pytest.mark.parametrize("kind", ["gated", "joined", "inserted"])
def test_a_memory_that_was_edited_is_read_again_by_the_next_request(kind: str) -> None:
    """Invariant 119: also while the first request that was given it runs, beside which a host reads nothing."""
    adapter = {
        "gated": mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, every=1),
        "joined": mmattn.adapters.JoinedAdapter(memory_dim=tiny.MEMORY_DIM, every=1),
        "inserted": mmattn.adapters.InsertedAdapter(memory_dim=tiny.MEMORY_DIM),
    }[kind]
    torch.manual_seed(0)
    model = tiny.open_gates(mmattn.attach(tiny.make("llama"), adapter), 2.0)
    (long, ids), memory = prompts((4, 3)), tiny.memory(1, seed=3)
    before = one_by_one(model, [ids], [memory])
    with model.host.continuous_batching_context_manager(**settings()) as manager:
        manager.add_request(long, "first", memory=memory, max_new_tokens=300)
        with torch.no_grad():
            memory.tokens.copy_(tiny.memory(1, seed=9).tokens)
        manager.add_request(ids, "second", memory=memory)
        given = {"default": memory}
        manager.add_request(ids, "third", memory=given)
        found = gathered(manager, 2)
        given["default"] = tiny.memory(1, seed=11)
        manager.add_request(ids, "fourth", memory=given)
        found |= gathered(manager, 1)
        manager.cancel_request("first")
    after, other = one_by_one(model, [ids], [memory]), one_by_one(model, [ids], [given])
    assert before != after != other
    assert found == {"second": after[0], "third": after[0], "fourth": other[0]}
