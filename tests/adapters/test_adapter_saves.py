"""Saving an adapter folder while processes die, disks fill up and others load: old or new, and never half."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mmattn.adapters.files
from mmattn.adapters.files import load_folder
from mmattn.errors import AdapterFileError
from tests.adapters.adapter_folders import FILES, config, save

ROOT = Path(__file__).resolve().parent.parent.parent


# A process that saves version after version: name and values tell which.
SAVER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from mmattn.adapters.files import load_folder, save_folder
from tests.adapters.adapter_folders import config
folder = sys.argv[2]

def save(i):
    tensors = {f"x{j}": torch.full((101, 103), float(i)) for j in range(3)}
    save_folder(folder, config=config(name=f"v{i}"), tensors=tensors, card=f"card {i}")

def version():
    found, tensors = load_folder(folder)
    values = {float(value) for x in tensors.values() for value in (x.min(), x.max())}
    assert values == {float(found["name"][1:])}, (found["name"], values)
    return int(found["name"][1:])
"""


def start(code: str, folder: Path, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SAVER + code, str(ROOT), str(folder), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return out


class TestKilled:
    @pytest.mark.slow
    def test_at_every_step_of_a_save(self, tmp_path: Path) -> None:
        """Invariant 67: the process ends at its first step, its second ... : the old one loads until the new one
        does.
        """
        code = """
steps = ("open", "fsync", "replace", "unlink", "chmod", "close", "mkdir")
plain = {name: getattr(os, name) for name in steps}
save(0)
last, n, seen = 0, 0, []
while True:
    n += 1
    child = os.fork()
    if not child:
        left = n
        def counted(name):
            def call(*args, **kwargs):
                global left
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain[name](*args, **kwargs)
            return call
        for name in steps:
            setattr(os, name, counted(name))
        save(n)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    now = version()
    assert now in (last, n), (last, n, now)
    seen.append(now == n)
    last = now
    if status == 0:
        break
    if n % 5 == 0:
        save(n)
        last = n
        assert len(os.listdir(folder)) == 3, os.listdir(folder)
assert seen[-1] and not seen[0]
assert sorted(os.listdir(folder)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
print(n, sum(seen))
"""
        steps, new = map(int, finish(start(code, tmp_path / "a")).split())
        assert steps > 20
        assert 1 < new < steps

    @pytest.mark.slow
    def test_two_processes_save_twenty_times_while_a_third_loads(self, tmp_path: Path) -> None:
        """Invariant 71."""
        code = """
save(0)
children = []
for first in (100, 200):
    child = os.fork()
    if not child:
        code = 1
        try:
            for i in range(first, first + 20):
                save(i)
                version()
            code = 0
        finally:
            os._exit(code)
    children.append(child)
loads = 0
while children:
    version()
    loads += 1
    done, status = os.waitpid(-1, os.WNOHANG)
    if done:
        assert status == 0, status
        children.remove(done)
assert version() in (119, 219)
print(loads)
"""
        assert int(finish(start(code, tmp_path / "a"))) > 0
        assert sorted(os.listdir(tmp_path / "a")) == FILES

    def test_a_load_ends_though_saves_never_stop(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the two files that a load reads, another save is tried each time; the second time it has to wait."""
        plain, tries = mmattn.adapters.files.read_header, []

        def read_header(*args: Any) -> Any:
            if not sys._getframe(1).f_code.co_name.startswith("_settle"):
                tries.append("done")
                try:
                    save(tmp_path, name=f"v{len(tries)}")
                except BlockingIOError as error:
                    assert "another process holds this folder" in str(error)
                    tries[-1] = "waited"
            return plain(*args)

        save(tmp_path, name="v0")
        monkeypatch.setattr(mmattn.adapters.files, "_WAIT", 0.05)
        monkeypatch.setattr(mmattn.adapters.files, "read_header", read_header)
        found, _ = load_folder(tmp_path)
        assert (found["name"], tries) == ("v1", ["done", "waited"])

    def test_disk_full_at_twenty_sizes(self, tmp_path: Path) -> None:
        """Invariant 68."""
        code = """
import resource
save(0)
before = {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)}
for size in range(0, 120_000, 6_000):
    for target in ("old", "new"):
        plain = folder
        folder = plain if target == "old" else os.path.join(plain + "-new", "deep")
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            save(1)
            print("saved")
        except OSError:
            pass
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        folder = plain
        assert {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder)} == before
        assert not os.path.exists(plain + "-new")
save(2)
assert version() == 2
"""
        assert finish(start(code, tmp_path / "a")) == ""

    def test_the_config_put_aside_saves_no_one_who_edits(self, tmp_path: Path) -> None:
        """Only a config that equals the one in the tensor file is taken from there."""
        save(tmp_path / "a", name="a")
        save(tmp_path / "b", name="b")
        shutil.copy(tmp_path / "b" / "adapter_config.json", tmp_path / "a" / "adapter_config.json")
        aside = tmp_path / "a" / ".adapter_config.json.next"
        shutil.copy(tmp_path / "b" / "adapter_config.json", aside)
        with pytest.raises(AdapterFileError, match="disagree"):
            load_folder(tmp_path / "a")
        aside.write_text(json.dumps(config(name="a")))
        assert load_folder(tmp_path / "a")[0]["name"] == "a"
