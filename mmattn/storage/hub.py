"""Models and tokenizers of transformers loaded as they were released: complete, finite, and without running code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from mmattn.errors import AdapterFileError
from mmattn.storage.fingerprints import plain_parts
from mmattn.storage.released_weights import refuse_keys
from mmattn.storage.safetensors import check_values


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """A context without the progress bars of transformers; its setting is restored afterwards."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_pretrained(
    kind: str, name: str | os.PathLike[str], what: str, unused: tuple[str, ...] = (), **options: Any
) -> tuple[Any, Any]:
    """Load the tokenizer and the model under a name on the hub or in a folder.

    Args:
        kind: the class of transformers that loads the model, such as "AutoModel".
        name: a name on the hub or a folder.
        what: what was asked for, in messages.
        unused: submodules that do not run, and need not be among the weights.
        **options: further arguments of the model's `from_pretrained`; `revision` is the tokenizer's, too.

    Raises:
        AdapterFileError: nothing to load, or weights that are incomplete, damaged or no safetensors.
        NonFiniteError: NaN or infinity in the weights.
    """
    import transformers

    revision = {"revision": options["revision"]} if "revision" in options else {}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **revision)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        _refuse(name, what, error)
    return tokenizer, load_model(kind, name, what, unused, **options)


def load_feature_extractor(name: str | os.PathLike[str]) -> Any:
    """Load what turns waveforms into the features that the model under a name reads.

    Args:
        name: a name on the hub or a folder.

    Raises:
        AdapterFileError: nothing to load.
    """
    import transformers

    try:
        return transformers.AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        _refuse(name, "feature extractor", error)


def load_model(kind: str, name: str | os.PathLike[str], what: str, unused: tuple[str, ...] = (), **options: Any) -> Any:
    """Load the model under a name on the hub or in a folder, without its tokenizer.

    Args:
        kind: the class of transformers that loads the model, such as "AutoModel".
        name: a name on the hub or a folder.
        what: what was asked for, in messages.
        unused: submodules that do not run, and need not be among the weights.
        **options: further arguments of `from_pretrained`.

    Raises:
        AdapterFileError: nothing to load, or weights that are incomplete, damaged or no safetensors.
        NonFiniteError: NaN or infinity in the weights.
    """
    import transformers
    from safetensors import SafetensorError

    try:
        model, found = getattr(transformers, kind).from_pretrained(
            name, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        _refuse(name, what, error)
    missing = sorted(key for key in found["missing_keys"] if key.split(".")[0] not in unused)
    refuse_keys(name, type(model).__name__, missing, [])
    for key, tensor in model.state_dict().items():
        for part in plain_parts(tensor):
            check_values(key, part)
    return model


def _refuse(name: str | os.PathLike[str], what: str, error: Exception) -> NoReturn:
    raise AdapterFileError(
        f"no {what} can be loaded from {os.fspath(name)!r} ({error}); give a name on the hub that is reachable or "
        "kept from before, or a folder with config.json, the tokenizer (of sounds preprocessor_config.json) and "
        "model.safetensors"
    ) from error
