"""OpenCLIPTextEncoder: the embedding that open_clip gives, beside that of the pictures, and what is no text."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mmattn
from mmattn.encoders import OpenCLIPEncoder, OpenCLIPTextEncoder
from mmattn.errors import ConfigError, TextError

TEXTS = ["a bluebell in the woods", "rape fields", "a primrose"]


def saved(eye: OpenCLIPEncoder, folder: Path, config: dict[str, Any]) -> str:
    weights = {name: tensor.contiguous().clone() for name, tensor in eye.model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config}))
    return f"local-dir:{folder}"


@pytest.mark.parametrize("kind", ["clip", "custom", "coca"])
@pytest.mark.parametrize("normalize", [True, False])
def test_embeddings_are_those_of_open_clip(
    tiny_clip: dict[str, Any], tmp_path: Path, kind: str, normalize: bool
) -> None:
    if kind != "clip":
        tiny_clip |= {"custom_text": True}
    if kind == "coca":
        tiny_clip |= {
            "multimodal_cfg": {"context_length": 13, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
        }
        tiny_clip["text_cfg"] |= {"embed_cls": True, "output_tokens": True}
        tiny_clip["vision_cfg"] |= {"attentional_pool": True, "output_tokens": True, "attn_pooler_heads": 1}
    eye = OpenCLIPEncoder(config=tiny_clip, pooled=True)
    if kind == "coca":
        # open_clip leaves it as it finds the memory, which may be NaN.
        torch.nn.init.normal_(eye.model.text_decoder.text_projection)
    encoder = OpenCLIPTextEncoder(saved(eye, tmp_path, tiny_clip), normalize=normalize)
    memory = encoder.encode(TEXTS, batch_size=2)
    wanted = eye.model.encode_text(eye.tokenizer(TEXTS), normalize=normalize)
    assert memory.tokens.shape == (3, 1, 19) == (3, 1, encoder.dim)
    assert memory.sources == [[{"text": 0}], [{"text": 1}], [{"text": 2}]]
    assert torch.isfinite(memory.tokens).all()
    torch.testing.assert_close(memory.tokens[:, 0], wanted)
    assert not any("visual" in name for name, _ in encoder.named_modules())
    assert encoder(TEXTS[0]).dim == eye.dim


def test_the_fingerprint_is_of_the_text_tower(tiny_clip: dict[str, Any], tmp_path: Path) -> None:
    eye = OpenCLIPEncoder(config=tiny_clip)
    name = saved(eye, tmp_path, tiny_clip)
    encoder = OpenCLIPTextEncoder(name)
    first = encoder.fingerprint
    assert OpenCLIPTextEncoder(name).fingerprint == first != eye.fingerprint
    assert OpenCLIPTextEncoder(name, normalize=False).fingerprint != first
    twin = copy.deepcopy(encoder)
    twin.model.logit_scale.fill_(3)
    assert twin.fingerprint == first
    twin.model.text_projection[0, 0] += 1
    assert twin.fingerprint != first


def test_texts_that_cannot_be_read_whole_or_at_all(tiny_clip: dict[str, Any]) -> None:
    encoder = OpenCLIPTextEncoder(config=tiny_clip)
    assert encoder.max_length == 13
    assert encoder.encode([]).tokens.shape == (0, 1, 19)
    with pytest.warns(UserWarning, match=r"1 texts are longer than 13 tokens and were cut: \[1\]"):
        encoder.encode(["a", "a " * 12])
    for texts, words in (
        (["a", " "], "text 1 is empty"),
        (["a", None], "text 1 must be"),
        ("\ud800", "surrogate"),
    ):
        with pytest.raises(TextError, match=words):
            encoder.encode(texts)
    with pytest.raises(ConfigError, match="batch_size"):
        encoder.encode("a", batch_size=True)


def test_the_front_door_has_it() -> None:
    assert mmattn.OpenCLIPTextEncoder is OpenCLIPTextEncoder
