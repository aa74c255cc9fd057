"""Conversions of weights into Hugging Face folders: SmolLM2, EfficientNet-Lite0, MiniLM, and files as they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

#: Tokens of the longest text that MiniLM was trained on.
_MINILM_LENGTH = 256


def convert_smollm2(files: Sequence[Path], folder: Path) -> None:
    """Convert the GGUF file of SmolLM2 to float32."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence as InTurn
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    (file,) = files
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # GGUF only names the rule, and transformers does not know it: digits one by one, then bytes.
    bytes_ = ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = InTurn([Digits(individual_digits=True), bytes_])
    read = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = read.config.to_dict()
    # A model that was read from GGUF believes that it is quantised, and refuses to be saved.
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    settings["rms_norm_eps"] = round(settings["rms_norm_eps"], 9)
    with torch.device("meta"):  # without initialising what is replaced
        model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def convert_efficientnet(files: Sequence[Path], folder: Path) -> None:
    """Convert the state dict of EfficientNet-Lite0 to a folder of timm."""
    import timm

    (file,) = files
    with torch.device("meta"):  # without initialising what is replaced
        model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    # The same tensors in the same order, under other names.
    names, tensors = model.state_dict(), torch.load(file, map_location="cpu", weights_only=True)
    contiguous = [tensor.contiguous() for tensor in tensors.values()]  # as safetensors wants them
    model.load_state_dict(dict(zip(names, contiguous, strict=True)), assign=True)
    timm.models.save_for_hf(model, str(folder), safe_serialization=True)


def convert_minilm(files: Sequence[Path], folder: Path) -> None:
    """Copy the folder of MiniLM, with the length of its training in the tokenizer's config."""
    copy_files(files, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"model_max_length": _MINILM_LENGTH}, indent=2), "utf-8")


def copy_files(files: Sequence[Path], folder: Path) -> None:
    """Copy what lies in the only source, a folder, as it is."""
    (source,) = files
    shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
