"""Adapter folders: what is saved comes back, what is the user's stays, and a folder is whole or refused."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from mmattn.adapters.files import check_tensors, load_folder, parse_config
from mmattn.errors import AdapterFileError, NonFiniteError
from tests.adapters.adapter_folders import ADAPTER, CARD, FILES, KINDS, config, contents, example, save


class TestRoundTrip:
    def test_bit_for_bit(self, tmp_path: Path) -> None:
        """Invariant 60."""
        tensors = example()
        save(tmp_path / "deep" / "folder", tensors)
        found, after = load_folder(tmp_path / "deep" / "folder")
        assert found == config()
        assert after.keys() == tensors.keys()
        assert all(torch.equal(after[name], tensors[name]) for name in tensors)
        assert parse_config(found, KINDS) == ADAPTER
        assert sorted(os.listdir(tmp_path / "deep" / "folder")) == FILES
        assert (tmp_path / "deep" / "folder" / "README.md").read_text().startswith(CARD)

    def test_files_of_the_user_stay(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("# My project\n")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("mine")
        save(tmp_path)
        save(tmp_path)
        assert (tmp_path / "README.md").read_text() == "# My project\n"
        assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "notes"])

    def test_links_as_in_the_cache_of_the_hub(self, tmp_path: Path) -> None:
        save(tmp_path / "blobs")
        (tmp_path / "snapshot").mkdir()
        for name in FILES:
            (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
        assert load_folder(tmp_path / "snapshot")[0] == config()


class TestFolders:
    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(AdapterFileError, match="no such folder"):
            load_folder(tmp_path / "none")
        (tmp_path / "file").write_text("x")
        with pytest.raises(AdapterFileError, match="it is a file"):
            load_folder(tmp_path / "file")
        (tmp_path / "other").mkdir()
        with pytest.raises(AdapterFileError, match="nothing"):
            load_folder(tmp_path / "other")
        for name in FILES[1:]:
            save(tmp_path / "a")
            (tmp_path / "a" / name).unlink()
            with pytest.raises(AdapterFileError, match=f"no {name}"):
                load_folder(tmp_path / "a")

    def test_not_finite_is_refused_before_the_old_one_is_touched(self, tmp_path: Path) -> None:
        """Invariant 64."""
        save(tmp_path)
        before = contents(tmp_path)
        tensors = example()
        tensors["blocks.1.gate"][1] = float("nan")
        with pytest.raises(NonFiniteError, match=r"'blocks\.1\.gate'"):
            save(tmp_path, tensors)
        assert contents(tmp_path) == before
        with pytest.raises(NonFiniteError):
            save(tmp_path / "new", tensors)
        assert not (tmp_path / "new").exists()

    def test_64_flipped_bits(self, tmp_path: Path) -> None:
        """Invariant 63."""
        save(tmp_path)
        path = tmp_path / "adapter_model.safetensors"
        good = path.read_bytes()
        rng = random.Random(11)
        for place in rng.sample(range(len(good)), 64):
            changed = bytearray(good)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(AdapterFileError):
                load_folder(tmp_path)

    def test_the_check_comes_before_any_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path)

        def refuse(found: dict[str, Any], shapes: dict[str, Any]) -> None:
            assert found == config()
            check_tensors({"latents": ((7, 14), torch.float32)}, shapes)

        monkeypatch.setattr("torch.empty", None)
        with pytest.raises(AdapterFileError, match="1 of another shape"):
            load_folder(tmp_path, check=refuse)

    def test_tensors_that_do_not_fit_are_listed_five_of_each(self) -> None:
        """Invariant 61."""
        f32 = torch.float32
        expected = {f"a{i}": ((i, 3), f32) for i in range(7)} | {"b": ((2,), f32), "c": ((5,), f32)}
        found = {f"z{i}": torch.zeros(1) for i in range(6)} | {"b": torch.zeros(3), "c": torch.zeros(5).half()}
        with pytest.raises(AdapterFileError) as caught:
            check_tensors(expected, found)
        text = str(caught.value)
        assert "7 missing (a0; a1; a2; a3; a4; ...)" in text
        assert "6 unexpected (z0; z1; z2; z3; z4; ...)" in text
        assert "1 of another shape (b [3], needed [2])" in text
        assert "1 of another dtype (c float16, needed float32)" in text
        check_tensors({"b": ((3,), f32)}, {"b": torch.zeros(3)})
