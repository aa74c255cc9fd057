"""Tensors in shards: each comes back as it was, whoever wrote it, and a damaged shard is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from mmattn.errors import AdapterFileError
from mmattn.training.hidden_states import TensorShards

ROOT = Path(__file__).resolve().parents[2]


def tensor(number: int) -> torch.Tensor:
    """A tensor of its own for each number, of unequal lengths and dtypes."""
    made = torch.randn(1 + number % 5, 7, generator=torch.Generator().manual_seed(number))
    return made.to((torch.float32, torch.bfloat16, torch.float16)[number % 3])


def filled(folder: Path, count: int, shard_bytes: int = 500) -> TensorShards:
    store = TensorShards(folder, shard_bytes)
    for number in range(count):
        assert torch.equal(store.put(f"t{number}", tensor(number)), tensor(number))
    return store


def test_every_tensor_comes_back_from_its_shard(tmp_path: Path) -> None:
    store = filled(tmp_path, 31)
    store.flush()
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and store.nbytes() == sum(shard.stat().st_size for shard in shards)
    for reader in (store, TensorShards(tmp_path)):
        for number in reversed(range(31)):
            found = reader.get(f"t{number}")
            assert found is not None and found.dtype == tensor(number).dtype and torch.equal(found, tensor(number))
        assert reader.get("t31") is None
    store.flush()
    assert sorted(tmp_path.glob("*.safetensors")) == shards, "there was nothing to write"


def test_what_is_put_is_a_copy(tmp_path: Path) -> None:
    store, given = TensorShards(tmp_path), torch.ones(3, 5)
    store.put("a", given[:, ::2])
    given.zero_()
    assert torch.equal(store.get("a"), torch.ones(3, 3))


def test_what_others_write_is_found(tmp_path: Path) -> None:
    """By a store that was opened before, without its being told."""
    store = filled(tmp_path, 2)
    assert store.get("t5") is None
    filled(tmp_path, 7).flush()
    assert torch.equal(store.get("t5"), tensor(5))


def test_a_killed_process_loses_no_shard(tmp_path: Path) -> None:
    """Killed with signal 9 while it puts one tensor after the other; what is not whole is not there."""
    code = (
        "import sys; from pathlib import Path; from tests.training.test_tensor_shards import *\n"
        "store = TensorShards(Path(sys.argv[1]), 500)\n"
        "for number in range(10**6):\n"
        "    store.put(f't{number}', tensor(number)); print(number, flush=True)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words, last = [sys.executable, "-c", code, str(tmp_path)], 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdout is not None and running.stderr is not None
        for line in running.stdout:
            last = int(line) if line.endswith("\n") else last
            if last == 57:
                running.send_signal(signal.SIGKILL)
        said = running.stderr.read()
    assert running.returncode == -signal.SIGKILL, said
    store = TensorShards(tmp_path)
    there = [number for number in range(last) if store.get(f"t{number}") is not None]
    assert there == list(range(len(there))) and len(there) > last - 30
    assert all(torch.equal(store.get(f"t{number}"), tensor(number)) for number in there)
    filled(tmp_path, 3).flush()
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".safetensors"], "leftovers are removed"


def test_threads_share_a_store(tmp_path: Path) -> None:
    store, wrong = TensorShards(tmp_path, 300), []

    def work(first: int) -> None:
        for number in range(first, 200, 4):
            store.put(f"t{number}", tensor(number))
            found = store.get(f"t{number}")
            if found is None or not torch.equal(found, tensor(number)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    store.flush()
    assert not wrong


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    filled(tmp_path, 3, 10**6).flush()
    (shard,) = tmp_path.glob("*.safetensors")
    raw = bytearray(shard.read_bytes())
    shard.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(AdapterFileError, match=f"{shard.name}.*wrong checksum"):
        [TensorShards(tmp_path).get(f"t{number}") for number in range(3)]
    shard.write_bytes(raw[:-1])
    with pytest.raises(AdapterFileError, match=f"{shard.name}.*truncated"):
        TensorShards(tmp_path)
