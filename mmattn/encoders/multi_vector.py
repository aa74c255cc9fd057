"""Multi-vector encoders of sentence-transformers (ColBERT, PyLate): texts as a vector for each token."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmattn.encoders.base import TextEncoderBase
from mmattn.encoders.sentence_folder import import_sentence_transformers
from mmattn.encoders.text import token_sources
from mmattn.errors import AdapterFileError, MissingExtraError, check_int
from mmattn.memory import Memory
from mmattn.models.loading import without_progress_bars
from mmattn.storage.safetensors import check_values
from mmattn.tokenization import check_text, refuse_empty

if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder as MultiVectorModel

#: Head of the pretraining: it never runs, and may be random.
_UNUSED = "pooler"


class MultiVectorEncoder(TextEncoderBase):
    """Texts as a memory (b, m, e) of a vector for each token, by a `MultiVectorEncoder` of sentence-transformers.

    It loads late-interaction models as sentence-transformers, PyLate and ColBERT (arXiv 2004.12832) save them. These
    encode queries in another way than entries, with other prompts and lengths; `mmattn.retrieval.MultiVectorIndex`
    takes `encode` for entries and `encode_query` for queries. A model without a trained projection, such as a bare
    BERT, gets a random one and finds nothing. Texts beyond the lengths of the model are truncated, and special tokens
    in a text stay special, as in sentence-transformers.

    Args:
        name: a name on the hub or a folder.
        device: where the network runs, by default the CPU.
        **options: further arguments of `sentence_transformers.MultiVectorEncoder`, such as `revision`.

    Attributes:
        model: the model of sentence-transformers, frozen.
        dim: width e of the memory.

    Raises:
        AdapterFileError: nothing to load, or weights that are damaged.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: sentence-transformers 6 or later is not installed.
    """

    model: MultiVectorModel
    _shown = ("dim",)

    def __init__(
        self, name: str | os.PathLike[str], *, device: str | torch.device | None = None, **options: Any
    ) -> None:
        library = import_sentence_transformers()
        if not hasattr(library, "MultiVectorEncoder"):
            raise MissingExtraError(
                f"sentence_transformers {library.__version__} has no multi-vector encoders; 6 or later does: "
                "pip install 'mmattn[multivector]'"
            )
        options["model_kwargs"] = {"use_safetensors": True, **options.get("model_kwargs", {})}
        try:
            with without_progress_bars():
                model = library.MultiVectorEncoder(os.fspath(name), device=str(device or "cpu"), **options)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise AdapterFileError(
                f"no multi-vector encoder can be loaded from {os.fspath(name)!r} ({error}); give a name on the hub "
                "that is reachable or kept from before, or the folder that its `save_pretrained` wrote"
            ) from error
        for key, tensor in model.state_dict().items():
            check_values(key, tensor)
        super().__init__(model, _described(model), device)
        self.dim = self._encode(model.encode_document, ["a"]).dim

    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        return self._encode(self.model.encode_document, texts, batch_size, progress)

    def encode_query(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory (b, l, e) of b queries. Arguments and errors as for `encode`."""
        check_int("batch_size", batch_size)
        return self._encode(self.model.encode_query, check_text(texts), batch_size, progress)

    def _encode(
        self, encode: Callable[..., list[Tensor]], texts: list[str], batch_size: int = 32, progress: bool = False
    ) -> Memory:
        refuse_empty([len(text.strip()) for text in texts])
        # Encoded in inference mode, which padding leaves by a copy.
        rows = encode(texts, batch_size=batch_size, show_progress_bar=progress) if texts else []
        return self._padded(rows, token_sources(list(map(len, rows))))

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if _UNUSED not in name.split(".")}


def _described(model: MultiVectorModel) -> dict[str, object]:
    """Return the settings that the vectors depend on, besides the weights."""
    modules: list[list[object]] = [
        [type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in model
    ]
    vocabulary = json.dumps(sorted(model.tokenizer.get_vocab().items()))
    return {
        "encoder": "multi-vector",
        "modules": json.loads(json.dumps(modules, default=str)),
        "prompts": dict(model.prompts),
        "max_length": model.max_seq_length,
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }
