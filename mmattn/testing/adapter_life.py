"""Checks of an adapter's life on a host: in training, beside others, in files, and unloaded."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from unittest import SkipTest

import torch
from torch import Tensor

from mmattn.adapters.files import CONFIG
from mmattn.errors import AttachError
from mmattn.hosts.attach import attach
from mmattn.hosts.loading import load
from mmattn.inspect.doctor.checks import emptied, padded
from mmattn.memory import Memory
from mmattn.testing.case import Case, cast, close, differ, distance, no_trace, refuses, same, stir, traces


def check_gradients_reach_the_adapter(case: Case) -> None:
    """Gradients reach every weight of the adapter and none of the host, also after an evaluation has filled caches."""
    model, memory = case.trained(), case.memory()
    adapter = model.adapter(case.name)
    with case.condition(model, memory):
        case.ask(model)
        case.call(model).float().square().mean().backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.requires_grad, f"{name} of the adapter is frozen"
        assert parameter.grad is not None, f"{name} of the adapter has no gradient"
        assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} is not finite"
        assert bool(parameter.grad.any()), f"the gradient of {name} is 0: nothing depends on it"
    parameters = {id(parameter) for parameter in adapter.parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == parameters, "what requires gradients is not exactly the adapter"
    touched = [name for name, parameter in model.host.named_parameters() if parameter.grad is not None]
    assert not touched, f"weights of the host have gradients: {touched[:3]}"


def check_gradients_reach_the_memory(case: Case) -> None:
    """Gradients reach the slots of a memory that may be seen, and are 0 where one is masked, whatever lies in it."""
    model, memory = case.trained(), padded(case.slots(), 0.0)

    def gradients(memory: Memory) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = memory.tokens.detach().clone().requires_grad_()
        model.zero_grad()
        case.call(model, memory.replace(tokens)).float().square().mean().backward()
        assert tokens.grad is not None, "the memory gets no gradient"
        grads = {name: value.grad for name, value in model.adapter(case.name).named_parameters()}
        return tokens.grad, {name: value.clone() for name, value in grads.items() if value is not None}

    plain, weights = gradients(memory)
    real = memory.real_slots()
    assert bool(torch.isfinite(plain).all()), "the gradient of the memory is not finite"
    assert not bool(plain[~real].any()), "masked slots get gradients"
    assert bool(plain.flatten(1).any(1).all()), "a row of the memory gets no gradient"
    for filling in (1e4, torch.nan):
        filled, filled_weights = gradients(padded(case.slots(), filling))
        same(filled, plain, f"the gradient of a memory with {filling} in masked slots")
        for name, gradient in weights.items():
            same(filled_weights[name], gradient, f"the gradient of {name} with {filling} in masked slots")


def check_rows_that_see_nothing_in_training(case: Case) -> None:
    """Rows without a slot to see give finite gradients, and a batch of such rows gives the adapter none."""
    model, memory = case.trained(), case.slots()
    for what, masked in (("one row", torch.arange(case.rows) == 0), ("all rows", torch.ones(case.rows).bool())):
        model.zero_grad()
        answer = case.call(model, emptied(memory, masked))
        if not answer.requires_grad:
            continue
        answer.float().square().mean().backward()
        for name, parameter in model.adapter(case.name).named_parameters():
            if parameter.grad is not None:
                assert bool(torch.isfinite(parameter.grad).all()), f"the gradient of {name} with {what} empty"
                empty = what == "all rows"
                assert not (empty and bool(parameter.grad.any())), f"{name} learns from rows that see nothing"


def check_training_moves_only_the_adapter(case: Case) -> None:
    """A fresh adapter learns, and steps of training move no weight of the host."""
    model, memory = case.fresh(), case.memory()
    target = case.ask(case.trained(), memory)
    before = {name: value.clone() for name, value in model.host.state_dict().items()}
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(6):
        loss = (case.call(model, memory) - target).float().square().mean()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < losses[0], f"a fresh adapter cannot learn: its losses are {losses}"
    model.eval()
    assert distance(case.ask(model, memory), case.host) > 0, "after training a memory changes nothing"
    for name, value in model.host.state_dict().items():
        same(value, before[name], f"{name} of the host after training")
    same(case.ask(model), case.host, "without a memory after training")


def check_it_follows_the_host(case: Case) -> None:
    """The adapter follows `to`, `half` and the modes, called on host or model, and answers in the host's dtype."""
    model, memory = case.trained(), case.memory()
    adapter, answer = model.adapter(case.name), case.ask(model, memory)
    for half in (model, model.host):
        half.train()
        assert adapter.training and all(part.training for part in adapter.modules()), "train() does not reach it"
        half.eval()
        assert not any(part.training for part in adapter.modules()), "eval() does not reach it"
    for dtype, mover in ((torch.float64, model.host), (torch.bfloat16, model)):
        mover.to(dtype)
        dtypes = {parameter.dtype for parameter in adapter.parameters()}
        allowed = {dtype} if dtype == torch.float64 else {dtype, torch.float32, torch.float64}
        assert dtype in dtypes and dtypes <= allowed, f"to({dtype}) of {type(mover).__name__}: the adapter is {dtypes}"
        batch = cast(case.batch, dtype)
        try:
            case.ask(case.make_host().to(dtype), batch=batch)
        except RuntimeError:
            continue  # the host itself cannot
        moved = case.ask(model, memory, batch)
        assert moved.dtype == dtype, f"a host of {dtype} answers in {moved.dtype}"
        assert bool(torch.isfinite(moved).all()), f"in {dtype}: NaN or infinity"
        if dtype == torch.float64:
            close(moved.to(answer.dtype), answer, "in float64")
    model.half()
    assert torch.float16 in {parameter.dtype for parameter in adapter.parameters()}, "half() does not reach it"
    model.host.to("meta")
    assert all(parameter.is_meta for parameter in adapter.parameters()), "to(device) of the host does not reach it"


def check_copies_are_apart(case: Case) -> None:
    """A deep copy answers as the model does, and from then on each goes its own way."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    twin = copy.deepcopy(model)
    same(case.ask(twin, memory), answer, "the copy")
    with case.condition(model, memory):
        same(case.ask(twin), case.host, "the copy, while a block of the other is open")
    with torch.no_grad():
        for parameter in twin.adapter(case.name).parameters():
            parameter.mul_(1.7)
    same(case.ask(model, memory), answer, "the first after the copy's weights changed")
    differ(case.ask(twin, memory), answer, "the copy after its weights changed")
    same(case.ask(twin.unload()), case.host, "the copy unloaded")
    same(case.ask(model, memory), answer, "the first after the copy was unloaded")


def check_unload_leaves_no_trace(case: Case) -> None:
    """`unload` gives back the very same host with nothing on it: attributes, hooks, modes, requires_grad, weights."""
    untouched, host = case.make_host(), case.make_host()
    for one in (untouched, host):
        for parameter in list(one.parameters())[::2]:
            parameter.requires_grad_(False)
    case.ask(untouched)
    before = traces(untouched)
    model = attach(host, case.adapter, case.name, **case.options)
    stir(model.adapter(case.name))
    assert sorted(host.state_dict()) == before["state_dict"], "the state_dict of the host has other keys"
    case.ask(model, case.memory())
    case.call(model, case.memory()).float().mean().backward()
    assert model.unload() is host, "unload() gives another object than attach() was given"
    no_trace(host, before, "after unload()")
    same(case.ask(host), case.host, "the host after unload()")
    again = attach(host, case.adapter, case.name, **case.options)
    if again.adapter(case.name).traits.starts_as_identity:
        same(case.ask(again, case.memory()), case.host, "attached again")


def check_adapters_stack(case: Case) -> None:
    """Several adapters act together, each on its own memory, and are switched by set_adapter and disable_adapter."""
    model, memory = case.trained(), case.memory()
    if not model.adapter(case.name).traits.starts_as_identity:
        raise SkipTest("a fresh adapter changes the output, also of an adapter beside it")
    alone = case.ask(model, memory)
    model.add_adapter("second", case.adapter)
    same(case.ask(model, {case.name: memory, "second": case.memory(1)}), alone, "beside a fresh one")
    stir(model.adapter("second"), seed=11)
    both = case.ask(model, {case.name: memory, "second": case.memory(1)})
    differ(both, alone, "two adapters and one")
    same(case.ask(model, {case.name: memory}), alone, "the other without a memory")
    with model.disable_adapter("second"):
        same(case.ask(model, {case.name: memory, "second": case.memory(1)}), alone, "the other disabled")
    model.set_adapter("second")
    second = case.ask(model, case.memory(1))
    differ(second, alone, "the second alone")
    model.set_adapter([case.name, "second"])
    same(case.ask(model, {case.name: memory, "second": case.memory(1)}), both, "both again")
    model.delete_adapter(case.name)
    same(case.ask(model, case.memory(1)), second, "the first deleted")
    refuses(AttachError, lambda: model.delete_adapter("second"), "the only one deleted")
    same(case.ask(model.unload()), case.host, "unloaded")


def check_saved_is_loaded(case: Case) -> None:
    """`mmattn.load` puts a saved adapter onto a new host: the same settings, weights and answers."""
    model, memory = case.trained(), case.memory()
    answer = case.ask(model, memory)
    with tempfile.TemporaryDirectory() as folder:
        model.save_adapter(folder, case.name)
        with open(os.path.join(folder, CONFIG), encoding="utf-8") as file:
            written = json.load(file)
        assert written["kind"] == case.adapter.kind, f"the file is of kind {written['kind']!r}"
        assert written["layers"] == list(model.adapter(case.name).layers), f"the file says layers {written['layers']}"
        package = type(case.adapter).__module__.partition(".")[0]
        assert written["package"] == package, f"the file says it is from {written['package']!r}"
        loaded = load(case.make_host(), folder, case.name, **case.options)
    settings = loaded.adapter(case.name).config
    assert settings == model.adapter(case.name).config, f"settings: {settings}"
    before, after = (one.adapter(case.name).state_dict() for one in (model, loaded))
    assert list(before) == list(after), "the weights have other names"
    for name, value in after.items():
        same(value, before[name], name)
    same(case.ask(loaded, memory), answer, "the loaded adapter")
    same(case.ask(loaded), case.host, "the loaded adapter without a memory")
