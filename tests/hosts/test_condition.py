"""Blocks left in another order than entered, by helpers, classes and tasks: each has its own memory."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from mmattn.hosts.context import _BLOCKS
from tests import tiny


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


WAYS = {
    "condition": lambda model, memory: model.condition(memory),
    "helper": in_a_helper,
    "class": Session,
}
ways = pytest.mark.parametrize("way", WAYS)


@ways
def test_a_helper_is_left_with_its_caller(asked, way):
    with WAYS[way](asked.model, asked.A):
        assert asked() == "A"
        with WAYS[way](asked.model, asked.B):
            assert asked() == "B"
            with asked.model.condition(None):
                assert asked() == "none"
        assert asked() == "A"
        first, second = WAYS[way](asked.model, asked.B), WAYS[way](asked.model, asked.A)
        first.__enter__()
        assert asked() == "B"
        second.__enter__()
        assert asked() == "A"
        first.__exit__(None, None, None)
        assert asked() == "A"
        second.__exit__(None, None, None)
        assert asked() == "A"
    assert asked() == "none"


@pytest.mark.parametrize("way", ["condition", "helper", "disable_adapter"])
@pytest.mark.parametrize("kind", ["generator", "asynchronous generator"])
def test_a_generator_is_refused_a_block(asked, way, kind):
    """Invariant 46: while the generator waits, its block would hold for its caller; nothing is left of the attempt."""
    opened = {**WAYS, "disable_adapter": lambda model, memory: model.disable_adapter()}[way]

    def stream():
        with opened(asked.model, asked.A):
            yield asked()

    async def asynchronous():
        with opened(asked.model, asked.A):
            yield asked()

    with pytest.raises(ConditionError, match="memory= to each call inside the generator"):
        next(stream()) if kind == "generator" else asyncio.run(anext(asynchronous()))
    assert asked() == "none"


@pytest.mark.parametrize("way", ["condition", "disable_adapter"])
def test_a_block_that_a_method_leaves_open_in_a_generator_holds_for_no_one_else(asked, way):
    """Invariant 46: the generator's own calls have it; while the generator waits, a call that finds it is refused."""

    class Session:
        def __enter__(self):
            self.block = asked.model.condition(asked.A) if way == "condition" else asked.model.disable_adapter()
            self.block.__enter__()

        def __exit__(self, *error):
            self.block.__exit__(*error)

    def stream():
        with Session():
            while True:
                yield asked()

    inside = "A" if way == "condition" else "none"
    with asked.model.condition(asked.B):
        generator = stream()
        for _ in range(2):
            assert next(generator) == inside
            with pytest.raises(ConditionError, match="is open in the generator stream, which waits"):
                asked()
        generator.close()
        assert asked() == "B"
    assert asked() == "none"


def test_calls_inside_generators_have_their_own_memories(asked):
    """Invariant 46: with `memory=` in the call, generators may take turns in any order, and in any thread."""

    def stream(name):
        while True:
            with torch.no_grad():
                logits = asked.model(asked.ids, memory=getattr(asked, name)).logits
            yield torch.equal(logits, asked.answers[name])

    one, other = stream("A"), stream("B")
    with ThreadPoolExecutor(2) as pool, asked.model.condition(asked.B):
        assert all(next(each) for each in (one, other, one))
        assert all(pool.submit(next, each).result() for each in (other, one))
        assert asked() == "B"


def test_an_interrupted_forward_leaves_nothing(asked):
    """Ctrl-C in the middle of a layer: a part of the host called afterwards is the host's own."""

    def interrupt(*_):
        raise KeyboardInterrupt

    body, ids = asked.model.host.model, asked.ids
    with torch.no_grad():
        want = body(ids).last_hidden_state
        handle = tiny.decoder_layers(asked.model.host)[1].register_forward_pre_hook(interrupt)
        for call in (
            lambda: asked.model(ids, memory=asked.A),
            lambda: asked.model.generate(ids, memory=asked.A, max_new_tokens=2),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
        handle.remove()
        assert torch.equal(body(ids).last_hidden_state, want)
        assert asked() == "none"


@pytest.mark.parametrize("change", ["set_adapter", "delete_adapter"])
def test_the_adapters_of_an_open_block_stay(asked, change):
    """Invariant 146: a block gives its memory to the adapters that were active where it began."""
    model = asked.model
    model.add_adapter("second", mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=[1]))
    with model.condition(asked.A):
        with pytest.raises(ConditionError, match=f"{change} inside a condition block"):
            getattr(model, change)("second")
        assert asked() == "A", "a fresh adapter adds nothing"
    assert model.active == ["default", "second"]
    getattr(model, change)("second")


# Asynchronous


def serve(main, *args):
    """Run a coroutine function; returns what it returns and what the event loop had to complain about."""
    complaints = []

    async def observed():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        return await main(*args)

    return asyncio.run(observed()), complaints


def test_tasks_have_a_memory_each(asked):
    async def work(name):
        seen = []
        with asked.model.condition(getattr(asked, name)):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(asked())
            # A task started inside the block is inside the block.
            seen += await asyncio.gather(asyncio.create_task(ask()), ask())
        return "".join(seen)

    async def ask():
        await asyncio.sleep(0)
        return asked()

    async def main():
        return await asyncio.gather(*[work(name) for name in "ABAB"])

    assert serve(main) == ([name * 5 for name in "ABAB"], [])
    assert asked() == "none"


def test_blocks_that_are_left_elsewhere_are_forgotten(asked):
    """Invariant 190. In a server that opens each block in one context and leaves it in another, none are kept."""
    before = len(_BLOCKS.get())
    for _ in range(23):
        session = Session(asked.model, asked.A).open()
        contextvars.copy_context().run(session.close)
    with asked.model.condition(asked.B):
        assert len(_BLOCKS.get()) == before + 1
    assert len(_BLOCKS.get()) == before
