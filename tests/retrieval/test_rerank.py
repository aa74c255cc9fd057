"""Reranker: the scores of the model alone with each pair, missing texts stay missing, what is no pair is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mmattn import Index, TextEncoder
from mmattn.cli.app import main
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, ShapeError, TextError
from mmattn.retrieval import Hits
from mmattn.retrieval.rerank import Reranker
from tests.tiny_texts import POSITIONS, save_encoder

QUERIES = ["the woods", "in spring"]
TEXTS = [
    ["flowers", "the bluebell flowers in the woods", "a </s> b"],
    ["in spring the flowers", "x", "ünï 🌼"],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(17)
    return save_encoder(tmp_path_factory.mktemp("reranker"), labels=1)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Reranker:
    return Reranker(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    """The score (2, 3) of every pair, alone, by transformers itself."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    rows = []
    for query, texts in zip(QUERIES, TEXTS, strict=True):
        pairs = [tokenizer(query, text, split_special_tokens=True, return_tensors="pt") for text in texts]
        with torch.no_grad():
            rows.append(torch.stack([model(**pair).logits[0, 0] for pair in pairs]))
    return torch.stack(rows)


def test_scores_are_those_of_the_pair_alone(reranker: Reranker, alone: torch.Tensor) -> None:
    assert not reranker.training
    assert not any(module.training for module in reranker.train().modules())
    for batch_size in (1, 4, 32):
        found = reranker(QUERIES, TEXTS, batch_size=batch_size)
        assert torch.isfinite(found.scores).all()
        torch.testing.assert_close(found.scores, alone)
    assert len(alone.unique()) == 6
    assert found.order.tolist() == [sorted(range(3), key=lambda place: -row[place]) for row in alone.tolist()]
    one = reranker(QUERIES[1], TEXTS[1])
    torch.testing.assert_close(one.scores, alone[1:])


def test_missing_texts_stay_missing(reranker: Reranker, alone: torch.Tensor) -> None:
    found = reranker(QUERIES, [[TEXTS[0][0], None, TEXTS[0][2]], [None, TEXTS[1][1], None]])
    there = torch.tensor([[True, False, True], [False, True, False]])
    torch.testing.assert_close(found.scores[there], alone[there])
    assert (found.scores[~there] == -torch.inf).all()
    assert found.order[0].tolist() == ([0, 2, 1] if alone[0, 0] > alone[0, 2] else [2, 0, 1])
    assert found.order[1].tolist() == [1, 0, 2]
    nothing = reranker(QUERIES, [[None, None]] * 2)
    assert nothing.scores.tolist() == [[-torch.inf] * 2] * 2
    assert nothing.order.tolist() == [[0, 1]] * 2


def test_a_long_text_is_cut_and_a_long_query_refused(folder: Path, reranker: Reranker) -> None:
    assert reranker.max_length == POSITIONS
    short = Reranker(folder, max_length=11)
    with pytest.warns(UserWarning, match=r"1 texts are longer than 11 tokens and were cut: \[1\]"):
        found = short("xxxx", ["yyyy", "yyyyyyyyy"])
    assert found.scores[0, 0] == pytest.approx(float(found.scores[0, 1]), abs=1e-5)
    with pytest.raises(TextError, match="the query 'xxxxxxxx' has 8 tokens, and from 1 to 7"):
        short("xxxxxxxx", ["y"])


@pytest.mark.parametrize(
    ("queries", "texts", "error", "words"),
    [
        ("a", ["b", b"c"], TextError, "text 1 must be a string"),
        ("a", ["b", " "], TextError, "text 1 is empty"),
        ("", ["b"], TextError, "the query '' has 0 tokens"),
        (["a", None], [["b"], ["c"]], TextError, "text 1 must be a string"),
        (["a"], ["b"], ShapeError, "as many lists of texts"),
        (["a", "b"], [["c"]], ShapeError, "2 queries need as many lists"),
        (["a", "b"], [["c"], ["d", "e"]], ShapeError, "all of one length"),
    ],
)
def test_what_is_no_pair_is_refused(
    reranker: Reranker, queries: Any, texts: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        reranker(queries, texts)


def test_models_that_are_no_rerankers(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 labels"):
        Reranker(save_encoder(tmp_path / "three", labels=3))
    path = save_encoder(tmp_path / "other", labels=1) / "model.safetensors"
    good = load_file(path)
    headless = {name: tensor for name, tensor in good.items() if not name.startswith("classifier")}
    save_file(headless, path, {"format": "pt"})
    with pytest.raises(AdapterFileError, match="2 missing: classifier.bias, classifier.weight"):
        Reranker(path.parent)
    save_file(good | {"classifier.weight": good["classifier.weight"] * torch.inf}, path, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"classifier\.weight"):
        Reranker(path.parent)
    with pytest.raises(AdapterFileError, match="no cross-encoder can be loaded from 'nobody/nothing'"):
        Reranker("nobody/nothing")


def test_a_score_that_is_no_number_is_refused(folder: Path) -> None:
    reranker = Reranker(folder)
    reranker.model.classifier.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="the score of 'b' is nan"):
        reranker("a", ["b"])


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


def test_hits_are_read_again_and_ordered(reranker: Reranker, alone: torch.Tensor) -> None:
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


def test_hits_that_cannot_be_reranked(reranker: Reranker) -> None:
    with pytest.raises(ConfigError, match="texts, and hit 0 of query 0 has none"):
        Hits(torch.ones(1, 2)).rerank("a", reranker)
    with pytest.raises(ConfigError, match="'y', hit 1 of query 0, has none: give texts="):
        Hits(torch.ones(1, 2), ids=[["x", "y"]], texts=[["a", None]]).rerank("a", reranker)
    with pytest.raises(ShapeError, match="1 queries need as many lists of texts"):
        hits().rerank("a", reranker)


def test_the_command_line_reranks(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    texts = [*TEXTS[0], *TEXTS[1]]
    index = Index.build(texts, encoder=TextEncoder(encoder))
    index.save(tmp_path / "index")
    asked = ["index", "search", str(tmp_path / "index"), "the woods", "--encoder", str(encoder), "--top-k", "2"]
    with pytest.raises(SystemExit):
        main([*asked, "--rerank", str(folder)])
    expected = index.search("the woods", 6).rerank("the woods", Reranker(folder)).first(2)
    assert expected.texts is not None and expected.ids is not None
    lines = zip(expected.scores[0].tolist(), expected.ids[0], expected.texts[0], strict=True)
    assert capsys.readouterr().out.splitlines() == [f"{score:.3f}  {name}  {text}" for score, name, text in lines]
