"""Multi-vector encoders of sentence-transformers (ColBERT, PyLate): texts as a vector for each token."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from mmattn.encoders.base import FrozenEncoder
from mmattn.errors import AdapterFileError, MissingExtraError, check_int, import_extra
from mmattn.memory import Memory
from mmattn.storage.hub import without_progress_bars
from mmattn.storage.safetensors import check_values
from mmattn.tokenization import check_text, refuse_empty

#: The head that some encoders carry for their own pretraining: it never runs, and may be random.
_UNUSED = "pooler"


class MultiVectorEncoder(FrozenEncoder):
    """Texts as a memory (b, m, e) of a vector for each token, by a `MultiVectorEncoder` of sentence-transformers.

    It loads late-interaction models as sentence-transformers, PyLate and ColBERT (arXiv 2004.12832) save them. These
    encode queries in another way than entries, with other prompts and lengths: `mmattn.retrieval.MultiVectorIndex`
    takes `encode` for entries and `encode_query` for queries. A model without a trained projection, such as a bare
    BERT, gets a random one and finds nothing. Texts beyond the lengths of the model are truncated, and special tokens
    in a text are special, as sentence-transformers has it.

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

    def __init__(
        self, name: str | os.PathLike[str], *, device: str | torch.device | None = None, **options: Any
    ) -> None:
        library = import_extra("sentence_transformers", "multivector")
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
        self.dim = self._encode(model.encode_document, "a").dim

    def forward(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """The memory (b, m, e) of b entries of an index, computed without gradients; `encode` is the same.

        `sources` names the text and the slot of each vector: {"text": 0, "token": 3}.

        Args:
            texts: one text or several.
            batch_size: texts that pass the network at once.
            progress: show the progress on stderr.

        Raises:
            TextError: an entry is no text or is empty; the message says which one.
            ConfigError: `batch_size` is no positive int.
        """
        return self._encode(self.model.encode_document, texts, batch_size, progress)  # type: ignore[arg-type]

    encode = forward

    def encode_query(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """The memory (b, l, e) of b queries. Arguments and errors as for `encode`."""
        return self._encode(self.model.encode_query, texts, batch_size, progress)  # type: ignore[arg-type]

    def _encode(
        self,
        encode: Callable[..., list[Tensor]],
        texts: str | Iterable[str],
        batch_size: int = 32,
        progress: bool = False,
    ) -> Memory:
        check_int("batch_size", batch_size)
        checked = check_text(texts)
        refuse_empty([len(text.strip()) for text in checked])
        if not checked:
            return Memory(torch.zeros(0, 0, self.dim, dtype=self.dtype, device=self.device))
        # Encoded in inference mode, which `pad` leaves by a copy.
        memory = Memory.pad(encode(checked, batch_size=batch_size, show_progress_bar=progress))
        sources: list[list[Any]] = [
            [{"text": number, "token": token} if token < length else None for token in range(memory.length)]
            for number, length in enumerate(memory.lengths)
        ]
        return Memory(memory.tokens, memory.mask, sources=sources)

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if _UNUSED not in name.split(".")}

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def _described(model: Any) -> dict[str, Any]:
    """What the vectors depend on beside the weights."""
    modules: list[Any] = [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in model]
    vocabulary = json.dumps(sorted(model.tokenizer.get_vocab().items()))
    return {
        "encoder": "multi-vector",
        "modules": json.loads(json.dumps(modules, default=str)),
        "prompts": dict(model.prompts),
        "max_length": model.max_seq_length,
        "vocabulary": hashlib.sha256(vocabulary.encode()).hexdigest(),
    }
