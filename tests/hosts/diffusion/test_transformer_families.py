"""Diffusion transformers that are built otherwise than most: what works there, what is refused, and in whose words."""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.adapters.joint_decoupled import JointDecoupledAdapter
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError
from mmattn.hosts.diffusion.scale import times_by_row
from tests import tiny
from tests.tiny import assert_close
from tests.tiny_transformers import attach, given, make, run

ROWS = 3


@torch.no_grad()
def test_attention_that_is_not_one_softmax():
    """Differential attention has two queries for a token: there is none to read a memory with."""
    with pytest.raises(AttachError, match="no attention layers with queries"):
        attach(make("StableAudio3DiTModel"))
    plain = attach(make("StableAudio3DiTModel", use_differential_attention=False))
    batch, memory = given(plain), tiny.memory(ROWS, lengths=[5, 0, 3])
    own, out = run(plain, batch), run(plain, batch, memory=memory)
    assert torch.equal(out[1], own[1]) and tiny.differs(out[0], own[0])


@pytest.mark.parametrize("family", ["AceStepTransformer1DModel", "Krea2Transformer2DModel", "WanTransformer3DModel"])
def test_a_joint_adapter_needs_keys_of_the_picture(family):
    """Not those of fewer heads, and not those of the text."""
    with pytest.raises(AttachError, match="keys and values of the picture"):
        mmattn.attach(make(family), JointDecoupledAdapter(memory_dim=tiny.MEMORY_DIM))


@pytest.mark.parametrize("family", ["PRXTransformer2DModel", "JoyImageEditTransformer3DModel"])
def test_no_start_as_projections_that_are_one(family):
    with pytest.raises(AttachError, match="start='nothing'"):
        attach(make(family), tokens=2, start="host")
    with pytest.raises(ConditionError, match="use_core"):
        attach(make(family)).use_core()


@torch.no_grad()
def test_frames_at_times_of_their_own():
    model = attach(make("AnyFlowTransformer3DModel"))
    batch, memory = given(model), tiny.memory(ROWS)
    assert batch["timestep"].shape == (ROWS, 3)
    out = run(model, batch, memory=memory)
    assert out.isfinite().all() and tiny.differs(out, run(model, batch))
    for row in range(ROWS):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        assert_close(run(model, alone, memory=memory[[row]]), out[row : row + 1], 1e-4)
    text = batch["encoder_hidden_states"]
    with mmattn.Guidance(guidance_scale=3.0).run(
        model, text, null_text=text * 0, memory=memory, inputs={"r_timestep": batch["r_timestep"]}
    ) as predict:
        assert predict(batch["hidden_states"], batch["timestep"][:1]).shape == out.shape


def test_the_time_of_each_row():
    """An adapter that follows the time step is told one for each row; where frames differ there is none."""
    frames = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]])
    assert times_by_row(torch.tensor(7), 0, 2).tolist() == [7, 7]
    assert times_by_row(frames, 2, 2).tolist() == [3, 4]
    assert times_by_row(frames[:, 0], 2, 2).tolist() == [3, 4]
    assert times_by_row(frames + torch.tensor([0.0, 1.0]), 2, 2) is None
    model = mmattn.attach(make("SD3Transformer2DModel"), JointDecoupledAdapter(memory_dim=tiny.MEMORY_DIM))
    source = model.bind(tiny.memory(ROWS))["default"]
    with pytest.raises(ConditionError, match="one timestep for each row"):
        source.step(TextState(ROWS, 8))
