"""What `attach` refuses, in words and with nothing changed: hosts of other shapes, names, options, hosts on meta."""

from __future__ import annotations

import diffusers
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import mmattn
from mmattn.errors import AttachError, ConditionError
from tests import tiny, tiny_unets
from tests.tiny import own

SMALL = {"vocab_size": tiny.VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def language(family: str, **sizes):
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SMALL, **sizes)).eval()


def of_another_width(host):
    """A host whose layers are not as wide as its config says."""
    host.config.hidden_size = 48
    return host


def traces(host) -> list:
    """What shows that someone was here: attributes, hooks, what is trained, modes and weights."""
    return [
        tiny_unets.traces(host),
        [module.training for module in host.modules()],
        [(name, one.requires_grad, one.device.type) for name, one in host.named_parameters()],
        [float(one.detach().double().sum()) for one in host.parameters() if one.device.type != "meta"],
    ]


def refused(host, adapter, match: str, error: type[Exception] = AttachError, **options) -> None:
    before = traces(host)
    with pytest.raises(error, match=match):
        mmattn.attach(host, adapter, **options)
    assert traces(host) == before, "something was left on the host"


# Hosts of other shapes


GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, head_dim=8)
BEFORE = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, head_dim=8, position="before")
LANGUAGE = {
    "another width": (lambda: of_another_width(tiny.make("llama")), None, r"\(b, l, 48\).*\(4, 2, 32\)"),
    "xlnet": (lambda: language("xlnet", d_model=32, n_layer=3, n_head=4, d_inner=48), None, r"\(2, 4, 32\) for 4 rows"),
    "reformer, whose backward pass runs layers again": (
        lambda: language(
            "reformer",
            hidden_size=32,
            num_attention_heads=4,
            is_decoder=True,
            attn_layers=["local"] * 3,
            axial_pos_embds=False,
            max_position_embeddings=64,
            feed_forward_size=48,
        ),
        None,
        "reversible",
    ),
    "a list that is not there": (lambda: tiny.make("llama"), "model.blocks", "no list of layers at 'model.blocks'"),
}


@pytest.mark.parametrize("adapter", [GATED, BEFORE], ids=["after", "before"])
@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_whose_layers_hand_on_something_else(name, adapter):
    make, path, match = LANGUAGE[name]
    refused(make(), adapter, match, path=path)


class OfItsOwn(diffusers.SD3Transformer2DModel):
    """A transformer that must be told what no config says."""

    def forward(self, hidden_states, timestep, weather):
        return super().forward(hidden_states, weather, weather, timestep)


SIZES = {"attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 1, "in_channels": 4}
PICTURES = {
    "a film whose frames are rows": (
        lambda: diffusers.LatteTransformer3DModel(
            sample_size=8, patch_size=2, cross_attention_dim=32, caption_channels=24, video_length=3, **SIZES
        ),
        "LatteTransformer3DModel.*film",
    ),
    "tokens of another shape": (
        lambda: diffusers.LuminaNextDiT2DModel(
            sample_size=8, hidden_size=32, num_layers=1, num_attention_heads=2, num_kv_heads=2, cross_attention_dim=22
        ),
        "LuminaNextDiT2DModel.*of another shape",
    ),
    "a forward of its own": (
        lambda: OfItsOwn(joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, **SIZES),
        "no example inputs for OfItsOwn.*weather",
    ),
    "autoencoder": (
        lambda: diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        "AutoencoderKL.*UNet2DConditionModel",
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_models_of_diffusers_beside_whose_attention_nothing_fits(name):
    make, match = PICTURES[name]
    host = make()
    for adapter in (mmattn.DecoupledAdapter(memory_dim=9), None):
        refused(host, adapter, match)
    refused(host, GATED, type(host).__name__)


# Names


def saved_and_loaded(name, folder) -> bool:
    """Whether an adapter can be attached by this name; then it can be saved and loaded by it, too."""
    lm = tiny.make("llama", num_hidden_layers=1)
    before = traces(lm)
    try:
        model = tiny.attach(lm, name=name, layers=(0,))
    except AttachError as error:
        assert "name" in str(error) and traces(lm) == before
        return False
    model.save_adapter(folder, name)
    again = mmattn.load(tiny.make("llama", num_hidden_layers=1), folder, name)
    ids, memory = tiny.text(2), {name: tiny.memory(2)}
    with torch.no_grad():
        assert torch.equal(again(ids, memory=memory).logits, model(ids, memory=memory).logits)
    again.set_adapter(name)
    assert model.unload() is lm
    return True


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("names")


@pytest.mark.parametrize("name", ["1", "x" * 100, "T", "class", "a-b_c"])
def test_a_name_that_attach_takes_can_be_saved_and_loaded(folder, name):
    assert saved_and_loaded(name, folder)


@pytest.mark.parametrize(
    "name",
    [
        "my pictures",
        "bilder-ü",
        "a/b",
        "-x",
        "x" * 101,
        "",
        "a.b",
        "keys",
        "items",
        "training",
        "_modules",
        "_buffers",
        "a\n",
    ]
    + [3, None, True, b"x"],
)
def test_a_name_that_could_not_be_saved_is_refused_at_once(folder, name):
    assert not saved_and_loaded(name, folder)


def test_names_are_checked_by_every_verb(tmp_path):
    model = tiny.attach(tiny.make("llama"))
    model.save_adapter(tmp_path)
    for verb in (
        lambda: model.add_adapter("my pictures", GATED),
        lambda: mmattn.load(model, tmp_path, "my pictures"),
        lambda: mmattn.attach(model, GATED, "my pictures"),
    ):
        with pytest.raises(AttachError, match="my pictures"):
            verb()
    assert list(model.adapters) == ["default"] == model.active


# Options


def test_a_second_attach_drops_no_option(ids):
    model = mmattn.attach(tiny.make("llama"), GATED, path="model.layers")
    mmattn.attach(model, GATED, "second", path="model.layers")
    for options, match in (
        ({"path": "model.other"}, "model.other.*model.layers"),
        ({"require_memory": True}, "require_memory"),
    ):
        for host in (model, model.host):
            with pytest.raises(AttachError, match=match):
                mmattn.attach(host, GATED, "third", **options)
    assert list(model.adapters) == ["default", "second"] and not model.require_memory
    # Asked for again, what was decided at first holds.
    strict = mmattn.attach(tiny.make("llama"), GATED, require_memory=True)
    mmattn.attach(strict, GATED, "second", require_memory=True)
    mmattn.attach(strict, GATED, "third")
    with pytest.raises(ConditionError, match="require_memory"):
        strict(ids)


def test_a_unet_has_no_path(tmp_path):
    unet = tiny_unets.make()
    refused(unet, tiny_unets.adapter(), "path=.*UNet2DConditionModel", path="down_blocks")
    model = tiny_unets.attach(unet)
    model.save_adapter(tmp_path)
    with pytest.raises(AttachError, match="path="):
        mmattn.attach(model, tiny_unets.adapter(), "second", path="down_blocks")
    with pytest.raises(mmattn.errors.MmattnError, match="path="):
        mmattn.load(tiny_unets.make(), tmp_path, path="down_blocks")
    with pytest.raises(AttachError, match="require_memory"):
        mmattn.attach(model, tiny_unets.adapter(), "second", require_memory=True)
    assert list(model.adapters) == ["default"]


# Hosts whose weights are elsewhere


@pytest.mark.parametrize("error", [KeyError, ZeroDivisionError, AttributeError])
def test_a_host_that_cannot_be_called_with_ids_is_refused(error, monkeypatch):
    lm = tiny.make("llama")

    def fails(*args, **kwargs):
        raise error("pixel_values")

    monkeypatch.setattr(lm.model, "forward", fails)
    with pytest.raises(AttachError, match=f"cannot be called with input_ids.*{error.__name__}.*pixel_values"):
        tiny.attach(lm)
    assert not lm._forward_hooks and not lm.model.layers[0]._forward_hooks


def test_a_host_without_weights_is_refused():
    with torch.device("meta"):
        host = AutoModelForCausalLM.from_config(tiny.config("llama"))
    refused(host, GATED, "meta device.*load weights first", ConditionError)
    unet = tiny_unets.make().to("meta")
    refused(unet, tiny_unets.adapter(), "load weights first", ConditionError)


@torch.no_grad()
def test_a_host_that_accelerate_has_offloaded(ids):
    """Its weights are on the meta device between calls; hooks bring them in."""
    from accelerate import cpu_offload

    memory = tiny.memory(ids.shape[0])
    want = tiny.attach(tiny.make("llama"))(ids, memory=memory).logits
    lm = tiny.make("llama")
    cpu_offload(lm, torch.device("cpu"))
    assert {one.device.type for one in lm.parameters()} == {"meta"}
    model = tiny.attach(lm)
    assert torch.equal(model(ids, memory=memory).logits, want) and torch.equal(model(ids).logits, own(ids))
    assert model.generate(ids, memory=memory, max_new_tokens=2).shape == (3, 9)
    assert model.unload() is lm and torch.equal(lm(ids).logits, own(ids))


@torch.no_grad()
def test_a_host_spread_by_a_device_map(ids, tmp_path):
    """As `device_map="auto"` does it where not all fits: some layers on disk."""
    lm, memory = tiny.make("llama"), tiny.memory(ids.shape[0])
    want = tiny.attach(tiny.make("llama"))(ids, memory=memory).logits
    lm.save_pretrained(tmp_path / "host")
    where = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    where |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "host", device_map=where, offload_folder=tmp_path / "disk", dtype=torch.float32
    ).eval()
    assert {one.device.type for one in spread.parameters()} == {"meta", "cpu"}
    model = tiny.attach(spread)
    assert torch.equal(model(ids, memory=memory).logits, want)
    assert model.unload() is spread and torch.equal(spread(ids).logits, own(ids))


def test_an_end_token_that_is_none_of_the_hosts_refuses_nothing():
    """A small GPT-2 with the defaults of its config: its end has the number of the large one's."""
    host = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](vocab_size=53, n_embd=24, n_layer=3, n_head=3))
    assert host.config.eos_token_id > 53
    for adapter in (GATED, mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, every=1), mmattn.adapters.PassageAdapter()):
        mmattn.attach(host, adapter).unload()
