"""`Case`: a host and an adapter for each check, random batches and memories; assertions about answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from types import ModuleType
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmattn.adapters.settings import AdapterConfig
from mmattn.hosts.attach import attach
from mmattn.hosts.model import AdaptedModel
from mmattn.memory import Memory

#: A function of a `Case`, a `HostCase` or a function that makes a store.
Check = Callable[[Any], None]
MakeHost = Callable[[], nn.Module]
MakeMemory = Callable[[torch.Generator, int], object]
#: Keyword arguments of a host.
Batch = Mapping[str, Any]
# By dtype, how far apart two ways to the same answer may be, as a share of the largest number in it.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Case:
    """A kind of adapter on a kind of host, and what the two are asked with.

    Args:
        adapter: the settings, of a registered kind.
        make_host: makes the frozen model: the same weights each time, in evaluation mode, small and on the CPU.
        make_memory: from a generator and a number of rows what the adapter reads; its `example_memory` by default.
        rows: b, at least 2.
        options: further arguments of `attach`.
    """

    name = "default"

    def __init__(
        self,
        adapter: AdapterConfig,
        make_host: MakeHost,
        make_memory: MakeMemory | None = None,
        rows: int = 3,
        **options: Any,
    ) -> None:
        self.adapter, self.make_host, self.rows, self.options = adapter, make_host, rows, options
        self.make_memory: MakeMemory = adapter.example_memory if make_memory is None else make_memory

    def fresh(self) -> AdaptedModel:
        """Return a new host with a new adapter."""
        return attach(self.make_host(), self.adapter, self.name, **self.options)

    def trained(self) -> AdaptedModel:
        """Return a new host with an adapter whose weights are as if it had been trained."""
        model = self.fresh()
        stir(model.adapter(self.name))
        return model

    @cached_property
    def batch(self) -> Batch:
        """Keyword arguments of the host."""
        return self.another_batch(0)

    def another_batch(self, seed: int) -> Batch:
        """Return a random batch."""
        return self.fresh().example_batch(seeded(seed), self.adapter, self.rows)

    @cached_property
    def host(self) -> Tensor:
        """The answer of a host that never had an adapter."""
        return self.ask(self.make_host())

    def memory(self, seed: int = 0) -> object:
        """Return a memory for every row, a new object each time."""
        return self.make_memory(seeded(100 + seed), self.rows)

    def slots(self, seed: int = 0) -> Memory:
        """Return a memory of vectors, to be cut, masked and reordered; skip if this kind reads something else."""
        memory = self.memory(seed)
        if not isinstance(memory, Memory):
            raise SkipTest(f"its memory is a {type(memory).__name__} and has no slots")
        return memory

    @cached_property
    def beside_memory(self) -> Batch:
        """The part of the batch that belongs to the memory, and is given with it."""
        words = type(self.fresh()).memory_keywords
        return {name: value for name, value in self.batch.items() if name in words}

    def condition(self, model: AdaptedModel, memory: object, **more: Any) -> AbstractContextManager[object]:
        """Return a condition block of this memory, with what belongs to it."""
        return model.condition(memory, **({} if memory is None else self.beside_memory), **more)

    def ask(self, model: nn.Module, memory: object = None, batch: Batch | None = None, **more: object) -> Tensor:
        """Return the answer of a model without gradients."""
        with torch.no_grad():
            return self.call(model, memory, batch, **more)

    def call(self, model: nn.Module, memory: object = None, batch: Batch | None = None, **more: object) -> Tensor:
        """Return the answer of a model: the first thing it returns."""
        arguments = dict(self.batch if batch is None else batch)
        if memory is None:
            arguments = {name: value for name, value in arguments.items() if name not in self.beside_memory}
        return answer_of(model(**arguments, **more) if memory is None else model(**arguments, **more, memory=memory))

    @cached_property
    def rows_are_apart(self) -> bool:
        """True if a row of the host's answer stays bit for bit the same when another row changes.

        Hosts with experts change by rounding, and with them what an adapter can promise.
        """
        host = self.make_host()
        first = torch.arange(self.rows) == 0
        changed = [self.ask(host, batch=mixed(self.another_batch(seed), self.batch, first)) for seed in (1, 2, 3)]
        return all(torch.equal(answer[1:], self.host[1:]) for answer in changed)

    def same_rows(self, got: Tensor, want: Tensor, what: str) -> None:
        """Assert that untouched rows stay the same: bit for bit where the host's rows are apart."""
        (same if self.rows_are_apart else close)(got, want, what)


def seeded(seed: int) -> torch.Generator:
    """Return a generator of random numbers on the CPU."""
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def stir(module: nn.Module, seed: int = 7) -> None:
    """Give every weight of a trainable part a random value, as training would: gates open, zeros become numbers."""
    generator = seeded(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, torch.float32)
        if parameter.dim() >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            parameter.add_((0.5 + 0.2 * noise.tanh()) * noise.sign())


def answer_of(output: Any) -> Tensor:
    """Return the first thing that a host returns."""
    return output if isinstance(output, Tensor) else output[0]


def memory_rows(memory: Any, rows: slice) -> object:
    """Return some rows of a memory, or the whole where it has none."""
    return memory[rows] if hasattr(memory, "__getitem__") else memory


def rows_of(batch: Batch, index: slice | Tensor, rows: int) -> dict[str, Any]:
    """Return some rows of everything in a batch that has a row for each of b."""
    return dict(_changed(lambda value: value[index] if _has_rows(value, rows) else value, batch))


def mixed(changed: Batch, batch: Batch, where: Tensor) -> Batch:
    """Return a batch with some rows (b,) of another one."""

    def choose(one: object, other: object) -> object:
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or not _has_rows(other, len(where)):
            return other
        return torch.where(where.view(-1, *[1] * (other.dim() - 1)).to(other.device), one, other)

    return _changed(choose, changed, batch)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch whose floating point tensors have another dtype."""

    def to_dtype(value: object) -> object:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return _changed(to_dtype, batch)


def _changed(change: Callable[..., object], *batches: Batch) -> Batch:
    """Apply a function to the values of batches; a tuple or list is one value, such as the axes of positions."""
    return tree_map(change, *map(dict, batches), is_leaf=lambda value: not isinstance(value, Mapping))


def _has_rows(value: object, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Assert that two answers are equal bit for bit."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    assert torch.equal(got, want), f"{what}: not bit for bit, {distance(got, want):.1e} apart"


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Assert that two answers are finite and equal to rounding."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} is not {tuple(want.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what}: NaN or infinity"
    apart, limit = distance(got, want), TOLERANCE[want.dtype]
    assert apart <= limit, f"{what}: {apart:.1e} apart, and rounding is at most {limit:.0e}"


def differ(got: Tensor, want: Tensor, what: str) -> None:
    """Assert that two answers are finite and apart by more than rounding in every row."""
    assert bool(torch.isfinite(got).all()), f"{what}: NaN or infinity"
    least = 10 * TOLERANCE[want.dtype]
    stuck = [row for row, (one, other) in enumerate(zip(got, want, strict=True)) if distance(one, other) <= least]
    assert not stuck, f"{what}: rows {stuck} are the same"


def distance(got: Tensor, want: Tensor) -> float:
    """Return the largest difference, as a share of the largest number of `want`."""
    size = want.double().abs().max().clamp(min=1e-30)
    return float((got.double() - want.double()).abs().max() / size) if want.numel() else 0.0


def refuses(kind: type[BaseException] | tuple[type[BaseException], ...], ask: Callable[[], object], what: str) -> None:
    """Assert that a call raises an error of this kind, with a message."""
    names = kind.__name__ if isinstance(kind, type) else " or ".join(one.__name__ for one in kind)
    try:
        ask()
    except kind as error:
        assert str(error), f"{what}: {type(error).__name__} says nothing"
    except Exception as error:
        raise AssertionError(f"{what}: {names} was to be raised, got {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{what}: {names} was to be raised, and nothing was")


def traces(host: nn.Module) -> dict[str, object]:
    """Return the classes, attributes, hooks, modes, names of weights and requires_grad of a model."""
    state: dict[str, object] = {"state_dict": sorted(host.state_dict())}
    for name, module in host.named_modules():
        hooks = {key: len(value) for key, value in vars(module).items() if "hooks" in key and value}
        state[f"module {name}"] = type(module).__name__, module.training, sorted(vars(module)), hooks
    state["requires_grad"] = {name: parameter.requires_grad for name, parameter in host.named_parameters()}
    return state


def no_trace(host: nn.Module, before: Mapping[str, object], what: str) -> None:
    """Assert that a model is as it was when `traces` was called."""
    after = traces(host)
    left = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    assert not left, f"{what}: {left[0]} was {before.get(left[0])}, is {after.get(left[0])} ({len(left)} differ)"


def checks_of(*modules: ModuleType) -> list[Check]:
    """Return the functions of modules whose names begin with `check_`."""
    return [
        value
        for module in modules
        for name, value in vars(module).items()
        if name.startswith("check_") and value.__module__ == module.__name__
    ]


def promise(check: Check) -> str:
    """Return the promise of a check: the first line of its docstring."""
    return (check.__doc__ or "").strip().partition("\n")[0]


def run_checks(checks: Iterable[Check], case: Any) -> dict[str, str]:
    """Run every check on a case, or on what makes a store; return those that do not apply, with the reason.

    Raises an AssertionError that names each check that failed, its promise and what happened instead.
    """
    failed: list[tuple[Check, Exception]] = []
    skipped = {}
    for check in checks:
        try:
            check(case)
        except SkipTest as reason:
            skipped[check.__name__] = str(reason)
        except Exception as error:
            failed.append((check, error))
    if failed:
        lines = [f"{check.__name__}: {promise(check)}\n  {type(error).__name__}: {error}" for check, error in failed]
        raise AssertionError(f"promises that are not held: {len(failed)}\n" + "\n".join(lines)) from failed[0][1]
    return skipped
