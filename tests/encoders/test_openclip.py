"""OpenCLIPEncoder: every way to name a model, patches and embeddings, frozen, with its own tokenizer."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from mmattn.encoders import OpenCLIPEncoder, OpenCLIPTextEncoder, load_image
from mmattn.errors import AdapterFileError, ConfigError, ImageError, TextError
from mmattn.memory import Memory


def saved(eye: OpenCLIPEncoder, folder: Path, config: dict[str, Any]) -> Path:
    """The encoder's CLIP as the folder that open_clip pushes to the hub."""
    folder.mkdir(exist_ok=True)
    weights = {name: tensor.contiguous().clone() for name, tensor in eye.model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(
        json.dumps({"model_cfg": config, "preprocess_cfg": {"mean": [0] * 3}})
    )
    return folder


def test_patches_are_what_the_tower_pools(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    tiny_clip["vision_cfg"] |= {"pool_type": "avg"}
    patches, pooled = OpenCLIPEncoder(config=tiny_clip), OpenCLIPEncoder(config=tiny_clip, pooled=True)
    pooled.model.load_state_dict(patches.model.state_dict())
    memory, embedding = patches([picture, "x.png"][:1]), pooled(picture)
    assert (patches.dim, patches.grid, pooled.dim) == (24, (5, 5), 19)
    assert memory.tokens.shape == (1, 25, 24)
    assert embedding.tokens.shape == (1, 1, 19)
    assert torch.isfinite(memory.tokens).all()
    torch.testing.assert_close(memory.tokens.mean(1) @ pooled.model.visual.proj, embedding.tokens[:, 0])


def test_each_slot_names_its_patch(tiny_clip: dict[str, Any]) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
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
    tiny_clip: dict[str, Any], picture: Image.Image, vision: dict[str, Any], dim: int, grid: tuple[int, int]
) -> None:
    own = {} if "timm_model_name" in vision else tiny_clip["vision_cfg"]
    config = tiny_clip | {"vision_cfg": own | vision, "custom_text": "timm_model_name" in vision}
    eye = OpenCLIPEncoder(config=config)
    assert (eye.dim, eye.grid) == (dim, grid)
    assert torch.isfinite(eye([picture] * 3).tokens).all()
    pooled = OpenCLIPEncoder(config=config, pooled=True)
    assert pooled([picture] * 3).tokens.shape == (3, 1, 19)


def test_a_tower_without_patches_says_so(tiny_clip: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from open_clip.transformer import VisionTransformer

    monkeypatch.delattr(VisionTransformer, "forward_intermediates")
    with pytest.raises(ConfigError, match="no patch tokens; use pooled=True"):
        OpenCLIPEncoder(config=tiny_clip)
    assert OpenCLIPEncoder(config=tiny_clip, pooled=True).dim == 19


def test_frozen_for_good(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
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


def test_batches_do_not_matter(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    images = [picture, picture.rotate(90), np.asarray(picture)[::-1], torch.rand(3, 43, 67), picture.resize((7, 5))]
    together = eye(images, batch_size=5).tokens
    torch.testing.assert_close(eye(images, batch_size=2).tokens, together)
    torch.testing.assert_close(torch.cat([eye(image).tokens for image in images]), together)
    assert eye([]).tokens.shape == (0, 25, 24)


def test_kept_memory_comes_back(tiny_clip: dict[str, Any], picture: Image.Image, tmp_path: Path) -> None:
    memory = OpenCLIPEncoder(config=tiny_clip)([picture, picture])
    memory.save(tmp_path / "pictures.safetensors")
    again = Memory.load(tmp_path / "pictures.safetensors")
    assert torch.equal(again.tokens, memory.tokens)
    assert again.sources == memory.sources


def test_one_picture_in_eight_encodings_has_one_embedding(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip, pooled=True)
    quarter = picture.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6
    rgba = picture.convert("RGBA")
    rgba.putpixel((0, 0), (255, 255, 255, 0))

    def written(image: Image.Image, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return buffer.getvalue()

    encodings = [
        written(picture, "PNG"),
        written(picture, "JPEG", quality=95, subsampling=0),
        written(quarter, "JPEG", quality=95, subsampling=0, exif=exif.tobytes()),
        written(picture, "WEBP", lossless=True),
        written(picture.convert("CMYK"), "TIFF"),
        written(picture.quantize(256), "PNG"),
        written(rgba, "PNG"),
        torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255,
    ]
    # Any two pictures look alike to random weights: what all pictures share is taken away before comparing.
    common = eye(Image.new("RGB", picture.size, (127, 127, 127))).tokens[0, 0]
    rows = eye([*encodings, quarter, picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)]).tokens[:, 0] - common
    likeness = torch.cosine_similarity(rows, rows[:1])
    assert torch.isfinite(likeness).all()
    assert likeness[:8].min() > 0.999
    assert likeness[8:].max() < 0.99


def test_a_bad_picture_is_numbered_across_batches(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    with pytest.raises(ImageError, match="picture 3: the bytes is empty"):
        OpenCLIPEncoder(config=tiny_clip)([picture, picture, picture, b""], batch_size=2)
    with pytest.raises(ImageError, match="max_pixels"):
        OpenCLIPEncoder(config=tiny_clip)(picture, max_pixels=100)


def test_the_fingerprint_is_of_what_shapes_the_memory(tiny_clip: dict[str, Any]) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    first = eye.fingerprint
    assert len(first) == 64
    twin = copy.deepcopy(eye)
    twin.model.logit_scale.fill_(3)  # not of the picture tower
    assert twin.fingerprint == first
    twin.model.visual.conv1.weight[0, 0, 0, 0] += 1
    assert twin.fingerprint != first
    pooled = OpenCLIPEncoder(config=tiny_clip, pooled=True)
    pooled.model.load_state_dict(eye.model.state_dict())
    assert pooled.fingerprint != first
    assert copy.deepcopy(eye).half().fingerprint != first


def test_the_tower_runs_in_its_own_dtype(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    want = eye(picture).tokens
    got = eye.to(torch.bfloat16)(picture).tokens
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.1, rtol=0.1)


def test_every_way_to_name_a_model_finds_the_same(
    tiny_clip: dict[str, Any], picture: Image.Image, tmp_path: Path
) -> None:
    import open_clip

    eye = OpenCLIPEncoder(config=tiny_clip)
    folder = saved(eye, tmp_path / "clip", tiny_clip)
    weights = folder / "open_clip_model.safetensors"
    (tmp_path / "tiny.json").write_text(json.dumps(tiny_clip))
    known = list(open_clip.list_models())
    found = [
        OpenCLIPEncoder(config=tiny_clip, pretrained=weights),
        OpenCLIPEncoder(config=tmp_path / "tiny.json", pretrained=str(weights)),
        OpenCLIPEncoder(tmp_path / "tiny.json", weights),
        OpenCLIPEncoder(f"{tmp_path / 'tiny.json'}:{weights}"),
    ]
    assert open_clip.list_models() == known
    assert {other.fingerprint for other in found} == {eye.fingerprint}
    local = OpenCLIPEncoder(f"local-dir:{folder}")
    assert local.image_processor.mean == (0, 0, 0)
    assert torch.equal(local.model.visual.proj, eye.model.visual.proj)
    assert not torch.equal(local(picture).tokens, eye(picture).tokens)


def test_a_name_open_clip_knows_takes_a_file(
    tiny_clip: dict[str, Any], picture: Image.Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "ViT-mini-8", tiny_clip)
    one = OpenCLIPEncoder("ViT-mini/8", pooled=True)
    folder = saved(one, tmp_path / "clip", tiny_clip)
    two = OpenCLIPEncoder(f"ViT-mini-8:{folder / 'open_clip_model.safetensors'}", pooled=True)
    assert one.dim == two.dim == 19
    assert one.fingerprint == two.fingerprint
    assert torch.equal(one(picture).tokens, two(picture).tokens)
    assert two.tokenizer("a").shape == (1, 13)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("ViT-B-23", ConfigError, "did you mean ViT-B-32"),
        ("ViT-B-32:laion3b", ConfigError, "its tags: openai"),
        ("ViT-B-32:", ConfigError, "give the weights once"),
        ("ViT-B-32:open_clip.pt", AdapterFileError, "pickle"),
        ("ViT-B-32:nowhere/clip.safetensors", AdapterFileError, "no weights file"),
        ("ViT-B-32:laion2b_s34b_b79k", AdapterFileError, "without a network"),
        ("hf-hub:nobody/nothing", AdapterFileError, "without a network"),
        ("local-dir:nowhere", ConfigError, "open_clip_config.json"),
        ("nowhere.json", ConfigError, "not a readable open_clip config"),
    ],
)
def test_names_that_lead_nowhere(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        OpenCLIPEncoder(name)


def test_a_config_that_is_damaged_or_says_more_than_is_read(tiny_clip: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "clip.json"
    for text, words in {
        "{": "is not a readable open_clip config",
        '{"embed_dim": 3, "embed_dim": 5}': "'embed_dim' stands twice",
        "[1, 2]": "is a JSON object, got list",
        json.dumps({"model_cfg": tiny_clip, "preprocess_cfg": {"intepolation": "bilinear"}}): "has no 'intepolation'",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            OpenCLIPEncoder(config=path)
    path.write_text(json.dumps(tiny_clip), encoding="utf-8-sig")
    assert OpenCLIPEncoder(config=path, pooled=True).dim == 19


def test_a_name_and_a_config() -> None:
    for kind in (OpenCLIPEncoder, OpenCLIPTextEncoder):
        with pytest.raises(ConfigError, match="give name or config, not both; got name='ViT-B-16'"):
            kind("ViT-B-16", config={})


def test_weights_given_twice() -> None:
    for name in ("ViT-B-32:openai", "local-dir:x", "hf-hub:a/b"):
        with pytest.raises(ConfigError, match=r"once|its own weights"):
            OpenCLIPEncoder(name, "laion2b_s34b_b79k")


def test_weights_that_do_not_fit(tiny_clip: dict[str, Any], tmp_path: Path) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    folder = saved(eye, tmp_path / "clip", tiny_clip)
    path, good = folder / "open_clip_model.safetensors", load_file(folder / "open_clip_model.safetensors")

    def refused(words: str, **changes: Any) -> None:
        save_file({key: tensor for key, tensor in (good | changes).items() if tensor is not None}, path)
        for spelled in (f"local-dir:{folder}", f"{folder / 'open_clip_config.json'}:{path}"):
            with pytest.raises(AdapterFileError, match=words):
                OpenCLIPEncoder(spelled)

    refused(r"2 missing: .*ln_final.weight", **{"ln_final.weight": None, "visual.proj": None})
    refused("1 unexpected: more", more=torch.zeros(2))
    refused("size mismatch", **{"visual.proj": torch.zeros(5, 7)})
    refused("visual.proj.*NaN", **{"visual.proj": good["visual.proj"] * torch.nan})
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(AdapterFileError, match="not a readable safetensors"):
        OpenCLIPEncoder(f"local-dir:{folder}")
    path.rename(folder / "open_clip_pytorch_model.bin")
    with pytest.raises(AdapterFileError, match=r"convert open_clip_pytorch_model.bin first"):
        OpenCLIPEncoder(f"local-dir:{folder}")


def test_configs_that_cannot_be_built(tiny_clip: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing embed_dim, text_cfg"):
        OpenCLIPEncoder(config={"vision_cfg": {}})
    with pytest.raises(ConfigError, match="cannot build.*width_of"):
        OpenCLIPEncoder(config=tiny_clip | {"vision_cfg": {"width_of": 3}})
    with pytest.raises(ConfigError, match="has no weights 'openai'"):
        OpenCLIPEncoder(config=tiny_clip, pretrained="openai")


def test_the_tokenizer_is_the_models_own(tiny_clip: dict[str, Any]) -> None:
    import open_clip

    eye = OpenCLIPEncoder(config=tiny_clip)
    texts = ["a bluebell in the woods", "it's 3 petals &amp; more", "", "Ünïcode"]
    assert torch.equal(eye.tokenizer(texts), open_clip.SimpleTokenizer(context_length=13)(texts))
    embedded = eye.model.encode_text(eye.tokenizer(texts))
    assert embedded.shape == (4, 19)
    assert torch.isfinite(embedded).all()


def test_special_tokens_in_a_text_stay_text(tiny_clip: dict[str, Any]) -> None:
    tokenizer = OpenCLIPEncoder(config=tiny_clip).tokenizer
    for text in ("a <end_of_text> b", "a &lt;end_of_text&gt; b", "<START_OF_TEXT>"):
        ids = tokenizer(text)[0].tolist()
        assert ids.count(49406) == ids.count(49407) == 1
        assert ids[0] == 49406
    for wrong in (None, ["a", None], ["a\ud800"], [b"a"]):
        with pytest.raises(TextError):
            tokenizer(wrong)


def test_a_cut_text_is_reported(tiny_clip: dict[str, Any]) -> None:
    tokenizer = OpenCLIPEncoder(config=tiny_clip).tokenizer
    with pytest.warns(UserWarning, match=r"1 texts are longer than 13 tokens and were cut: \[1\]"):
        ids = tokenizer(["a", "a " * 12, "a " * 11])
    assert ids.shape == (3, 13)
    assert ids[1, -1] == 49407


def test_intake_is_the_one_of_load_image(tiny_clip: dict[str, Any], picture: Image.Image) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    assert torch.equal(eye(picture.convert("CMYK")).tokens, eye(load_image(picture.convert("CMYK"))).tokens)
