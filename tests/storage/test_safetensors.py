"""Tensor and JSON files: what is written comes back bit for bit, and fingerprints tell every state from another."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from mmattn.errors import ConfigError
from mmattn.storage.json_files import read_json, write_json
from mmattn.storage.safetensors import fingerprint, read_header, read_tensors, write_tensors
from tests.storage.tensor_files import META, example, litter, same_bits


class TestRoundTrip:
    def test_every_dtype_bit_for_bit(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        after, metadata = read_tensors(tmp_path / "a", "example")
        assert metadata == META
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
        shapes, same = read_header(tmp_path / "a", "example")
        assert same == META
        assert shapes == {name: (tuple(x.shape), x.dtype) for name, x in before.items()}

    def test_other_readers_open_it(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        after = safetensors.torch.load_file(tmp_path / "a")
        assert after.keys() == before.keys()
        assert all(same_bits(after[name], before[name]) for name in before)
        with safetensors.safe_open(tmp_path / "a", "pt") as file:
            assert file.metadata()["format"] == "example"
            assert json.loads(file.metadata()["metadata"]) == META

    def test_the_same_tensors_make_the_same_bytes(self, tmp_path: Path) -> None:
        before = example()
        write_tensors(tmp_path / "a", before, META)
        write_tensors(tmp_path / "b", dict(reversed(before.items())), META)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_views_and_shared_storage_become_independent_copies(self, tmp_path: Path) -> None:
        """Invariant 72."""
        whole = torch.randn(23, 29)
        before = {"whole": whole, "tied": whole, "row": whole[3], "slice": whole[::2, 1:5], "turned": whole.T}
        before["wide"] = torch.randn(5, 1).expand(5, 7)
        before["grad"] = torch.nn.Parameter(whole[1:3])
        write_tensors(tmp_path / "a", before, META)
        after, _ = read_tensors(tmp_path / "a", "example")
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert all(after[name].is_contiguous() for name in before)
        after["whole"].zero_()
        assert torch.equal(after["tied"], whole)
        size = sum(x.numel() * 4 for x in before.values())
        assert size < (tmp_path / "a").stat().st_size < size + 4096

    def test_saving_to_the_path_loaded_from(self, tmp_path: Path) -> None:
        """Invariant 70."""
        write_tensors(tmp_path / "a", example(), META)
        first = (tmp_path / "a").read_bytes()
        tensors, metadata = read_tensors(tmp_path / "a", "example")
        write_tensors(tmp_path / "a", tensors, metadata)
        assert (tmp_path / "a").read_bytes() == first

    def test_json(self, tmp_path: Path) -> None:
        write_json(tmp_path / "a.json", META)
        assert read_json(tmp_path / "a.json") == META
        assert (tmp_path / "a.json").read_text(encoding="utf-8").endswith("}\n")

    @pytest.mark.parametrize(
        "value",
        [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {1: "a", "1": "b"}, {"a": "\ud800"}, {"a": b"x"}],
    )
    def test_what_is_not_json_is_refused_and_the_old_file_stays(self, tmp_path: Path, value: dict[str, object]) -> None:
        write_json(tmp_path / "a.json", META)
        write_tensors(tmp_path / "a", example(), META)
        old = (tmp_path / "a").read_bytes()
        with pytest.raises(ConfigError, match="plain JSON"):
            write_json(tmp_path / "a.json", value)
        with pytest.raises(ConfigError, match="plain JSON"):
            write_tensors(tmp_path / "a", {}, {"format": "example", "value": value})
        assert read_json(tmp_path / "a.json") == META
        assert (tmp_path / "a").read_bytes() == old
        assert litter(tmp_path) == []

    def test_what_is_no_dense_tensor_is_refused_by_name(self, tmp_path: Path) -> None:
        for value in (
            torch.zeros(3, device="meta"),
            torch.eye(3).to_sparse(),
            torch.zeros(3, dtype=torch.complex64),
            np.zeros(3),
        ):
            with pytest.raises(ConfigError, match="'lost'"):
                write_tensors(tmp_path / "a", {"lost": value}, {"format": "example"})  # type: ignore[dict-item]
        with pytest.raises(ConfigError, match="format"):
            write_tensors(tmp_path / "a", {}, {})
        assert os.listdir(tmp_path) == []


class TestFingerprint:
    def test_one_changed_weight_anywhere_changes_it(self) -> None:
        state = {"a": torch.randn(101, 103), "b": torch.randn(9001, dtype=torch.float64).bfloat16(), "c": torch.ones(3)}
        first = fingerprint(state)
        assert fingerprint({name: x.clone() for name, x in reversed(state.items())}) == first
        seen = {first}
        for tensor in state.values():
            flat = tensor.view(-1).view(torch.uint8)
            for place in random.Random(7).sample(range(len(flat)), min(len(flat), 100)):
                flat[place] ^= 1
                seen.add(fingerprint(state))
                flat[place] ^= 1
        assert len(seen) == 1 + 100 + 100 + 12
        assert fingerprint(state) == first

    def test_names_shapes_and_dtypes_count(self) -> None:
        x = torch.zeros(6)
        states = [{"w": x}, {"v": x}, {"w": x.view(2, 3)}, {"w": x.int()}, {"w": x, "v": x}, {"w": x[:5]}, {}]
        assert len({fingerprint(state) for state in states}) == 7

    def test_no_values_no_fingerprint(self) -> None:
        with pytest.raises(ConfigError, match="meta"):
            fingerprint({"w": torch.zeros(3, device="meta")})
