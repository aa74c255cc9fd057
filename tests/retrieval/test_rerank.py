"""`Hits.rerank`: scores of a cross-encoder and MaxSim of token vectors; masked hits stay masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mmattn import Index, TextEncoder
from mmattn.cli.app import main
from mmattn.errors import AdapterFileError, ConfigError, IndexMismatchError, NonFiniteError, ShapeError, TextError
from mmattn.retrieval import Hits
from mmattn.retrieval.hits import load_cross_encoder
from tests.tiny_texts import save_encoder

QUERIES = ["the woods", "in spring"]
TEXTS = [
    ["flowers", "the bluebell flowers in the woods", "a b"],
    ["in spring the flowers", "x", "ünï 🌼"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(17)
    return save_encoder(tmp_path_factory.mktemp("reranker"), labels=1)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Any:
    return load_cross_encoder(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    """The score (2, 3) of every pair, alone, by transformers itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = []
    for query, texts in zip(QUERIES, TEXTS, strict=True):
        pairs = [tokenizer(query, text, return_tensors="pt") for text in texts]
        with torch.no_grad():
            rows.append(torch.stack([model(**pair).logits[0, 0] for pair in pairs]))
    return torch.stack(rows)


def test_models_that_are_no_cross_encoders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 texts got scores \(2, 3\)"):
        Hits(torch.ones(1, 2), texts=[["a", "b"]]).rerank(
            "a", load_cross_encoder(save_encoder(tmp_path / "three", labels=3))
        )
    path = save_encoder(tmp_path / "other", labels=1) / "model.safetensors"
    good = load_file(path)
    headless = {name: tensor for name, tensor in good.items() if not name.startswith("classifier")}
    save_file(headless, path, {"format": "pt"})
    with pytest.raises(AdapterFileError, match="2 missing: classifier.bias, classifier.weight"):
        load_cross_encoder(path.parent)
    save_file(good | {"classifier.weight": good["classifier.weight"] * torch.inf}, path, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"classifier\.weight"):
        load_cross_encoder(path.parent)
    with pytest.raises(AdapterFileError, match="no cross-encoder can be loaded from 'nobody/nothing'"):
        load_cross_encoder("nobody/nothing")
    model = load_cross_encoder(folder)
    model.model.classifier.bias.data.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="the score of 'b' is nan"):
        Hits(torch.ones(1, 1), texts=[["b"]]).rerank("a", model)


def hits() -> Hits:
    """Of two queries; the second found two of three."""
    return Hits(
        torch.tensor([[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]], requires_grad=True),
        torch.tensor([[True] * 3, [True, True, False]]),
        torch.arange(2.0 * 3 * 5).view(2, 3, 5),
        [["a", "b", "c"], ["d", "e", "f"]],
        TEXTS,
        [[{"n": 3 * row + place} for place in range(3)] for row in range(2)],
        [[torch.full((place + 1, 7), float(3 * row + place)) for place in range(3)] for row in range(2)],
    )


def test_hits_are_read_again_and_ordered(reranker: Any, alone: torch.Tensor) -> None:
    before = hits()
    found = before.rerank(QUERIES, reranker)
    order = [sorted(range(3), key=lambda place: -alone[0, place]), sorted(range(2), key=lambda place: -alone[1, place])]
    assert order[0] != [0, 1, 2]
    order[1].append(2)
    assert found.mask.tolist() == before.mask.tolist() and not found.scores.requires_grad
    torch.testing.assert_close(found.scores[0], alone[0, order[0]])
    torch.testing.assert_close(found.scores[1, :2], alone[1, order[1][:2]])
    assert found.scores[1, 2] == -torch.inf
    for row, places in enumerate(order):
        for rank, place in enumerate(places):
            for name in ("ids", "texts", "metadata"):
                assert getattr(found, name)[row][rank] == getattr(before, name)[row][place]
            assert torch.equal(found.vectors[row, rank], before.vectors[row, place])
            tokens = found.tokens[row][rank]
            assert tokens is before.tokens[row][place] and (tokens is None) == (place == 2 and row == 1)
    best = found.first(1)
    assert best.ids == [[found.ids[0][0]], [found.ids[1][0]]] and best.scores.shape == (2, 1)
    assert best.memory(tokens=True).lengths == [order[0][0] + 1, order[1][0] + 1]


def test_the_first_of_hits() -> None:
    before = hits()
    first = before.first(2)
    assert first.ids == [["a", "b"], ["d", "e"]] and first.mask.all()
    assert first.scores.requires_grad
    assert before.first(5).ids == before.ids
    for count in (0, 1.0):
        with pytest.raises(ConfigError, match="count"):
            before.first(count)  # type: ignore[arg-type]


def test_token_vectors_are_compared_by_maxsim(tmp_path: Path) -> None:
    """Of texts that are encoded, and of the encoded tokens of the hits; padding never counts."""
    encoder = TextEncoder(save_encoder(tmp_path), pooling="none")
    asked = encoder.encode(QUERIES)
    for encoded in (False, True):
        before = hits()
        if encoded:
            before.tokens = [[encoder.encode(text).tokens[0] for text in row] for row in TEXTS]
            before.texts = [["another text"] * 3] * 2
        else:
            before.tokens = None
        found = before.rerank(QUERIES, encoder)
        for row, (query, real) in enumerate(zip(asked.tokens, asked.real_slots(), strict=True)):
            count = 3 - row
            sums = []
            for text in TEXTS[row][:count]:
                cosines = torch.nn.functional.cosine_similarity(
                    query[real][:, None], encoder.encode(text).tokens, dim=2
                )
                sums.append(cosines.amax(1).sum())
            wanted, order = torch.stack(sums).sort(descending=True)
            torch.testing.assert_close(found.scores[row, :count], wanted)
            assert found.ids[row][:count] == [before.ids[row][place] for place in order]
    with pytest.raises(IndexMismatchError, match="tokens of width 7"):
        hits().rerank(QUERIES, encoder)


@pytest.mark.parametrize(
    ("given", "queries", "error", "names"),
    [
        ({}, "a", ConfigError, "hit 0 of query 0"),
        ({"ids": [["x", "y"]], "texts": [["a", None]]}, "a", ConfigError, "'y'"),
        ({"texts": [["a", "b"]]}, ["a", "b"], ShapeError, "1 rows .* 2"),
        ({"texts": [["a", "b"]]}, " ", TextError, "empty"),
        ({"texts": [["a", "b"]]}, [None], TextError, "string"),
    ],
)
def test_hits_that_cannot_be_reranked(reranker: Any, given: Any, queries: Any, error: Any, names: str) -> None:
    with pytest.raises(error, match=names):
        Hits(torch.ones(1, 2), **given).rerank(queries, reranker)


def test_the_command_line_reranks(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    texts = [*TEXTS[0], *TEXTS[1]]
    index = Index.build(texts, encoder=TextEncoder(encoder))
    index.save(tmp_path / "index")
    asked = ["index", "search", str(tmp_path / "index"), "the woods", "--encoder", str(encoder), "--top-k", "2"]
    with pytest.raises(SystemExit):
        main([*asked, "--rerank", str(folder)])
    expected = index.search("the woods", 6).rerank("the woods", load_cross_encoder(folder)).first(2)
    assert expected.texts is not None and expected.ids is not None
    lines = zip(expected.scores[0].tolist(), expected.ids[0], expected.texts[0], strict=True)
    assert capsys.readouterr().out.splitlines() == [f"{score:.3f}  {name}  {text}" for score, name, text in lines]
