"""Blocks that give a memory: helpers, generators, tasks and threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError
from mmattn.hosts.context import _BLOCKS
from tests import tiny
from tests.tiny import own


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
    """Invariant 46."""
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


def test_an_interrupted_forward_leaves_nothing(asked):
    """Ctrl-C in the middle of a layer: a part of the host called afterwards is the host's own."""

    def interrupt(*_):
        raise KeyboardInterrupt

    body, ids = asked.model.host.model, asked.ids
    with torch.no_grad():
        want = body(ids).last_hidden_state
        for call in (
            lambda: asked.model(ids, memory=asked.A),
            lambda: asked.model.generate(ids, memory=asked.A, max_new_tokens=2),
        ):
            layer = tiny.decoder_layers(asked.model.host)[1]
            with pytest.raises(KeyboardInterrupt), layer.register_forward_pre_hook(interrupt):
                call()
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

    assert asyncio.run(main()) == [name * 5 for name in "ABAB"]
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


# Threads: a memory arrives in them, or one warning or an error says what to do; never another, never silently none


# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def recorded(work):
    """What a piece of work returns, and the warnings that it gave meanwhile, in whichever thread."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work()
    return result, [str(one.message) for one in caught]


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_block_left_in_another_thread(asked):
    """Invariant 46."""
    block = asked.model.condition(asked.A)
    block.__enter__()
    assert asked() == "A"
    in_a_thread(lambda: block.__exit__(None, None, None))
    assert asked() == "none"
    in_a_thread(asked.model.condition(asked.B).__enter__)
    assert asked.quietly() == "none"


def test_a_thread_without_the_context_is_warned_once(asked):
    """Invariant 47."""
    with asked.model.condition(asked.A):
        seen, said = recorded(lambda: [in_a_thread(asked) for _ in range(3)])
        assert asked() == "A"
    assert seen == ["none"] * 3
    assert len(said) == 1 and "memory=" in said[0] and "copy_context" in said[0]


def test_a_thread_with_the_context_sees_the_memory(asked):
    with asked.model.condition(asked.A), ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(contextvars.copy_context().run, asked) for _ in range(4)]
        with asked.model.condition(asked.B):
            jobs += [pool.submit(contextvars.copy_context().run, asked) for _ in range(4)]
            assert "".join(job.result() for job in jobs) == "AAAABBBB"
    assert asked() == "none"


IN_THREADS = {
    "generate_batch": lambda host, ids: host.generate_batch(ids.tolist(), **tiny.paged(4)),
    "init_continuous_batching": lambda host, ids: host.init_continuous_batching(**tiny.paged(4)),
    "continuous_batching_context_manager": lambda host, ids: host.continuous_batching_context_manager(
        **tiny.paged(4)
    ).__enter__(),
}


@pytest.mark.parametrize("name", IN_THREADS)
def test_continuous_batching_is_refused_a_memory(ids, model, name):
    """Invariant 48: many requests share a row there, and the thread would not even see the block."""
    for asked in (model, model.host):
        with model.condition(tiny.memory(3)), pytest.raises(ConditionError, match="another thread.*generate_batch"):
            IN_THREADS[name](asked, ids)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, own(ids))


@pytest.mark.parametrize("beams", [1, 2])
def test_a_text_goes_on_with_what_it_began_with_whatever_another_thread_begins(beams: int) -> None:
    """Invariant 121: a thread writes its text while another begins one in its block, by a host edited since."""
    torch.manual_seed(0)
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.InsertedAdapter(memory_dim=tiny.MEMORY_DIM))
    tiny.open_gates(model, 2.0)
    edited = [layer.mlp.down_proj.weight for layer in model.host.model.layers[:2]]
    ids, memory = torch.tensor([[5, 6, 7], [8, 9, 4]]), tiny.memory(2)
    answer = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "num_beams": beams}

    def written(meanwhile) -> torch.Tensor:
        forwards = itertools.count()

        def third(host, args, kwargs) -> None:
            here, text = threading.current_thread() is threading.main_thread(), kwargs.get("input_ids")
            if here and text is not None and text.shape[1] == 1 and next(forwards) == 1:
                with torch.no_grad():
                    for one in edited:
                        one.mul_(-1.5)
                meanwhile()

        own = [one.detach().clone() for one in edited]
        hook = model.host.register_forward_pre_hook(third, with_kwargs=True)
        try:
            with hook, model.condition(memory):
                return model.host.generate(ids, **answer)
        finally:
            with torch.no_grad():
                for one, before in zip(edited, own, strict=True):
                    one.copy_(before)

    def begin() -> None:
        inside = contextvars.copy_context()
        work = functools.partial(model.host.generate, ids[:, :2], **(answer | {"num_beams": 3, "max_new_tokens": 2}))
        in_a_thread(lambda: inside.run(work))

    alone = written(lambda: None)
    assert torch.equal(written(begin), alone)
