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

from mmattn.encoders.base import TextEncoderBase, register_encoder
from mmattn.encoders.text import TextEncoder
from mmattn.errors import AdapterFileError, ConfigError, ShapeError, check_float, check_int, import_extra
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.tokenization import check_text, refuse_empty

if TYPE_CHECKING:
    import numpy
    from scipy.sparse import csr_matrix

FORMAT = "mmattn-name-encoder"
#: Places of hashed features before they are projected.
_PLACES = 1 << 16
_NGRAMS = range(2, 5)
_PARTS = ("words", "ngrams")
#: Question marks, also Arabic and full-width ones, and blanks at the end of a text.
_END = re.compile(r"[\s?\u061f\uff1f]+\Z")


@register_encoder("names")
class NameEncoder(TextEncoderBase):
    """Vectors of texts about names as a memory (b, 1, 3w): meaning, words and spelling, each of width w.

    A sentence encoder takes names that are one letter apart for the same, most of all among very many. Here it reads
    the common words of a text alone ("currency of"), each distinct sequence of them once. Beside it are two sparse
    vectors of the whole text: its words, and its sequences of 2 to 4 letters, case and accents kept. Question marks and
    blanks at the end do not count, and composed and decomposed letters (NFC, NFD) are the same. Features that are rare
    in the texts of `fit` weigh more (inverse document frequency, as in BM25). All three are projected to w numbers by
    fixed random matrices (Johnson and Lindenstrauss 1984) and have the same length.

    Queries may have other words than entries ("What is the currency of Lima?", "currency of Lima"): `fit` learns a
    linear map from queries to entries, which `encode_query` applies.

    Args:
        name: of the text encoder, as for `TextEncoder`.
        width: w of each part.
        common: the share of the texts of `fit` from which on a word is common.
        device: device of the network, by default the CPU.

    Attributes:
        dim: width 3w of the memory.
        query_projection: (3w, r) and (r, 3w), whose product the map adds to queries; None before `fit`.

    Raises:
        ConfigError: a setting that is not allowed.
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

    model: TextEncoder
    _shown = ("dim", "width", "common")
    query_projection: tuple[Tensor, Tensor] | None

    def __init__(
        self,
        name: str | os.PathLike[str] = "minilm",
        *,
        width: int = 64,
        common: float = 0.02,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__(TextEncoder(name), device=device)
        self.name, self.query_projection = os.fspath(name), None
        self.width = check_int("width", width)
        self.common = check_float("common", common, at_least=0, below=1)
        self.dim = 3 * width
        self.common_words: frozenset[str] = frozenset()
        self.weights = torch.ones(len(_PARTS), _PLACES)

    @classmethod
    def from_name(cls, name: str, device: str | torch.device | None = None, pooling: str | None = None) -> NameEncoder:
        """Load the file for `load_text_encoder`."""
        cls._refuse_pooling(name, pooling)
        return cls.load(name, device)

    def fit(self, queries: Sequence[str], entries: Sequence[str]) -> None:
        """Learn which words are common, how much each feature weighs, and the map from queries to entries.

        Args:
            queries: texts of queries.
            entries: the entry that each should find.

        Raises:
            ShapeError: another number of entries than of queries, or none.
            TextError: a text without words.
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
        self.query_projection = _linear_map(self.encode(queries).tokens[:, 0], self.encode(entries).tokens[:, 0])

    def project_queries(self, vectors: Tensor) -> Tensor:
        """Map vectors of queries, as `encode` gives them; the identity before `fit`.

        Args:
            vectors: (…, e).
        """
        if self.query_projection is None:
            return vectors
        down, up = (part.to(vectors) for part in self.query_projection)
        return nn.functional.normalize(vectors + vectors @ down @ up, dim=-1)

    def _encode_texts(self, texts: list[str], kind: str, batch_size: int, progress: bool) -> Tensor:
        _refuse_wordless(texts)
        parts = [self._meaning(texts, batch_size, progress)]
        for number, part in enumerate(_PARTS):
            counts = self._features(part, texts)
            counts.data = self.weights[number].numpy()[counts.indices] * (2 * (counts.data > 0) - 1)
            projected = torch.from_numpy(counts @ self._matrices[1 + number]).to(parts[0])
            parts.append(nn.functional.normalize(projected, dim=1))
        vectors = nn.functional.normalize(torch.cat(parts, 1), dim=1)
        return self.project_queries(vectors) if kind == "query" else vectors

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
        vectorizer = import_extra("sklearn.feature_extraction.text", "data").HashingVectorizer
        return vectorizer(analyzer=features, n_features=_PLACES, norm=None, dtype="float32").transform(texts)

    @cached_property
    def _matrices(self) -> list[numpy.ndarray]:
        """The projections (d, w) of the three parts."""
        import numpy

        random = numpy.random.RandomState(0)  # whose stream is the same in every version
        sizes = (self.model.dim, _PLACES, _PLACES)
        return [(random.randn(size, self.width) / self.width**0.5).astype("float32") for size in sizes]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the map of queries to a safetensors file, with the settings; the text encoder is named, not copied.

        Args:
            path: of the file.

        Raises:
            ConfigError: there is no map yet.
            OSError: the disk is full, or the folder is not writable.
        """
        if self.query_projection is None:
            raise ConfigError("there is no map of queries to save: call fit first")
        name = os.path.abspath(self.name) if os.path.isdir(self.name) else self.name
        write_tensors(Path(path), self._weights(), {"format": FORMAT, "name": name, **self._settings()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device | None = None) -> NameEncoder:
        """Read the file of `save`.

        Args:
            path: of the file.
            device: where it runs, by default the CPU.

        Raises:
            AdapterFileError: the file is missing, damaged or something else, or names a text encoder of another width.
        """
        state, metadata = read_tensors(Path(path), FORMAT)
        with parse_errors(path, "NameEncoder"):
            name, words = (
                validated(key, kind, metadata[key]) for key, kind in (("name", str), ("common_words", list[str]))
            )
            width, common = check_int("width", metadata["width"], at_most=1 << 16), metadata["common"]
            weights, down, up = (state[key].float() for key in ("weights", "down", "up"))
            weights = weights.view(len(_PARTS), _PLACES)
        encoder = cls(name, width=width, common=common, device=device)
        encoder.common_words, encoder.weights = frozenset(words), weights
        if not (down.dim() == up.dim() == 2 and len(down) == up.shape[1] == encoder.dim and down.shape[1] == len(up)):
            raise AdapterFileError(
                f"{os.fspath(path)!r} maps queries by {tuple(down.shape)} and {tuple(up.shape)}, but its vectors have "
                f"width {encoder.dim}"
            )
        encoder.query_projection = (down.to(encoder.device), up.to(encoder.device))
        return encoder

    def _settings(self) -> dict[str, object]:
        return {"width": self.width, "common": self.common, "common_words": sorted(self.common_words)}

    def _described(self) -> dict[str, object]:
        return {"encoder": "names", **self._settings(), "dense": self.model.fingerprint}

    def _weights(self) -> dict[str, Tensor]:
        weights = {"weights": self.weights}
        if self.query_projection is not None:
            weights |= dict(zip(("down", "up"), self.query_projection, strict=True))
        return weights


def _linear_map(queries: Tensor, entries: Tensor, ridge: float = 1e-3, rank: int = 64) -> tuple[Tensor, Tensor]:
    """Fit entries - queries, both (n, e), by ridge regression on the queries; return factors (e, r) and (r, e).

    `ridge` is a share of the mean eigenvalue of the queries.
    """
    source, target = queries.double(), entries.double()
    gram = source.T @ source
    penalty = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.double, device=gram.device)
    change = torch.linalg.solve(gram + penalty, source.T @ (target - source))
    left, size, right = torch.linalg.svd(change)
    return (left[:, :rank] * size[:rank]).float().contiguous(), right[:rank].float().contiguous()


def _refuse_wordless(texts: Sequence[str]) -> None:
    refuse_empty([len(_words(text)) for text in texts])


def _words(text: str) -> list[str]:
    # A question mark is no part of the name before it, and a letter with an accent has two spellings in Unicode.
    return _END.sub("", unicodedata.normalize("NFC", text)).split()


def _ngrams(text: str) -> list[str]:
    text = f" {' '.join(_words(text))} "
    return [text[start : start + size] for size in _NGRAMS for start in range(len(text) - size + 1)]
