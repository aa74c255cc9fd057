"""Invariant 142: passages within a byte budget, in memory and in files, answer as if all were in memory."""

from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError
from tests import tiny
from tests.adapters.joined_hosts import CLOSE, answer, distance
from tests.kv_store import passage_process
from tests.kv_store.passage_hosts import text

LENGTHS = (3, 5, 7, 11, 13, 17)
#: K and V of one token, two heads of 8 in single precision.
TOKEN = 2 * 2 * 8 * 4 * tiny.LAYERS
PASSAGES = [[(31 * number + 7 * token) % tiny.VOCAB for token in range(size)] for number, size in enumerate(LENGTHS)]
ROWS = [[0, 1], [2], [5, 3], [4, 0, 2]]


def cache_of(family: str = "llama", **budget: Any) -> tuple[Any, mmattn.hosts.PassageCache]:
    """A tiny host that has read the passages within a budget."""
    model = mmattn.attach(tiny.make(family), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model, **budget)
    assert passages.add(PASSAGES, progress=False) == list(range(len(PASSAGES)))
    return model, passages


def calls_of(model: Any, ids: torch.Tensor, memory: Any) -> int:
    """How often the host is called for an answer: once, and to read passages."""
    with tiny.counting(model.host) as calls:
        answer(model, ids, memory=memory)
    return len(calls)


def files(folder: Path) -> list[Path]:
    """The files of passages."""
    return sorted(folder.glob("*/*.safetensors"))


@pytest.mark.parametrize("prefix", [(), (50, 51)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_files_are_memory_bit_for_bit(family: str, prefix: tuple[int, ...], tmp_path: Path) -> None:
    """Invariant 142: a passage that was loaded from its file, ahead or not, answers as one in memory; none is read
    twice.
    """
    model, whole = cache_of(family, prefix=prefix)
    other, some = cache_of(family, prefix=prefix, folder=tmp_path, max_bytes=TOKEN * 20)
    assert len(files(tmp_path)) == len(PASSAGES)
    memories = [(whole.select([row]), some.select([row])) for row in ROWS * 2]
    for first, second in memories:
        assert torch.equal(answer(other, text(), memory=second), answer(model, text(), memory=first))
    later, again = cache_of(family, prefix=prefix, folder=tmp_path, max_bytes=0)
    answer(later, text(), memory=again.select([[0]]))  # the prefix is read
    for row in ROWS:
        assert calls_of(later, text(), again.select([row])) == 1 and again.nbytes() == 0
        found = answer(later, text(), memory=again.select([row]))
        assert torch.equal(found, answer(model, text(), memory=whole.select([row])))


@pytest.mark.parametrize("in_files", [False, True])
def test_the_budget_is_held(in_files: bool, tmp_path: Path) -> None:
    """Invariant 142: memory never has more bytes than it may; what has no place is read again, to the same answer."""
    model, whole = cache_of()
    largest = TOKEN * 29
    other, some = cache_of(max_bytes=largest, folder=tmp_path if in_files else None)
    draw = random.Random(0)
    for _ in range(30):
        row = draw.sample(range(len(PASSAGES)), draw.randint(1, 4))
        found = answer(other, text(), memory=some.select([row]))
        assert 0 < some.nbytes() <= largest
        assert distance(found, answer(model, text(), memory=whole.select([row]))) <= CLOSE
    assert whole.nbytes() == TOKEN * sum(LENGTHS)


def test_what_was_used_last_stays() -> None:
    """Invariant 192: the passages that were used longest ago are evicted, however often they were used before."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(model, max_bytes=TOKEN * 10)
    one, two, three = passages.add([[number] * 5 for number in range(1, 4)], progress=False)
    for number in (one, one, one, two, three):
        answer(model, text(), memory=passages.select([[number]]))
    assert [calls_of(model, text(), passages.select([[number]])) for number in (two, three, one)] == [1, 1, 2]


def test_a_damaged_file_is_read_again(tmp_path: Path) -> None:
    """Invariant 142: a changed byte, a torn file or another passage in its place is noticed, and written anew."""
    model, whole = cache_of()
    cache_of(folder=tmp_path)
    wanted = answer(model, text(), memory=whole.select([[0, 1, 2]]))
    good = {path: path.read_bytes() for path in files(tmp_path)}
    first, *_, last = good.values()
    for bad in (first[:-3] + b"abc", first[: len(first) // 2], b"", last):
        path = next(iter(good))
        path.write_bytes(bad)
        other, some = cache_of(folder=tmp_path, max_bytes=0)
        for row in ([0, 1, 2], [3, 4, 5]):
            answer(other, text(), memory=some.select([row]))
        assert distance(answer(other, text(), memory=some.select([[0, 1, 2]])), wanted) <= CLOSE
        assert path.stat().st_size == len(first) and path.read_bytes()[-64:] != bad[-64:]
        assert calls_of(other, text(), some.select([range(len(PASSAGES))])) == 1


def test_another_prefix_has_other_files(tmp_path: Path) -> None:
    """And the same prefix the same; other weights: tests/hosts/test_what_was_computed.py."""
    for prefix, times in (((), 1), ((50,), 2), ((), 2)):
        cache_of(folder=tmp_path, prefix=prefix)
        assert len(files(tmp_path)) == times * len(PASSAGES)


def test_files_have_a_budget(tmp_path: Path) -> None:
    """Invariant 142: files never have more bytes than they may, whoever wrote them, and those used last stay."""
    cache_of(folder=tmp_path)
    size = sum(path.stat().st_size for path in files(tmp_path))
    model, passages = cache_of(folder=tmp_path, max_bytes=0, max_file_bytes=size)
    before = set(files(tmp_path))
    answer(model, text(), memory=passages.select([[0, 1, 2]]))
    for number in range(20):
        passages.add([[number + 2] * 13, [number + 2]], progress=False)
        assert calls_of(model, text(), passages.select([[0, 1, 2]])) == 1
        assert sum(path.stat().st_size for path in files(tmp_path)) <= size
    assert set(files(tmp_path)) != before


def test_uses_by_others_count(tmp_path: Path) -> None:
    """Invariant 181: of files whose folder is full, those stay that another process uses."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    others = mmattn.hosts.PassageCache(model, folder=tmp_path, max_bytes=0)
    (theirs,) = others.add([[2] * 7], progress=False)
    kept = set(files(tmp_path))
    others.add([[3] * 7, [5] * 7], progress=False)
    before = set(files(tmp_path))
    size = sum(path.stat().st_size for path in before)
    passages = mmattn.hosts.PassageCache(model, folder=tmp_path, max_bytes=0, max_file_bytes=size)
    for number in range(7):
        answer(model, text(), memory=others.select([[theirs]]))
        passages.add([[number + 11] * 7], progress=False)
    after = set(files(tmp_path))
    assert kept <= after and not after & (before - kept)


def test_budgets_that_make_no_sense() -> None:
    """A budget of files without a folder, and a negative one, are refused."""
    model = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    with pytest.raises(ConfigError, match="folder"):
        mmattn.hosts.PassageCache(model, max_file_bytes=7)
    with pytest.raises(ValueError, match="max_bytes"):
        mmattn.hosts.PassageCache(model, max_bytes=-1)


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be written the passage is used all the same."""
    model, whole = cache_of()
    other = mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())
    passages = mmattn.hosts.PassageCache(other, folder=tmp_path)
    passages.add([[7, 8]], progress=False)
    monkeypatch.setattr("os.fsync", _full)
    with pytest.warns(RuntimeWarning, match="not written"):
        numbers = passages.add(PASSAGES, progress=False)
    found = answer(other, text(), memory=passages.select([numbers]))
    assert distance(found, answer(model, text(), memory=whole.select([range(len(PASSAGES))]))) <= CLOSE


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")


def test_threads(tmp_path: Path) -> None:
    """Invariant 142: threads that share a cache with little memory get the answers that they get alone."""
    model, whole = cache_of()
    wanted = [answer(model, text(), memory=whole.select([row])) for row in ROWS]
    other, some = cache_of(folder=tmp_path, max_bytes=TOKEN * 13, max_file_bytes=60_000)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(15):
            number = draw.randrange(len(ROWS))
            memory = some.select([ROWS[number]])
            found = answer(other, text(), memory=memory)
            assert distance(found, wanted[number]) <= CLOSE and some.nbytes() <= TOKEN * 13

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_caches_share_a_folder(tmp_path: Path) -> None:
    """Invariant 142: of two caches that need the same passages at once each passage is read by one."""
    caches = [passage_process.open_cache(tmp_path) for _ in range(2)]
    orders = [random.Random(seed).sample(range(23), 23) for seed in range(2)]

    def work(passages: mmattn.hosts.PassageCache, order: list[int]) -> None:
        for number in order:
            passages.add([passage_process.passage(number)], progress=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, [passages for _, passages, _ in caches], orders))
    assert sum(len(read) for _, _, read in caches) == 23
    for model, passages, read in caches:
        read.clear()
        passages.select([range(23)]).slots(model.adapter("default"))
        assert not read


@pytest.mark.slow
def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Invariant 142: of two processes that need the same passages at once each passage is read by one, and both have
    the same.
    """
    command = [sys.executable, "-m", "tests.kv_store.passage_process", str(tmp_path), "share"]
    started = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, text=True) for seed in ("1", "2")]
    outputs = [process.communicate(timeout=120)[0].split() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sum(int(read) for read, _ in outputs) == passage_process.COUNT
    assert outputs[0][1] == outputs[1][1]


@pytest.mark.slow
def test_kills_lose_and_tear_nothing(tmp_path: Path) -> None:
    """Invariant 142: after each of 20 kills every passage that `add` returned is in its file, and every file is
    whole.
    """
    command = [sys.executable, "-m", "tests.kv_store.passage_process", str(tmp_path), "kill", "20"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    kills, lost, damaged, written = map(int, found.stdout.split())
    assert (kills, lost, damaged) == (20, 0, 0) and written > 20
    assert not list(tmp_path.glob("*/.mmattn-*"))
