"""Scores of texts for a query by a model of sentence-transformers, which `Hits.rerank` sorts by."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmattn.encoders.sentence_folder import import_sentence_transformers
from mmattn.errors import ConfigError, IndexMismatchError, NonFiniteError
from mmattn.memory import Memory
from mmattn.models.cache import resolve
from mmattn.models.loading import load_model, without_progress_bars


def text_scores(model: Any, query: str, texts: list[str], tokens: Sequence[Tensor] | None, batch_size: int) -> Tensor:
    """Return the scores (n,) float32 of n texts: those of a cross-encoder, or MaxSim of token vectors.

    MaxSim (ColBERT, arXiv 2004.12832, equation 3) is the sum over the vectors of the query of the largest cosine with a
    vector of the text. `tokens`, n tensors (m, e), are the vectors of the texts, which are otherwise encoded.
    """
    library = import_sentence_transformers()
    if hasattr(model, "predict"):
        pairs = [(query, text) for text in texts]
        options = {"activation_fn": torch.nn.Identity(), "convert_to_tensor": True, "show_progress_bar": False}
        scores = model.predict(pairs, batch_size=batch_size, **options)
    else:
        (wanted,) = _token_vectors(model.encode_query([query]))
        if tokens is None:
            tokens = _token_vectors(model.encode_document(texts, batch_size=batch_size))
        if tokens[0].shape[1] != len(wanted[0]):
            raise IndexMismatchError(
                f"the query has vectors of width {len(wanted[0])} and the hits have tokens of width "
                f"{tokens[0].shape[1]}: use the encoder of the tokens"
            )
        scores = library.util.maxsim([normalize(wanted, dim=1)], [normalize(part, dim=1) for part in tokens])[0]
    if scores.shape != (len(texts),):
        raise ConfigError(f"a reranker gives each text one score; {len(texts)} texts got scores {tuple(scores.shape)}")
    scores = scores.float().cpu()
    if not scores.isfinite().all():
        place = int((~scores.isfinite()).nonzero()[0])
        raise NonFiniteError(f"the score of {texts[place]!r:.60} is {scores[place]}; load the model in float32")
    return scores


def load_cross_encoder(name: str | os.PathLike[str]) -> Any:
    """Load a `CrossEncoder` of sentence-transformers with one label, whose weights are complete and finite.

    Raises:
        AdapterFileError: nothing to load, or weights that are no safetensors or incomplete.
        NonFiniteError: NaN or infinity in the weights.
        MissingExtraError: sentence-transformers is not installed.
    """
    library, place = import_sentence_transformers(), os.fspath(resolve(name))
    # sentence-transformers itself starts missing weights at random.
    load_model("AutoModelForSequenceClassification", place, "cross-encoder")
    with without_progress_bars():
        return library.CrossEncoder(place, model_kwargs={"use_safetensors": True})


def _token_vectors(encoded: Memory | Sequence[Tensor]) -> list[Tensor]:
    """Return the vectors (m, e) of each text, of an encoder of mmattn or of sentence-transformers."""
    if not isinstance(encoded, Memory):
        return [vectors.float().cpu() for vectors in encoded]
    rows = zip(encoded.tokens.float().cpu(), encoded.real_slots().cpu(), strict=True)
    return [tokens[real] for tokens, real in rows]
