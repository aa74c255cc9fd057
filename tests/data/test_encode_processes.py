"""Processes that share the encoding of a store: under torchrun, killed among them, and on Ray."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mmattn import training
from tests.data.encoded_rows import Eye, captions, contents, encode_captions, encoded, start

pytestmark = pytest.mark.slow

COLOURS = [1, 2, 1, 3, 4, 5, 6, 4, 7, 8, 1, 9, 10, 11, 12, 2, 13, 14]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    captions(tmp_path / "data", COLOURS)
    encode_captions(tmp_path / "data", tmp_path / "whole", Eye())
    return tmp_path


def test_two_processes_make_the_same_store(data: Path) -> None:
    """Each encodes its share, and no content twice."""
    done = start(data / "data", data / "store", data / "log", processes=2)
    assert done.returncode == 0, done.stderr
    assert contents(data / "store") == contents(data / "whole")
    assert encoded(data / "log") == 14


def test_other_numbers_of_processes_go_on(data: Path) -> None:
    """Invariant 109: one that is killed at its second batch, then two, each killed at its second, then one."""
    done = start(data / "data", data / "store", data / "log", kill=2)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = start(data / "data", data / "store", data / "log", kill=2, processes=2)
    assert done.returncode != 0 and not (data / "store" / "encoded.json").exists()
    done = start(data / "data", data / "store", data / "log")
    assert done.returncode == 0, done.stderr
    assert contents(data / "store") == contents(data / "whole")


@pytest.mark.filterwarnings("ignore")
def test_ray(data: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed; it comes with mmattn[scale]")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        store = encode_captions(data / "data", data / "store", Eye(), executor="ray")
    finally:
        ray.shutdown()
    assert contents(data / "store") == contents(data / "whole")
    assert isinstance(store, training.EncodedDataset) and len(store) == len(COLOURS)
