"""What the tests of adapter folders share: a config and tensors that fit it, saving them, and looking at the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmattn.adapters.files import adapter_settings, save_folder
from mmattn.adapters.gated import GatedAdapter
from mmattn.adapters.resampler import Resampler

FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
KINDS = {"gated": GatedAdapter}
ADAPTER = GatedAdapter(memory_dim=13, layers=(1, 3), num_heads=3, head_dim=5, resampler=Resampler(num_latents=7))
CARD = "---\nlibrary_name: mmattn\n---\n\n# An adapter\n"


def config(**changes: Any) -> dict[str, Any]:
    host = {"kind": "causal_lm", "class": "LlamaForCausalLM", "model_type": "llama", "hidden_size": 17, "num_layers": 5}
    return {
        "format": "mmattn-adapter",
        "format_version": 1,
        "mmattn_version": "0.1.0.dev1",
        "kind": "gated",
        "package": "mmattn",
        "adapter": adapter_settings(ADAPTER),
        "layers": [1, 3],
        "host": {**host, "fingerprint": "0123456789abcdef" * 4},
        "encoder": "OpenCLIP ViT-B-32:laion2b_s34b_b79k",
        "name": "default",
        **changes,
    }


def example() -> dict[str, torch.Tensor]:
    return {"blocks.1.gate": torch.randn(3), "blocks.1.out.weight": torch.randn(17, 15), "latents": torch.randn(7, 13)}


def save(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> None:
    save_folder(folder, config=config(**changes), tensors=example() if tensors is None else tensors, card=CARD)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
