"""Checks of an adapter's calls: whose memory a call sees, and that nothing computed of it is ever stale."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor

from mmattn.errors import AttachError, ConditionError, MmattnError
from mmattn.hosts.context import THREAD
from mmattn.testing.case import Case, close, memory_rows, refuses, rows_of, same


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
    together = threading.Barrier(len(memories), timeout=60)

    def work(number: int) -> tuple[int, Tensor, Tensor]:
        try:
            with case.condition(model, memories[number]):
                together.wait()
                asked = number, case.ask(model), case.ask(model, memories[number - 1])
                together.wait()
                return asked
        except Exception:
            together.abort()
            raise

    with ThreadPoolExecutor(len(memories)) as pool:
        for number, block, call in pool.map(work, 2 * list(range(len(memories)))):
            close(block, answers[number], f"thread {number}, a block of its own")
            close(call, answers[number - 1], f"thread {number}, a call of its own")


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
    edits = {"tokens": Tensor.neg_, "mask": lambda mask: mask[:, -1].logical_not_(), "scores": lambda one: one.mul_(-2)}
    for name, edit in edits.items():
        memory = case.slots()
        if getattr(memory, name) is None:
            continue
        prepared = model.prepare(memory)
        with case.condition(model, memory):
            case.ask(model)
            case.ask(model, prepared)
            edit(getattr(memory, name))
            answer = case.ask(model, copy.deepcopy(memory))
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
    refuses(AttachError, lambda: model.disable_adapter("nobody").__enter__(), "disable_adapter of nobody")
    same(case.ask(model, memory), case.ask(model, {case.name: memory}), "afterwards")


#: Ways to generate that write what greedy decoding with a cache writes.
WAYS: tuple[dict[str, Any], ...] = (
    {"use_cache": False},
    {"cache_implementation": "static"},
    {"prefill_chunk_size": 3},
    {"prompt_lookup_num_tokens": 2},
)
GREEDY: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def check_generation(case: Case) -> None:
    """Generated tokens are those of forwards of the whole text, in every way to generate that the host has."""
    model, ids = _writer(case)
    memory, beside, options = case.memory(), case.beside_memory, GREEDY | {"attention_mask": torch.ones_like(ids)}
    greedy = model.generate(ids, memory=memory, **beside, **options)
    # What belongs to the memory may follow the length of the text.
    for end in range(ids.shape[1], ids.shape[1] + 1 if beside else greedy.shape[1]):
        expected = case.ask(model, memory, {"input_ids": greedy[:, :end], **beside})[:, -1].argmax(-1)
        assert torch.equal(greedy[:, end], expected), f"token {end} is not that of a forward of the whole text"
    with case.condition(model, memory):
        assert torch.equal(model.host.generate(ids, **options), greedy), "generate of the host itself, in a block"
    host: Any = case.make_host()
    for way in WAYS:
        rows = slice(0, 1 if "prompt_lookup_num_tokens" in way else case.rows)  # drafts are of one row
        arguments = rows_of({**options, **way, "inputs": ids}, rows, case.rows)
        try:
            host.generate(**arguments)
        except ValueError:
            continue  # the host itself cannot
        tokens = model.generate(memory=memory_rows(memory, rows), **arguments, **rows_of(beside, rows, case.rows))
        assert torch.equal(tokens, greedy[rows]), f"{way} writes something else"


def check_padded_prompts(case: Case) -> None:
    """Prompts of several lengths, padded on the left, are continued as each is alone, by one beam or three."""
    model, ids = _writer(case)
    # What belongs to the memory would be padded, too.
    memory, cut = case.memory(), 0 if case.beside_memory else 2
    real = torch.arange(ids.shape[1]) >= cut * torch.arange(case.rows)[:, None]
    padded = ids.masked_fill(~real, getattr(model.host.config, "pad_token_id", None) or 0)
    for beams in (1, 3):
        options = GREEDY | {"num_beams": beams, "attention_mask": real.long()}
        tokens = model.generate(padded, memory=memory, **case.beside_memory, **options)
        with case.condition(model, memory):
            assert torch.equal(model.host.generate(padded, **options), tokens), f"{beams} beams of the host, in a block"
        for row in range(case.rows):
            alone = _continued(case, model, ids[row, cut * row :], memory, row, num_beams=beams)
            assert tokens[row, ids.shape[1] :].tolist() == alone, f"row {row} by {beams} beams"


def check_requests(case: Case) -> None:
    """Requests of continuous batching are answered as each is alone, and as by the host without a memory."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, ids = _writer(case)
    memory, settings = case.memory(), GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    blocks = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=64)
    prompts = [ids[row, 2 * row :] for row in range(case.rows)] + [ids[0]]
    memories = [memory_rows(memory, slice(row, row + 1)) for row in range(case.rows)] + [None]
    options = {"generation_config": settings, "continuous_batching_config": blocks}
    try:
        requests = model.generate_batch([one.tolist() for one in prompts], memory=memories, **options)
    except ConditionError as error:  # it must know the text of a request
        raise SkipTest(str(error)) from error
    if not all(request.generated_tokens for request in requests.values()):
        host: Any = case.make_host()
        if not all(request.generated_tokens for request in host.generate_batch([[1]], **options).values()):
            raise SkipTest("the host itself cannot")
    for row, (prompt, request) in enumerate(zip(prompts, requests.values(), strict=True)):
        alone = _continued(case, model, prompt, None if memories[row] is None else memory, row)
        assert request.generated_tokens == alone, f"request {row}: {request.generated_tokens}, alone {alone}"


def _continued(case: Case, model: Any, prompt: Tensor, memory: object, row: int, **options: Any) -> list[int]:
    """Return what a model writes after a prompt alone, with one row of a memory."""
    rows = slice(row, row + 1)
    arguments = {"attention_mask": torch.ones_like(prompt[None]), **GREEDY, **options}
    if memory is not None:
        arguments |= {"memory": memory_rows(memory, rows), **rows_of(case.beside_memory, rows, case.rows)}
    return model.generate(prompt[None], **arguments)[0, len(prompt) :].tolist()


def _writer(case: Case) -> tuple[Any, Tensor]:
    """Return a model whose adapter is trained, and prompts; skip hosts that write no text after ids alone."""
    model = case.trained()
    if not hasattr(type(model), "generate"):
        raise SkipTest("this kind of host does not generate")
    if set(case.batch) - {"input_ids"} != set(case.beside_memory):
        raise SkipTest("it is called with more than ids")
    return model, case.batch["input_ids"]
