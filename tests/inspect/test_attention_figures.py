"""Figures of heads whose behaviour is known beforehand."""

from __future__ import annotations

import math

import pytest
import torch

import mmattn
from mmattn.errors import ShapeError
from mmattn.inspect import head_figures
from tests import tiny
from tests.tiny import assert_close


def test_known_heads() -> None:
    l, m = 5, 9
    diagonal, last, even = torch.zeros(l, m), torch.zeros(l, m), torch.full((l, m), 0.5 / m)
    diagonal[torch.arange(l), 2 * torch.arange(l)] = 1.0
    last[:, -1] = 1.0
    last[3] = 0.0  # saw nothing
    figures = head_figures(torch.stack([diagonal, last, even])[None])
    assert_close(figures.entropy, torch.tensor([0.0, 0.0, math.log2(m)]))
    assert_close(figures.null, torch.tensor([0.0, 0.0, 0.5]))
    assert_close(figures.diagonal, torch.tensor([1.0, 1 / 4, 1 / m]))
    assert figures.distance[0] == 0 and figures.distance[1] == pytest.approx((1 + 0.75 + 0.5 + 0) / 4)
    assert str(figures).count("\n") == 3


def test_steps_of_a_generation_are_one_text() -> None:
    model, ids, memory = tiny.attach(tiny.make("llama"), null_slot=True), tiny.text(2, 3), tiny.memory(2, 5)
    with mmattn.inspect.record(model) as weights:
        out = model.generate(ids, memory=memory, max_new_tokens=4, do_sample=False)
    steps = head_figures(torch.cat(weights["default", 0], 2))
    with mmattn.inspect.record(model) as weights:
        model(out[:, :-1], memory=memory)
    whole = head_figures(weights["default", 0][0])
    for name in ("entropy", "distance", "diagonal", "null"):
        assert_close(getattr(steps, name), getattr(whole, name), 1e-4)
    assert (whole.null > 0).all()
    with pytest.raises(ShapeError, match=r"\(b, h, l, m\)"):
        head_figures(torch.ones(3, 5))
