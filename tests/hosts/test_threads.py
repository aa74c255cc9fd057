"""Threads: a memory arrives in them, or one warning or an error says what to do; never another, never silently none."""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
)

import mmattn
from mmattn.errors import ConditionError
from tests import tiny
from tests.tiny import own

# peft 0.21 asks transformers 5.23 by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

NEW = 4


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
    block = asked.model.condition(asked.A)
    block.__enter__()
    assert asked() == "A"
    in_a_thread(lambda: block.__exit__(None, None, None))
    assert asked() == "none"
    in_a_thread(asked.model.condition(asked.B).__enter__)
    assert asked.quietly() == "none"


def test_a_thread_without_the_context_is_warned_once(asked):
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


def paged() -> dict:
    """Greedy settings with a cache of a size for tests, not for servers."""
    return {
        "generation_config": GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        "continuous_batching_config": ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=32),
    }


IN_THREADS = {
    "generate_batch": lambda host, ids: host.generate_batch(ids.tolist(), **paged()),
    "init_continuous_batching": lambda host, ids: host.init_continuous_batching(**paged()),
    "continuous_batching_context_manager": lambda host, ids: host.continuous_batching_context_manager(
        **paged()
    ).__enter__(),
}


def attached(where: str):
    """An adapter on a tiny LLaMA, and the object that is asked to generate."""
    lm = tiny.make("llama")
    if where == "on a LoRA":
        guest = peft.get_peft_model(lm, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
        return tiny.attach(guest), guest
    model = tiny.attach(lm)
    if where == "under a LoRA":
        return model, peft.get_peft_model(lm, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model, model if where == "the adapted model" else lm


@pytest.mark.parametrize("name", IN_THREADS)
@pytest.mark.parametrize("where", ["the host", "the adapted model", "on a LoRA", "under a LoRA"])
def test_continuous_batching_is_refused_a_memory(ids, name, where):
    """Many requests share a row there, and the thread would not even see the block."""
    model, asked = attached(where)
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
            with model.condition(memory):
                return model.host.generate(ids, **answer)
        finally:
            hook.remove()
            with torch.no_grad():
                for one, before in zip(edited, own, strict=True):
                    one.copy_(before)

    def begin() -> None:
        texts = []
        inside = contextvars.copy_context()
        work = functools.partial(model.host.generate, ids[:, :2], **(answer | {"num_beams": 3, "max_new_tokens": 2}))
        thread = threading.Thread(target=lambda: texts.append(inside.run(work)))
        thread.start()
        thread.join(60)
        assert len(texts) == 1

    alone = written(lambda: None)
    assert torch.equal(written(begin), alone)
