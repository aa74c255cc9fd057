"""What was computed before, as a table: caches, changes, and what a cache must answer after a change."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor

from mmattn.errors import MmattnError

Ask = Callable[[], Tensor]
#: Relative distance of two answers in float32.
CLOSE = 1e-5
#: What a change must change.
VISIBLE = 1e-4


@dataclass
class Subject:
    """A model, and what was put on it.

    Attributes:
        host: the bare model.
        peft: the peft model around it, if there is one.
        model: what answers: the adapted model, or an encoder.
        given: further inputs that were made with it.
    """

    host: Any
    peft: Any = None
    model: Any = None
    given: Any = None


@dataclass(frozen=True)
class Cache:
    """A place where something computed is kept.

    Attributes:
        name: of the case.
        make: makes the bare model, the same each time; options say what it differs in.
        adapt: puts the rest on it.
        open: with a folder, yields a question that is answered from what was computed before.
        follows: the parts that its contents are computed with: "adapter", "host".
        is_file: whoever has the folder can use it.
    """

    name: str
    make: Callable[..., Subject]
    adapt: Callable[[Subject], None]
    open: Callable[[Subject, Path], AbstractContextManager[Ask]]
    follows: frozenset[str]
    is_file: bool = False


@dataclass(frozen=True)
class Change:
    """A change of one thing.

    Attributes:
        name: of the case.
        apply: makes it, or returns a context manager that makes it for a while.
        is_of_host: it can be made before the model is adapted.
        is_equal: it is not meant to change an answer.
    """

    name: str
    apply: Callable[[Subject], AbstractContextManager[Any] | None]
    is_of_host: bool = True
    is_equal: bool = False

    def made(self, subject: Subject) -> AbstractContextManager[Any]:
        """Make the change; a block in which it holds."""
        return self.apply(subject) or nullcontext()


class NotAPair(AssertionError):
    """The change does not change the answer, or changes it though it should not: the pair would prove nothing."""


def outcome(cache: Cache, change: Change, folder: Path, **options: Any) -> str:
    """Return "equal" where a cache answers after a change as if all was computed anew, or the error that it raises.

    What is computed anew comes from a second model that was changed before it was adapted and read anything. A change
    for a while is made in both orders: the cache is filled before it, and within it.
    """
    with torch.no_grad():
        with ExitStack() as stack:
            subject = _adapted(cache, options)
            ask = stack.enter_context(cache.open(subject, _made(folder / "old")))
            before = ask()
            assert distance(ask(), before) == 0, "the same question has two answers"
            try:
                want = _anew(cache, change, _made(folder / "new"), options)
            except Exception as broken:
                raise NotAPair(f"{change.name}: {broken}") from broken
            off = distance(want, before) if want.shape == before.shape else math.inf
            if off > CLOSE if change.is_equal else off < VISIBLE:
                raise NotAPair(f"{change.name} changes the answer by {off:.2g}")
            try:
                block = change.apply(subject)
                with block or nullcontext():
                    found = _compared(ask, want)
            except MmattnError as refused:  # the change itself
                return type(refused).__name__
            if block is not None:
                _compared(ask, before)
        if block is not None:
            with ExitStack() as stack:
                subject = _adapted(cache, options)
                with change.made(subject):
                    ask = stack.enter_context(cache.open(subject, _made(folder / "within")))
                    ask()
                _compared(ask, before)
    return found


def outcome_of_files(cache: Cache, folder: Path, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the same for a second model, made with other options, that takes up the folder of the first."""
    with torch.no_grad():
        with cache.open(_adapted(cache, first), _made(folder / "old")) as ask:
            before = ask()
        other = _adapted(cache, second)
        with cache.open(other, _made(folder / "new")) as ask:
            want = ask()
        if (off := distance(want, before)) < VISIBLE:
            raise NotAPair(f"{second} changes the answer by {off:.2g}")
        with cache.open(other, folder / "old") as ask:
            return _compared(ask, want)


def all_of(cases: Mapping[str, Callable[[Path], object]], folder: Path, least: int) -> None:
    """Run many small cases and tell all faults together; those that are no pair do not count.

    Args:
        cases: each is given a folder of its own.
        folder: for these.
        least: how many must count.
    """
    faults, count = [], 0
    for name, run in cases.items():
        place = Path(mkdtemp(dir=folder))
        try:
            run(place)
            count += 1
        except NotAPair:
            pass
        except AssertionError as fault:
            faults.append(f"{name}: {str(fault).splitlines()[0]}")
        shutil.rmtree(place)
    assert not faults, "\n".join(faults)
    assert count >= least, f"{count} of {len(cases)} cases change an answer"


def distance(got: Tensor, want: Tensor) -> float:
    """Return max |got - want| relative to max |want|; both must be finite and of one shape."""
    assert got.shape == want.shape, f"{tuple(got.shape)} is not {tuple(want.shape)}"
    assert torch.isfinite(got).all() and torch.isfinite(want).all(), "not finite"
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def _adapted(cache: Cache, options: dict[str, Any]) -> Subject:
    subject = cache.make(**options)
    cache.adapt(subject)
    return subject


def _anew(cache: Cache, change: Change, folder: Path, options: dict[str, Any]) -> Tensor:
    with ExitStack() as stack:
        twin = cache.make(**options)
        if change.is_of_host:
            stack.enter_context(change.made(twin))
        cache.adapt(twin)
        if not change.is_of_host:
            stack.enter_context(change.made(twin))
        return stack.enter_context(cache.open(twin, folder))()


def _compared(ask: Ask, want: Tensor) -> str:
    try:
        got = ask()
    except MmattnError as refused:
        return type(refused).__name__
    off = distance(got, want)
    assert off <= CLOSE, f"silent: off by {off:.2g}"
    return "equal"


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder
