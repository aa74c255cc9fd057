"""Classifier-free guidance: the equation, what the null goes without, and that K and V are made once."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.errors import ConditionError, ConfigError, ShapeError
from tests import tiny, tiny_transformers, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import ROWS, TEXT_LENGTH

TIMES = (900, 500, 100)
MASK = torch.arange(TEXT_LENGTH) < torch.tensor([7, 3, 5])[:, None]
NOTHING = torch.zeros(ROWS, TEXT_LENGTH, dtype=torch.bool)


@pytest.fixture
def model():
    """A tiny UNet with an open adapter, its text through the core."""
    return tiny_unets.attach(tiny_unets.make()).use_core()


@pytest.fixture
def memory():
    """A memory with padding."""
    return tiny.memory(ROWS, lengths=[5, 2, 3])


def predicted(model, guidance, *, times=TIMES, **given):
    x = tiny_unets.picture()
    with torch.no_grad(), guidance.run(model, tiny_unets.text(), **given) as predict:
        return [predict(x, time) for time in times]


def alone(model, time, **given):
    with torch.no_grad():
        return model(tiny_unets.picture(), time, tiny_unets.text(), **given).sample


@pytest.mark.parametrize("adapter_scale", [0.7, torch.tensor([0.2, 1.0, 0.5]), {"up": 0.9}, lambda time: time / 1000])
@pytest.mark.parametrize("mask", [None, MASK])
def test_the_equation(model, memory, adapter_scale, mask):
    scale, conditions = 2.5, {"text_mask": mask, "memory": memory, "adapter_scale": adapter_scale}
    for time, found in zip(TIMES, predicted(model, mmattn.Guidance(scale), **conditions), strict=True):
        full, null = alone(model, time, **conditions), alone(model, time, text_mask=NOTHING)
        assert_close(found, scale * full - (scale - 1) * null)
        assert differs(found, full)


def test_no_guidance_is_the_host_with_its_conditions(model, memory):
    out = predicted(model, mmattn.Guidance(1.0), text_mask=MASK, memory=memory)
    assert torch.equal(out[1], alone(model, TIMES[1], text_mask=MASK, memory=memory))


@pytest.mark.parametrize("length", [3, TEXT_LENGTH])
@pytest.mark.parametrize("mask", [None, MASK])
def test_a_null_text_has_its_own_length_and_the_text_its_own_mask(model, memory, mask, length):
    empty = tiny_unets.text(1, seed=1)[:, :length]
    found = predicted(model, mmattn.Guidance(3.0), times=[500], null_text=empty, text_mask=mask, memory=memory)[0]
    with torch.no_grad():
        null = model(tiny_unets.picture(), 500, empty.expand(ROWS, -1, -1)).sample
    assert_close(found, 3 * alone(model, 500, text_mask=mask, memory=memory) - 2 * null)


def test_nothing_stays_behind(model, memory):
    want = alone(model, 500)
    with pytest.raises(ShapeError), mmattn.Guidance(3.0).run(model, tiny_unets.text(), memory=memory) as predict:
        predict(tiny_unets.picture(ROWS + 1), 500)
    assert torch.equal(alone(model, 500), want)


def test_bad_settings(model, memory):
    with pytest.raises(ConfigError, match="guidance_scale must"):
        mmattn.Guidance(float("nan"))
    with pytest.raises(ConditionError, match=r"null_text=.*use_core\(\)"):
        predicted(model.use_core(False), mmattn.Guidance(2.0), memory=memory)
    with pytest.raises(ShapeError, match="text_mask must be"):
        predicted(model.use_core(), mmattn.Guidance(1.0), text_mask=MASK[:, :2])


def test_a_time_step_for_each_row_of_a_transformer():
    """Invariant 127."""
    model = tiny_transformers.attach(tiny_transformers.make("PixArtTransformer2DModel")).use_core()
    batch, memory = tiny_transformers.given(model, ROWS), tiny.memory(ROWS)
    more = {"added_cond_kwargs": batch["added_cond_kwargs"]}
    with (
        torch.no_grad(),
        mmattn.Guidance(2.0).run(model, batch["encoder_hidden_states"], memory=memory, inputs=more) as predict,
    ):
        together = predict(batch["hidden_states"], torch.tensor(TIMES))
        for row, time in enumerate(TIMES):
            assert_close(together[row], predict(batch["hidden_states"], torch.tensor([time] * ROWS))[row], 1e-5)
            assert_close(together[row], predict(batch["hidden_states"], time)[row], 1e-5)


def test_a_host_whose_pipeline_has_the_other_order():
    """Guidance makes its own batch, the null first, also for DiT."""
    model = tiny_transformers.attach(tiny_transformers.make("DiTTransformer2DModel"))
    batch, memory = tiny_transformers.given(model, ROWS), tiny.memory(ROWS)
    labels = {"class_labels": batch["class_labels"]}
    text = torch.zeros(ROWS, 1, 1)
    model.predict = lambda sample, time, text, **more: tiny_transformers.run(
        model.host, {"hidden_states": sample, "timestep": time.expand(len(sample)), **more}
    )
    with (
        torch.no_grad(),
        mmattn.Guidance(2.0).run(model, text, null_text=text, memory=memory, inputs=labels) as predict,
    ):
        found = predict(batch["hidden_states"], torch.tensor(7.0))
    given = tiny_transformers.run(model, batch, memory=memory)
    assert_close(found, 2 * given - tiny_transformers.run(model, batch), 1e-5)


@pytest.mark.parametrize(
    ("family", "further", "differing"),
    [
        ("SD3Transformer2DModel", ("pooled_projections",), "pooled_projections"),
        ("BriaFiboTransformer2DModel", ("text_encoder_layers", "img_ids", "txt_ids"), "text_encoder_layers"),
    ],
)
@torch.no_grad()
def test_further_inputs(family, further, differing):
    """ε(∅) + s (ε(c) − ε(∅)) by hand, with pooled texts, or a text for each layer, of their own for the null text."""
    model = tiny_transformers.attach(tiny_transformers.make(family))
    batch, memory = tiny_transformers.given(model, ROWS), tiny.memory(ROWS)
    text, inputs = batch["encoder_hidden_states"], {name: batch[name] for name in further}
    value = batch[differing]
    null = {differing: [one * 0 for one in value] if isinstance(value, list) else value * 0}
    guidance = mmattn.Guidance(guidance_scale=3.0)
    with guidance.run(model, text, null_text=text * 0, memory=memory, inputs=inputs, null_inputs=null) as predict:
        found = predict(batch["hidden_states"], torch.tensor(7.0))
    empty = tiny_transformers.run(model, batch | null | {"encoder_hidden_states": text * 0})
    full = tiny_transformers.run(model, batch, memory=memory)
    assert_close(found, empty + 3 * (full - empty), 1e-5)
    with pytest.raises(ConfigError, match="null_inputs"), guidance.run(model, text, null_text=text, null_inputs=null):
        pass
