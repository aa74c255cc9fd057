"""Adapters from and to the hub: a cache kept from before, and a server on this machine that answers as the hub does."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.recipes import assets_folder
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


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as an upload of small files asks for."""

    files: dict[str, bytes] = {}
    said: dict[str, object] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.path == "/api/repos/create":
            self.said["create"] = json.loads(body)
            answer: object = {"url": f"{address}/org/flowers"}
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            answer = {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in asked]}
        elif self.path == "/api/models/org/flowers/branch/v1":
            self.said["branch"] = json.loads(body)
            answer = {}
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        else:
            assert self.path == "/api/models/org/flowers/commit/v1", self.path
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                else:
                    self.said["summary"] = line["value"]["summary"]
            answer = {"commitUrl": f"{address}/org/flowers/commit/{NEW}", "commitOid": NEW, "pullRequestUrl": None}
        self.reply(answer)

    def do_GET(self) -> None:
        self.reply({"id": "org/flowers", "sha": OLD, "siblings": []})

    def reply(self, answer: object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


PUSH = """
from mmattn.recipes import assets_folder
from tests import tiny
model = tiny.attach(tiny.make("llama"))
model.save_adapter({folder!r})
print(model.push_to_hub("org/flowers", private=True, revision="v1", token="hf_x", commit_message="Petals"))
"""


def pushed(program: str, tmp_path: Path) -> tuple[str, dict[str, bytes]]:
    """What a program printed that talks to the hub, and the files it uploaded."""
    Hub.files.clear()
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2]
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    return done.stdout, dict(Hub.files)


@pytest.mark.slow
def test_an_adapter_is_pushed_and_nothing_of_the_host(tmp_path: Path) -> None:
    done, files = pushed(PUSH.format(folder=str(tmp_path / "kept")), tmp_path)
    assert f"/org/flowers/commit/{NEW}" in done
    kept = {file.name: file.read_bytes() for file in (tmp_path / "kept").iterdir()}
    assert files == kept and set(kept) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    assert Hub.said["summary"] == "Petals" and "branch" in Hub.said
    asked = Hub.said["create"]
    assert isinstance(asked, dict) and (asked.get("private") is True or asked.get("visibility") == "private"), asked


@pytest.mark.slow
def test_a_pipeline_is_pushed_with_what_it_needs(tmp_path: Path) -> None:
    program = """
import mmattn
print(mmattn.pipeline("assets/rag/adapter").push_to_hub("org/flowers", revision="v1", token="hf_x"))
"""
    done, files = pushed(program, tmp_path)
    assert f"/org/flowers/commit/{NEW}" in done
    folder = assets_folder() / "rag" / "adapter"
    assert files == {file.name: file.read_bytes() for file in folder.iterdir()} and "pipeline_config.json" in files
    assert Hub.said["summary"] == "Adapter for question-answering"


def test_a_pipeline_of_models_that_nobody_else_has_is_not_pushed(tmp_path: Path) -> None:
    shutil.copytree(assets_folder() / "diffusion" / "adapter", tmp_path / "adapter")
    shutil.copy(assets_folder() / "diffusion" / "style.safetensors", tmp_path)
    pipe: Any = mmattn.pipeline(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="'../style.safetensors', a path of this machine"):
        pipe.push_to_hub("org/flowers", token="hf_x")


def test_a_hub_that_is_not_there() -> None:
    model = tiny.attach(tiny.make("llama"))
    with pytest.raises(AdapterFileError, match="could not be uploaded to 'org/flowers'"):
        model.push_to_hub("org/flowers", token="hf_x")
