"""The scripts of this folder in short: a few seconds of each, so that they run when someone needs them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.stress import (
    disk_full,
    growth,
    kills_in_stores,
    mutated_files,
    scripts,
    serving,
    store_processes,
    threads,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_two_threads_share_a_host() -> None:
    """Invariant 51."""
    found = threads.compare(2, 3)
    assert found == {"threads": (0, 6), "pool": (0, 2), "asyncio": (0, 2), "streamers": (0, 2)}


def test_some_mutated_folders() -> None:
    found = mutated_files.fuzz(300, seed=1)
    assert not found.wrong
    assert found.refused > 200 and found.loaded > 0 and found.refused + found.loaded == 300
    assert found.growth < 300 << 20


def test_nothing_is_left_behind() -> None:
    for work in (growth.generating, growth.attaching, growth.saving):
        left = work(6)
        assert (left.tensors, left.hooks) == (0, 0), work.__name__


def test_clients_of_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 86."""
    assert serving.main(3, 8) == 0, capsys.readouterr().out


def test_a_full_disk(tmp_path: Path) -> None:
    """A tmpfs has as much room as it says, and again as before; a save with too little of it does no harm."""
    with contextlib.ExitStack() as stack:
        try:
            leave = stack.enter_context(disk_full.small_disk(tmp_path))
        except OSError as error:
            pytest.skip(f"no tmpfs may be mounted: {error}")
        leave(2 * disk_full.PAGE)
        with pytest.raises(OSError):
            (tmp_path / "large").write_bytes(bytes(5 * disk_full.PAGE))
        leave(None)
        failed, harm = disk_full.fill(tmp_path, leave, 3)
        assert failed and not harm


def test_kills_during_saves() -> None:
    """Invariant 67: in a process of its own, which may fork: it has no threads."""
    scripts.check("kills_in_save", "5")


def test_kills_in_stores(capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 92."""
    assert kills_in_stores.main(kills_in_stores.STORES, 1, 40) == 0, capsys.readouterr().out


@pytest.mark.parametrize("store", ["pgvector", "lancedb"])
def test_processes_share_a_store(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant 92."""
    assert store_processes.main((store,), 3) == 0, capsys.readouterr().out
