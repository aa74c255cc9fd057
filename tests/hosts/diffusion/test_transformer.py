"""Diffusion transformers as hosts: what adapters add in each kind of attention, maps, text padding, refusals.

What every family must do is in `tests/families/diffusion.py`.
"""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload

import mmattn
from mmattn.adapters.decoupled import JointDecoupledAdapter
from mmattn.adapters.text_state import TextState
from mmattn.errors import AttachError, ConditionError, ShapeError
from mmattn.hosts.diffusion.scale import times_by_row
from tests import tiny, tiny_transformers, tiny_unets
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
CORE = (JOINT, "PixArtTransformer2DModel", "SanaTransformer2DModel", CROSS, "LTXVideoTransformer3DModel")


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
        hook = model.layer(0).register_forward_hook(listen, with_kwargs=True)
        run(model, batch, **more)
        hook.remove()
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
    with pytest.raises(AttachError, match="middle"):
        attach(make(PACKED), blocks=("middle",))


@pytest.mark.parametrize("family", [JOINT, PACKED, "QwenImageTransformer2DModel", "LTXVideoTransformer3DModel", CROSS])
@torch.no_grad()
def test_a_map_acts_on_its_own_tokens(family):
    """In the first layer; later ones mix. Of films by frame too."""
    model, heard = attach(make(family)), []
    batch, memory, (frames, height, width) = given(model), tiny.memory(ROWS), model.structure.grid

    def listen(attn, args, output):
        heard.append(output if isinstance(output, torch.Tensor) else output[model.picture_part(0)])

    hook = model.layer(0).register_forward_hook(listen)
    left = torch.zeros(ROWS, height, width)
    left[:, :, : width // 2] = 1
    run(model, batch)
    run(model, batch, memory=memory, adapter_scale=left)
    first = torch.zeros(ROWS, frames, height, width)
    first[:, 0] = 1
    run(model, batch, memory=memory, adapter_scale=first)
    hook.remove()
    moved = [(out - heard[0]).abs().amax(-1).unflatten(1, (frames, height, width)) > 1e-6 for out in heard[1:]]
    assert torch.equal(moved[0], left[:, None].bool().expand_as(moved[0]))
    assert torch.equal(moved[1], first.bool())


@torch.no_grad()
def test_a_map_over_a_picture_of_unknown_shape():
    model = attach(make(PACKED))
    batch, memory = given(model), tiny.memory(ROWS)
    with pytest.raises(ShapeError, match="aspect"):
        run(model, batch, memory=memory, adapter_scale=torch.ones(ROWS, 4, 2))
    lost = batch | {"img_ids": batch["img_ids"] * 0}
    with pytest.raises(ConditionError, match="how its tokens lie"):
        run(model, lost, memory=memory, adapter_scale=torch.ones(ROWS, 2, 4))
    assert run(model, lost, memory=memory, adapter_scale=torch.ones(ROWS)).isfinite().all()
    with pytest.raises(ConditionError, match="timestep"):
        run(attach(make(OWN)), given(attach(make(OWN))) | {"timestep": None}, memory=memory, adapter_scale=lambda t: t)


@pytest.mark.parametrize("family", CORE)
@torch.no_grad()
def test_padding_of_the_text_is_hidden(family):
    """Invariant 96: joint attention, too, sees no masked token of its text (diffusers #8673); unmasked as it was."""
    model = attach(make(family))
    batch, memory = given(model), tiny.memory(ROWS)
    batch |= {name: torch.ones_like(mask) for name, mask in batch.items() if name == "encoder_attention_mask"}
    want, own = run(model, batch, memory=memory), run(model, batch)
    model.use_core()
    assert_close(run(model, batch, memory=memory), want, 2e-6)
    assert_close(run(model, batch), own, 2e-6)
    mask = torch.ones(ROWS, tiny_transformers.TEXT_LENGTH, dtype=torch.bool)
    mask[1, 3:] = False
    garbage = batch["encoder_hidden_states"].clone()
    garbage[1, 3:] = 1e3
    other = batch | {"encoder_hidden_states": garbage}
    assert tiny.differs(run(model, other, memory=memory)[1:2], want[1:2])
    seen = run(model, batch, memory=memory, text_mask=mask)
    assert seen.isfinite().all()
    assert_close(run(model, other, memory=memory, text_mask=mask), seen, 2e-6)
    assert_close(seen[[0, 2]], want[[0, 2]], 2e-6)
    # A row of three tokens is that of a text of three tokens.
    short = {
        name: value[1:2] if isinstance(value, torch.Tensor) and len(value) == ROWS else value
        for name, value in batch.items()
    }
    short |= {name: value[:, :3] for name, value in short.items() if name.startswith("encoder_")}
    assert_close(run(model, short, memory=memory[1]), seen[1:2], 1e-5)
    with pytest.raises(ShapeError, match="text_mask"):
        run(model, batch, memory=memory, text_mask=mask[:, 1:])
    model.use_core(False)
    assert torch.equal(run(model, batch, memory=memory), want)


@torch.no_grad()
def test_keys_and_values_of_the_text_are_kept_over_steps():
    model = attach(make("PixArtTransformer2DModel")).use_core()
    batch = given(model)
    batch.pop("encoder_attention_mask")
    # The caption is projected at every step; keys and values are those of what is projected.
    other = batch | {"encoder_hidden_states": batch["encoder_hidden_states"].roll(1, 0)}
    layers = [model.layer(index).to_k for index in range(2)]
    with tiny_unets.counting(*layers) as ran, model.condition(tiny.memory(ROWS)):
        first, second = run(model.host, batch), run(model.host, other)
        assert len(ran) == 4 and tiny.differs(first, second)
        for _ in range(2):  # as guidance calls a host for each half in turn
            assert torch.equal(run(model.host, batch), first)
            assert torch.equal(run(model.host, other), second)
        assert len(ran) == 4
        batch["encoder_hidden_states"] *= 2
        assert tiny.differs(run(model.host, batch), first) and len(ran) == 6


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("family", [PACKED, "QwenImageTransformer2DModel", "StableAudioDiTModel", OWN])
def test_attention_that_the_core_cannot_stand_for(family):
    model = attach(make(family))
    before = [type(model.layer(index).processor) for index in range(len(model.layer_names))]
    with pytest.raises(ConditionError, match="use_core.*adapters work there|default one"):
        model.use_core()
    assert [type(model.layer(index).processor) for index in range(len(model.layer_names))] == before
    with pytest.raises(ConditionError, match="use_core"):
        model(**given(model), text_mask=torch.ones(ROWS, 5, dtype=torch.bool))


@torch.no_grad()
def test_layers_that_do_not_reach_the_prediction():
    """The probe: attention whose output is thrown away is refused, and nothing is left on the host."""
    host = make()
    gate = host.transformer_blocks[1].norm1.linear
    before = tiny_unets.traces(host)
    gate.weight.zero_()
    gate.bias.zero_()
    # SD3's last block: nothing of its attention reaches the picture then.
    with pytest.raises(ConditionError, match=r"transformer_blocks\.1\.attn.*do not reach"):
        mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM))
    assert tiny_unets.traces(host) == before
    mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM, blocks=("transformer_blocks.0",)))


@pytest.mark.parametrize("family", [JOINT, PACKED])
@torch.no_grad()
def test_weights_that_are_fetched_for_every_use(family):
    model = attach(make(family))
    batch, memory = given(model), tiny.memory(ROWS, lengths=[5, 0, 3])
    want, own = run(model, batch, memory=memory), run(model, batch)
    cpu_offload(model.host, execution_device=torch.device("cpu"))
    assert model.layer(1).to_out[0].weight.is_meta
    out = run(model, batch, memory=memory)
    assert_close(out, want)
    assert torch.equal(out[1], own[1])
    again = mmattn.attach(model.unload(), mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM))
    assert torch.equal(run(again, batch, memory=memory), own)


@pytest.mark.parametrize("family", [JOINT, PACKED])
@torch.no_grad()
def test_a_host_of_eight_bits(family):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    host = make(family).bfloat16()
    quantize_(host, Int8WeightOnlyConfig())
    model = attach(host)
    assert all(parameter.dtype == torch.float32 for parameter in model.adapters.parameters())
    batch, memory = given(model), tiny.memory(ROWS, lengths=[5, 0, 3])
    own, out = run(model, batch), run(model, batch, memory=memory)
    assert out.dtype == own.dtype and out.isfinite().all()
    assert torch.equal(out[1], own[1]) and tiny.differs(out[0], own[0])


@pytest.mark.parametrize("family", [JOINT, PACKED])
@torch.no_grad()
@pytest.mark.slow
def test_compiled_afterwards(family):
    model = attach(make(family))
    batch, memory = given(model), tiny.memory(ROWS)
    want, own = run(model, batch, memory=memory), run(model, batch)
    compiled = torch.compile(model.host, backend="eager")
    with model.condition(memory):
        assert_close(compiled(**batch)[0], want)
        assert_close(compiled(**batch)[0], want)
    assert_close(compiled(**batch)[0], own)


@torch.no_grad()
def test_fused_projections():
    model = attach(make())
    batch, memory = given(model), tiny.memory(ROWS)
    want = run(model, batch, memory=memory)
    model.host.fuse_qkv_projections()
    assert_close(run(model, batch, memory=memory), want, 1e-5)


def test_a_start_as_the_hosts_own_projections():
    for family, names in ((JOINT, ("add_k_proj", "add_v_proj")), (CROSS, ("to_k", "to_v"))):
        model = attach(make(family), opened=False, tokens=2, start="host")
        block = model.adapter("default").attention(0)
        for own, name in zip((block.k_proj, block.v_proj), names, strict=True):
            assert torch.equal(own.weight, getattr(model.layer(0), name).weight)


# Built otherwise than most


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
