"""Adapters from and to the hub: a cache that was filled before, and a client that records what is uploaded."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch

import mmattn
from mmattn.errors import AdapterFileError, ConfigError
from tests import tiny

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache with two commits of org/flowers: OLD is tagged v1, NEW is main. Files are links, as there."""
    from huggingface_hub import constants

    repository = tmp_path / "models--org--flowers"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for commit in (OLD, NEW):
        made, model = tmp_path / "made" / commit, tiny.attach(tiny.make("llama"))
        with torch.no_grad():
            next(model.adapters.parameters()).add_(int(commit))
        model.save_adapter(made)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        for file in made.iterdir():
            blob = repository / "blobs" / f"{commit}-{file.name}"
            blob.write_bytes(file.read_bytes())
            (repository / "snapshots" / commit / file.name).symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEW)
    (repository / "refs" / "v1").write_text(OLD)
    return tmp_path


def weights(model: mmattn.AdaptedCausalLM) -> dict[str, torch.Tensor]:
    return model.adapters["default"].state_dict()


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("main", NEW), ("v1", OLD), (OLD, OLD)])
def test_a_repository_by_name_and_revision(cache: Path, revision: str | None, commit: str) -> None:
    got = weights(mmattn.load(tiny.make("llama"), "org/flowers", revision=revision))
    want = weights(mmattn.load(tiny.make("llama"), cache / "made" / commit))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    other = weights(mmattn.load(tiny.make("llama"), cache / "made" / (OLD if commit == NEW else NEW)))
    assert any(not torch.equal(got[name], other[name]) for name in other)


def test_what_is_not_there(cache: Path) -> None:
    lm = tiny.make("llama")
    with pytest.raises(AdapterFileError, match="no folder 'org/trees', and no adapter of that name on the hub"):
        mmattn.load(lm, "org/trees")
    with pytest.raises(AdapterFileError, match="at revision 'v2'"):
        mmattn.load(lm, "org/flowers", revision="v2")
    with pytest.raises(ConfigError, match="is for names on the hub"):
        mmattn.load(lm, cache / "made" / NEW, revision="v1")
    blob = cache / "models--org--flowers" / "blobs" / f"{NEW}-adapter_model.safetensors"
    blob.write_bytes(blob.read_bytes()[:-5])
    with pytest.raises(AdapterFileError):
        mmattn.load(lm, "org/flowers")
    assert all(not part._forward_hooks for part in lm.modules())


class Hub:
    """As much of `huggingface_hub.HfApi` as an upload uses; `said` records the arguments of each method."""

    said: ClassVar[dict[str, dict[str, Any]]] = {}
    files: ClassVar[dict[str, bytes]] = {}

    def __init__(self, token: str | None = None) -> None:
        self.said["init"] = {"token": token}

    def create_repo(self, repository: str, **options: Any) -> SimpleNamespace:
        self.said["create"] = options
        return SimpleNamespace(repo_id=repository)

    def create_branch(self, repository: str, **options: Any) -> None:
        self.said["branch"] = options

    def upload_folder(self, folder_path: str, allow_patterns: list[str], **options: Any) -> str:
        self.said["upload"] = options
        self.files.clear()
        self.files.update({name: Path(folder_path, name).read_bytes() for name in os.listdir(folder_path)})
        assert set(self.files) <= set(allow_patterns)
        return f"https://hub/{options['repo_id']}/commit/{NEW}"


def test_an_adapter_is_pushed_and_nothing_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    model = tiny.attach(tiny.make("llama"))
    model.save_adapter(tmp_path)
    options = {"private": True, "revision": "v1", "token": "hf_x", "commit_message": "Petals"}
    assert model.push_to_hub("org/flowers", **options) == f"https://hub/org/flowers/commit/{NEW}"
    assert Hub.files == {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert set(Hub.files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert Hub.said["init"] == {"token": "hf_x"} and Hub.said["create"]["private"] is True
    assert Hub.said["branch"]["branch"] == "v1" == Hub.said["upload"]["revision"]
    assert Hub.said["upload"]["commit_message"] == "Petals"


def test_a_pipeline_is_pushed_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    folder = Path("assets") / "rag" / "adapter"
    pipe: Any = mmattn.pipeline(folder)
    assert pipe.push_to_hub("org/flowers", revision="v1", token="hf_x") == f"https://hub/org/flowers/commit/{NEW}"
    assert Hub.files == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert "pipeline_config.json" in Hub.files
    assert Hub.said["upload"]["commit_message"] == "Adapter for question-answering"


def test_a_pipeline_of_models_that_nobody_else_has_is_not_pushed(tmp_path: Path) -> None:
    shutil.copytree(Path("assets") / "diffusion" / "adapter", tmp_path / "adapter")
    shutil.copy(Path("assets") / "diffusion" / "style.safetensors", tmp_path)
    pipe: Any = mmattn.pipeline(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="'../style.safetensors', a path of this machine"):
        pipe.push_to_hub("org/flowers", token="hf_x")


def test_a_hub_that_is_not_there() -> None:
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(AdapterFileError, match="could not be uploaded to 'org/flowers'"):
        model.push_to_hub("org/flowers", token="hf_x")
