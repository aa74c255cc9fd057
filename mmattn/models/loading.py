"""Models, tokenizers and weights loaded as they were released: complete, finite, and without running code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from mmattn.errors import AdapterFileError, ConfigError
from mmattn.models.cache import resolve
from mmattn.storage.safetensors import check_values, plain_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bars of transformers inside the block."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def load_pretrained(
    kind: str, name: str | os.PathLike[str], what: str, unused: tuple[str, ...] = (), **options: object
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Load the tokenizer and the model under a short name, a name on the hub or in a folder, as `load_model` does."""
    revision = {"revision": options["revision"]} if "revision" in options else {}
    return load_part("AutoTokenizer", name, what, **revision), load_model(kind, name, what, unused, **options)


def load_part(kind: str, name: str | os.PathLike[str], what: str, **options: object) -> Any:
    """Load a tokenizer, processor or feature extractor with a class of transformers, such as "AutoTokenizer"."""
    import transformers

    name = resolve(name)
    with _loading(name, what):
        return getattr(transformers, kind).from_pretrained(name, trust_remote_code=False, **options)


def load_model(
    kind: str, name: str | os.PathLike[str], what: str, unused: tuple[str, ...] = (), **options: object
) -> PreTrainedModel:
    """Load a model with a class of transformers, such as "AutoModel", by a short name, a hub name or a folder."""
    import transformers

    name = resolve(name)
    with _loading(name, what):
        model, report = getattr(transformers, kind).from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    missing = sorted(key for key in report["missing_keys"] if key.split(".")[0] not in unused)
    refuse_keys(name, type(model).__name__, missing, [])
    for key, tensor in model.state_dict().items():
        for part in plain_parts(tensor):
            check_values(key, part)
    return model


@contextmanager
def _loading(name: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turn what transformers raises into an AdapterFileError."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise AdapterFileError(
            f"no {what} can be loaded from {os.fspath(name)!r} ({error}); give a name on the hub that is reachable or "
            "cached, a folder that save_pretrained wrote, or a name that `mmattn models` lists"
        ) from error


def read_weights(path: str | os.PathLike[str], pickles: bool = False) -> dict[str, Tensor]:
    """Read all tensors of another library's file; AdapterFileError for damage, NonFiniteError for NaN or infinity.

    Args:
        path: a safetensors file.
        pickles: also read `.bin`, `.pt` and `.pth`, with `weights_only`; parts of a nested dict are named "part.name".
    """
    from safetensors.torch import load_file

    file = Path(path)
    is_pickle = pickles and file.suffix.lower() in (".bin", ".pt", ".pth")
    if not is_pickle and file.suffix.lower() != ".safetensors":
        raise AdapterFileError(
            f"weights are read from .safetensors files, got {str(path)!r}: a pickle can run code. Convert it: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), new)"
        )
    if not file.is_file():
        raise AdapterFileError(f"there is no weights file {str(path)!r}")
    try:
        weights = _unpickled(file) if is_pickle else load_file(file)
    except Exception as error:  # damaged pickles raise anything
        raise AdapterFileError(f"{str(path)!r} cannot be read as weights: {error}; get the file again") from error
    if not weights or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise AdapterFileError(f"{str(path)!r} must hold tensors by name; get the file again")
    for name, tensor in weights.items():
        check_values(f"{name} in {str(path)!r}", tensor)
    return weights


def _unpickled(file: Path) -> dict[str, Any]:
    """Return the content of a pickle, read with `weights_only`, by dotted name."""
    content = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        return {}
    parts = {name: value for name, value in content.items() if isinstance(value, dict)}
    nested = {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}
    return {name: value for name, value in content.items() if name not in parts} | nested


def is_weights_path(weights: object) -> bool:
    """Return True for a path, False for a name of released weights; ConfigError for anything else."""
    if isinstance(weights, os.PathLike):
        return True
    if not isinstance(weights, str):
        raise ConfigError(f"weights must be a name or a path, got {type(weights).__name__}")
    return os.sep in weights or "/" in weights or Path(weights).suffix in (".safetensors", ".pt", ".pth", ".bin")


def refuse_keys(path: str | os.PathLike[str], name: str, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise AdapterFileError for tensors that a network lacks or a file has too many; five of each are named."""
    faults = [
        f"{len(keys)} {what}: {', '.join(keys[:5])}{', …' if len(keys) > 5 else ''}"
        for what, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    if faults:
        raise AdapterFileError(
            f"{os.fspath(path)!r} does not hold the weights of {name} ({'; '.join(faults)}); give the name of the "
            "network the file was made for, or rename its tensors"
        )
