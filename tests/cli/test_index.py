"""`mmattn index`: built, searched and described; messages that name what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn.encoders.text import TextEncoder
from mmattn.retrieval.index import Index
from tests.cli.running import call


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")
    file = tmp_path / "lines.jsonl"
    file.write_text('{"text": "the bluebell", "name": "a"}\n{"no": 1}\n{"text": "in the woods", "name": "b"}\n')
    return file


class TestIndex:
    def test_built_searched_and_described(
        self, bert: Path, lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder, given = tmp_path / "index", ["--encoder", bert, "--id-field", "name"]
        code, out, err = call(capsys, "index", "build", lines, "-o", folder, *given, "--skip-broken")
        assert code == 0, err
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["index", "lines.jsonl"]
        reader = TextEncoder(bert)
        index = Index.load(folder, encoder=reader)
        expected = Index.build(["the bluebell", "in the woods"], encoder=reader, ids=["a", "b"])
        torch.testing.assert_close(index.search("woods", 2).scores, expected.search("woods", 2).scores)
        code, out, err = call(capsys, "index", "search", folder, "the bluebell", "--encoder", bert, "--top-k", 1)
        assert code == 0 and out == "1.000  a  the bluebell\n", err
        code, out, err = call(capsys, "index", "info", folder)
        assert code == 0 and f"encoder {reader.fingerprint}\n" in out, err

    def test_a_misspelt_store_is_refused_before_anything_is_embedded(
        self,
        bert: Path,
        lines: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        words = ["index", "build", lines, "-o", tmp_path / "index", "--encoder", bert, "--skip-broken"]
        calls: list[Any] = []
        monkeypatch.setattr(TextEncoder, "encode", lambda self, texts, **options: calls.append(texts))
        code, _, err = call(capsys, *words, "--store", "hnws")
        assert not calls
        assert code == 2 and err.startswith("mmattn: store must be one of ") and "'hnws'" in err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lines.jsonl"]

    @pytest.mark.parametrize(
        ("content", "more"),
        [("", ()), ("\n \n", ()), ('{"no": 1}\n', ("--skip-broken",))],
        ids=["empty", "blank", "broken"],
    )
    def test_files_without_text_make_no_index(
        self, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, more: tuple[str, ...]
    ) -> None:
        pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")
        (tmp_path / "a.jsonl").write_text(content)
        words = ["index", "build", tmp_path / "a.jsonl", "-o", tmp_path / "index", "--encoder", bert, *more]
        code, _, err = call(capsys, *words)
        assert code == 2 and ("a.jsonl:1 has no text" if more else "nothing to embed: a.jsonl have") in err
        assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]

    def test_what_does_not_fit_is_not_shown(
        self, bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reader = TextEncoder(bert)
        near = reader.encode(["the bluebell"]).tokens[:, 0]
        texts = ["the bluebell", "across", "opposite"]
        across = torch.linalg.qr(torch.cat([near, torch.eye(len(near[0]))[:3]]).T).Q[:, 1:2].T
        Index.build(
            torch.cat([near, 0.1 * near + across, -near]), encoder=reader, ids=["a", "b", "c"], texts=texts
        ).save(tmp_path / "index")
        words = ["index", "search", tmp_path / "index", "the bluebell", "--encoder", bert]
        code, out, err = call(capsys, *words)
        assert (code, out) == (0, "1.000  a  the bluebell\n"), err
        code, out, err = call(capsys, *words, "--score-threshold", -0.5)
        assert code == 0 and [line.split()[1] for line in out.splitlines()] == ["a", "b"], err
        code, out, err = call(capsys, *words, "--score-threshold", 1.5)
        assert (code, out) == (0, "")
        assert err == "nothing fits: the best score is 1.000, below --score-threshold 1.5\n"
        Index.build([], encoder=reader).save(tmp_path / "empty")
        code, out, err = call(capsys, "index", "search", tmp_path / "empty", "x", "--encoder", bert)
        assert (code, out, err) == (0, "", "nothing fits: the index is empty\n")
