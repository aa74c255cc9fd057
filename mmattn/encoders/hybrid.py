"""Texts by meaning and by spelling: a text encoder beside hashed character n-grams."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mmattn.encoders.base import TextEncoderBase, register_encoder
from mmattn.encoders.text import TextEncoder
from mmattn.errors import AdapterFileError, ConfigError, ShapeError, check_int, import_extra
from mmattn.memory import Memory
from mmattn.storage.json_files import parse_errors, validated
from mmattn.storage.safetensors import read_tensors, write_tensors

if TYPE_CHECKING:
    from sklearn.feature_extraction.text import HashingVectorizer

#: Lengths of the n-grams.
_NGRAMS = (2, 4)


@register_encoder("hybrid")
class HybridEncoder(TextEncoderBase):
    """Dense embeddings of texts beside hashed counts of their character n-grams, as a memory (b, 1, e).

    A text encoder represents the meaning of a text, and may not distinguish names that it has not been trained on:
    all-MiniLM-L6-v2 reads letters without their accents. The n-grams represent the spelling: 2 to 4 letters in a row
    within a word, lower-case, counted with signs at hashed places (feature hashing, arXiv 0902.2206;
    `HashingVectorizer` of scikit-learn). Composed and decomposed letters (NFC, NFD) are the same. Both parts have
    length 1, and so has the whole vector.

    Queries may have other words than entries ("What is the currency of Lima?", "currency of Lima"): `fit_queries`
    learns a linear map from queries to entries, which `encode_query` applies.

    Args:
        name: of the text encoder, as for `TextEncoder`.
        ngrams: places for the counts of n-grams.
        device: where the network runs, by default the CPU.

    Attributes:
        dim: width e of the memory: that of the text encoder plus `ngrams`.
        query_projection: (e, r) and (r, e), whose product the map adds to queries; None before `fit_queries`.

    Raises:
        ConfigError: a setting outside what is allowed.
        AdapterFileError: no such text encoder.
        MissingExtraError: scikit-learn is not installed.

    >>> encoder = HybridEncoder()
    >>> one, other = encoder.encode(["currency of Armeńska", "currency of Armenska"]).tokens[:, 0]
    >>> bool(one @ other < 0.97), encoder.dim
    (True, 640)
    """

    file_format: ClassVar[str] = "mmattn-hybrid-encoder"
    model: TextEncoder
    query_projection: tuple[Tensor, Tensor] | None

    def __init__(
        self,
        name: str | os.PathLike[str] = "minilm",
        *,
        ngrams: int = 256,
        device: str | torch.device | None = None,
    ) -> None:
        self.name, self.ngrams = os.fspath(name), check_int("ngrams", ngrams)
        dense = TextEncoder(name)
        super().__init__(dense, {"encoder": "hybrid", "ngrams": [*_NGRAMS, self.ngrams]}, device)
        self.dim = dense.dim + self.ngrams
        self.query_projection = None

    @classmethod
    def from_name(
        cls, name: str, device: str | torch.device | None = None, pooling: str | None = None
    ) -> HybridEncoder:
        """Load the file for `load_text_encoder`."""
        return cls.load(name, device)

    def _encode_texts(self, texts: list[str], batch_size: int, progress: bool) -> Memory:
        texts = [unicodedata.normalize("NFC", text) for text in texts]
        dense = self.model.encode(texts, batch_size=batch_size, progress=progress)
        counts = torch.zeros(0, self.ngrams)
        if texts:
            vectorizer = hashing(analyzer="char_wb", ngram_range=_NGRAMS, n_features=self.ngrams)
            counts = torch.from_numpy(vectorizer.transform(texts).toarray())
        both = nn.functional.normalize(torch.cat([dense.tokens[:, 0], counts.to(dense.tokens)], 1), dim=1)
        return Memory(both[:, None], sources=dense.sources)

    def encode_query(self, texts: str | Iterable[str], *, batch_size: int = 32, progress: bool = False) -> Memory:
        """Return the memory (b, 1, e) of b queries. Arguments and errors as for `encode`."""
        memory = self.encode(texts, batch_size=batch_size, progress=progress)
        return Memory(self.project_queries(memory.tokens), sources=memory.sources)

    def project_queries(self, vectors: Tensor) -> Tensor:
        """Map vectors of queries, as `encode` gives them; the identity before `fit_queries`.

        Args:
            vectors: (…, e).
        """
        if self.query_projection is None:
            return vectors
        down, up = (part.to(vectors) for part in self.query_projection)
        return nn.functional.normalize(vectors + vectors @ down @ up, dim=-1)

    def fit(self, queries: Sequence[str], entries: Sequence[str]) -> None:
        """Learn the map from the texts of queries to those of the entries that answer them.

        Args:
            queries: texts of queries.
            entries: the entry that each should find.

        Raises:
            ShapeError: another number of entries than of queries, or none.
        """
        self.fit_queries(self.encode(queries).tokens[:, 0], self.encode(entries).tokens[:, 0])

    @torch.no_grad()
    def fit_queries(self, queries: Tensor, entries: Tensor, *, ridge: float = 1e-3, rank: int = 64) -> None:
        """Learn a linear map from queries to the entries that answer them, by ridge regression.

        Args:
            queries: (n, e) of `encode` for texts of queries.
            entries: (n, e) of `encode` for the entry that each should find.
            ridge: weight of the penalty, as a share of the mean eigenvalue of the queries.
            rank: r of the map.

        Raises:
            ShapeError: not two matrices of the same shape, of width e.
        """
        if queries.shape != entries.shape or queries.dim() != 2 or queries.shape[1] != self.dim or not len(queries):
            raise ShapeError(
                f"queries and entries must be (n, {self.dim}), one entry for each query; got {tuple(queries.shape)} "
                f"and {tuple(entries.shape)}"
            )
        source, target = queries.double(), entries.double()
        identity = torch.eye(self.dim, dtype=torch.double, device=source.device)
        gram = source.T @ source
        penalty = ridge * gram.diagonal().mean() * identity
        change = torch.linalg.solve(gram + penalty, source.T @ (target - source))
        left, size, right = torch.linalg.svd(change)
        down, up = (part.float().contiguous() for part in (left[:, :rank] * size[:rank], right[:rank]))
        self.query_projection = (down.to(self.device), up.to(self.device))

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
        write_tensors(Path(path), self._weights(), {"format": self.file_format, "name": name, **self._metadata()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device | None = None) -> HybridEncoder:
        """Read what `save` wrote.

        Args:
            path: of the file.
            device: where it runs, by default the CPU.

        Raises:
            AdapterFileError: the file is missing, damaged or something else, or names a text encoder of another width.
        """
        state, metadata = read_tensors(Path(path), cls.file_format)
        with parse_errors(path, "HybridEncoder"):
            name = validated("name", str, metadata["name"])
            ngrams = check_int("ngrams", metadata["ngrams"], at_most=1 << 24)
            down, up = state["down"].float(), state["up"].float()
        encoder = cls(name, ngrams=ngrams, device=device)
        encoder._set_projection(path, down, up)
        return encoder

    def _set_projection(self, path: str | os.PathLike[str], down: Tensor, up: Tensor) -> None:
        """Take the map of a file, or refuse one of another width."""
        if not (down.dim() == up.dim() == 2 and len(down) == up.shape[1] == self.dim and down.shape[1] == len(up)):
            raise AdapterFileError(
                f"{os.fspath(path)!r} maps queries by {tuple(down.shape)} and {tuple(up.shape)}, but {self.name!r} "
                f"with {self.ngrams} n-grams gives vectors of width {self.dim}: the text encoder has changed"
            )
        self.query_projection = (down.to(self.device), up.to(self.device))

    def _metadata(self) -> dict[str, object]:
        """Return the settings that a file needs beside the name of the text encoder."""
        return {"ngrams": self.ngrams}

    def _described(self) -> dict[str, object]:
        return {**self.settings, "dense": self.model.fingerprint}

    def _weights(self) -> dict[str, Tensor]:
        return {} if self.query_projection is None else dict(zip(("down", "up"), self.query_projection, strict=True))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, ngrams={self.ngrams}, query_projection={self.query_projection is not None}"


def hashing(**settings: Any) -> HashingVectorizer:
    """Return scikit-learn's counts of features at hashed places."""
    return import_extra("sklearn.feature_extraction.text", "data").HashingVectorizer(dtype="float32", **settings)
