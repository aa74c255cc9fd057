"""Blocks left in another order than entered, by generators, helpers and tasks: each sees its own, and nothing stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import warnings

import pytest
import torch

from tests import tiny
from tests.hosts.told import Told


@pytest.fixture
def told(model, ids):
    return Told(model, ids)


class Session:
    """A block opened and closed by methods, as classes of applications do it."""

    def __init__(self, model, memory):
        self.model, self.memory = model, memory

    def open(self):
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.model.condition(self.memory))
        return self

    def close(self, *_):
        self.stack.close()

    __enter__, __exit__ = open, close

    async def __aenter__(self):
        return self.open()

    async def __aexit__(self, *_):
        self.close()


@contextlib.contextmanager
def in_a_helper(model, memory):
    with contextlib.ExitStack() as stack:
        stack.enter_context(model.condition(memory))
        yield


@contextlib.contextmanager
def in_a_helper_of_a_helper(model, memory):
    with in_a_helper(model, memory):
        yield


@contextlib.contextmanager
def opened_by_a_function(model, memory):
    session = Session(model, memory)
    session.open()
    yield
    session.close()


WAYS = {
    "condition": lambda model, memory: model.condition(memory),
    "helper": in_a_helper,
    "helper of a helper": in_a_helper_of_a_helper,
    "function in a helper": opened_by_a_function,
    "class": Session,
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize("order", list(itertools.permutations("AB")))
@ways
def test_generators_close_in_any_order(told, way, order):
    """Each sees its own memory, whoever was resumed last, and the host is itself when both are closed."""

    def stream(memory):
        with WAYS[way](told.model, memory):
            while True:
                yield told()

    streams = {name: stream(getattr(told, name)) for name in "AB"}
    for name in "ABABBA":
        assert next(streams[name]) == name
    for i, name in enumerate(order):
        streams[name].close()
        for other in order[i + 1 :]:
            assert next(streams[other]) == other
    assert told() == "none"


@ways
def test_a_helper_is_left_with_its_caller(told, way):
    with WAYS[way](told.model, told.A):
        assert told() == "A"
        with WAYS[way](told.model, told.B):
            assert told() == "B"
            with told.model.condition(None):
                assert told() == "none"
        assert told() == "A"
        first, second = WAYS[way](told.model, told.B), WAYS[way](told.model, told.A)
        first.__enter__()
        assert told() == "B"
        second.__enter__()
        assert told() == "A"
        first.__exit__(None, None, None)
        assert told() == "A"
        second.__exit__(None, None, None)
        assert told() == "A"
    assert told() == "none"


@ways
def test_the_innermost_block_is_that_of_the_code_that_runs(told, way):
    """Also where it was entered earlier than one around the code that resumes it."""
    inner = told.stream("B")
    next(inner)
    with WAYS[way](told.model, told.A):
        assert next(inner) == "B"
        assert told() == "A"
        inner.close()
        assert told() == "A"

    def outer():
        with told.model.condition(told.A):
            with WAYS[way](told.model, told.B):
                yield told()
            for seen in told.stream("B"):
                yield seen
                yield told()

    assert list(itertools.islice(outer(), 4)) == ["B", "B", "A", "B"]
    assert told() == "none"


def test_disabled_and_conditioned_in_turns(told):
    def without():
        with told.model.disable_adapter():
            while True:
                yield told()

    seeing, blind = told.stream("A"), without()
    assert [next(one) for one in (seeing, blind, seeing, blind)] == ["A", "none", "A", "none"]
    with told.model.condition(told.B):
        assert [next(blind), told(), next(seeing), told()] == ["none", "B", "A", "B"]
        seeing.close()
        assert [next(blind), told()] == ["none", "B"]
    with told.model.disable_adapter():
        assert told() == "none"
        # Disabling holds from outside of the blocks that are entered within it, too.
        assert next(told.stream("A")) == "none"
    blind.close()
    assert told() == "none"


def test_some_of_several_adapters_are_disabled(ids):
    """A block that disables one adapter leaves the other its memory, in either order of leaving."""
    model = tiny.attach(tiny.make("llama"))
    tiny.attach(model, name="other")
    memory = tiny.memory(3)
    with torch.no_grad():
        only = {name: model(ids, memory={name: memory}).logits for name in ("default", "other")}
        gives, takes = model.condition(memory), model.disable_adapter("other")
        gives.__enter__()
        takes.__enter__()
        assert torch.equal(model.host(ids).logits, only["default"])
        gives.__exit__(None, None, None)
        assert torch.equal(model.host(ids).logits, model(ids).logits)
        with model.condition(memory):
            assert torch.equal(model.host(ids).logits, only["default"])
        takes.__exit__(None, None, None)
        with model.condition(memory), model.disable_adapter("default"):
            assert torch.equal(model.host(ids).logits, only["other"])


def test_a_suspended_generator_gives_its_memory_to_no_one_and_says_so(told):
    """What a yield fixture is, too: the caller is told once how to hand the memory on, and never given another's."""
    first, second = told.stream("A"), told.stream("B")
    next(first), next(second)
    with pytest.warns(UserWarning, match="memory=.*copy_context") as caught:
        assert told() == "none"
        assert told() == "none"
    assert len(caught) == 1
    first.close(), second.close()
    assert told() == "none"


def test_an_interrupted_forward_leaves_nothing(told):
    """Ctrl-C in the middle of a layer: a part of the host called afterwards is the host's own."""

    def interrupt(*_):
        raise KeyboardInterrupt

    body, ids = told.model.host.model, told.ids
    with torch.no_grad():
        want = body(ids).last_hidden_state
        handle = tiny.decoder_layers(told.model.host)[1].register_forward_pre_hook(interrupt)
        for call in (
            lambda: told.model(ids, memory=told.A),
            lambda: told.model.generate(ids, memory=told.A, max_new_tokens=2),
            lambda: next(told.stream("A")),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
        handle.remove()
        assert torch.equal(body(ids).last_hidden_state, want)
        assert told() == "none"


# Asynchronous


def serve(main, *args):
    """Run a coroutine function; returns what it returns and what the event loop had to complain about."""
    complaints = []

    async def observed():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await main(*args)

    return asyncio.run(observed()), complaints


def test_a_stream_left_by_break(told):
    async def stream():
        with told.model.condition(told.A):
            while True:
                yield told()

    async def main():
        seen = []
        async for one in stream():
            seen.append(one)
            break
        gc.collect()
        await asyncio.sleep(0.01)
        return [*seen, told()]

    assert serve(main) == (["A", "none"], [])
    assert told() == "none"


@pytest.mark.parametrize("way", [*WAYS, "async class", "async helper"])
def test_asynchronous_streams_of_one_task(told, way):
    @contextlib.asynccontextmanager
    async def helper(memory):
        with told.model.condition(memory):
            await asyncio.sleep(0)
            yield

    @contextlib.asynccontextmanager
    async def entered(memory):
        with WAYS[way](told.model, memory):
            yield

    def open_block(memory):
        if way == "async class":
            return Session(told.model, memory)
        return helper(memory) if way == "async helper" else entered(memory)

    async def stream(memory):
        async with open_block(memory):
            while True:
                await asyncio.sleep(0)
                yield told()

    async def main():
        a, b = stream(told.A), stream(told.B)
        seen = [await anext(one) for one in (a, b, a, b, b, a)]
        await a.aclose()
        seen.append(await anext(b))
        await b.aclose()
        return "".join(seen), told()

    assert serve(main) == (("ABABBAB", "none"), [])


def test_tasks_have_a_memory_each(told):
    async def work(name):
        seen = []
        with told.model.condition(getattr(told, name)):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(told())
            # A task started inside the block is inside the block.
            seen += await asyncio.gather(asyncio.create_task(ask()), ask())
        return "".join(seen)

    async def ask():
        await asyncio.sleep(0)
        return told()

    async def main():
        return await asyncio.gather(*[work(name) for name in "ABAB"])

    assert serve(main) == ([name * 5 for name in "ABAB"], [])
    assert told() == "none"


def test_tasks_of_a_loop_that_a_generator_runs(told):
    """The generator is on the stack of every task, and its block around all of theirs."""

    async def work(name):
        with told.model.condition(getattr(told, name)):
            await asyncio.sleep(0)
            return told()

    async def main():
        return [told(), *await asyncio.gather(*[work(name) for name in "ABAB"]), told()]

    def stream():
        with told.model.condition(told.B):
            while True:
                yield "".join(asyncio.run(main()))

    for _, seen in zip(range(2), stream(), strict=False):
        assert seen == "BABABB"
    assert told() == "none"


def test_a_task_whose_stream_waits_is_given_its_memory_or_told(told):
    """A task started by a stream that is suspended meanwhile: never another's memory, never silently none."""

    async def stream(memory):
        with told.model.condition(memory):
            while True:
                yield await asyncio.create_task(ask())

    async def ask():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return told(), len(caught)

    async def main():
        a, b = stream(told.A), stream(told.B)
        seen = [await anext(one) for one in (a, b, a)]
        await a.aclose(), await b.aclose()
        return seen

    seen, complaints = serve(main)
    assert not complaints
    names, warned = zip(*seen, strict=True)
    for name, own in zip(names, "ABA", strict=True):
        assert name == own or sum(warned) == 1, (names, warned)
        assert name in (own, "none")
