"""Checks of an adapter's calls: whose memory a call sees, and that nothing computed of it is ever stale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.context import THREAD
from mmattn.memory import Memory
from mmattn.testing.case import Case, close, each_tensor, memory_rows, refuses, rows_of, same


def check_blocks_nest(case: Case) -> None:
    """A block's memory holds for calls of model and host inside it, an inner block's inside that; an error ends it."""
    model, one, other = case.trained(), case.memory(), case.memory(1)
    answers = case.ask(model, one), case.ask(model, other)
    with case.condition(model, one):
        same(case.ask(model.host), answers[0], "the host in a block")
        with case.condition(model, other):
            same(case.ask(model), answers[1], "an inner block")
            same(case.ask(model, one), answers[0], "a call's own memory in a block")
            with case.condition(model, None):
                same(case.ask(model), case.host, "no memory in a block")
            with model.disable_adapter():
                same(case.ask(model, one), case.host, "disabled in a block")
        same(case.ask(model), answers[0], "after the inner block")
    with contextlib.suppress(KeyError), case.condition(model, one):
        raise KeyError("in a block")
    same(case.ask(model), case.host, "after a block that was left by an error")


def check_exits_are_their_own(case: Case) -> None:
    """Blocks may end in any order, each exit removes its own entry only; a generator may not hold one open."""
    model, one, other = case.trained(), case.memory(), case.memory(1)
    answers = case.ask(model, one), case.ask(model, other)
    first, second = case.condition(model, one), case.condition(model, other)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    same(case.ask(model), answers[1], "the first block left first")
    second.__exit__(None, None, None)
    same(case.ask(model), case.host, "both blocks left")

    def stream() -> Generator[None, None, None]:
        with case.condition(model, one):
            yield

    refuses(ConditionError, lambda: next(stream()), "a condition block that a generator opens")
    same(case.ask(model), case.host, "after a generator was refused a block")


def check_threads(case: Case) -> None:
    """Threads that ask one model at once each see their own memory."""
    model, memories = case.trained(), [case.memory(seed) for seed in range(3)]
    answers = [case.ask(model, memory) for memory in memories]
    # All blocks are open when the first thread asks.
    together, outcomes = threading.Barrier(len(memories), timeout=60), dict[int, list[Tensor | Exception]]()

    def work(number: int) -> None:
        try:
            for _ in range(2):
                with case.condition(model, memories[number]):
                    together.wait()
                    outcomes.setdefault(number, []).append(case.ask(model))
                    outcomes[number].append(case.ask(model, memories[number - 1]))
                    together.wait()
        except Exception as error:
            outcomes[number] = [error]
            together.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(memories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(memories)):
        for turn, one in enumerate(outcomes[number]):
            if isinstance(one, Exception):
                raise one
            close(one, answers[number - turn % 2], f"thread {number}, {'a call' if turn % 2 else 'a block'} of its own")


def check_prepared_is_the_same(case: Case) -> None:
    """A prepared memory serves many calls, with the answers of the memory itself and of one that is not cached."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    try:
        prepared = model.prepare(memory)
    except ConditionError as error:
        raise SkipTest(f"its memory belongs to one call: {error}") from error
    for time in ("first", "second"):
        same(case.ask(model, prepared), answer, f"prepared, the {time} time")
    with torch.inference_mode():
        close(case.call(model, prepared).clone(), answer, "prepared, in inference mode")
    close(case.call(model, memory).detach(), answer, "where gradients are needed, so that nothing is cached")
    close(case.call(model, prepared).detach(), answer, "prepared, where gradients are needed")


def check_edits_of_memory(case: Case) -> None:
    """A memory that is edited in place is read anew, in its block and prepared."""
    model = case.trained()

    def edit(name: str, memory: Memory) -> None:
        value = getattr(memory, name)
        if name == "mask":
            value[:, -1] = ~value[:, -1]
        elif name == "tokens":
            value.neg_()
        else:
            value.mul_(-2)

    for name in ("tokens", "mask", "scores"):
        memory = case.slots()
        if getattr(memory, name) is None:
            continue
        prepared = model.prepare(memory)
        with case.condition(model, memory):
            case.ask(model)
            case.ask(model, prepared)
            edit(name, memory)
            answer = case.ask(model, each_tensor(memory, Tensor.clone))
            close(case.ask(model), answer, f"{name} edited in a block")
            close(case.ask(model, prepared), answer, f"{name} edited after prepare")


def check_edits_of_weights(case: Case) -> None:
    """After any weight of the adapter has changed, no key or value of before is used."""
    model = case.trained()
    memory = case.memory()
    with case.condition(model, memory):
        case.ask(model)
        for name, parameter in model.adapter(case.name).named_parameters():
            with torch.no_grad():
                parameter.mul_(1.3).add_(0.05)
            close(case.ask(model), case.ask(model, case.memory()), f"{name} changed in a block")


def check_errors_inside_change_nothing(case: Case) -> None:
    """A call that fails in the host, in the middle of its layers, leaves nothing behind."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)

    def fail(*_: object) -> None:
        raise KeyError("in a layer")

    hook = model.layer(model.adapter(case.name).layers[-1]).register_forward_hook(fail)
    refuses(KeyError, lambda: case.ask(model, memory), "a layer that fails")
    hook.remove()
    assert getattr(THREAD, "step", None) is None, "the forward that failed is still under way"
    same(case.ask(model), case.host, "without a memory afterwards")
    same(case.ask(model, memory), answer, "with a memory afterwards")


def check_words_are_not_dropped(case: Case) -> None:
    """Misspelt keywords, unknown names and what belongs to a memory that is not given are refused, not ignored."""
    model, memory = case.trained(), case.memory()
    refuses((TypeError, MmattnError), lambda: model(**case.batch, memori=memory), "memori=")
    refuses(TypeError, lambda: case.condition(model, memory, adapter_scal=0.5).__enter__(), "condition(adapter_scal=)")
    refuses(ConditionError, lambda: case.ask(model, adapter_scale=0.5), "adapter_scale= without memory=")
    refuses(MmattnError, lambda: case.ask(model, memory, adapter_scale=float("nan")), "a scale of NaN")
    refuses(AttachError, lambda: case.ask(model, {"nobody": memory}), "a memory for an adapter that is not there")
    refuses(AttachError, lambda: model.set_adapter("nobody"), "set_adapter of one that is not there")
    refuses(
        AttachError, lambda: model.disable_adapter("nobody").__enter__(), "disable_adapter of one that is not there"
    )
    same(case.ask(model, memory), case.ask(model, {case.name: memory}), "afterwards")


def check_generation(case: Case) -> None:
    """Generated tokens are those of forwards of the whole text, and beams of a batch are those of each row alone."""
    model, memory = case.trained(), case.memory()
    generate = getattr(type(model), "generate", None)
    if generate is None:
        raise SkipTest("this kind of host does not generate")
    if set(case.batch) - {"input_ids"} != set(case.beside_memory):
        raise SkipTest("it is called with more than ids")
    ids, beside = case.batch["input_ids"], case.beside_memory
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with torch.no_grad():
        greedy = generate(model, ids, memory=memory, **beside, **options)
        # What belongs to the memory may follow the length of the text.
        for end in range(ids.shape[1], ids.shape[1] + 1 if beside else greedy.shape[1]):
            expected = case.ask(model, memory, {"input_ids": greedy[:, :end], **beside})[:, -1].argmax(-1)
            assert torch.equal(greedy[:, end], expected), f"token {end} is not that of a forward of the whole text"
        beams = generate(model, ids, memory=memory, num_beams=3, **beside, **options)
        with case.condition(model, memory):
            host: Any = model.host
            assert torch.equal(host.generate(ids, **options), greedy), "generate of the host itself, in a block"
            assert torch.equal(host.generate(ids, num_beams=3, **options), beams), "beams of the host, in a block"
        for row in range(case.rows):
            rows = slice(row, row + 1)
            one = rows_of({**options, **beside, "ids": ids}, rows, case.rows)
            tokens = generate(model, one.pop("ids"), memory=memory_rows(memory, rows), num_beams=3, **one)
            assert torch.equal(tokens, beams[rows]), f"beams of row {row} alone: {tokens} is not {beams[rows]}"
