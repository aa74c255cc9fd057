"""Every setting of the gated adapter keeps the promises that the plain one keeps."""

from __future__ import annotations

import functools

import pytest

import mmattn
from mmattn.testing import Case
from mmattn.testing.adapter_answers import (
    check_memory_is_heard,
    check_rows_keep_to_themselves,
    check_rows_that_see_nothing,
    check_starts_as_identity,
)
from mmattn.testing.adapter_life import check_gradients_reach_the_adapter
from tests import tiny

SMALL = {"memory_dim": tiny.MEMORY_DIM, "layers": (0, 2), "num_heads": 2, "head_dim": 8}
SETTINGS = {
    "gates per head": {"gate": "head"},
    "gates per channel": {"gate": "channel"},
    "no feed-forward": {"feed_forward": 0},
    "grouped heads": {"num_heads": 4, "num_kv_heads": 2},
    "one key head": {"num_heads": 3, "num_kv_heads": 1},
    "query and key norm": {"qk_norm": True},
    "null slot": {"null_slot": True},
    "length norm": {"length_norm": 17.0},
    "score bias": {"score_bias": True},
    "standardised scores": {"score_bias": True, "score_mean": 0.7, "score_std": 0.3, "null_slot": True},
    "resampler": {"resampler": mmattn.Resampler(num_latents=3, depth=2, num_heads=2)},
    "before the layer": {"position": "before"},
    "RMS norm": {"layout": {"norm": "rms", "norm_eps": 1e-3}, "qk_norm": True},
    "no memory norm": {"layout": {"memory_norm": False}},
    "SwiGLU": {"layout": {"activation": "swiglu"}},
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_promises(setting):
    case = Case(mmattn.GatedAdapter(**SMALL | setting), functools.partial(tiny.make, "llama"))
    for check in (
        check_starts_as_identity,
        check_memory_is_heard,
        check_rows_that_see_nothing,
        check_rows_keep_to_themselves,
        check_gradients_reach_the_adapter,
    ):
        check(case)
