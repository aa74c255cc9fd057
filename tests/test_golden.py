"""Adapters that a released version saved load on their hosts and answer as on the day they were saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmattn
from mmattn.adapters.base import adapter_kinds
from mmattn.adapters.files import FORMAT_VERSION
from tests.adapters.adapter_folders import contents
from tests.golden import make as golden
from tests.tiny import assert_close, differs

ADAPTERS = sorted(path.parent for path in golden.HERE.glob("*/*/adapter_config.json"))


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_golden_adapter_answers_as_it_did(path: Path, tmp_path: Path) -> None:
    """Invariant 74: without a warning: the host is known by its fingerprint too, and a row without memory is the
    host's own.
    """
    before, given = contents(path), golden.read(path)
    host = golden.load_host(golden.host_of(path.name))
    assert_close(golden.ask(host, given, memory=False), given["own"])
    model = mmattn.load(host, path)
    got = golden.ask(model, given, memory=True)
    assert_close(got, given["answer"])
    assert differs(got[:2], given["own"][:2])
    if path.name != "composed":  # to which every row has a text
        assert_close(got[2:], given["own"][2:])
    model.save_adapter(tmp_path / "again", encoder="OpenCLIP ViT-B-32:laion2b_s34b_b79k")
    again = mmattn.load(golden.load_host(golden.host_of(path.name)), tmp_path / "again")
    assert torch.equal(golden.ask(again, given, memory=True), got)
    assert contents(path) == before


def test_the_single_file_of_an_ip_adapter_answers_as_it_did() -> None:
    path = golden.HERE / "1" / "decoupled-image-tokens"
    before, given = contents(path.parent), golden.read(path)
    model = mmattn.load(golden.load_host("unet"), path.with_name(f"{path.name}-ip-adapter.safetensors"))
    assert_close(golden.ask(model, given, memory=True), given["answer"])
    assert contents(path.parent) == before


def test_there_is_one_of_every_kind_and_of_every_format() -> None:
    versions = {path.parent.name for path in ADAPTERS}
    assert versions == {str(version) for version in range(1, FORMAT_VERSION + 1)}
    newest = {path.name.partition("-")[0] for path in ADAPTERS if path.parent.name == str(FORMAT_VERSION)}
    # Kinds that other tests registered have none.
    assert newest == {name for name, kind in adapter_kinds().items() if kind.__module__.startswith("mmattn.")}
