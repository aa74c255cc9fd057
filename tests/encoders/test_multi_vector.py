"""MultiVectorEncoder: what sentence-transformers computes, as a memory; fingerprints, files, and what is refused."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn.encoders import MultiVectorEncoder
from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError, NonFiniteError, TextError
from tests.tiny_texts import save_encoder

sentence_transformers = pytest.importorskip(
    "sentence_transformers", minversion="6", reason="sentence-transformers 6 or later is not installed"
)
TEXTS = ["the woods", "in spring the bluebell flowers in the woods", "a", "flowers, in the."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ColBERT: a projection, marks of queries and entries, expanded queries, and words that entries lack."""
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Normalize

    torch.manual_seed(11)
    path = tmp_path_factory.mktemp("colbert")
    transformer = Transformer(str(save_encoder(path / "bert")), document_length=29)
    project = Dense(12, 7, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings")
    modules = [transformer, project, MultiVectorMask([","]), Normalize(module_input_name="token_embeddings")]
    prompts = {"query": "ask: ", "document": "told: "}
    model = sentence_transformers.MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu")
    model.save_pretrained(str(path / "model"))
    return path / "model"


@pytest.fixture(scope="module")
def published(folder: Path) -> Any:
    return sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> MultiVectorEncoder:
    return MultiVectorEncoder(folder)


def test_vectors_are_those_of_sentence_transformers(encoder: MultiVectorEncoder, published: Any) -> None:
    for encode, theirs in ((encoder.encode, published.encode_document), (encoder.encode_query, published.encode_query)):
        memory, wanted = encode(TEXTS, batch_size=3), theirs(TEXTS)
        assert memory.dim == encoder.dim == 7 and memory.lengths == [len(part) for part in wanted]
        for row, part in enumerate(wanted):
            assert torch.isfinite(part).all()
            torch.testing.assert_close(memory.tokens[row, : len(part)], part)
        assert memory.sources is not None and memory.sources[1][1] == {"text": 1, "token": 1}
        assert not memory.tokens.is_inference() and not memory.tokens.requires_grad
    assert encoder.encode(TEXTS).lengths != encoder.encode_query(TEXTS).lengths
    assert encoder.encode([]).tokens.shape == (0, 0, 7)
    assert torch.equal(encoder.encode("the woods").tokens, encoder.encode(["the woods"]).tokens)


def test_the_fingerprint_is_of_settings_and_weights(folder: Path, encoder: MultiVectorEncoder) -> None:
    assert MultiVectorEncoder(folder).fingerprint == encoder.fingerprint
    others = [MultiVectorEncoder(folder, prompts={"query": "who: "}), MultiVectorEncoder(folder)]
    with torch.no_grad():
        next(others[1].parameters()).add_(1)
    assert len({encoder.fingerprint, *(other.fingerprint for other in others)}) == 3
    assert not any(parameter.requires_grad for parameter in encoder.parameters()) and not encoder.train().training


def test_what_is_refused(folder: Path, encoder: MultiVectorEncoder, tmp_path: Path) -> None:
    for texts, match in ((["a", " "], "text 1 is empty"), (["a", None], "text 1 must be a string")):
        with pytest.raises(TextError, match=match):
            encoder.encode(texts)  # type: ignore[arg-type]
        with pytest.raises(TextError, match=match):
            encoder.encode_query(texts)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size"):
        encoder.encode(["a"], batch_size=0)
    with pytest.raises(AdapterFileError, match="no multi-vector encoder can be loaded from"):
        MultiVectorEncoder(tmp_path / "nothing")
    broken = sentence_transformers.MultiVectorEncoder(str(folder), device="cpu")
    with torch.no_grad():
        next(broken.parameters())[0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        broken.save_pretrained(str(tmp_path / "broken"))
    with pytest.raises(NonFiniteError):
        MultiVectorEncoder(tmp_path / "broken")


@pytest.mark.parametrize("library", [None, types.SimpleNamespace(__version__="5.1.0")])
def test_a_library_that_is_missing_or_too_old_is_named(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", library)
    with pytest.raises(MissingExtraError, match=r"mmattn\[multivector\]"):
        MultiVectorEncoder("anything")
