"""Hosts whose weights are on the disk, in 8 bits, in 4, or in half precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting
from torch import nn

import mmattn
from mmattn import training
from mmattn.errors import AttachError, ConditionError
from mmattn.testing.case import cast, no_trace, traces
from tests import tiny, tiny_transformers, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_transformers import given, make, run
from tests.transformer_sizes import NAMES

ROWS = 3
CPU = torch.device("cpu")
HOSTS = ("stable", "SD3Transformer2DModel", "FluxTransformer2DModel", "PixArtTransformer2DModel")
TEXT_LAYERS = ("stable", "PixArtTransformer2DModel")


def offload(host: Any, kind: str, folder: Path) -> None:
    """Keep its weights on the disk, but for those that are in use."""
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(host, CPU, offload_type=kind, offload_to_disk_path=str(folder), **blocks)


def store(host: Any, way: str, folder: Path) -> None:
    """Store its weights so that they are there only while a layer runs."""
    if way == "accelerate":
        cpu_offload(host, execution_device=CPU)
    elif way == "float8":
        host.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    else:
        offload(host, way, folder)


def plain(family: str, way: str, folder: Path) -> Any:
    """The host that computes the same with its weights in memory."""
    host = make(family)
    if way == "float8":
        store(stored := make(family), way, folder)
        with torch.no_grad():
            for parameter, value in zip(host.parameters(), stored.parameters(), strict=True):
                parameter.copy_(value.float())
    return host


@pytest.mark.parametrize("after", [False, True], ids=["stored after attach", "stored before"])
@pytest.mark.parametrize("way", ["leaf_level", "block_level", "float8", "accelerate"])
@pytest.mark.parametrize("family", HOSTS)
@torch.no_grad()
def test_memory_is_seen_as_with_weights_in_memory(family: str, way: str, after: bool, tmp_path: Path) -> None:
    """Invariant 155."""
    reference = tiny_transformers.attach(plain(family, way, tmp_path / "reference"))
    batch, memory = given(reference, ROWS), tiny.memory(ROWS, lengths=[5, 0, 3])
    want = run(reference, batch, memory=memory)
    host = make(family)
    if after:
        store(host, way, tmp_path / "host")
    model = tiny_transformers.attach(host, opened=False)
    model.adapters.load_state_dict(reference.adapters.state_dict())
    if not after:
        store(host, way, tmp_path / "host")
    own, got = run(model, batch), run(model, batch, memory=memory)
    assert got.isfinite().all()
    assert_close(got, want)
    assert torch.equal(got[1], own[1]) and differs(got[0], own[0])
    assert torch.equal(run(model.unload(), batch), own)


@pytest.mark.parametrize("way", ["leaf_level", "float8"])
@pytest.mark.parametrize("family", TEXT_LAYERS)
@torch.no_grad()
def test_the_text_goes_through_the_core(family: str, way: str, tmp_path: Path) -> None:
    """Invariant 155: few queries over a short text, where the core would rather multiply weights itself."""
    answers = []
    for stored in (False, True):
        host = make(family) if stored else plain(family, way, tmp_path / "reference")
        model = tiny_transformers.attach(host)
        if stored:
            store(host, way, tmp_path / "host")
        batch, mask = given(model, ROWS), torch.ones(ROWS, 7 if family == "stable" else 5, dtype=torch.bool)
        mask[0, 2:], mask[1] = False, False
        model.use_core()
        answers.append(run(model, batch, memory=tiny.memory(ROWS), text_mask=mask))
    assert answers[1].isfinite().all()
    assert_close(answers[1], answers[0])


@pytest.mark.parametrize("family", ["stable", "SD3Transformer2DModel"])
@torch.no_grad()
def test_copies_of_projections(family: str, tmp_path: Path) -> None:
    """Invariant 155: a copy of what the host multiplies with, or refused."""

    def copied(host: Any) -> dict[str, torch.Tensor]:
        model = mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=tiny.MEMORY_DIM, tokens=2, start="host"))
        state: dict[str, torch.Tensor] = model.adapters.state_dict()
        return {name: value for name, value in state.items() if "k_proj" in name or "v_proj" in name}

    want = copied(make(family))
    for way in ("leaf_level", "accelerate", "lora"):
        host = make(family)
        tiny_unets.lora(host) if way == "lora" else store(host, way, tmp_path / way)
        for name, value in copied(host).items():
            assert_close(value, want[name])
    host = make(family)
    store(host, "block_level", tmp_path / "blocks")
    before = traces(host)
    with pytest.raises(AttachError, match="on the disk: attach before apply_group_offloading"):
        copied(host)
    no_trace(host, before, "after attach was refused")


@pytest.mark.parametrize("family", ["SD3Transformer2DModel", "PixArtTransformer2DModel"])
@torch.no_grad()
def test_hosts_in_4_bits(family: str) -> None:
    """Invariant 155: their weights lie in a row, two in a byte."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    host, plain_host = make(family), make(family)
    for name, layer in list(host.named_modules()):
        if not (type(layer) is nn.Linear and ".attn" in name):
            continue
        size = layer.in_features, layer.out_features
        packed = bitsandbytes.nn.Linear4bit(*size, layer.bias is not None, compute_dtype=torch.float32)
        packed.weight = bitsandbytes.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, module=packed)
        packed.bias, packed.support_avx512bf16_for_cpu = layer.bias, False
        host.set_submodule(name, packed.to("cpu"))
        unit = torch.eye(layer.in_features)
        plain_host.get_submodule(name).weight.copy_((packed(unit) - packed(torch.zeros_like(unit))).T)
    settings = {"tokens": 2, "start": "host"}
    reference, model = (tiny_transformers.attach(one.eval(), opened=False, **settings) for one in (plain_host, host))
    for name, value in reference.adapters.state_dict().items():
        if "k_proj" in name or "v_proj" in name:
            assert_close(model.adapters.state_dict()[name], value)
    model.adapters.load_state_dict(reference.adapters.state_dict())
    batch, memory = given(model, ROWS), tiny.memory(ROWS, lengths=[5, 0, 3])
    assert differs(run(model, batch, memory=memory)[0], run(model, batch)[0])
    assert_close(run(model, batch, memory=memory), run(reference, batch, memory=memory))
    assert_close(run(model.use_core(), batch, memory=memory), run(reference.use_core(), batch, memory=memory))


def test_no_fingerprint_of_weights_that_are_not_there(tmp_path: Path) -> None:
    """Invariant 155: an adapter saved beside a host on the disk names no weights, and loads without a warning."""
    host = make("SD3Transformer2DModel")
    model = tiny_transformers.attach(host)
    offload(host, "leaf_level", tmp_path / "host")
    model.save_adapter(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["host"]["fingerprint"] is None
    mmattn.load(make("SD3Transformer2DModel"), tmp_path / "adapter")


# Language models whose weights are brought in while a layer runs: group offloading of diffusers, 8-bit storage


def store_language_model(host: Any, way: str, folder: Path) -> Any:
    """Keep its weights on the disk, or in 8 bits, while no layer runs."""
    if way == "float8":
        apply_layerwise_casting(host, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=("norm",))
    else:
        apply_group_offloading(host, CPU, offload_type=way, offload_to_disk_path=str(folder))
    return host


def test_no_loss_in_chunks_of_a_head_that_is_brought_in(tmp_path: Path) -> None:
    """Invariant 155: the gradient of such a loss multiplies the weight itself."""
    batch = training.collate([[5, 6, 7, 8]], tiny.memory(1))
    for way in ("leaf_level", "float8"):
        model = tiny.attach(store_language_model(tiny.make("llama"), way, tmp_path))
        with pytest.raises(ConditionError, match="no loss in chunks: "):
            training.token_nats(model, batch, chunk_size=2)
        with torch.no_grad():
            assert torch.equal(training.token_nats(model, batch, "auto"), training.token_nats(model, batch, None))
    hooked = tiny.attach(tiny.make("llama"))
    hooked.host.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(ConditionError, match="hooks"):
        training.token_nats(hooked, batch, chunk_size=2)


@torch.no_grad()
def test_packed_rows_of_a_host_in_8_bits(tmp_path: Path) -> None:
    """Invariant 155: the mask that keeps documents of MPT apart has the dtype in which it computes."""
    model = tiny.attach(store_language_model(tiny.make("mpt"), "float8", tmp_path))
    ids, memory = tiny.text(1), tiny.memory(2)
    packed = model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), use_cache=False, memory=memory).logits
    parts = [
        model(ids[:, part], memory=memory[torch.tensor([n])]).logits for n, part in enumerate((slice(3), slice(3, 7)))
    ]
    assert packed.isfinite().all()
    assert_close(packed, torch.cat(parts, 1))


@pytest.mark.parametrize(
    "adapter",
    [mmattn.adapters.InsertedAdapter(tiny.MEMORY_DIM), mmattn.adapters.PrefixAdapter(3)],
    ids=lambda x: x.kind,
)
def test_frequencies_on_the_disk(adapter: Any, tmp_path: Path) -> None:
    """Invariant 155: they are read at attach, and are not there."""
    host = store_language_model(tiny.make("llama"), "leaf_level", tmp_path)
    with pytest.raises(AttachError, match="leave offload_to_disk_path out, or attach before"):
        mmattn.attach(host, adapter)
    assert "_mmattn" not in vars(host)
    ids = tiny.text(2)
    with torch.no_grad():
        assert_close(host(ids).logits, tiny.own(ids))


# Loaded in half precision, where diffusers keeps some weights in float32

#: diffusers itself makes none from this config.
FAMILIES = ["stable", *(family for family in NAMES if family != "Transformer2DModel")]
FAST = (
    "stable",
    "WanTransformer3DModel",
    "SD3Transformer2DModel",
    "PixArtTransformer2DModel",
    "QwenImageTransformer2DModel",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
)
def test_hosts_in_half(family, dtype, tmp_path):
    """Invariant 129: a host that can be attached to in float32 can be in half, and answers with and without memory."""
    whole = make(family)
    whole.save_pretrained(tmp_path)
    host = type(whole).from_pretrained(tmp_path, dtype=dtype).eval()
    host.requires_grad_(False)  # torch chooses between matrix products by it, even without gradients
    try:
        tiny_transformers.attach(whole)
    except AttachError:
        with pytest.raises(AttachError):
            tiny_transformers.attach(host)
        return
    dtypes = {name: one.dtype for name, one in host.named_parameters()}
    model = tiny_transformers.attach(host)
    adapter = model.adapter("default")
    with torch.no_grad():
        for layer in adapter.layers:
            adapter.attention(layer).v_proj.weight.mul_(32)  # well above the rounding of halves
    assert {name: one.dtype for name, one in host.named_parameters()} == dtypes
    batch = given(model, 2)
    batch = cast(batch, dtype) if family == "stable" else batch
    alone, out = run(model, batch), run(model, batch, memory=tiny.memory(2))
    assert out.dtype == dtype and out.isfinite().all() and tiny.differs(out, alone, 2e-3)
    assert torch.equal(run(model, batch, memory=tiny.memory(2), adapter_scale=0.0), alone)
    model.unload()
    assert torch.equal(run(host, batch), alone)
