"""Diffusion transformers as hosts: what adapters add in each kind of attention, maps, text padding; what is refused.

What every family must do is in `tests/families/diffusion.py`.
"""

from __future__ import annotations

import pytest
import torch

import mmattn
from mmattn.adapters.decoupled import JointDecoupledAdapter
from mmattn.adapters.text_state import TextState
from mmattn.errors import ConditionError, MaskError, ShapeError
from mmattn.hosts.diffusion.scale import times_by_row
from tests import tiny
from tests.tiny import assert_close
from tests.tiny_transformers import attach, given, make, run

ROWS = 3
JOINT, PACKED, CROSS, OWN = (
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
    "WanTransformer3DModel",
    "DiTTransformer2DModel",
)
KINDS = {JOINT: "joint", PACKED: "joint", CROSS: "cross", OWN: "self"}


#: Families whose queries, their norm and the output projection have other names.
NAMES = {
    "JoyImageEditTransformer3DModel": ("img_attn_qkv", "img_attn_q_norm", "img_attn_proj"),
    "Kandinsky5Transformer3DModel": ("to_query", "query_norm", "out_layer"),
    "Krea2Transformer2DModel": ("to_q", "norm_q", "to_out.0"),
    "LongCatAudioDiTTransformer": ("to_q", "q_norm", "to_out.0"),
    "PRXTransformer2DModel": ("img_qkv_proj", "norm_q", "to_out.0"),
}


def share(model, index, x, memory, names=("to_q", "norm_q", "to_out.0")):
    """By hand, what an adapter adds to the output of an attention layer that was given x, no row of memory padded."""
    attn, adapter = model.layer(index), model.adapters["default"]
    block, heads = adapter.attention(index), 2
    slots = adapter.read(memory).tokens
    project, norm, out = attn.get_submodule(names[0]), getattr(attn, names[1]), attn.get_submodule(names[2])
    q, k, v = project(x)[..., : out.weight.shape[1]], block.k_proj(slots), block.v_proj(slots)
    if norm is not None and norm.weight.shape[0] == q.shape[2]:
        q = norm(q)
    q, k, v = (one.unflatten(2, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    if norm is not None and norm.weight.shape[0] == q.shape[3]:
        q = norm(q)
    weights = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).softmax(-1)
    found = (weights @ v).transpose(1, 2).flatten(2)
    return found @ out.weight.T


@pytest.mark.parametrize("family", [*KINDS, *NAMES])
@torch.no_grad()
def test_what_an_adapter_adds_in_a_layer(family):
    """The queries are the picture's, normalised as the host does, without positions; the text's output is its own."""
    model = attach(make(family))
    assert KINDS.get(family) in (None, model.structure.layers[0].kind)
    batch, memory, heard = given(model), tiny.memory(ROWS), {}

    def listen(attn, args, kwargs, output):
        heard.setdefault("x", kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
        heard.setdefault("out", output)

    def hear(**more):
        heard.clear()
        with model.layer(0).register_forward_hook(listen, with_kwargs=True):
            run(model, batch, **more)
        return heard["x"], heard["out"]

    (x, own), (same, out) = hear(), hear(memory=memory)
    assert torch.equal(x, same)
    if model.structure.layers[0].kind == "joint":
        assert torch.equal(out[1], own[1])
        own, out = own[0], out[0]
    want = share(model, 0, x, memory, *([NAMES[family]] if family in NAMES else []))
    assert tiny.differs(out, own)
    assert_close(out - own, want, 1e-5)


@torch.no_grad()
def test_blocks_and_streams():
    """Flux' single blocks, text and picture in one stream, take an adapter where they are named."""
    model = attach(make(PACKED))
    assert [model.layer_names[layer] for layer in model.adapter("default").layers] == [
        "transformer_blocks.0.attn",
        "transformer_blocks.1.attn",
    ]
    streams = attach(make(PACKED), blocks=("single_transformer_blocks", "transformer_blocks.1"))
    assert len(streams.adapter("default").layers) == 3
    batch, memory = given(model), tiny.memory(ROWS)
    assert tiny.differs(run(streams, batch, memory=memory), run(streams, batch))
    with pytest.raises(ShapeError, match="one stream"):
        run(streams, batch, memory=memory, adapter_scale=torch.ones(ROWS, 2, 4))
    # Where there are no others, streams are all there is.
    lumina = attach(make("Lumina2Transformer2DModel"))
    assert {name.split(".")[0] for name in lumina.layer_names} == {"noise_refiner", "layers"}
    assert len(lumina.adapter("default").layers) == len(lumina.layer_names)


@pytest.mark.parametrize("family", [JOINT, PACKED, "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel", CROSS])
@torch.no_grad()
def test_a_map_acts_on_its_own_tokens(family):
    """In the first layer; later ones mix. Of films by frame too."""
    model, heard = attach(make(family)), []
    batch, memory, (frames, height, width) = given(model), tiny.memory(ROWS), model.structure.grid

    def listen(attn, args, output):
        heard.append(output if isinstance(output, torch.Tensor) else output[model.picture_part(0)])

    left, first = torch.zeros(ROWS, height, width), torch.zeros(ROWS, frames, height, width)
    left[:, :, : width // 2], first[:, 0] = 1, 1
    with model.layer(0).register_forward_hook(listen):
        run(model, batch)
        for scale in (left, first):
            run(model, batch, memory=memory, adapter_scale=scale)
    moved = [(out - heard[0]).abs().amax(-1).unflatten(1, (frames, height, width)) > 1e-6 for out in heard[1:]]
    assert torch.equal(moved[0], left[:, None].bool().expand_as(moved[0]))
    assert torch.equal(moved[1], first.bool())


@torch.no_grad()
def test_attention_that_is_not_one_softmax():
    """Differential attention is refused; without it the same host is none too many."""
    plain = attach(make("StableAudio3DiTModel", use_differential_attention=False))
    batch, memory = given(plain), tiny.memory(ROWS, lengths=[5, 0, 3])
    own, out = run(plain, batch), run(plain, batch, memory=memory)
    assert torch.equal(out[1], own[1]) and tiny.differs(out[0], own[0])


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


@torch.no_grad()
def test_calls_that_are_refused():
    flux, dit, unet, memory = attach(make(PACKED)), attach(make(OWN)), attach(make("stable")), tiny.memory(ROWS)
    lost, mask = given(flux) | {"img_ids": given(flux)["img_ids"] * 0}, torch.ones(ROWS, 7)
    core = attach(make("stable")).use_core()
    assert run(flux, lost, memory=memory, adapter_scale=torch.ones(ROWS)).isfinite().all()
    for model, batch, more, error, says in (
        (flux, given(flux), {"adapter_scale": torch.ones(ROWS, 4, 2)}, ShapeError, "aspect"),
        (flux, lost, {"adapter_scale": torch.ones(ROWS, 2, 4)}, ConditionError, "tokens"),
        (dit, given(dit) | {"timestep": None}, {"adapter_scale": lambda time: time}, ConditionError, "timestep"),
        (unet, given(unet), {"text_mask": mask.bool()}, ConditionError, r"use_core\(\)"),
        (core, given(core) | {"encoder_hidden_states": None}, {}, ConditionError, "text"),
        (core, given(core), {"text_mask": mask}, MaskError, "from_huggingface"),
        (core, given(core), {"text_mask": mask.bool().tolist()}, MaskError, "list"),
        (core, given(core), {"text_mask": mask[:, :5].bool()}, ShapeError, r"\(3, 7\).*\(3, 5\)"),
        (core, given(core), {"text_mask": mask[:2].bool()}, ShapeError, r"\(3, 7\).*\(2, 7\)"),
    ):
        with pytest.raises(error, match=says):
            run(model, batch, memory=memory, **more)
        with pytest.raises(error, match=says), model.condition(memory, **more):
            run(model.host, batch)
