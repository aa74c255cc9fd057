"""UNets of films, whose layers have a row for each frame: memory, scales and guidance stay with their own film."""

from __future__ import annotations

import pytest
import torch
from diffusers import UNet3DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel

import mmattn
from mmattn.errors import ShapeError
from mmattn.testing.case import stir
from tests import tiny
from tests.tiny import assert_close, differs

FRAMES, ROWS = 3, 2
_SIZES = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "cross_attention_dim": 12,
    "in_channels": 5,
    "out_channels": 5,
}


def blocks(kind: str) -> dict:
    down, up = (f"CrossAttnDownBlock{kind}", f"DownBlock{kind}"), (f"UpBlock{kind}", f"CrossAttnUpBlock{kind}")
    return {"down_block_types": down, "up_block_types": up}


def three_d():
    return UNet3DConditionModel(**_SIZES, **blocks("3D"), attention_head_dim=4)


def motion():
    return UNetMotionModel(**_SIZES, **blocks("Motion"), num_attention_heads=2, motion_num_attention_heads=2)


def spatio_temporal():
    sizes = {name: value for name, value in _SIZES.items() if name != "norm_num_groups"} | {
        "block_out_channels": (32, 64)
    }
    times = {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 12}
    return UNetSpatioTemporalConditionModel(**sizes, **blocks("SpatioTemporal"), **times, num_attention_heads=2)


KINDS = {"3d": three_d, "motion": motion, "spatio-temporal": spatio_temporal}


def batch(kind: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    sample = torch.randn(ROWS, 5, FRAMES, 8, 12, generator=drawn)
    text = torch.randn(ROWS, 1 if kind == "spatio-temporal" else 7, 12, generator=drawn)
    if kind == "motion":
        text = text.repeat_interleave(FRAMES, 0)  # as AnimateDiff's pipeline gives it
    given = {"sample": sample, "timestep": torch.tensor(11), "encoder_hidden_states": text}
    if kind == "spatio-temporal":
        given |= {"sample": sample.transpose(1, 2), "added_time_ids": torch.ones(ROWS, 3)}
    return given


@pytest.fixture(params=KINDS)
def film(request):
    torch.manual_seed(0)
    host = KINDS[request.param]().eval()
    model = mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM))
    stir(model.adapter("default"))
    return model, batch(request.param)


@torch.no_grad()
def run(model, given, **more):
    return model(**given, **more)[0]


def some(given, row):
    """One film of a batch."""
    return {name: value.unflatten(0, (ROWS, -1))[row] if name != "timestep" else value for name, value in given.items()}


@torch.no_grad()
def test_each_film_sees_its_own_memory(film):
    model, given = film
    memory, own = tiny.memory(ROWS, lengths=[5, 3]), run(model, given)
    out = run(model, given, memory=memory)
    assert all(differs(out[row], own[row]) for row in range(ROWS))
    for row in range(ROWS):
        assert_close(run(model, some(given, row), memory=memory[row])[0], out[row], 1e-4)
    half = run(model, given, memory=tiny.memory(ROWS, lengths=[5, 0]))
    assert torch.equal(half[1], own[1]) and differs(half[0], own[0])


@torch.no_grad()
def test_the_unconditional_half_of_guidance_sees_none(film):
    model, given = film
    memory = tiny.memory(ROWS)
    twice = {name: value if name == "timestep" else torch.cat([value, value]) for name, value in given.items()}
    with model.condition(memory, guided=True):
        both = run(model.host, twice)
    assert_close(both[:ROWS], run(model, given), 1e-5)
    assert_close(both[ROWS:], run(model, given, memory=memory), 1e-5)


@torch.no_grad()
def test_a_scale_for_each_film(film):
    model, given = film
    memory, own = tiny.memory(ROWS), run(model, given)
    out = run(model, given, memory=memory, adapter_scale=torch.tensor([0.0, 1.0]))
    assert_close(out[0], own[0], 1e-6)
    assert_close(out[1], run(model, given, memory=memory)[1], 1e-5)
    ones, zeros = torch.ones(ROWS, 8, 12), torch.zeros(ROWS, 8, 12)
    if any("temporal" in name for name in model.layer_names):
        with pytest.raises(ShapeError, match="blocks="):
            run(model, given, memory=memory, adapter_scale=ones)
        return
    assert torch.equal(run(model, given, memory=memory, adapter_scale=zeros), own)
    assert_close(run(model, given, memory=memory, adapter_scale=ones), run(model, given, memory=memory), 1e-5)
