"""Checks of an adapter in training: what gets gradients, what moves, what follows the host."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from mmattn.inspect.trial import padded
from mmattn.memory import Memory
from mmattn.testing.case import Case, cast, close, differ, distance, same
from mmattn.testing.running import Check


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
    own = {id(parameter) for parameter in adapter.parameters()}
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == own, "what requires gradients is not exactly the adapter"
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
        found = {name: value.grad for name, value in model.adapter(case.name).named_parameters()}
        return tokens.grad, {name: value.clone() for name, value in found.items() if value is not None}

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
        mask = memory.real_slots() & ~masked[:, None]
        answer = case.call(model, Memory(memory.tokens, mask, memory.segments, memory.scores))
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
    assert losses[-1] < losses[0], (
        f"the loss went from {losses[0]:.6f} to {losses[-1]:.6f}: a fresh adapter cannot learn"
    )
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
        found = {parameter.dtype for parameter in adapter.parameters()}
        wanted = {dtype} if dtype == torch.float64 else {dtype, torch.float32, torch.float64}
        assert dtype in found and found <= wanted, f"to({dtype}) of a {type(mover).__name__} leaves the adapter {found}"
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
    found = {parameter.dtype for parameter in adapter.parameters()}
    assert torch.float16 in found, f"half() leaves the adapter {found}"


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


CHECKS: list[Check] = [
    check_gradients_reach_the_adapter,
    check_gradients_reach_the_memory,
    check_rows_that_see_nothing_in_training,
    check_training_moves_only_the_adapter,
    check_it_follows_the_host,
    check_copies_are_apart,
]
