"""OpenCLIPEncoder and OpenCLIPTextEncoder: patches and embeddings of open_clip's models, frozen, and their files."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmattn.encoders import OpenCLIPEncoder, OpenCLIPTextEncoder
from mmattn.errors import AdapterFileError, ConfigError, ImageError, TextError
from mmattn.memory import Memory

SaveClip = Callable[..., str]
TEXTS = ["a bluebell in the woods", "rape fields", "a primrose"]


def test_patches_are_what_the_tower_pools(save_clip: SaveClip, picture: Image.Image) -> None:
    name = save_clip(vision_cfg={"pool_type": "avg"})
    patches, pooled = OpenCLIPEncoder(name), OpenCLIPEncoder(name, pooled=True)
    memory, embedding = patches([picture]), pooled(picture)
    assert (patches.dim, patches.grid, pooled.dim) == (24, (5, 5), 19)
    assert memory.tokens.shape == (1, 25, 24)
    assert embedding.tokens.shape == (1, 1, 19)
    assert torch.isfinite(memory.tokens).all()
    torch.testing.assert_close(memory.tokens.mean(1) @ pooled.model.visual.proj, embedding.tokens[:, 0])


def test_each_slot_names_its_patch(save_clip: SaveClip) -> None:
    eye = OpenCLIPEncoder(save_clip())
    memory = eye(torch.rand(3, 3, 50, 70), batch_size=2)
    assert memory.sources is not None
    assert memory.sources[2][7] == {"image": 2, "patch": [1, 2]}
    # Before any layer looks around, only the changed patch answers a change of its own pixels.
    eye.model.visual.transformer.resblocks = torch.nn.ModuleList([torch.nn.Identity()])
    eye.model.visual.transformer.resblocks[0].forward = lambda x, **kwargs: x
    dark, bright = np.zeros((40, 40, 3), np.uint8), np.zeros((40, 40, 3), np.uint8)
    bright[8:16, 16:24] = 255
    changed = (eye(dark).tokens - eye(bright).tokens).abs().amax(-1)[0].nonzero().flatten().tolist()
    assert [eye(dark).sources[0][slot]["patch"] for slot in changed] == [[1, 2]]


@pytest.mark.parametrize(
    ("vision", "dim", "grid"),
    [
        ({"layers": [1, 1, 1, 1], "width": 8, "head_width": 8, "image_size": 64}, 256, (2, 2)),
        ({"timm_model_name": "test_vit", "timm_pool": "avg", "timm_proj": "linear", "image_size": 160}, 64, (10, 10)),
        ({"attentional_pool": True, "attn_pooler_heads": 1, "attn_pooler_queries": 7}, 24, (5, 5)),
        ({"pool_type": "avg", "final_ln_after_pool": True}, 24, (5, 5)),
        ({"image_size": [32, 56], "output_tokens": True}, 24, (4, 7)),
    ],
    ids=["resnet", "timm", "attentional pool", "norm after pool", "not square"],
)
def test_other_towers(
    save_clip: SaveClip, picture: Image.Image, vision: dict[str, Any], dim: int, grid: tuple[int, int]
) -> None:
    name = save_clip(vision_cfg=vision)
    eye = OpenCLIPEncoder(name)
    assert (eye.dim, eye.grid) == (dim, grid)
    assert torch.isfinite(eye([picture] * 3).tokens).all()
    assert OpenCLIPEncoder(name, pooled=True)([picture] * 3).tokens.shape == (3, 1, 19)


def test_a_tower_without_patches_says_so(save_clip: SaveClip, monkeypatch: pytest.MonkeyPatch) -> None:
    from open_clip.transformer import VisionTransformer

    monkeypatch.delattr(VisionTransformer, "forward_intermediates")
    name = save_clip()
    with pytest.raises(ConfigError, match="gives no patch tokens .*use pooled=True"):
        OpenCLIPEncoder(name)
    assert OpenCLIPEncoder(name, pooled=True).dim == 19


def test_frozen_for_good(save_clip: SaveClip, picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(save_clip())
    eye.train()
    assert not any(module.training for module in eye.modules())
    assert not any(parameter.requires_grad for parameter in eye.parameters())
    tokens = eye(picture).tokens
    assert not tokens.requires_grad
    # Unlike inference tensors, these may be kept by someone's backward.
    layer = torch.nn.Linear(24, 3)
    layer(tokens).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.abs().sum() > 0


def test_batches_do_not_matter_and_a_memory_is_saved(save_clip: SaveClip, picture: Image.Image, tmp_path: Path) -> None:
    eye = OpenCLIPEncoder(save_clip())
    images = [picture, picture.rotate(90), np.asarray(picture)[::-1], torch.rand(3, 43, 67), picture.resize((7, 5))]
    together = eye(images, batch_size=5)
    torch.testing.assert_close(eye(images, batch_size=2).tokens, together.tokens)
    torch.testing.assert_close(torch.cat([eye(image).tokens for image in images]), together.tokens)
    assert eye([]).tokens.shape == (0, 25, 24)
    together.save(tmp_path / "pictures.safetensors")
    again = Memory.load(tmp_path / "pictures.safetensors")
    assert torch.equal(again.tokens, together.tokens)
    assert again.sources == together.sources


def test_a_bad_picture_is_numbered_across_batches(save_clip: SaveClip, picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(save_clip())
    with pytest.raises(ImageError, match="picture 3: the bytes is empty"):
        eye([picture, picture, picture, b""], batch_size=2)


def test_the_fingerprint_is_of_what_shapes_the_memory(save_clip: SaveClip) -> None:
    name = save_clip()
    eye, encoder = OpenCLIPEncoder(name), OpenCLIPTextEncoder(name)
    first, second = eye.fingerprint, encoder.fingerprint
    assert OpenCLIPTextEncoder(name).fingerprint == second
    assert len({first, second, OpenCLIPEncoder(name, pooled=True).fingerprint}) == 3
    for one, weight in ((eye, "visual.conv1.weight"), (encoder, "text_projection")):
        twin = copy.deepcopy(one)
        twin.model.logit_scale.fill_(3)  # of neither tower
        assert twin.fingerprint == one.fingerprint
        twin.model.get_parameter(weight).flatten()[0] += 1
        assert twin.fingerprint != one.fingerprint
    assert copy.deepcopy(eye).half().fingerprint != first


def test_a_folder_and_a_name_of_open_clip_with_a_file(save_clip: SaveClip, monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip

    name = save_clip(preprocess_cfg={"mean": [0] * 3})
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    eye = OpenCLIPEncoder(name, pooled=True)
    assert eye.image_processor.mean == (0, 0, 0)
    weights = Path(name.removeprefix("local-dir:")) / "open_clip_model.safetensors"
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-mini-8", open_clip.get_model_config(name))
    known = OpenCLIPEncoder("ViT-mini/8", weights, pooled=True)
    assert known.fingerprint == OpenCLIPEncoder(f"ViT-mini-8:{weights}", pooled=True).fingerprint != eye.fingerprint
    assert torch.equal(known.model.visual.proj, eye.model.visual.proj)
    assert known.tokenizer("a").shape == (1, 13)
    assert OpenCLIPEncoder("ViT-mini-8", pooled=True).fingerprint != known.fingerprint, "random weights"
    assert not logging.getLogger().handlers, "the root logger stays as it was"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("ViT-B-23", ConfigError, "did you mean ViT-B-32"),
        ("ViT-B-32:laion3b", AdapterFileError, "'laion3b' is not a known tag"),
        ("ViT-B-32:", ConfigError, "give the weights once"),
        ("ViT-B-32:nowhere/clip.safetensors", AdapterFileError, "is not a known tag or valid file path"),
        ("ViT-B-32:laion2b_s34b_b79k", AdapterFileError, "without a network"),
        ("hf-hub:nobody/nothing", AdapterFileError, "without a network"),
        ("local-dir:nowhere", AdapterFileError, "not found"),
    ],
)
def test_names_that_lead_nowhere(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OpenCLIPEncoder(name)


def test_files_that_do_not_fit(save_clip: SaveClip) -> None:
    name = save_clip()
    folder = Path(name.removeprefix("local-dir:"))
    path, good = folder / "open_clip_model.safetensors", load_file(folder / "open_clip_model.safetensors")

    def refused(words: str, **changes: Any) -> None:
        save_file({key: tensor for key, tensor in (good | changes).items() if tensor is not None}, path)
        with pytest.raises(AdapterFileError, match=f"(?s){words}"):
            OpenCLIPEncoder(name)

    refused("Missing key.*ln_final.weight", **{"ln_final.weight": None})
    refused("Unexpected key.*more", more=torch.zeros(2))
    refused("size mismatch", **{"visual.proj": torch.zeros(5, 7)})
    refused("visual.proj.*NaN", **{"visual.proj": good["visual.proj"] * torch.nan})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(AdapterFileError, match="open_clip cannot load local-dir"):
        OpenCLIPEncoder(name)
    path.unlink()
    with pytest.raises(AdapterFileError, match="Required pretrained weights"):
        OpenCLIPEncoder(name)
    (folder / "open_clip_config.json").write_text("{")
    with pytest.raises(AdapterFileError, match="Could not load valid config"):
        OpenCLIPEncoder(name)


def test_special_tokens_in_a_text_stay_text(save_clip: SaveClip) -> None:
    import open_clip

    tokenizer = OpenCLIPEncoder(save_clip()).tokenizer
    texts = ["a bluebell in the woods", "it's 3 petals &amp; more", "", "Ünïcode"]
    assert torch.equal(tokenizer(texts), open_clip.SimpleTokenizer(context_length=13)(texts))
    for text in ("a <end_of_text> b", "a &lt;end_of_text&gt; b", "<START_OF_TEXT>"):
        ids = tokenizer(text)[0].tolist()
        assert ids.count(49406) == ids.count(49407) == 1
        assert ids[0] == 49406
    for wrong in (None, ["a", None], ["a\ud800"], [b"a"]):
        with pytest.raises(TextError):
            tokenizer(wrong)


@pytest.mark.parametrize("kind", ["clip", "custom", "coca"])
def test_texts_are_embedded_as_by_open_clip(save_clip: SaveClip, kind: str) -> None:
    changes: dict[str, Any] = {} if kind == "clip" else {"custom_text": True}
    if kind == "coca":
        decoder = {"context_length": 13, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
        changes |= {"multimodal_cfg": decoder, "text_cfg": {"embed_cls": True, "output_tokens": True}}
        changes["vision_cfg"] = {"attentional_pool": True, "output_tokens": True, "attn_pooler_heads": 1}
    name = save_clip(**changes)
    eye, encoder = OpenCLIPEncoder(name, pooled=True), OpenCLIPTextEncoder(name)
    memory = encoder.encode(TEXTS, batch_size=2)
    wanted = eye.model.encode_text(eye.tokenizer(TEXTS), normalize=True)
    assert memory.tokens.shape == (3, 1, 19) == (3, 1, encoder.dim)
    assert memory.sources == [[{"text": 0}], [{"text": 1}], [{"text": 2}]]
    assert torch.isfinite(memory.tokens).all()
    torch.testing.assert_close(memory.tokens[:, 0], wanted)
    assert not any("visual" in name for name, _ in encoder.named_modules())
    assert encoder(TEXTS[0]).dim == eye.dim


def test_texts_that_cannot_be_read_whole_or_at_all(save_clip: SaveClip) -> None:
    encoder = OpenCLIPTextEncoder(save_clip())
    assert encoder.max_length == 13
    assert encoder.encode([]).tokens.shape == (0, 1, 19)
    with pytest.warns(UserWarning, match=r"1 texts are longer than 13 tokens and were cut: \[1\]"):
        encoder.encode(["a", "a " * 12, "a " * 11])
    for texts, words in ((["a", " "], "text 1 is empty"), (["a", None], "text 1 must be"), ("\ud800", "surrogate")):
        with pytest.raises(TextError, match=words):
            encoder.encode(texts)
    with pytest.raises(ConfigError, match="batch_size"):
        encoder.encode("a", batch_size=True)
