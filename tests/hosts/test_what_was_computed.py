"""What was computed before is used only where it would be computed now: every cache, every change, one at a time."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmattn.errors import MmattnError
from tests.hosts.computed_caches import CACHES, Cache, attach, make_host
from tests.hosts.computed_changes import CHANGES, Change


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and torch.isfinite(got).all() and torch.isfinite(want).all()
    return float((got.double() - want.double()).abs().max() / want.double().abs().max())


def pairs() -> list:
    return [
        pytest.param(cache, change, id=f"{cache.name}-{change.name}")
        for cache in CACHES
        for change in CHANGES
        if is_pair(cache, change)
    ]


def is_pair(cache: Cache, change: Change) -> bool:
    if cache.host == "unet" and change.of == "lora":
        return False
    if change.of == "adapter":
        return "adapter" in cache.follows
    if change.of in ("host", "lora"):
        return True
    return True


def outcome(cache: Cache, change: Change, folder: Path) -> str:
    """Answer after a change as anew ("equal"), or refuse ("refused: …"); raise AssertionError otherwise."""
    lora = change.of == "lora"
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        subject = attach(make_host(cache.host, lora=lora), cache)
        ask = stack.enter_context(cache.open(subject, folder / "old"))
        before = ask()
        assert error(ask(), before) == 0
        twin = make_host(cache.host, lora=lora)
        if change.of in ("host", "lora"):
            done = change.apply(twin)
            twin = attach(twin, cache)
        else:
            twin = attach(twin, cache)
            done = change.apply(twin)
        if change.of == "call":
            done, again = nullcontext(), done
        with done or nullcontext():
            with (change.apply(twin) if change.of == "call" else None) or nullcontext():
              with cache.open(twin, folder / "new") as anew:
                want = anew()
        if change.is_equal:
            assert error(want, before) < 1e-5, "the change is none"
        else:
            assert error(want, before) > 1e-3, "the change changes nothing"
        with change.apply(subject) or nullcontext():
            try:
                got = ask()
            except MmattnError as refused:
                return f"refused: {type(refused).__name__}"
        off = error(got, want)
        assert off <= change.tolerance, f"silent: off by {off:.2g}"
    return "equal"


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "change"), pairs())
def test_the_answer_is_that_of_today_or_an_error(cache: Cache, change: Change, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir(), (tmp_path / "new").mkdir()
    outcome(cache, change, tmp_path)
