"""Texts about names: what their common words mean, beside exact and weighted features of all words."""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmattn.encoders.base import register_encoder
from mmattn.encoders.hybrid import HybridEncoder, hashing
from mmattn.errors import ShapeError, check_float, check_int
from mmattn.memory import Memory
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors
from mmattn.tokenization import check_text, refuse_empty

if TYPE_CHECKING:
    import numpy
    from scipy.sparse import csr_matrix

#: Places of hashed features before they are projected.
_PLACES = 1 << 16
_NGRAMS = range(2, 5)
_PARTS = ("words", "ngrams")
#: Question marks, also Arabic and full-width ones, and blanks at the end of a text.
_END = re.compile(r"[\s?\u061f\uff1f]+\Z")


@register_encoder("names")
class NameEncoder(HybridEncoder):
    """Vectors of texts about names as a memory (b, 1, 3w): meaning, words and spelling, each of width w.

    A sentence encoder takes names that are one letter apart for the same, most of all among very many. Here it reads
    the common words of a text alone ("currency of"), each distinct sequence of them once. Beside it are two sparse
    vectors of the whole text: its words, and its sequences of 2 to 4 letters, case and accents kept. Question marks and
    blanks at the end do not count, and composed and decomposed letters (NFC, NFD) are the same. Features that are rare
    in the texts of `fit` weigh more (inverse document frequency, as in BM25). All three are projected to w numbers by
    fixed random matrices (Johnson and Lindenstrauss 1984) and have the same length.

    Args:
        name: of the text encoder, as for `TextEncoder`.
        width: w of each part.
        common: the share of the texts of `fit` from which on a word is common.
        device: where the network runs, by default the CPU.

    Attributes:
        dim: width 3w of the memory.

    Raises:
        ConfigError: a setting outside what is allowed.
        AdapterFileError: no such text encoder.
        MissingExtraError: scikit-learn is not installed.

    >>> encoder = NameEncoder(width=32)
    >>> names = ["Lima", "Quito", "Oslo", "Armenska"]
    >>> encoder.fit([f"What is the currency of {name}?" for name in names], [f"currency of {name}" for name in names])
    >>> right, near = encoder.encode(["currency of Armeńska", "currency of Armenska"]).tokens[:, 0]
    >>> query = encoder.encode_query("What is the currency of Armeńska?").tokens[0, 0]
    >>> bool(query @ right > 0.9 > 0.8 > query @ near)
    True
    """

    file_format = "mmattn-name-encoder"

    def __init__(
        self,
        name: str | os.PathLike[str] = "minilm",
        *,
        width: int = 64,
        common: float = 0.02,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(name, ngrams=check_int("width", width), device=device)
        self.width = width
        self.common = check_float("common", common, at_least=0, below=1)
        self.dim = 3 * width
        self.common_words: frozenset[str] = frozenset()
        self.weights = torch.ones(len(_PARTS), _PLACES)

    def fit(self, queries: Sequence[str], entries: Sequence[str]) -> None:
        """Learn which words are common, how much each feature weighs, and the map from queries to entries.

        Arguments and errors as for `HybridEncoder.fit`.
        """
        texts = [*check_text(queries), *check_text(entries)]
        if len(queries) != len(entries) or not texts:
            raise ShapeError(f"each query needs its entry; got {len(queries)} queries and {len(entries)} entries")
        _refuse_wordless(texts)
        counts = Counter(word for text in texts for word in set(_words(text)))
        self.common_words = frozenset(word for word, count in counts.items() if count >= self.common * len(texts))
        frequencies = [(self._features(part, texts) != 0).sum(0) for part in _PARTS]
        texts_with = torch.tensor([frequency.tolist()[0] for frequency in frequencies])
        self.weights = torch.log((1 + len(texts)) / (1 + texts_with)).float()
        super().fit(queries, entries)

    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        if not texts:
            return Memory(torch.zeros(0, 1, self.dim, device=self.device))
        _refuse_wordless(texts)
        parts = [self._meaning(texts, batch_size, progress)]
        for number, part in enumerate(_PARTS):
            counts = self._features(part, texts)
            counts.data = self.weights[number].numpy()[counts.indices] * (2 * (counts.data > 0) - 1)
            projected = torch.from_numpy(counts @ self._matrices[1 + number]).to(parts[0])
            parts.append(nn.functional.normalize(projected, dim=1))
        vectors = nn.functional.normalize(torch.cat(parts, 1), dim=1)
        return Memory(vectors[:, None], sources=[[{"text": number}] for number in range(len(texts))])

    def _meaning(self, texts: Sequence[str], batch_size: int, progress: bool) -> Tensor:
        """Return the projected embeddings (b, w) of the common words; zeros where a text has none."""
        common = [" ".join(word for word in _words(text) if word in self.common_words) for text in texts]
        distinct = sorted(set(common) - {""})
        dense = self.model.encode(distinct, batch_size=batch_size, progress=progress).tokens[:, 0]
        dense = nn.functional.normalize(dense @ torch.from_numpy(self._matrices[0]).to(dense), dim=1)
        place = {text: row for row, text in enumerate(distinct)} | {"": len(distinct)}
        return nn.functional.pad(dense, (0, 0, 0, 1))[[place[text] for text in common]]

    def _features(self, part: str, texts: Sequence[str]) -> csr_matrix:
        features = _words if part == "words" else _ngrams
        return hashing(analyzer=features, n_features=_PLACES, norm=None).transform(texts)

    @cached_property
    def _matrices(self) -> list[numpy.ndarray]:
        """The projections (d, w) of the three parts."""
        import numpy

        random = numpy.random.RandomState(0)  # whose stream is the same in every version
        sizes = (self.model.dim, _PLACES, _PLACES)
        return [(random.randn(size, self.width) / self.width**0.5).astype("float32") for size in sizes]

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device | None = None) -> NameEncoder:
        """Read what `save` wrote. Arguments and errors as for `HybridEncoder.load`."""
        state, metadata = read_tensors(Path(path), cls.file_format)
        with parse_errors(path, "NameEncoder"):
            name, words = (
                validated(key, kind, metadata[key]) for key, kind in (("name", str), ("common_words", list[str]))
            )
            width, common = check_int("width", metadata["width"], at_most=1 << 16), metadata["common"]
            weights, down, up = (state[key].float() for key in ("weights", "down", "up"))
            weights = weights.view(len(_PARTS), _PLACES)
        encoder = cls(name, width=width, common=common, device=device)
        encoder.common_words, encoder.weights = frozenset(words), weights
        encoder._set_projection(path, down, up)
        return encoder

    def _metadata(self) -> dict[str, object]:
        return {"width": self.width, "common": self.common, "common_words": sorted(self.common_words)}

    def _described(self) -> dict[str, object]:
        return {"encoder": "names", **self._metadata(), "dense": self.model.fingerprint}

    def _weights(self) -> dict[str, Tensor]:
        return {"weights": self.weights, **super()._weights()}


def _refuse_wordless(texts: Sequence[str]) -> None:
    refuse_empty([len(_words(text)) for text in texts])


def _words(text: str) -> list[str]:
    # A question mark is no part of the name before it, and a letter with an accent has two spellings in Unicode.
    return _END.sub("", unicodedata.normalize("NFC", text)).split()


def _ngrams(text: str) -> list[str]:
    text = f" {' '.join(_words(text))} "
    return [text[start : start + size] for size in _NGRAMS for start in range(len(text) - size + 1)]
