"""What was computed before is used only where it would be computed now: every cache, every change, one at a time."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmattn.errors import MmattnError
from tests import tiny
from tests.hosts.computed_caches import CACHES, IDS, Ask, Cache, Subject, attach, make_host
from tests.hosts.computed_changes import CHANGES, Change, config_changes, module_changes


class NoChange(AssertionError):
    """A change that changes nothing, or changes an answer that it must not change."""


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and torch.isfinite(got).all() and torch.isfinite(want).all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def is_pair(cache: Cache, change: Change) -> bool:
    """Whether a cache and a change can meet."""
    if change.of == "lora" and cache.host == "unet":
        return False
    return change.of != "adapter" or ("adapter" in cache.follows and not ("parametrized" in change.name and "prefix" in cache.name))


PAIRS = [(cache, change) for cache in CACHES for change in CHANGES if is_pair(cache, change)]


def outcome(cache: Cache, change: Change, folder: Path, family: str = "llama") -> str:
    """Return "equal" for an answer as anew after a change, or the name of the error that was raised."""
    with ExitStack() as stack, torch.no_grad():
        lora = change.of == "lora"
        subject = attach(make_host(cache.host, family, lora), cache)
        ask = stack.enter_context(cache.open(subject, _made(folder / "old")))
        before = ask()
        assert error(ask(), before) == 0
        with _changed_from_the_start(cache, change, folder, make_host(cache.host, family, lora)) as anew:
            want = _ask(anew)
        if isinstance(want, Tensor):
            off = error(want, before)
            if (off > 1e-5) if change.is_equal else (off < 1e-3):
                raise NoChange(f"{change.name} changes the answer by {off:.2g}")
        with change.apply(subject) or nullcontext():
            got = _ask(ask)
        if isinstance(got, MmattnError):
            return type(got).__name__
        assert isinstance(want, Tensor), f"silent: anew it is refused, {want}"
        off = error(got, want)
        assert off <= 1e-5, f"silent: off by {off:.2g}"
    return "equal"


def _made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def _ask(ask: Ask) -> Tensor | MmattnError:
    try:
        return ask()
    except MmattnError as refused:
        return refused


def _changed_from_the_start(cache: Cache, change: Change, folder: Path, twin: Subject) -> ExitStack:
    """Open a cache of a host that has been changed before anything was computed, and before it was attached to."""
    stack = ExitStack()
    is_first = change.of in ("host", "lora")
    if is_first:
        stack.enter_context(change.apply(twin) or nullcontext())
    attach(twin, cache)
    if not is_first:
        stack.enter_context(change.apply(twin) or nullcontext())

    def ask() -> Tensor:
        return stack.enter_context(cache.open(twin, _made(folder / "new")))()

    class Stack(ExitStack):
        def __enter__(self) -> Ask:
            self.enter_context(stack)
            return ask

    return Stack()


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "change"), [pytest.param(*pair, id=f"{pair[0].name}-{pair[1].name}") for pair in PAIRS])
def test_the_answer_is_that_of_today_or_an_error(cache: Cache, change: Change, tmp_path: Path) -> None:
    outcome(cache, change, tmp_path)


def of_another_host(cache: Cache, family: str, changes: dict[str, Any], folder: Path) -> str:
    """Return what becomes of files when a host of equal weights and another config takes them up."""
    with torch.no_grad():
        with cache.open(attach(make_host("lm", family), cache), _made(folder / "old")) as ask:
            before = ask()
        other = make_host("lm", family, **changes)
        other.host.load_state_dict(make_host("lm", family).host.state_dict())
        attach(other, cache)
        with cache.open(other, _made(folder / "new")) as ask:
            want = ask()
        off = error(want, before)
        if off < 1e-3:
            raise NoChange(f"{changes} changes the answer by {off:.2g}")
        with cache.open(other, folder / "old") as ask:
            got = _ask(ask)
        if isinstance(got, MmattnError):
            return type(got).__name__
        off = error(got, want)
        assert off <= 1e-5, f"silent: off by {off:.2g}"
    return "equal"
