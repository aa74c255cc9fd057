"""A corpus in shards: rows and vectors as given, the same after any interruption and by any workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmattn.encoders.text import TextEncoder
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, TextError
from mmattn.retrieval import embed_corpus
from mmattn.training import EncodedDataset
from tests.tiny_texts import WIDTH, save_encoder

pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(13)
    return save_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TextEncoder:
    return TextEncoder(folder)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """31 JSON lines and 5 plain ones, with a blank line in each."""
    rows = [json.dumps({"text": f"flower {n} ü", "key": n, "more": [n, None]}, ensure_ascii=False) for n in range(31)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join([*rows[:11], "", *rows[11:]]), encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"one wood\r\n\r\ntwo woods\r\nthe wood\r\nin spring\r\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_rows_and_vectors_come_back(files: list[Path], encoder: TextEncoder, tmp_path: Path) -> None:
    dataset = embed_corpus(files, tmp_path / "out", encoder, texts_per_shard=7)
    assert (len(dataset), dataset.dim, dataset.fingerprint) == (35, WIDTH, encoder.fingerprint)
    parts = list(EncodedDataset(tmp_path / "out").entries(6))
    assert [len(ids) for ids, _, _, _ in parts] == [6] * 5 + [5]
    ids, texts, metadata = ([entry for part in parts for entry in part[i]] for i in range(3))
    assert ids[:12] == [f"a.jsonl:{n}" for n in (*range(1, 12), 13)]
    assert (ids[31:], texts[31:]) == (
        ["b.txt:1", "b.txt:3", "b.txt:4", "b.txt:5"],
        ["one wood", "two woods", "the wood", "in spring"],
    )
    assert texts[30] == "flower 30 ü"
    assert metadata[:2] == [{"key": 0, "more": [0, None]}, {"key": 1, "more": [1, None]}]
    assert metadata[31:] == [{}] * 4
    vectors = torch.cat([part[3] for part in parts])
    assert torch.isfinite(vectors).all()
    torch.testing.assert_close(vectors, encoder.encode(texts).tokens[:, 0])


def test_one_file_one_shard_and_ids_of_its_own(files: list[Path], encoder: TextEncoder, tmp_path: Path) -> None:
    ((ids, texts, metadata, vectors),) = embed_corpus(files[0], tmp_path / "out", encoder, id_field="key").entries()
    assert ids == [str(n) for n in range(31)]
    assert metadata[3] == {"more": [3, None]}
    assert vectors.shape == (31, WIDTH)
    (tmp_path / "c.ndjson").write_text('{"body": "a", "text": 3}\n')
    ((ids, texts, metadata, _),) = embed_corpus(tmp_path / "c.ndjson", tmp_path / "c", encoder, field="body").entries()
    assert (ids, texts, metadata) == (["c.ndjson:1"], ["a"], [{"text": 3}])


def test_blank_lines_an_empty_file_and_equal_texts(encoder: TextEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n\n\nb\na\n")
    (tmp_path / "b.txt").write_text("")
    dataset = embed_corpus([tmp_path / "b.txt", tmp_path / "a.txt"], tmp_path / "out", encoder, texts_per_shard=1)
    ((ids, texts, _, vectors),) = dataset.entries()
    assert (ids, texts) == (["a.txt:1", "a.txt:4", "a.txt:5"], ["a", "b", "a"])
    assert torch.equal(vectors[0], vectors[2]) and dataset.manifest.contents == 2


def test_broken_lines_are_named_and_skipped_only_when_asked(encoder: TextEncoder, tmp_path: Path) -> None:
    lines = [
        b'{"text": "a"}',
        b'{"text": "b',
        b'["a"]',
        b'{"words": "c"}',
        b'{"text": 5}',
        b'{"text": " "}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud83c"}',
        b'{"text": "d", "text": "e"}',
        b'{"text": "f"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        embed_corpus(path, tmp_path / "out", encoder, texts_per_shard=3)
    message = str(caught.value)
    assert message.startswith("8 of 10 rows of a.jsonl cannot be used:")
    for words in ("a.jsonl:2 is not sound JSON", "a.jsonl:3 holds no JSON object but list", "a.jsonl:4 has no text in"):
        assert words in message
    assert "got 5" in message and not contents(tmp_path / "out")
    dataset = embed_corpus(path, tmp_path / "out", encoder, texts_per_shard=3, skip_broken=True)
    assert [row.id for row in dataset] == ["a.jsonl:1", "a.jsonl:10"]
    skipped = dataset.left_out
    assert [reason.split()[0] for reason in skipped] == [f"a.jsonl:{n}" for n in range(2, 10)]
    assert "not UTF-8" in skipped[5] and "surrogate" in skipped[6] and "twice" in skipped[7]
    with pytest.raises(ConfigError, match="10 of 10 rows"):
        embed_corpus(path, tmp_path / "other", encoder, id_field="key", skip_broken=True)


#: By kind the bytes of a plain file and of JSON lines, the texts in both, and what is wrong in each.
FILES: dict[str, tuple[bytes, bytes, list[str], list[str], list[str]]] = {
    "byte-order marks": (
        b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n",
        b'\xef\xbb\xbf{"text": "one"}\n\xef\xbb\xbf{"text": "two"}\n',
        ["one", "two"],
        [],
        [],
    ),
    "CRLF": (b"one\r\n\r\ntwo\r\n", b'{"text": "one"}\r\n\r\n{"text": "two"}\r\n', ["one", "two"], [], []),
    "no last end": (b"one\ntwo", b'{"text": "one"}\n{"text": "two"}', ["one", "two"], [], []),
    "NUL": (
        b"one\nt\0wo\n",
        b'{"text": "one"}\n{"text": "t\0wo"}\n',
        ["one"],
        ["2 has NUL characters"],
        ["2 has NUL characters"],
    ),
    "UTF-16": (
        "one\ntwo".encode("utf-16"),
        '{"text": "one"}'.encode("utf-16"),
        [],
        ["1 has NUL characters", "2 has NUL characters"],
        ["1 has NUL characters"],
    ),
    "latin-1": (
        "one\nzwö".encode("latin-1"),
        '{"text": "one"}\n{"text": "zwö"}'.encode("latin-1"),
        ["one"],
        ["2 is not UTF-8"],
        ["2 is not UTF-8"],
    ),
    "line ends of old": (b"a\rb\none\r", b'{"text": "one"}\r', ["one"], ["1 has a carriage return"], []),
    "a key twice": (b"one", b'{"text": "one"}\n{"text": "a", "text": "b"}', ["one"], [], ["2 is not sound JSON"]),
}


@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
@pytest.mark.parametrize("kind", FILES)
def test_files_are_read_right_or_named_with_their_line(
    encoder: TextEncoder, tmp_path: Path, kind: str, suffix: str
) -> None:
    path, (plain, lines, texts, *both) = tmp_path / f"a.{suffix}", FILES[kind]
    path.write_bytes(plain if suffix == "txt" else lines)
    faults = both[suffix == "jsonl"]
    if faults:
        with pytest.raises(ConfigError, match="\n".join(f"  a.{suffix}:{fault}.*" for fault in faults)):
            embed_corpus(path, tmp_path / "out", encoder, skip_broken=not texts)
    if texts:
        dataset = embed_corpus(path, tmp_path / "out", encoder, skip_broken=True)
        assert [row.text for row in dataset] == texts


def test_long_lines_are_read_and_longer_ones_named(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "wood " * 200_000
    (tmp_path / "a.txt").write_text(f"one\n{long}\ntwo\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": long}) + "\n")
    with pytest.warns(UserWarning, match="cut"):
        dataset = embed_corpus([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", encoder, texts_per_shard=2)
    assert [row.text for row in dataset] == ["one", long.strip(), "two", long]
    monkeypatch.setattr("mmattn.retrieval.corpus.MAX_LINE", 99)
    for name, line in (("a", "x" * 100), ("b", "x" * 1001), ("c", "x" * 200 + "\ny" + " " * 97)):
        (tmp_path / f"{name}.txt").write_text(f"one\n{line}\ntwo")
        with pytest.raises(ConfigError, match=f"^1 of . rows of {name}.txt .*\n  {name}.txt:2 has more than 99 byte"):
            embed_corpus(tmp_path / f"{name}.txt", tmp_path / f"{name} out", encoder)
        dataset = embed_corpus(tmp_path / f"{name}.txt", tmp_path / f"{name} out", encoder, skip_broken=True)
        assert [row.text for row in dataset] == ["one", *(text.strip() for text in line.split("\n")[1:]), "two"]


def test_another_encoder_or_corpus_is_refused(
    files: list[Path], encoder: TextEncoder, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    embed_corpus(files, out, encoder, texts_per_shard=7)
    before = contents(out)
    for given, other, words in (
        (files, TextEncoder(folder, pooling="max"), "was encoded otherwise .passages by .*give the same again"),
        (files[:1], encoder, "has the rows of a.jsonl, b.txt: name another folder"),
        (files[::-1], encoder, "has the rows of a.jsonl, b.txt"),
    ):
        with pytest.raises(ConfigError, match=words):
            embed_corpus(given, out, other, texts_per_shard=7)
        assert contents(out) == before


def test_settings_that_cannot_be(files: list[Path], encoder: TextEncoder, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="executor must be one of 'local', 'ray'"):
        embed_corpus(files, out, encoder, executor="spark")
    with pytest.raises(ConfigError, match="contents_per_shard"):
        embed_corpus(files, out, encoder, texts_per_shard=0)
    with pytest.raises(ConfigError, match="at least one file"):
        embed_corpus([], out, encoder)
    with pytest.raises(ConfigError, match="two files of the corpus are called 'b.txt'"):
        embed_corpus([files[1], files[1]], out, encoder)
    with pytest.raises(AdapterFileError, match="nowhere.txt"):
        embed_corpus(tmp_path / "nowhere.txt", out, encoder)
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(TextError, match="nothing to embed: blank.txt"):
        embed_corpus(tmp_path / "blank.txt", out, encoder)
    with pytest.raises(ConfigError, match="use an encoder that pools"):
        embed_corpus(files, out, TextEncoder(folder, pooling="none"))


def test_vectors_that_are_not_finite_are_refused(files: list[Path], folder: Path, tmp_path: Path) -> None:
    broken = TextEncoder(folder)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        embed_corpus(files, tmp_path / "out", broken)
    assert not list((tmp_path / "out").rglob("vectors-*"))
