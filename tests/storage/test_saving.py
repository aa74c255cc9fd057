"""Saving a file: modes, links, full disks, interruptions and neighbours; what fails leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from mmattn.storage.json_files import read_json, write_json
from mmattn.storage.safetensors import read_tensors, write_tensors
from tests.storage.tensor_files import META, example, litter


def run(code: str, *args: object, **kwargs: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **kwargs)  # type: ignore[call-overload,no-any-return]


class TestSaving:
    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
    def test_mode_follows_the_umask(self, tmp_path: Path, umask: int, mode: int) -> None:
        """Invariant 69."""
        old = os.umask(umask)
        try:
            write_tensors(tmp_path / "a", example(), META)
            write_json(tmp_path / "b", META)
        finally:
            os.umask(old)
        assert (tmp_path / "a").stat().st_mode & 0o777 == mode
        assert (tmp_path / "b").stat().st_mode & 0o777 == mode

    def test_an_existing_mode_stays(self, tmp_path: Path) -> None:
        write_tensors(tmp_path / "a", example(), META)
        (tmp_path / "a").chmod(0o640)
        write_tensors(tmp_path / "a", {}, META)
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
        assert read_tensors(tmp_path / "a", "example")[0] == {}

    def test_a_link_stays_a_link_and_its_target_is_replaced(self, tmp_path: Path) -> None:
        """Invariant 69."""
        (tmp_path / "deep").mkdir()
        write_json(tmp_path / "deep/real", {"old": 1})
        (tmp_path / "link").symlink_to("deep/real")
        (tmp_path / "new link").symlink_to("deep/none yet")
        for name in ("link", "new link"):
            write_json(tmp_path / name, {"new": 2})
            assert (tmp_path / name).is_symlink()
        assert read_json(tmp_path / "deep/real") == read_json(tmp_path / "deep/none yet") == {"new": 2}
        assert litter(tmp_path) == litter(tmp_path / "deep") == []

    def test_a_folder_a_missing_parent_and_a_parent_that_is_a_file(self, tmp_path: Path) -> None:
        """Invariant 68."""
        (tmp_path / "file").write_text("x")
        before = sorted(os.listdir(tmp_path))
        for path, error in {
            tmp_path: IsADirectoryError,
            tmp_path / "none" / "a": FileNotFoundError,
            tmp_path / "file" / "a": OSError,
        }.items():
            with pytest.raises(error):
                write_tensors(path, example(), META)
        assert sorted(os.listdir(tmp_path)) == before

    def test_a_read_only_folder(self) -> None:
        """Invariant 68."""
        # Root writes anywhere, so a process that gives its rights up does it; outside the tests' own private folder.
        code = """
import os, sys
from mmattn.storage.json_files import write_json
if os.getuid() == 0:
    os.setuid(65534)
for folder in sys.argv[1:]:
    try:
        write_json(os.path.join(folder, "a"), {"new": 2})
        print("written")
    except OSError as error:
        print(type(error).__name__)
"""
        with tempfile.TemporaryDirectory() as shut, tempfile.TemporaryDirectory() as free:
            write_json(os.path.join(shut, "a"), {"old": 1})
            os.chmod(shut, 0o555)
            os.chmod(free, 0o777)
            done = run(code, shut, free)
            assert done.stdout.split() == ["PermissionError", "written"], done.stderr
            assert read_json(os.path.join(shut, "a")) == {"old": 1}
            assert os.listdir(shut) == ["a"]

    def test_ctrl_c_in_the_middle(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_json(tmp_path / "a", {"old": 1})

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("os.fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_json(tmp_path / "a", {"new": 2})
        assert read_json(tmp_path / "a") == {"old": 1}
        assert os.listdir(tmp_path) == ["a"]

    def test_data_then_name_then_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The order that outlives a power cut."""
        steps: list[str] = []
        sync, replace = os.fsync, os.replace

        def watched_sync(handle: int) -> None:
            steps.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
            sync(handle)

        def watched_replace(a: str, b: str) -> None:
            steps.append("rename")
            replace(a, b)

        monkeypatch.setattr("os.fsync", watched_sync)
        monkeypatch.setattr("os.replace", watched_replace)
        write_tensors(tmp_path / "a", example(), META)
        assert steps == ["file", "rename", "folder"]

    def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(self, tmp_path: Path) -> None:
        code = """
import sys
from mmattn.storage.files import replacing
with replacing(sys.argv[1]) as file:
    file.write(b"half")
    file.flush()
    print("ready", flush=True)
    sys.stdin.readline()
    file.write(b" and half")
"""
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", code, str(tmp_path / name)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for name in ("killed", "alive")
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        writers[0].kill()
        writers[0].communicate()
        assert len(litter(tmp_path)) == 2
        write_json(tmp_path / "other", {})
        assert len(litter(tmp_path)) == 1
        writers[1].communicate("go\n")
        assert (tmp_path / "alive").read_bytes() == b"half and half"
        assert sorted(os.listdir(tmp_path)) == ["alive", "other"]

    def test_tensors_that_change_while_they_are_written_make_no_bad_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A training thread beside the save: the file holds some step's values, and its checksums fit."""
        weight = torch.zeros(1000)
        sha256 = hashlib.sha256

        def busy(*args: bytes) -> object:
            weight.add_(1)
            return sha256(*args)

        monkeypatch.setattr("mmattn.storage.safetensors.hashlib.sha256", busy)
        write_tensors(tmp_path / "a", {"x": weight, "y": weight}, META)
        monkeypatch.undo()
        after, _ = read_tensors(tmp_path / "a", "example")
        assert after["y"][0] > after["x"][0] > 0
