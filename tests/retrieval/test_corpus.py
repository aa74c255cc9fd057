"""A corpus in shards: rows and vectors as given, and broken lines named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mmattn.encoders.text import TextEncoder
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError, TextError
from mmattn.retrieval import embed_corpus
from mmattn.training import encoding_of
from tests.tiny_texts import WIDTH


@pytest.fixture(scope="module")
def encoder(bert: Path) -> TextEncoder:
    return TextEncoder(bert)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """31 JSON lines and 5 plain ones, with a blank line in each."""
    rows = [json.dumps({"text": f"flower {n} ü", "key": n, "more": [n, None]}, ensure_ascii=False) for n in range(31)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join([*rows[:11], "", *rows[11:]]), encoding="utf-8")
    (tmp_path / "b.txt").write_bytes(b"one wood\r\n\r\ntwo woods\r\nthe wood\r\nin spring\r\n")
    return [tmp_path / "a.jsonl", tmp_path / "b.txt"]


def test_rows_and_vectors_come_back(files: list[Path], encoder: TextEncoder, tmp_path: Path) -> None:
    rows, left_out = embed_corpus(files, tmp_path / "out", encoder, rows_per_shard=7)
    encoding = encoding_of(rows)
    assert encoding is not None and (len(rows), left_out) == (35, [])
    assert (encoding.dim, encoding.fingerprint) == (WIDTH, encoder.fingerprint)
    assert rows["id"][:12] == [f"a.jsonl:{n}" for n in (*range(1, 12), 13)]
    assert rows["id"][31:] == ["b.txt:1", "b.txt:3", "b.txt:4", "b.txt:5"]
    assert rows["text"][30:] == ["flower 30 ü", "one wood", "two woods", "the wood", "in spring"]
    metadata = [json.loads(value) for value in rows["metadata"]]
    assert metadata[:2] == [{"key": 0, "more": [0, None]}, {"key": 1, "more": [1, None]}]
    assert metadata[31:] == [{}] * 4
    vectors = torch.cat(list(rows.with_format("torch")["memory"]))
    assert torch.isfinite(vectors).all()
    torch.testing.assert_close(vectors, encoder.encode(rows["text"][:]).tokens[:, 0])


def test_ids_and_fields_of_a_file(files: list[Path], encoder: TextEncoder, tmp_path: Path) -> None:
    rows, _ = embed_corpus(files[0], tmp_path / "out", encoder, id_field="key")
    assert rows["id"][:] == [str(n) for n in range(31)] and json.loads(rows["metadata"][3]) == {"more": [3, None]}
    (tmp_path / "c.ndjson").write_text('{"body": "a", "text": 3}\n')
    rows, _ = embed_corpus(tmp_path / "c.ndjson", tmp_path / "c", encoder, field="body")
    assert (rows["id"][:], rows["text"][:], rows["metadata"][:]) == (["c.ndjson:1"], ["a"], ['{"text": 3}'])


def test_blank_lines_an_empty_file_and_equal_texts(encoder: TextEncoder, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a\n\n\nb\na\n")
    (tmp_path / "b.txt").write_text("")
    rows, _ = embed_corpus([tmp_path / "b.txt", tmp_path / "a.txt"], tmp_path / "out", encoder)
    assert (rows["id"][:], rows["text"][:]) == (["a.txt:1", "a.txt:4", "a.txt:5"], ["a", "b", "a"])
    assert rows["memory"][0] == rows["memory"][2]


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
        embed_corpus(path, tmp_path / "out", encoder)
    message = str(caught.value)
    assert message.startswith("8 of 10 lines cannot be used:")
    for words in ("a.jsonl:2 is not sound JSON", "a.jsonl:3 holds no JSON object but list", "a.jsonl:4 has no text in"):
        assert words in message
    assert "got 5" in message and not (tmp_path / "out").exists()
    rows, skipped = embed_corpus(path, tmp_path / "out", encoder, skip_broken=True)
    assert rows["id"][:] == ["a.jsonl:1", "a.jsonl:10"]
    assert [reason.split()[0] for reason in skipped] == [f"a.jsonl:{n}" for n in range(2, 10)]
    assert "not UTF-8" in skipped[5] and "surrogate" in skipped[6] and "twice" in skipped[7]
    with pytest.raises(ConfigError, match="10 of 10 lines"):
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
        rows, _ = embed_corpus(path, tmp_path / "out", encoder, skip_broken=True)
        assert rows["text"][:] == texts


def test_long_lines_are_read_and_longer_ones_named(
    encoder: TextEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "wood " * 200_000
    (tmp_path / "a.txt").write_text(f"one\n{long}\ntwo\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": long}) + "\n")
    with pytest.warns(UserWarning, match="cut"):
        rows, _ = embed_corpus([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out", encoder)
    assert rows["text"][:] == ["one", long.strip(), "two", long]
    monkeypatch.setattr("mmattn.retrieval.corpus.MAX_LINE", 99)
    for name, line in (("a", "x" * 100), ("b", "x" * 1001), ("c", "x" * 200 + "\ny" + " " * 97)):
        (tmp_path / f"{name}.txt").write_text(f"one\n{line}\ntwo")
        with pytest.raises(ConfigError, match=f"^1 of . lines .*\n  {name}.txt:2 has more than 99 byte"):
            embed_corpus(tmp_path / f"{name}.txt", tmp_path / f"{name} out", encoder)
        rows, _ = embed_corpus(tmp_path / f"{name}.txt", tmp_path / f"{name} out", encoder, skip_broken=True)
        assert rows["text"][:] == ["one", *(text.strip() for text in line.split("\n")[1:]), "two"]


def test_settings_that_cannot_be(files: list[Path], encoder: TextEncoder, bert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="rows_per_shard"):
        embed_corpus(files, out, encoder, rows_per_shard=0)
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
        embed_corpus(files, out, TextEncoder(bert, pooling="none"))


def test_vectors_that_are_not_finite_are_refused(files: list[Path], bert: Path, tmp_path: Path) -> None:
    broken = TextEncoder(bert)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError):
        embed_corpus(files, tmp_path / "out", broken)
    assert not list((tmp_path / "out").glob("*.arrow"))
