"""Adapters merged into one by the weighted sum of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import AttachError, ConfigError
from tests import tiny, tiny_unets

ROWS, LENGTH = 3, 7


@pytest.fixture(params=["language", "unet"])
def model(request: pytest.FixtureRequest) -> Any:
    """A host with adapters "default" and "other" of equal settings and different weights."""
    made: Any = tiny.attach(tiny.make("llama")) if request.param == "language" else tiny_unets.attach(tiny_unets.make())
    made.add_adapter("other", made.adapters["default"].config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.adapters["other"].parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    made.set_adapter("default")
    return made


def test_the_weights_are_the_weighted_sum(model: Any) -> None:
    model.add_weighted_adapter(["default", "other"], [0.75, -0.5], "merged")
    states = [model.adapters[name].state_dict() for name in ("default", "other", "merged")]
    for key, value in states[2].items():
        want = 0.75 * states[0][key].double() - 0.5 * states[1][key].double()
        assert torch.equal(value, want.to(value.dtype)) and bool(value.isfinite().all())
    assert any(bool((value != states[0][key]).any()) for key, value in states[2].items())
    assert model.active == ["default"]


def test_what_cannot_be_merged(model: Any) -> None:
    config = model.adapters["default"].config
    smaller: Any = (
        mmattn.GatedAdapter(memory_dim=config.memory_dim, layers=(1,), num_heads=2, head_dim=8)
        if isinstance(config, mmattn.GatedAdapter)
        else mmattn.DecoupledAdapter(memory_dim=config.memory_dim + 2)
    )
    model.add_adapter("smaller", smaller)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for names, weights, name, error, match in (
        (["default", "smaller"], [1, 1], "merged", AttachError, "other settings"),
        (["default", "nobody"], [1, 1], "merged", AttachError, "nobody"),
        (["default", "other"], [1, 1], "other", AttachError, "already attached"),
        (["default", "other"], [1], "merged", ConfigError, "one weight"),
        (["default", "other"], [1, float("nan")], "merged", ConfigError, "weights"),
        ("default", [1], "merged", ConfigError, "give a list"),
        ([], [], "merged", ConfigError, "give a list"),
    ):
        with pytest.raises(error, match=match):
            model.add_weighted_adapter(names, weights, name)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    assert list(model.adapters) == ["default", "other", "smaller"]
