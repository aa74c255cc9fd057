"""Small pictures and small CLIPs for the encoders' tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.encoders.pieces import drawing


@pytest.fixture
def picture() -> Image.Image:
    return drawing()


@pytest.fixture
def save_clip(tmp_path: Path) -> Callable[..., str]:
    """Save a CLIP with random weights as open_clip pushes it to the hub: `save_clip(vision_cfg={...}) -> its name`.

    By default 40 x 40 pixels in 5 x 5 patches, width 24, embeddings of 19.
    """
    import open_clip

    def save(preprocess_cfg: dict[str, Any] | None = None, **changes: Any) -> str:
        config: dict[str, Any] = {
            "embed_dim": 19,
            "vision_cfg": {"image_size": 40, "layers": 2, "width": 24, "head_width": 12, "patch_size": 8},
            "text_cfg": {"context_length": 13, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
        }
        for name, change in changes.items():
            config[name] = config[name] | change if name in ("vision_cfg", "text_cfg") else change
        if "timm_model_name" in config["vision_cfg"]:
            config |= {"vision_cfg": changes["vision_cfg"], "custom_text": True}
        folder = tmp_path / f"clip{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        described = {"model_cfg": config, "preprocess_cfg": preprocess_cfg or {}}
        (folder / "open_clip_config.json").write_text(json.dumps(described))
        model = open_clip.create_model(f"local-dir:{folder}")
        if hasattr(model, "text_decoder"):
            # open_clip leaves it as it finds the memory, which may be NaN.
            torch.nn.init.normal_(model.text_decoder.text_projection)
        weights = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
        save_file(weights, folder / "open_clip_model.safetensors")
        return f"local-dir:{folder}"

    return save
