"""NameEncoder: near misses apart, common words by their meaning, its file, and what is no such file."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mmattn.encoders import NameEncoder
from mmattn.encoders.text import load_text_encoder
from mmattn.errors import AdapterFileError, ConfigError, ShapeError, TextError
from mmattn.storage.safetensors import read_tensors, write_tensors
from tests.cli.running import call

CITIES = ["Lima", "Quito", "La Paz", "Bogotá", "Asunción", "Caracas", "Brasília", "Montevideo", "Santiago"]
TITLES = [f"currency of {name}" for name in CITIES]
QUESTIONS = [f"What pays {name}?" for name in CITIES]
WIDTH = 29


@pytest.fixture
def encoder(bert: Path) -> NameEncoder:
    encoder = NameEncoder(bert, width=WIDTH, common=0.3)
    encoder.fit(QUESTIONS, TITLES)
    return encoder


def test_names_that_differ_by_a_letter_an_accent_or_a_blank_are_apart(encoder: NameEncoder) -> None:
    names = ["Nova Armeńska", "Nova Armenska", "Nova ArmeńskA", "NovaArmeńska", "Nova Armeńsk", "Armeńska Nova"]
    vectors = encoder.encode([f"currency of {name}" for name in names]).tokens[:, 0]
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(names)))
    query = encoder.encode_query(f"What pays {names[0]}?").tokens[0, 0]
    scores = vectors @ query
    assert scores.isfinite().all() and scores[0] > 0.9 and scores[1:].max() < scores[0] - 0.03


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_name_in_two_spellings_of_unicode_is_one(bert: Path, form: str) -> None:
    """Invariant 164: whichever of them was fitted; compatibility letters stay letters of their own."""
    encoder = NameEncoder(bert)
    encoder.fit(*([unicodedata.normalize(form, text) for text in texts] for texts in (QUESTIONS, TITLES)))
    for texts in (QUESTIONS, TITLES, ["currency of Ångström", "currency of Việt Nam", "currency of 한국"]):
        composed, decomposed = (
            encoder.encode([unicodedata.normalize(one, t) for t in texts]) for one in ("NFC", "NFD")
        )
        assert composed.tokens.isfinite().all() and torch.equal(composed.tokens, decomposed.tokens)
        queries = [encoder.encode_query([unicodedata.normalize(one, t) for t in texts]) for one in ("NFC", "NFD")]
        assert torch.equal(queries[0].tokens, queries[1].tokens)
    one, other = encoder.encode(["currency of ﬁn", "currency of fin"]).tokens
    assert not torch.equal(one, other)


@pytest.mark.parametrize("end", ["? ", "?\n", "\n", " ?", "??\r\n", "？", "؟", "? ?", "?\u00a0", "\u3000"])
def test_blanks_and_question_marks_at_the_end_are_no_part_of_a_name(encoder: NameEncoder, end: str) -> None:
    """Invariant 164."""
    asked = [question.rstrip("?") for question in QUESTIONS]
    assert torch.equal(encoder.encode([text + end for text in asked]).tokens, encoder.encode(asked).tokens)
    assert not torch.equal(encoder.encode(["pays Who? Lima"]).tokens, encoder.encode(["pays Who Lima"]).tokens)


def test_texts_without_words_are_refused(bert: Path) -> None:
    """Invariant 164: in `fit` and in `encode`, and nothing is changed."""
    encoder = NameEncoder(bert, width=WIDTH)
    before = encoder.fingerprint
    for texts in (["", ""], ["?", " \n"], ["a", "?"]):
        with pytest.raises(TextError, match="is empty"):
            encoder.fit(["a", "b"], texts)
        with pytest.raises(TextError, match="is empty"):
            encoder.encode(texts)
    assert encoder.fingerprint == before and not encoder.common_words and encoder.query_projection is None


def test_the_meaning_is_that_of_common_words_and_each_sequence_of_them_is_encoded_once(
    encoder: NameEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encoder.common_words == {"currency", "of", "What", "pays"}
    read: list[list[str]] = []
    whole = encoder.model.encode
    monkeypatch.setattr(encoder.model, "encode", lambda texts, **rest: read.append(texts) or whole(texts, **rest))
    vectors = encoder.encode([*TITLES, "Lima", "pays of Lima"]).tokens[:, 0]
    assert read == [["currency of", "pays of"]]
    meaning = torch.nn.functional.normalize(vectors[:, :WIDTH], dim=1)
    torch.testing.assert_close(meaning[0], meaning[8])
    assert not meaning[9].any() and not torch.allclose(meaning[10], meaning[0])
    assert encoder.encode([]).tokens.shape == (0, 1, 3 * WIDTH)


def test_queries_are_mapped_to_the_entries_they_were_fitted_to(bert: Path, encoder: NameEncoder) -> None:
    """The map is ridge regression towards no change; entries stay as they are, and each map is another encoder."""
    asked, titles = (encoder.encode(texts).tokens[:, 0] for texts in (QUESTIONS, TITLES))
    mapped = encoder.encode_query(QUESTIONS).tokens[:, 0]
    torch.testing.assert_close(mapped.norm(dim=-1), torch.ones(len(TITLES)))
    assert (mapped * titles).sum(1).min() > 0.99 > (asked * titles).sum(1).max()
    fresh = NameEncoder(bert, width=WIDTH, common=0.3)
    assert torch.equal(fresh.encode_query(QUESTIONS).tokens, fresh.encode(QUESTIONS).tokens), "nothing is fitted yet"
    assert fresh.fingerprint != encoder.fingerprint


def test_commands_take_its_file(encoder: NameEncoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder.save(tmp_path / "encoder.safetensors")
    (tmp_path / "titles.txt").write_text("\n".join(TITLES), encoding="utf-8")
    given = ["--encoder", tmp_path / "encoder.safetensors"]
    code, _, err = call(capsys, "index", "build", tmp_path / "titles.txt", "-o", tmp_path / "index", *given)
    assert code == 0, err
    code, out, err = call(capsys, "index", "search", tmp_path / "index", QUESTIONS[5], "--top-k", 1, *given)
    assert code == 0 and TITLES[5] in out, err
    code, _, err = call(capsys, "index", "search", tmp_path / "index", QUESTIONS[5])
    assert code == 2 and "width" in err


@pytest.mark.slow
def test_rare_words_weigh_more_than_common_ones(bert: Path) -> None:
    encoder = NameEncoder(bert, width=307)
    texts = ["of Lima", "of Quito", "of Lima now"]

    def similarity(one: str, other: str) -> float:
        first, second = encoder.encode([one, other]).tokens[:, 0, 307:614]
        return float(torch.nn.functional.cosine_similarity(first, second, dim=0))

    assert similarity("of Oslo", "of Bern") == pytest.approx(0.5, abs=0.1)
    encoder.fit(texts, texts)
    assert similarity("of Oslo", "of Bern") == pytest.approx(0, abs=0.1), "a word of every text says nothing"


def test_a_file_gives_the_same_encoder(encoder: NameEncoder, bert: Path, tmp_path: Path) -> None:
    path = tmp_path / "encoder.safetensors"
    with pytest.raises(ConfigError, match="call fit first"):
        NameEncoder(bert).save(path)
    encoder.save(path)
    read = load_text_encoder(str(path))
    assert isinstance(read, NameEncoder) and read.fingerprint == encoder.fingerprint
    assert torch.equal(read.encode_query(QUESTIONS).tokens, encoder.encode_query(QUESTIONS).tokens)
    before = encoder.fingerprint
    encoder.fit(QUESTIONS[:7], TITLES[:7])
    assert encoder.fingerprint != before, "other weights of words are another encoder"


def test_other_files_and_texts_are_refused(encoder: NameEncoder, tmp_path: Path) -> None:
    encoder.save(tmp_path / "encoder.safetensors")
    save_file({"down": torch.zeros(3, 2), "up": torch.zeros(2, 3)}, tmp_path / "plain.safetensors")
    tensors, metadata = read_tensors(tmp_path / "encoder.safetensors", "mmattn-name-encoder")
    write_tensors(tmp_path / "short.safetensors", tensors | {"weights": torch.ones(2, 31)}, metadata)
    write_tensors(tmp_path / "narrow.safetensors", tensors, metadata | {"width": 7})
    for name, message in (("short", "NameEncoder"), ("narrow", "width 21"), ("plain", "plain"), ("nothing", "nothing")):
        with pytest.raises(AdapterFileError, match=message):
            NameEncoder.load(tmp_path / f"{name}.safetensors")
    with pytest.raises(ShapeError, match="each query needs its entry"):
        encoder.fit(QUESTIONS, TITLES[1:])
    with pytest.raises(ConfigError, match="common"):
        NameEncoder(common=2.0)
