"""Conversions of weights into Hugging Face folders: SmolLM2, EfficientNet-Lite0, MiniLM, Whisper, files as they are."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


# Whisper, from the format of CTranslate2 ------------------------------------------------------------------------------


_FLOAT16 = 4
#: Names in transformers, by the modules of a layer in CTranslate2; of a product whose outputs stand in one, several.
_LAYER = {
    "self_attention/layer_norm": ["self_attn_layer_norm"],
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/layer_norm": ["encoder_attn_layer_norm"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/layer_norm": ["final_layer_norm"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
_OUTSIDE = {"layer_norm": "layer_norm", "embeddings": "embed_tokens", "position_encodings": "embed_positions"}
_PARAMETER = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
_TASKS = {"translate": "<|translate|>", "transcribe": "<|transcribe|>"}


def convert_whisper(files: Sequence[Path], folder: Path) -> None:
    """Join the parts of Whisper's model.bin and convert it to float32."""
    from tokenizers import Tokenizer
    from transformers import (
        GenerationConfig,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    *parts, settings, tokens = files
    variables = dict(_variables(b"".join(part.read_bytes() for part in parts)))
    state = {name: tensor.float() for key, value in variables.items() for name, tensor in _renamed(key, value)}
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    layers = sum(key.startswith("encoder/layer_") and key.endswith("/ffn/linear_0/bias") for key in variables)
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    heads, inner = int(variables["encoder/num_heads"]), len(state["model.encoder.layers.0.fc1.bias"])
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        max_source_positions=len(state["model.encoder.embed_positions.weight"]),
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
    )
    with torch.device("meta"):  # without initialising what is replaced
        model = WhisperForConditionalGeneration(config)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    content = json.loads(tokens.read_text("utf-8"))
    merges = content["model"]["merges"]
    if merges[0] == "Ġ a":
        merges.insert(0, "Ġ t")  # as published the first one is missing
    bpe, longest = Tokenizer.from_str(json.dumps(content)), config.max_target_positions
    tokenizer = WhisperTokenizerFast(tokenizer_object=bpe, model_max_length=longest)
    options = _generation(json.loads(settings.read_text("utf-8")), tokenizer)
    model.generation_config = GenerationConfig(max_length=config.max_target_positions, **options)
    model.save_pretrained(folder)
    WhisperProcessor(WhisperFeatureExtractor(feature_size=config.num_mel_bins), tokenizer).save_pretrained(folder)


def _generation(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
    """Return the options of `generate` that Whisper needs, from CTranslate2's config and the ids of special tokens."""
    number = tokenizer.convert_tokens_to_ids
    end = number("<|endoftext|>")
    return {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": number("<|startoftranscript|>"),
        "prev_sot_token_id": number("<|startofprev|>"),
        "no_timestamps_token_id": number("<|notimestamps|>"),
        "max_initial_timestamp_index": 50,
        "is_multilingual": True,
        "lang_to_id": {tokenizer.convert_ids_to_tokens(language): language for language in settings["lang_ids"]},
        "task_to_id": {task: number(token) for task, token in _TASKS.items()},
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "alignment_heads": settings["alignment_heads"],
        "task": "transcribe",
        "return_timestamps": False,
    }


def _variables(data: bytes) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values of CTranslate2's model.bin, format 6: little-endian, each with its shape and type.

    A value that is no float16 is a setting; its first byte is enough for those that are read here.
    """
    position = 0

    def take(kind: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{kind}", data, position)
        position += struct.calcsize(kind)
        return int(value)

    def text() -> str:
        nonlocal position
        length = take("H")
        position += length
        return data[position - length : position - 1].decode()  # a zero ends it

    take("I"), text(), take("I")  # the version of the format, the name of the model, and its revision
    for _ in range(take("I")):
        name = text()
        shape = [take("I") for _ in range(take("B"))]
        kind, size = take("B"), take("I")
        if kind == _FLOAT16:
            yield name, torch.frombuffer(bytearray(data[position : position + size]), dtype=torch.float16).view(shape)
        else:
            yield name, torch.tensor(data[position])
        position += size


def _renamed(key: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in transformers and the values of a variable; fused products are split."""
    if value.dim() == 0 or key.endswith("alignment_heads"):
        return
    part, rest = key.split("/", 1)
    module, _, parameter = rest.rpartition("/")
    parameter = _PARAMETER.get(parameter, parameter)
    if "/" not in module:
        yield f"model.{part}.{_OUTSIDE.get(module, module)}.{parameter}", value
        return
    layer, _, inner = module.partition("/")
    names = _LAYER[inner]
    for name, piece in zip(names, value.chunk(len(names)), strict=True):
        if not name.endswith("k_proj") or parameter == "weight":  # keys have no bias; there it is 0
            yield f"model.{part}.layers.{layer.removeprefix('layer_')}.{name}.{parameter}", piece
