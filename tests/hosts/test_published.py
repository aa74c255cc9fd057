"""Published gated cross-attention: the logits of transformers' Idefics and Mllama, and of OpenFlamingo's equations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    IdeficsConfig,
    IdeficsForVisionText2Text,
    LlamaConfig,
    LlamaForCausalLM,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

import mmattn
from mmattn.errors import AdapterFileError, AttachError, ConfigError, NonFiniteError, ShapeError
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs

ROWS, LENGTH, PATCHES, IMAGES = 3, 7, 5, 2
SLOTS = IMAGES * PATCHES
HOST = {"hidden_size": 32, "intermediate_size": 53, "num_attention_heads": 4, "vocab_size": tiny.VOCAB}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
# How many images began at or before each token: from the middle on, from the start, and never.
BEGUN = torch.tensor([[0, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]])
ALWAYS = torch.tensor([[1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 1], [1, 2, 2, 2, 2, 2, 2]])


def randomised(model, seed=3):
    """The model with weights that matter: matrices large, norms around 1, gates open."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.2)
            else:
                parameter.normal_(0, 0.7)
    return model.eval()


def states(e, seed=0):
    """States of images (b, m, e), of which the second row has one image only and the third none, and their memory."""
    tokens = torch.randn(ROWS, SLOTS, e, generator=torch.Generator().manual_seed(seed))
    segments = torch.arange(SLOTS).expand(ROWS, SLOTS) // PATCHES
    return tokens, segments


def seen(begun):
    """Which images (b, l, i) each token sees: the latest."""
    return begun[..., None] == torch.arange(1, IMAGES + 1)


# Idefics


def idefics(alpha="float", interval=1, layers=4, **changes):
    config = IdeficsConfig(
        **HOST,
        **SPECIAL,
        num_hidden_layers=layers,
        cross_layer_interval=interval,
        alpha_type=alpha,
        rms_norm_eps=1e-3,
        vision_config={
            "embed_dim": tiny.MEMORY_DIM,
            "intermediate_size": 17,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 8,
            "patch_size": 4,
        },
        **changes,
    )
    return randomised(IdeficsForVisionText2Text(config))


def text_part(model, layers, **changes):
    """The Llama that a published model is built around, on copies of its weights."""
    config = LlamaConfig(**(HOST | SPECIAL | {"num_hidden_layers": len(layers), "rms_norm_eps": 1e-3} | changes))
    lm = LlamaForCausalLM(config).eval()
    theirs = {name.replace("model.language_model.", "model."): value for name, value in model.state_dict().items()}
    state = {}
    for name in lm.state_dict():
        there = name
        if name.startswith("model.layers."):
            _, _, number, rest = name.split(".", 3)
            there = f"model.layers.{layers[int(number)]}.{rest}"
        state[name] = theirs[there][: tiny.VOCAB] if "embed_tokens" in name else theirs[there]
    lm.load_state_dict(state)
    return lm


def by_idefics(model, ids, tokens, begun):
    given = tokens.unflatten(1, (IMAGES, PATCHES))
    with torch.no_grad():
        return model(ids, image_encoder_embeddings=given, image_attention_mask=seen(begun).long()).logits


IDEFICS = {
    "one number": {},
    "a number per channel": {"alpha": "vector"},
    "every second layer": {"interval": 2},
    "norms of queries and keys": {"alpha": "vector", "qk_layer_norms": True, "interval": 4},
}


@pytest.mark.parametrize("options", IDEFICS.values(), ids=list(IDEFICS))
@torch.no_grad()
def test_idefics(options):
    theirs, ids = idefics(**options), tiny.text(ROWS, LENGTH)
    lm = text_part(theirs, range(4))
    own = lm(ids).logits
    model = mmattn.load_published(lm, "idefics", theirs.state_dict())
    assert model.adapters["default"].layers == tuple(range(0, 4, options.get("interval", 1)))
    tokens, segments = states(tiny.MEMORY_DIM)
    # Images that no token of a row sees are padding.
    mask = segments < torch.tensor([2, 1, 0])[:, None]
    garbage = tokens.masked_fill(~mask[..., None], float("nan"))
    memory = mmattn.Memory(garbage, mask, segments, check_finite=False)
    want = by_idefics(theirs, ids, tokens, BEGUN)
    got = model(ids, memory=memory, images=BEGUN).logits
    assert_close(got, want)
    assert differs(want, own)  # also the third row, whose tokens see no image: their feed-forward acts
    assert_close(model(ids, memory=mmattn.Memory(tokens, segments=segments), images=BEGUN).logits, want)
    other = mmattn.Memory(states(tiny.MEMORY_DIM, seed=1)[0], mask, segments)
    changed = model(ids, memory=other, images=BEGUN).logits
    assert differs(changed[:2], want[:2]) and torch.equal(changed[2], got[2])
    assert torch.equal(changed[0, 0], got[0, 0])  # the first word of the first row comes before its images
    assert torch.equal(model(ids).logits, own)


@torch.no_grad()
def test_idefics_without_its_feed_forward_is_silent_where_nothing_is_seen():
    theirs, ids = idefics(), tiny.text(ROWS, LENGTH)
    state = theirs.state_dict()
    for name in state:
        if "alpha_dense" in name:
            state[name].zero_()
    lm = text_part(theirs, range(4))
    own = lm(ids).logits
    tokens, segments = states(tiny.MEMORY_DIM)
    out = mmattn.load_published(lm, "idefics", state)(
        ids, memory=mmattn.Memory(tokens, segments=segments), images=BEGUN
    )
    assert torch.equal(out.logits[2], own[2]) and differs(out.logits[:2], own[:2])
    assert_close(out.logits, by_idefics(theirs, ids, tokens, BEGUN))


@torch.no_grad()
def test_idefics_writes_on_and_is_kept(tmp_path):
    """Words after the prompt see its last image; what was read is an adapter like others."""
    theirs, ids, media_token = idefics(interval=2), tiny.text(ROWS, LENGTH), 3
    ids = ids.masked_fill(ids == media_token, 4)
    ids[:, 0] = ids[0, 3] = media_token
    tokens, segments = states(tiny.MEMORY_DIM)
    memory = mmattn.Memory(tokens, segments=segments)
    model = mmattn.load_published(text_part(theirs, range(4)), "idefics", theirs.state_dict(), media_token=media_token)
    out = model.generate(ids, memory=memory, max_new_tokens=3, do_sample=False)
    begun = (ids == media_token).cumsum(1)
    begun = torch.cat([begun, begun[:, -1:].expand(-1, 3)], 1)
    want = by_idefics(theirs, out, tokens, begun)
    assert torch.equal(want[:, LENGTH - 1 : -1].argmax(-1), out[:, LENGTH:])
    model.save_adapter(tmp_path / "adapter")
    again = mmattn.load(text_part(theirs, range(4)), tmp_path / "adapter")
    assert torch.equal(again(ids, memory=memory).logits, model(ids, memory=memory).logits)


# Mllama


def mllama(cross=(1, 3), layers=5, kv_heads=2):
    text = HOST | SPECIAL | {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-3}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 17,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
        "max_num_tiles": 1,
        "vision_output_dim": 32,
        "intermediate_layers_indices": [0],
        "supported_aspect_ratios": [[1, 1]],
    }
    config = MllamaConfig(text_config=text | {"cross_attention_layers": list(cross)}, vision_config=vision)
    return randomised(MllamaForConditionalGeneration(config))


def around(theirs, cross):
    """The Llama made of the layers that are not cross-attention."""
    text = theirs.config.text_config
    layers = [layer for layer in range(text.num_hidden_layers) if layer not in cross]
    kv_heads = text.num_key_value_heads
    return text_part(theirs, layers, num_key_value_heads=kv_heads, rope_parameters=text.rope_parameters)


def by_mllama(model, ids, tokens, begun):
    # Without a mask its SDPA is causal in the slots; everything is said by ones.
    mask = torch.ones(ROWS, LENGTH, IMAGES, 1) if begun is None else seen(begun).long()[..., None]
    with torch.no_grad():
        return model(ids, cross_attention_states=tokens, cross_attention_mask=mask).logits


@pytest.mark.parametrize(("cross", "layers"), [((1, 3), (1, 2)), ((0, 4), (0, 3))])
@torch.no_grad()
def test_mllama(cross, layers):
    theirs, ids = mllama(cross, layers=6), tiny.text(ROWS, LENGTH)
    lm = around(theirs, cross)
    own = lm(ids).logits
    assert_close(own, theirs(ids).logits)  # without images it passes over its cross-attention
    model = mmattn.load_published(lm, "mllama", theirs.state_dict())
    assert model.adapters["default"].layers == layers
    tokens, segments = states(32)
    memory = mmattn.Memory(tokens, segments=segments)
    want = by_mllama(theirs, ids, tokens, ALWAYS)
    assert_close(model(ids, memory=memory, images=ALWAYS).logits, want)
    assert differs(want, own)
    other = mmattn.Memory(states(32, seed=1)[0], segments=segments)
    assert differs(model(ids, memory=other, images=ALWAYS).logits, want)
    everything = mmattn.load_published(lm, "mllama", theirs.state_dict(), "everything", look="all")
    with everything.disabled("default"):
        out = everything(ids, memory={"everything": mmattn.Memory(tokens)}).logits
    assert_close(out, by_mllama(theirs, ids, tokens, None))


@torch.no_grad()
def test_mllama_before_its_first_image():
    """Theirs lets words before an image look at all slots, so that they change with it; here they see nothing."""
    theirs, ids = mllama(), tiny.text(ROWS, LENGTH)
    lm = around(theirs, (1, 3))
    own = lm(ids).logits
    model = mmattn.load_published(lm, "mllama", theirs.state_dict())
    tokens, segments = states(32)
    out = model(ids, memory=mmattn.Memory(tokens, segments=segments), images=BEGUN).logits
    leaks = by_mllama(theirs, ids, tokens, BEGUN)
    assert torch.equal(out[2], own[2]) and torch.equal(out[0, 0], own[0, 0])
    assert differs(leaks[2:], own[2:]) and differs(leaks[:1, 0], own[:1, 0])
    assert_close(out[1], leaks[1])


# OpenFlamingo


def open_flamingo(at, e=tiny.MEMORY_DIM, heads=2, head_dim=8, d=32, prefix="lang_encoder.model.layers."):
    """Random weights of its blocks before some decoder layers, in its names."""
    generator, inner = torch.Generator().manual_seed(5), heads * head_dim

    def random(*shape):
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"perceiver.latents": random(7, e), "lang_encoder.lm_head.weight": random(tiny.VOCAB, d)}
    for layer in at:
        block = {
            "attn_gate": random(1) + 0.7,
            "attn.norm.weight": 1 + random(d),
            "attn.norm.bias": random(d),
            "attn.to_q.weight": random(inner, d),
            "attn.to_kv.weight": random(2 * inner, e),
            "attn.to_out.weight": random(d, inner),
            "ff_gate": random(1) - 0.7,
            "ff.0.weight": 1 + random(d),
            "ff.0.bias": random(d),
            "ff.1.weight": random(4 * d, d),
            "ff.3.weight": random(d, 4 * d),
        }
        tensors |= {f"{prefix}{layer}.gated_cross_attn_layer.{name}": value for name, value in block.items()}
    return tensors


def flamingo_block(w, x, media, begun, heads, immediate):
    """Its equations: x (b, l, d), media (b, i, n, e), begun (b, l) images so far; text sees the last or all of them."""
    b, images, n, _ = media.shape
    media = media.reshape(b, images * n, -1)
    q = F.layer_norm(x, x.shape[-1:], w["attn.norm.weight"], w["attn.norm.bias"]) @ w["attn.to_q.weight"].T
    k, v = (media @ w["attn.to_kv.weight"].T).chunk(2, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (q, k, v))
    scores = q / q.shape[-1] ** 0.5 @ k.transpose(-1, -2)
    time = torch.arange(1, images + 1).repeat_interleave(n)
    looks = begun[..., None] == time if immediate else begun[..., None] >= time
    weights = scores.masked_fill(~looks[:, None], -torch.finfo(scores.dtype).max).softmax(-1)
    if immediate:
        weights = weights.masked_fill((begun == 0)[:, None, :, None], 0)
    found = (weights @ v).transpose(1, 2).flatten(2) @ w["attn.to_out.weight"].T
    x = found * w["attn_gate"].tanh() + x
    hidden = F.gelu(F.layer_norm(x, x.shape[-1:], w["ff.0.weight"], w["ff.0.bias"]) @ w["ff.1.weight"].T)
    return hidden @ w["ff.3.weight"].T * w["ff_gate"].tanh() + x


def by_open_flamingo(tensors, at, ids, tokens, begun, immediate=True, heads=2):
    lm = tiny.make("llama")
    media = tokens.unflatten(1, (IMAGES, PATCHES))
    for layer in at:
        mark = f".{layer}.gated_cross_attn_layer."
        w = {name.split(mark)[1]: value for name, value in tensors.items() if mark in name}

        def before(_, args, w=w):
            return flamingo_block(w, args[0], media, begun, heads, immediate), *args[1:]

        lm.model.layers[layer].register_forward_pre_hook(before)
    with torch.no_grad():
        return lm(ids).logits


@pytest.mark.parametrize("at", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("look", ["latest", "previous"])
@torch.no_grad()
def test_open_flamingo(at, look):
    tensors, ids = open_flamingo(at), tiny.text(ROWS, LENGTH)
    own = tiny.own(ids)
    model = mmattn.load_published(tiny.make("llama"), "openflamingo", tensors, look=look, num_heads=2)
    tokens, segments = states(tiny.MEMORY_DIM)
    memory = mmattn.Memory(tokens, segments=segments)
    begun = BEGUN if look == "latest" else ALWAYS
    want = by_open_flamingo(tensors, at, ids, tokens, begun, look == "latest")
    assert_close(model(ids, memory=memory, images=begun).logits, want)
    assert differs(want, own)
    changed = mmattn.Memory(torch.cat([states(tiny.MEMORY_DIM, seed=1)[0][:, :PATCHES], tokens[:, PATCHES:]], 1))
    changed = mmattn.Memory(changed.tokens, segments=segments)
    # The first image of the first row: seen by its last word only through all previous ones, or through other words.
    assert differs(model(ids, memory=changed, images=begun).logits[:2], want[:2])
    with pytest.raises(ShapeError, match=look):
        model(ids, memory=mmattn.Memory(tokens), images=begun)


@torch.no_grad()
def test_open_flamingo_by_its_media_token():
    tensors, ids, media_token = open_flamingo((1,), heads=1, head_dim=64), tiny.text(ROWS, LENGTH), 3
    ids = ids.masked_fill(ids == media_token, 4)
    ids[0, 1] = ids[0, 4] = ids[1, 0] = media_token
    model = mmattn.load_published(tiny.make("llama"), "openflamingo", tensors, media_token=media_token)
    assert model.adapters["default"].config.num_heads == 1  # heads are 64 wide
    tokens, segments = states(tiny.MEMORY_DIM)
    got = model(ids, memory=mmattn.Memory(tokens, segments=segments)).logits
    assert_close(got, by_open_flamingo(tensors, (1,), ids, tokens, BEGUN, heads=1))


# Files


@torch.no_grad()
def test_from_files(tmp_path):
    theirs, ids = mllama(), tiny.text(ROWS, LENGTH)
    state = {name: value.contiguous() for name, value in theirs.state_dict().items()}
    names = sorted(state)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(state, tmp_path / "one.safetensors")
    torch.save(state, tmp_path / "one.bin")
    for part in range(2):
        save_file({name: state[name] for name in names[part::2]}, folder / f"model-{part}.safetensors")
    hub = {name.replace("model.language_model.", "language_model.model."): value for name, value in state.items()}
    only = {name: value.half() for name, value in state.items() if ".layers.1." in name or ".layers.3." in name}
    tokens, segments = states(32)
    given = {"memory": mmattn.Memory(tokens, segments=segments), "images": ALWAYS}
    want = by_mllama(theirs, ids, tokens, ALWAYS)
    for weights in (tmp_path / "one.safetensors", str(tmp_path / "one.bin"), folder, hub):
        assert_close(mmattn.load_published(around(theirs, (1, 3)), "mllama", weights)(ids, **given).logits, want)
    model = mmattn.load_published(around(theirs, (1, 3)), "mllama", only)
    assert {one.dtype for one in model.adapters.parameters()} == {torch.float32}
    assert_close(model(ids, **given).logits, want, 1e-2)


def faults():
    """What is wrong: family, weights, host, and what the message says."""
    good, flamingo = idefics(interval=2).state_dict(), open_flamingo((1,))
    block, old = "model.gated_cross_attn_layers.1.", "lang_encoder.model.layers.1.gated_cross_attn_layer."
    wide = {"hidden_size": 48, "intermediate_size": 53}

    def without(tensors, name):
        return {key: value for key, value in tensors.items() if key != name}

    def idefics_host(**changes):
        return tiny.make("llama", **({"num_hidden_layers": 4, "num_key_value_heads": 4} | changes))

    trailing = mllama((1, 4)).state_dict()
    return {
        "another family": ("mllama", good, idefics_host(), "no gated cross-attention of mllama"),
        "nothing": ("idefics", {}, idefics_host(), "no gated cross-attention of idefics"),
        "two models": ("idefics", good | {"b." + key: good[key] for key in good}, idefics_host(), "several models"),
        "missing": ("idefics", without(good, block + "alpha_dense"), idefics_host(), f"1 missing: {block}alpha_dense"),
        "unknown": ("idefics", good | {block + "bias": torch.zeros(3)}, idefics_host(), f"1 unexpected: {block}bias"),
        "activation": ("idefics", good, idefics_host(hidden_act="gelu"), "SwiGLU"),
        "shape": (
            "idefics",
            good | {block + "mlp.up_proj.weight": torch.zeros(51, 32)},
            idefics_host(),
            r"up_proj.weight \[51, 32\].* needed \[53, 32\]",
        ),
        "gate": (
            "idefics",
            good | {block + "alpha_dense": torch.zeros(1, 1, 32)},
            idefics_host(),
            r"alpha_dense \[1, 1, 32\].* needed \[1\]",
        ),
        "integers": (
            "idefics",
            good | {block + "alpha_dense": torch.zeros(1, dtype=torch.long)},
            idefics_host(),
            "alpha_dense .*int64",
        ),
        "infinite": (
            "idefics",
            good | {block + "alpha_dense": torch.full((1,), float("inf"))},
            idefics_host(),
            "alpha_dense.*infinite",
        ),
        "depth": ("idefics", good, idefics_host(num_hidden_layers=3), "do not divide the 3 layers"),
        "width": ("idefics", good, idefics_host(**wide), "32 wide, and this host is 48 wide"),
        "norms": ("idefics", good, tiny.make("gpt2", n_layer=4), "epsilon None"),
        "behind the last": ("mllama", trailing, idefics_host(num_hidden_layers=3), "before layer 3"),
        "one after another": ("mllama", mllama((1, 2)).state_dict(), idefics_host(num_hidden_layers=3), "follow"),
        "layers left in": ("mllama", mllama().state_dict(), idefics_host(num_hidden_layers=5), "3 others"),
        "too deep": ("openflamingo", open_flamingo((7,)), tiny.make("llama"), "layers 0 to 2"),
        "heads": ("openflamingo", flamingo, tiny.make("llama"), "num_heads="),
        "no bias": ("openflamingo", without(flamingo, old + "ff.0.bias"), tiny.make("llama"), "ff.0.bias"),
        "a picture model": ("openflamingo", flamingo, tiny_unets.make(), "UNet2DConditionModel"),
    }


def test_what_does_not_fit_changes_nothing():
    for wrong, (family, weights, host, match) in faults().items():
        before = tiny_unets.traces(host)
        with pytest.raises((AdapterFileError, NonFiniteError), match=match):
            mmattn.load_published(host, family, weights)
        assert tiny_unets.traces(host) == before, wrong


def test_files_that_are_none(tmp_path):
    lm, ids = tiny.make("llama"), tiny.text(ROWS, LENGTH)
    tensors = open_flamingo((1,))
    save_file(tensors, tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "torn.safetensors").write_bytes(whole[:-9])
    (tmp_path / "page.bin").write_bytes(b"<html>" * 99)
    torch.save({"state": tensors}, tmp_path / "nested.pt")
    (tmp_path / "empty").mkdir()
    for name in ("torn.safetensors", "page.bin", "nested.pt", "empty", "nowhere.safetensors", "."):
        with pytest.raises(AdapterFileError):
            mmattn.load_published(lm, "openflamingo", tmp_path / name, num_heads=2)
    with pytest.raises(AdapterFileError, match="by name"):
        mmattn.load_published(lm, "openflamingo", {"a": 3})
    with pytest.raises(ConfigError, match="'idefics', 'mllama', 'openflamingo'"):
        mmattn.load_published(lm, "flamingo", tensors)
    model = mmattn.load_published(lm, "openflamingo", tmp_path / "good.safetensors", num_heads=2)
    with pytest.raises(AttachError, match="already attached"):
        mmattn.load_published(model, "openflamingo", tensors, num_heads=2)
    assert torch.equal(model(ids).logits, tiny.own(ids)) and list(model.adapters) == ["default"]
