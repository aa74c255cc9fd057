"""What attach refuses, what it tells beforehand, and the modes around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

import mmattn
from mmattn.adapters import InsertedAdapter, JoinedAdapter, PassageAdapter
from mmattn.adapters.decoupled import DecoupledLayout, JointDecoupledAdapter
from mmattn.errors import AdapterFileError, AttachError, ConditionError
from mmattn.hosts import attach_check
from mmattn.testing.case import no_trace, traces
from tests import tiny, tiny_transformers, tiny_unets
from tests.cli.running import call
from tests.families.building import tiny_config, tiny_model
from tests.tiny import own

GATED = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, head_dim=8)
BEFORE = mmattn.GatedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, head_dim=8, position="before")
CHUNKED = mmattn.ChunkedAdapter(memory_dim=tiny.MEMORY_DIM, layers=(0, 2), num_heads=2, chunk_size=3)
DECOUPLED = mmattn.DecoupledAdapter(memory_dim=9)
COPIED = mmattn.DecoupledAdapter(memory_dim=9, tokens=2, start="host")
AFTER_BLOCKS = mmattn.DecoupledAdapter(9, tokens=2, layout=DecoupledLayout(slot_dim=10, bias=True, added_to="block"))
JOINTLY = JointDecoupledAdapter(memory_dim=9)
FLUX, TWO_WIDTHS = "FluxTransformer2DModel", {"num_cross_attention_heads": 1, "cross_attention_head_dim": 16}
SIZES = {"attention_head_dim": 16, "num_attention_heads": 2, "num_layers": 1, "in_channels": 4}


def family(name, auto=AutoModelForCausalLM):
    return partial(tiny_model, name, auto)


def text_model(name):
    return family(name, AutoModelForSeq2SeqLM if name in ("t5", "bart") else AutoModelForSequenceClassification)


def of_another_width():
    """A host whose layers are not as wide as its config says."""
    host = tiny.make("llama")
    host.config.hidden_size = 48
    return host


def called_with_pictures(error):
    """A host that raises when it is called with ids."""

    def make():
        host = tiny.make("llama")

        def fails(*args, **kwargs):
            raise error("pixel_values")

        host.model.forward = fails
        return host

    return make


def on_meta():
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(tiny.config("llama"))


def film():
    return diffusers.LatteTransformer3DModel(
        sample_size=8, patch_size=2, cross_attention_dim=32, caption_channels=24, video_length=3, **SIZES
    )


def of_other_tokens():
    return diffusers.LuminaNextDiT2DModel(
        sample_size=8, hidden_size=32, num_layers=1, num_attention_heads=2, num_kv_heads=2, cross_attention_dim=22
    )


class OfItsOwn(diffusers.SD3Transformer2DModel):
    """A transformer that must be told what no config says."""

    def forward(self, hidden_states, timestep, weather):
        return super().forward(hidden_states, weather, weather, timestep)


def with_a_forward_of_its_own():
    return OfItsOwn(joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=32, **SIZES)


def of_chunks():
    """A host whose layers see a chunk of the text each."""
    host = tiny.make("llama")
    host.config.layer_types = ["chunked_attention"] * tiny.LAYERS
    return host


def unread():
    """SD3 of which nothing of the attention of the last block reaches the picture."""
    host = tiny_transformers.make()
    for parameter in host.transformer_blocks[1].norm1.linear.parameters():
        torch.nn.init.zeros_(parameter)
    return host


def transformer(name, **changes):
    return partial(tiny_transformers.make, name, **changes)


def autoencoder():
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4)


def without_attention_to_texts():
    sizes = {"block_out_channels": (14, 22), "norm_num_groups": 2, "layers_per_block": 1, "attention_head_dim": 2}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    return diffusers.UNet2DModel(sample_size=8, **sizes, **blocks)


@pytest.mark.parametrize(
    ("make", "adapter", "options", "error", "says"),
    [
        # Layers that hand on something else.
        *((of_another_width, adapter, {}, AttachError, r"\(b, l, 48\)") for adapter in (GATED, BEFORE)),
        *((family("xlnet"), adapter, {}, AttachError, "rows") for adapter in (GATED, BEFORE)),
        *((family("reformer"), adapter, {}, AttachError, "reversible") for adapter in (GATED, BEFORE)),
        (lambda: tiny.make("llama"), GATED, {"path": "model.blocks"}, AttachError, "model.blocks"),
        (lambda: tiny.make("llama"), replace(GATED, layers=None, every=5), {}, AttachError, "every=5"),
        *(
            (called_with_pictures(error), GATED, {}, AttachError, f"input_ids.*{error.__name__}.*pixel_values")
            for error in (KeyError, ZeroDivisionError, AttributeError)
        ),
        (on_meta, GATED, {}, ConditionError, "meta device"),
        *(
            (family(name, AutoModelForImageClassification), GATED, {}, AttachError, r"\(b, l, \d+\)")
            for name in ("convnext", "resnet")
        ),
        # Parts of a host, and kinds of adapters that write token by token.
        (text_model("bart"), replace(GATED, layers=(0, 4), where="encoder"), {}, AttachError, r"\[0, 4\].*0 to 3"),
        (text_model("t5"), CHUNKED, {}, AttachError, "T5ForConditionalGeneration"),
        (text_model("t5"), replace(GATED, visible_segments="latest"), {}, AttachError, "T5ForConditionalGeneration"),
        (text_model("t5"), GATED, {"path": "decoder.block"}, AttachError, "kind 'encoder_decoder'"),
        (text_model("bert"), CHUNKED, {}, AttachError, "token by token.*BertForSequenceClassification"),
        (text_model("bert"), replace(GATED, where="encoder"), {}, AttachError, "where='encoder'"),
        (lambda: tiny.make("llama"), replace(GATED, where="encoder"), {}, AttachError, "where='encoder'"),
        # Positions that cannot be moved, and embeddings that are projected to hidden states.
        (lambda: tiny.make("falcon", alibi=True), PassageAdapter(), {}, AttachError, "Falcon"),
        (of_chunks, PassageAdapter(), {}, AttachError, "within chunks"),
        (lambda: tiny.make("opt", word_embed_proj_dim=24), InsertedAdapter(13), {}, AttachError, "width 24, .* 32"),
        # Models of diffusers, beside whose attention nothing fits.
        *((film, adapter, {}, AttachError, "LatteTransformer3DModel") for adapter in (DECOUPLED, None)),
        (of_other_tokens, DECOUPLED, {}, AttachError, "LuminaNextDiT2DModel"),
        (with_a_forward_of_its_own, DECOUPLED, {}, AttachError, "OfItsOwn.*weather"),
        (autoencoder, DECOUPLED, {}, AttachError, "AutoencoderKL.*UNet2DConditionModel"),
        (without_attention_to_texts, DECOUPLED, {}, AttachError, "UNet2DModel.*cross-attention"),
        (lambda: tiny_unets.make().to("meta"), DECOUPLED, {}, ConditionError, "load weights first"),
        (lambda: nn.Linear(3, 5), DECOUPLED, {}, AttachError, "Linear"),
        # Attention with two queries for a token, and layers that do not reach the picture.
        (transformer("StableAudio3DiTModel"), DECOUPLED, {}, AttachError, "queries"),
        (unread, DECOUPLED, {}, ConditionError, r"transformer_blocks\.1\.attn"),
        (transformer(FLUX), replace(DECOUPLED, blocks=("middle",)), {}, AttachError, "middle"),
        (transformer("PRXTransformer2DModel"), COPIED, {}, AttachError, "start='nothing'"),
        (transformer("JoyImageEditTransformer3DModel"), COPIED, {}, AttachError, "start='nothing'"),
        (tiny_unets.make, replace(COPIED, tokens=None), {}, AttachError, "tokens="),
        (tiny_unets.make, AFTER_BLOCKS, {}, AttachError, "added_to='block'"),
        (transformer("SanaTransformer2DModel", **TWO_WIDTHS), AFTER_BLOCKS, {}, AttachError, "added_to='block'"),
        # Not keys of fewer heads, and not those of the text.
        *(
            (transformer(f"{name}Model"), JOINTLY, {}, AttachError, "picture")
            for name in ("AceStepTransformer1D", "Krea2Transformer2D", "WanTransformer3D")
        ),
        # Adapters of another kind of host, and what they name.
        *((make, GATED, {}, AttachError, "") for make in (film, autoencoder, with_a_forward_of_its_own)),
        (tiny_unets.make, GATED, {}, AttachError, "UNet2DConditionModel"),
        (lambda: tiny.make("llama"), DECOUPLED, {}, AttachError, "LlamaForCausalLM.*GatedAdapter"),
        (tiny_unets.make, tiny_unets.adapter(blocks=("down", "middle")), {}, AttachError, "middle.*down_blocks.0"),
        (tiny_unets.make, tiny_unets.adapter(start="host"), {}, AttachError, "start='host'.*17 wide.*13 wide"),
        (tiny_unets.make, DECOUPLED, {"path": "down_blocks"}, AttachError, "path=.*UNet2DConditionModel"),
    ],
)
def test_a_host_that_does_not_fit_is_refused_and_unchanged(make, adapter, options, error, says):
    """Invariants 30, 36, 44, 105."""
    host = make()
    before, weights = traces(host), [one.detach().clone() for one in host.parameters()]
    with pytest.raises(error, match=says or type(host).__name__):
        mmattn.attach(host, adapter, **options)
    no_trace(host, before, "after attach was refused")
    for one, weight in zip(host.parameters(), weights, strict=True):
        assert one.is_meta or torch.equal(one, weight)


# Names


@pytest.mark.parametrize("name", ["1", "x" * 100, "T", "class", "a-b_c"])
def test_a_name_that_attach_takes_can_be_saved_and_loaded(tmp_path, name):
    model = tiny.attach(tiny.make("llama", num_hidden_layers=1), name=name, layers=(0,))
    model.save_adapter(tmp_path, name)
    again = mmattn.load(tiny.make("llama", num_hidden_layers=1), tmp_path, name)
    ids, memory = tiny.text(2), {name: tiny.memory(2)}
    with torch.no_grad():
        assert torch.equal(again(ids, memory=memory).logits, model(ids, memory=memory).logits)
    again.set_adapter(name)


NAMES = ["my pictures", "bilder-ü", "a/b", "-x", "x" * 101, "", "a.b", "a\n", 3, None, True, b"x"]
NAMES += ["keys", "items", "training", "_modules", "_buffers"]


def test_names_are_checked_by_every_verb(tmp_path):
    """Invariant 43: one that could not be saved is refused at once, and nothing changes."""
    model = tiny.attach(tiny.make("llama"))
    model.save_adapter(tmp_path)
    before = traces(model.host)
    for name in NAMES:
        for verb in (
            lambda name=name: model.add_adapter(name, GATED),
            lambda name=name: mmattn.load(model, tmp_path, name),
            lambda name=name: mmattn.attach(model, GATED, name),
        ):
            with pytest.raises(AttachError, match="name"):
                verb()
    no_trace(model.host, before, "after names were refused")
    assert list(model.adapters) == ["default"] == model.active


# Options


def test_a_second_attach_drops_no_option(ids, tmp_path):
    model, unet = mmattn.attach(tiny.make("llama"), GATED, path="model.layers"), tiny_unets.attach(tiny_unets.make())
    mmattn.attach(model, GATED, "second", path="model.layers")
    for host, adapter, options, says in (
        (model, GATED, {"path": "model.other"}, "model.other.*model.layers"),
        (model.host, GATED, {"path": "model.other"}, "model.other.*model.layers"),
        (model, GATED, {"require_memory": True}, "require_memory"),
        (model.host, GATED, {"require_memory": True}, "require_memory"),
        (unet, DECOUPLED, {"path": "down_blocks"}, "path="),
        (unet, DECOUPLED, {"require_memory": True}, "require_memory"),
    ):
        with pytest.raises(AttachError, match=says):
            mmattn.attach(host, adapter, "third", **options)
    assert list(model.adapters) == ["default", "second"] and not model.require_memory
    unet.save_adapter(tmp_path)
    with pytest.raises(mmattn.errors.MmattnError, match="path="):
        mmattn.load(tiny_unets.make(), tmp_path, path="down_blocks")
    # Asked for again, what was decided at first holds.
    strict = mmattn.attach(tiny.make("llama"), GATED, require_memory=True)
    mmattn.attach(strict, GATED, "second", require_memory=True)
    mmattn.attach(strict, GATED, "third")
    with pytest.raises(ConditionError, match="require_memory"):
        strict(ids)


# Hosts whose weights are elsewhere


def offloaded(folder):
    """By accelerate: weights are on the meta device between calls; hooks bring them in."""
    from accelerate import cpu_offload

    host = tiny.make("llama")
    cpu_offload(host, torch.device("cpu"))
    return host


def spread(folder):
    """As `device_map="auto"` does it where not all fits: some layers on disk."""
    tiny.make("llama").save_pretrained(folder / "host")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = dict.fromkeys(parts, "cpu") | {"model.layers.1": "disk", "model.layers.2": "disk"}
    return AutoModelForCausalLM.from_pretrained(
        folder / "host", device_map=where, offload_folder=folder / "disk", dtype=torch.float32
    ).eval()


@pytest.mark.parametrize("make", [offloaded, spread])
@torch.no_grad()
def test_a_host_whose_weights_are_elsewhere(make, ids, tmp_path):
    memory, lm = tiny.memory(3), make(tmp_path)
    assert "meta" in {one.device.type for one in lm.parameters()}
    want, model = tiny.attach(tiny.make("llama"))(ids, memory=memory).logits, tiny.attach(lm)
    assert torch.equal(model(ids, memory=memory).logits, want) and torch.equal(model(ids).logits, own(ids))
    assert model.generate(ids, memory=memory, max_new_tokens=2).shape == (3, 9)
    assert model.unload() is lm and torch.equal(lm(ids).logits, own(ids))


def test_an_end_token_that_is_none_of_the_hosts_refuses_nothing():
    """A small GPT-2 with the defaults of its config: its end has the number of the large one's."""
    host = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt2"](vocab_size=53, n_embd=24, n_layer=3, n_head=3))
    assert host.config.eos_token_id > 53
    for adapter in (GATED, mmattn.adapters.JoinedAdapter(tiny.MEMORY_DIM, every=1), mmattn.adapters.PassageAdapter()):
        mmattn.attach(host, adapter).unload()


# `attach_check` from a config alone, beside `attach` with weights


HOSTS = [
    ("llama", "AutoModelForCausalLM", None),
    ("gemma3", "AutoModelForImageTextToText", None),
    ("deepseek_v4", "AutoModelForCausalLM", None),
    ("t5", "AutoModelForSeq2SeqLM", "encoder"),
    ("whisper", "AutoModelForSpeechSeq2Seq", "decoder"),
    ("bert", "AutoModelForSequenceClassification", None),
    ("vit", "AutoModelForImageClassification", None),
]


@pytest.mark.parametrize(("family", "auto", "where"), HOSTS)
def test_it_tells_what_attach_does(family: str, auto: str, where: str | None) -> None:
    host = tiny_model(family, getattr(transformers, auto))
    config = host.config
    config.architectures = [type(host).__name__]
    report = attach_check(config, memory_dim=13, every=2, where=where)
    assert report.ok and report.undecided is None
    model = mmattn.attach(host, mmattn.GatedAdapter(memory_dim=13, every=2, where=where))
    adapter = model.adapter("default")
    assert (report.host, report.kind, report.layers) == (type(host).__name__, model.kind, adapter.layers)
    trained, whole = model.trainable_parameters()
    assert report.parameters == (trained, whole - trained)
    paths = {site.module.rpartition(".")[0] for site in model.sites("after")}
    assert {path for _, path, _, _ in report.stacks} == paths


@pytest.mark.parametrize(("family", "why"), [("xlnet", "no adapter can be put on it"), ("reformer", "reversible")])
def test_it_refuses_what_attach_refuses(family: str, why: str) -> None:
    report = attach_check(tiny_config(family), every=1)
    assert not report.ok and why in str(report)
    with pytest.raises(AttachError, match=why):
        mmattn.attach(tiny_model(family, transformers.AutoModelForCausalLM), mmattn.GatedAdapter(memory_dim=5, every=1))


def test_what_depends_on_values_is_said() -> None:
    """Which experts are asked, Jet MoE reads off the tensors themselves."""
    report = attach_check(tiny_config("jetmoe"), every=2)
    assert report.ok and report.undecided is not None and "undecided without weights" in str(report)


def test_a_model_of_any_size_takes_no_memory() -> None:
    config = LlamaConfig(hidden_size=65536, intermediate_size=212992, num_hidden_layers=2, num_attention_heads=128)
    report = attach_check(config)
    assert report.parameters[1] > 100e9 and report.layers == (1,)


def test_what_is_no_model() -> None:
    config = LlamaConfig(num_attention_heads=4, hidden_size=32)
    config.architectures = ["LlamaForCausalLM"]
    config.hidden_act = "nothing"
    with pytest.raises(AdapterFileError, match="transformers makes no model of this LlamaConfig.*nothing"):
        attach_check(config)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config: Any = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=5, num_attention_heads=4)
    config.save_pretrained(tmp_path)
    code, out, _ = call(capsys, "attach-check", tmp_path, "--every", 2, "--memory-dim", 13)
    assert code == 0 and "model.layers, 5 of width 64" in out and "at layers [1, 3]" in out
    code, out, _ = call(capsys, "attach-check", tmp_path, "--where", "encoder")
    assert code == 1 and "where='encoder'" in out
    code, _, said = call(capsys, "attach-check", tmp_path / "nothing")
    assert code == 2 and said.count("\n") == 1 and "it is no folder, and the hub has no such model" in said
    (tmp_path / "config.json").write_text("{}")
    code, _, said = call(capsys, "attach-check", tmp_path)
    assert code == 2 and said.count("\n") == 1 and "is no config of transformers" in said


# Adapters that are put on a host inside a mode of torch: as outside of it, or refused in words


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "bfloat16 by default": lambda: tiny.default_dtype(torch.bfloat16),
    "float16 by default": lambda: tiny.default_dtype(torch.float16),
    "float64 by default": lambda: tiny.default_dtype(torch.float64),
    "device meta": lambda: torch.device("meta"),
    "init_empty_weights with buffers": lambda: init_empty_weights(include_buffers=True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
KINDS: dict[str, Callable[[], Any]] = {
    "gated": lambda: mmattn.GatedAdapter(memory_dim=13, every=1, num_heads=2),
    "resampler": lambda: mmattn.GatedAdapter(memory_dim=13, every=2, num_heads=2, resampler={"num_latents": 3}),
    "joined": lambda: JoinedAdapter(memory_dim=13, every=1),
    "inserted": lambda: InsertedAdapter(memory_dim=13),
}


def check_dtype(model: Any, mode: str) -> None:
    dtype = torch.float64 if mode == "float64 by default" else torch.float32
    weights = [*model.adapters.parameters(), *model.adapters.buffers()]
    assert {one.dtype for one in weights if one.is_floating_point()} == {dtype}
    assert {one.device.type for one in weights} == {"cpu"} and not any(one.is_inference() for one in weights)


def check_trains(model: Any) -> None:
    ids = tiny.text(2)
    model(ids, memory=tiny.memory(2), labels=ids).loss.backward()
    gradients = [one.grad for one in model.adapters.parameters() if one.grad is not None]
    assert any(bool(one.any()) for one in gradients) and all(bool(one.isfinite().all()) for one in gradients)
    model.zero_grad()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_attach_and_load(mode: str, kind: str, tmp_path: Path) -> None:
    """Invariant 153."""
    ids, memory = tiny.text(2), tiny.memory(2)
    saved = tiny.open_gates(mmattn.attach(tiny.make("llama"), KINDS[kind]()))
    saved.save_adapter(tmp_path)
    with torch.no_grad():
        wanted = saved(ids, memory=memory).logits
    host = tiny.make("llama")
    with MODES[mode]():
        model = mmattn.attach(host, KINDS[kind]())
    check_dtype(model, mode)
    tiny.open_gates(model)
    check_trains(model)
    model.unload()
    host = tiny.make("llama")
    with MODES[mode]():
        loaded = mmattn.load(host, tmp_path)
        mmattn.load(loaded, tmp_path, "second")
        loaded.add_adapter("third", mmattn.GatedAdapter(memory_dim=13, every=2, num_heads=2))
    check_dtype(loaded, mode)
    loaded.delete_adapter("third")
    loaded.delete_adapter("second")
    with torch.no_grad():
        tiny.assert_close(loaded(ids, memory=memory).logits, wanted)
    check_trains(loaded)


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "autocast"])
def test_calibrate(mode: str) -> None:
    """Invariant 153."""
    model = mmattn.attach(tiny.make("llama"), KINDS["gated"]())
    with MODES[mode]():
        model.calibrate(tiny.text(2), memory=tiny.memory(2))
    check_dtype(model, mode)
    check_trains(tiny.open_gates(model))


@pytest.mark.parametrize("mode", [name for name in MODES if name != "autocast"])
def test_weights_that_begin_as_the_hosts(mode: str) -> None:
    """Invariant 153: of a UNet, whose projections are copied as they are."""
    unet = tiny_unets.make()
    start: dict[str, Any] = {"start": "host", "memory_dim": tiny_unets.TEXT_DIM}
    wanted = tiny_unets.attach(tiny_unets.make(), opened=False, **start).adapters.state_dict()
    with MODES[mode]():
        model = mmattn.attach(unet, tiny_unets.adapter(**start))
    check_dtype(model, mode)
    state = model.adapters.state_dict()
    copied = [name for name in state if "k_proj" in name or "v_proj" in name]
    assert copied and all(torch.equal(state[name].float(), wanted[name]) for name in copied)


def test_weights_without_values_are_refused(tmp_path: Path) -> None:
    """Invariant 153: nothing is changed then."""
    host = tiny.make("llama")
    mmattn.attach(tiny.make("llama"), KINDS["gated"]()).save_adapter(tmp_path)
    before = dict(vars(host))
    for put in (lambda: mmattn.attach(host, KINDS["gated"]()), lambda: mmattn.load(host, tmp_path)):
        with (
            init_empty_weights(include_buffers=False),
            pytest.raises(ConditionError, match="outside of init_empty_weights"),
        ):
            put()
    assert vars(host).keys() == before.keys()
    model = mmattn.attach(host, KINDS["gated"]())
    with (
        init_empty_weights(include_buffers=False),
        pytest.raises(ConditionError, match="outside of init_empty_weights"),
    ):
        model.add_adapter("second", KINDS["gated"]())
    assert list(model.adapters) == model.active == ["default"]
