"""HybridEncoder: meaning beside spelling, queries that are worded otherwise, its file, and what is no such file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mmattn
from mmattn.encoders import HybridEncoder, StyleEncoder, StyleNetwork
from mmattn.errors import AdapterFileError, ConfigError, ShapeError, TextError
from mmattn.storage.safetensors import write_tensors
from tests.cli.running import call
from tests.tiny_texts import WIDTH, save_encoder

CITIES = ["Lima", "Quito", "La Paz", "Bogotá", "Asunción", "Caracas", "Brasília", "Montevideo", "Santiago"]
TITLES = [f"currency of {name}" for name in CITIES]
QUESTIONS = [f"What pays {name}?" for name in CITIES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(11)
    return save_encoder(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def encoder(folder: Path) -> HybridEncoder:
    return HybridEncoder(folder, ngrams=31)


def test_half_is_the_text_encoder_and_half_the_spelling(folder: Path, encoder: HybridEncoder) -> None:
    memory = encoder.encode(TITLES)
    assert memory.tokens.shape == (len(TITLES), 1, WIDTH + 31) and encoder.dim == WIDTH + 31
    torch.testing.assert_close(memory.tokens.norm(dim=-1), torch.ones(len(TITLES), 1))
    dense = mmattn.TextEncoder(folder).encode(TITLES).tokens
    torch.testing.assert_close(memory.tokens[..., :WIDTH] * 2**0.5, dense)
    spelled = memory.tokens[:, 0, WIDTH:]
    torch.testing.assert_close(spelled.norm(dim=-1), torch.full((len(TITLES),), 0.5**0.5))
    assert memory.sources[3] == [{"text": 3}]
    alone = encoder.encode(TITLES[4]).tokens[0]
    torch.testing.assert_close(alone, memory.tokens[4])
    assert encoder.encode([]).tokens.shape == (0, 1, encoder.dim)


def test_n_grams_are_counts_of_letters_within_words(encoder: HybridEncoder) -> None:
    def spelled(text: str) -> torch.Tensor:
        return encoder.encode([text]).tokens[0, 0, WIDTH:]

    assert torch.equal(spelled("Lima pays"), spelled("pays LIMA")), "neither the order of words nor their case counts"
    assert not torch.allclose(spelled("Armenska"), spelled("Armeńska"))
    near, far = spelled("Montevideo") @ spelled("Montevidea"), spelled("Montevideo") @ spelled("Caracas")
    assert near > 0.3 > far


def test_queries_are_mapped_to_the_entries_they_were_fitted_to(encoder: HybridEncoder) -> None:
    asked, titles = (encoder.encode(texts).tokens[:, 0] for texts in (QUESTIONS, TITLES))
    assert torch.equal(encoder.encode_query(QUESTIONS).tokens[:, 0], asked), "nothing is fitted yet"
    before = encoder.fingerprint
    encoder.fit_queries(asked, titles, ridge=1e-6)
    mapped = encoder.encode_query(QUESTIONS).tokens[:, 0]
    torch.testing.assert_close(mapped.norm(dim=-1), torch.ones(len(TITLES)))
    assert (mapped * titles).sum(1).min() > 0.999 > (asked * titles).sum(1).max()
    assert torch.equal(encoder.encode(TITLES).tokens[:, 0], titles), "entries stay as they are"
    once = encoder.fingerprint
    encoder.fit_queries(asked, titles, ridge=1e-3)
    assert len({before, once, encoder.fingerprint}) == 3, "each map is another encoder"
    encoder.fit_queries(asked, titles, ridge=1e-6)
    assert encoder.fingerprint == once
    with torch.no_grad():
        next(encoder.model.parameters()).mul_(1.5)
    assert encoder.fingerprint != once, "so are other weights of the text encoder"


def test_the_map_is_ridge_regression_towards_no_change(encoder: HybridEncoder) -> None:
    torch.manual_seed(3)
    queries, entries = torch.randn(97, encoder.dim), torch.randn(97, encoder.dim)
    encoder.fit_queries(queries, entries, ridge=0.3, rank=encoder.dim)
    penalty = 0.3 * queries.square().sum() / encoder.dim
    down, up = encoder.query_projection
    change = (down @ up).double().requires_grad_()
    loss = (queries.double() + queries.double() @ change - entries).square().sum() + penalty * change.square().sum()
    (slope,) = torch.autograd.grad(loss, change)
    assert slope.abs().max() < 1e-3 * loss
    encoder.fit_queries(queries, entries, ridge=1e6)
    torch.testing.assert_close(
        encoder.project_queries(queries), torch.nn.functional.normalize(queries, dim=1), atol=1e-3, rtol=0
    )


def test_a_file_gives_the_same_encoder(encoder: HybridEncoder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="call fit first"):
        encoder.save(tmp_path / "encoder.safetensors")
    encoder.fit_queries(*(encoder.encode(texts).tokens[:, 0] for texts in (QUESTIONS, TITLES)), rank=5)
    encoder.save(tmp_path / "encoder.safetensors")
    read = HybridEncoder.load(tmp_path / "encoder.safetensors")
    assert read.fingerprint == encoder.fingerprint and read.dim == encoder.dim
    assert torch.equal(read.encode_query(QUESTIONS).tokens, encoder.encode_query(QUESTIONS).tokens)


def test_other_files_and_settings_are_refused(encoder: HybridEncoder, folder: Path, tmp_path: Path) -> None:
    StyleEncoder(StyleNetwork(1, 64), 16).save(tmp_path / "style.safetensors")
    save_file({"down": torch.zeros(3, 2), "up": torch.zeros(2, 3)}, tmp_path / "plain.safetensors")
    for name in ("style", "plain", "nothing"):
        with pytest.raises(AdapterFileError, match=f"{name}.safetensors"):
            HybridEncoder.load(tmp_path / f"{name}.safetensors")
    told = {"format": "mmattn-hybrid-encoder", "name": str(folder), "ngrams": 31}
    width = encoder.dim
    for down, up in (((3, 2), (2, 3)), ((width, 2), (3, width)), ((width,), (width,))):
        write_tensors(tmp_path / "a.safetensors", {"down": torch.zeros(down), "up": torch.zeros(up)}, told)
        with pytest.raises(AdapterFileError, match=f"gives vectors of width {width}"):
            HybridEncoder.load(tmp_path / "a.safetensors")
    write_tensors(tmp_path / "a.safetensors", {"down": torch.zeros(width, 2)}, told)
    with pytest.raises(AdapterFileError, match="holds no sound HybridEncoder.*'up'"):
        HybridEncoder.load(tmp_path / "a.safetensors")
    with pytest.raises(ShapeError, match="one entry for each query"):
        encoder.fit_queries(torch.zeros(3, encoder.dim), torch.zeros(2, encoder.dim))
    with pytest.raises(TextError):
        encoder.encode(["a", None])


def test_commands_take_its_file(encoder: HybridEncoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder.fit_queries(*(encoder.encode(texts).tokens[:, 0] for texts in (QUESTIONS, TITLES)), ridge=1e-6)
    encoder.save(tmp_path / "encoder.safetensors")
    (tmp_path / "titles.txt").write_text("\n".join(TITLES), encoding="utf-8")
    given = ["--encoder", tmp_path / "encoder.safetensors"]
    code, _, err = call(capsys, "index", "build", tmp_path / "titles.txt", "-o", tmp_path / "index", *given)
    assert code == 0, err
    code, out, err = call(capsys, "index", "search", tmp_path / "index", QUESTIONS[5], "--top-k", 1, *given)
    assert code == 0 and TITLES[5] in out, err
    code, _, err = call(capsys, "index", "search", tmp_path / "index", QUESTIONS[5])
    assert code == 2 and "width" in err
