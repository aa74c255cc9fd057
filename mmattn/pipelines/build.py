"""Load the models that a pipeline names: the host with its tokenizer, on one device."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mmattn.adapters.files import CONFIG
from mmattn.encoders.base import FrozenEncoder
from mmattn.errors import AdapterFileError, ConfigError, import_extra
from mmattn.hosts.context import Arguments
from mmattn.models.catalogue import find_asset
from mmattn.models.loading import load_pretrained
from mmattn.pipelines.config import ModelReference, tokenizer_fingerprint
from mmattn.storage.json_files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.utils.quantization_config import QuantizationConfigMixin


def default_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU without one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if accelerator is None else accelerator


def resolve(name: str, folder: Path) -> str:
    """Return a path beside the adapter's folder, a path of the installation ("assets/…"), or the name on the hub."""
    beside = folder / name
    return str(beside) if not os.path.isabs(name) and beside.exists() else find_asset(name)


def load_language_model(
    name: str, device: str | torch.device = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in float32, in evaluation mode, and its tokenizer.

    Args:
        name: "smollm2", a name on the hub, a folder, or an asset of the installation ("assets/lm").
        device: of the model; "auto" is the accelerator of this machine, or the CPU.

    Raises:
        AdapterFileError: nothing to load, or weights that are incomplete or damaged.
        NonFiniteError: NaN or infinity in the weights.
    """
    tokenizer, lm = load_pretrained("AutoModelForCausalLM", name, "language model", dtype=torch.float32)
    return lm.to(default_device() if device == "auto" else device).eval(), tokenizer


def load_host(
    reference: ModelReference, folder: Path, device: torch.device, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model, in evaluation mode, and its tokenizer.

    Args:
        reference: their names.
        folder: of the adapter.
        device: where the model runs.
        dtype: of its weights, float32 by default.

    Raises:
        AdapterFileError: nothing to load under this name, or the tokenizer is not that of the training.
        ConfigError: a dtype for a quantised model.
    """
    options: Arguments = {"dtype": dtype or torch.float32}
    if reference.revision is not None:
        options["revision"] = reference.revision
    if reference.quantization is not None:
        if dtype is not None:
            raise ConfigError(f"dtype={dtype} is for plain weights, and {reference.name!r} is quantised; leave it out")
        options["quantization_config"] = quantization_config(reference.quantization)
        options["device_map"] = {"": str(device)}
    name = resolve(reference.name, folder)
    tokenizer, host = load_pretrained("AutoModelForCausalLM", name, "language model", **options)
    check_tokenizer(tokenizer, reference, folder)
    if reference.quantization is None:
        host = host.to(device)
    if reference.lora is not None:
        from mmattn.training.lora import load_lora

        host = load_lora(host, Path(resolve(reference.lora, folder)))
    return host.eval(), tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, reference: ModelReference, folder: Path) -> None:
    """Raise AdapterFileError if a tokenizer is not the one that the adapter was trained with."""
    expected = reference.tokenizer_fingerprint
    if expected is not None and expected != tokenizer_fingerprint(tokenizer):
        raise AdapterFileError(
            f"the tokenizer of {reference.name!r} is not the one that the adapter in {str(folder)!r} was trained with: "
            "its vocabulary has changed since; load the revision that it was trained with"
        )


def quantization_config(kind: str) -> QuantizationConfigMixin:
    """Return the settings of transformers for weights in 8 or 4 bit (NF4, arXiv 2305.14314, section 3)."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if kind == "int8":
        return TorchAoConfig(import_extra("torchao", "quantised").quantization.Int8WeightOnlyConfig())
    import_extra("bitsandbytes", "quantised")
    if kind == "bnb8":
        # Warns at every product that it rounds its input.
        logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")


def check_encoder(encoder: FrozenEncoder, name: str, folder: Path) -> None:
    """Raise AdapterFileError if an encoder is not the one that an adapter was trained with, as far as its file says."""
    path = folder / CONFIG
    fingerprint = read_json(path).get("encoder") if path.is_file() else None
    if fingerprint is not None and fingerprint != encoder.fingerprint:
        raise AdapterFileError(
            f"the adapter in {str(folder)!r} was trained on memories of another encoder than {name}: its weights or "
            "settings have changed since"
        )
