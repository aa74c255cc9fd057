"""Files whose checksums are right and which lie: what they say is checked, whatever holds them."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.encoders.style import StyleEncoder, StyleNetwork
from mmattn.errors import AdapterFileError, IndexFileError, NonFiniteError
from mmattn.hosts import PassageCache
from mmattn.inspect import Trace, load_traces, save_traces
from mmattn.inspect.trace import FILE, FORMAT
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.training import trainer as trainer_module
from mmattn.training.trainer import WEIGHTS, load_weights, trained_parameters
from tests import tiny
from tests.training import small_run

FILE_ERRORS = (AdapterFileError, IndexFileError, NonFiniteError)
JUNK = (None, True, -1, 10**9, 0.5, "", "float32", [], [-1], [[0, 1]], {}, {"a": 1}, "\x00", 3)
Use = Callable[[], Any]
"""Loads a file and makes use of what is in it: returns the tensors that a user would get."""


def lying(draw: random.Random, tensors: dict[str, Any], metadata: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Tensors and metadata of which one was changed."""
    tensors, metadata = dict(tensors), copy.deepcopy(metadata)
    if draw.random() < 0.4:
        change_json(draw, metadata, skipped=("format", "format_version"))
        return tensors, metadata
    name = draw.choice(sorted(tensors))
    tensor = tensors[name]
    changes: list[Callable[[], Any]] = [
        lambda: tensor[: len(tensor) // 2] if tensor.dim() else tensor,
        lambda: torch.cat([tensor, tensor]) if tensor.dim() else tensor,
        lambda: tensor.flatten(),
        lambda: tensor[None],
        lambda: torch.zeros(()),
        lambda: tensor.new_zeros(0),
        lambda: tensor.long(),
        lambda: tensor.bool(),
        lambda: tensor.half(),
        lambda: tensor.float().to(torch.float8_e4m3fn),
        lambda: tensor.double(),
        lambda: tensor - tensor.to(torch.int8) - 7 if tensor.dtype == torch.int64 else -tensor.float(),
        lambda: tensor + 10**6 if tensor.dtype == torch.int64 else tensor.flip(0),
        lambda: torch.full_like(tensor, math.nan) if tensor.is_floating_point() else torch.zeros_like(tensor),
        lambda: torch.full_like(tensor, math.inf) if tensor.is_floating_point() else torch.ones_like(tensor),
    ]
    if draw.random() < 0.15:
        tensors["surprise" if draw.random() < 0.5 else "0000.scores"] = torch.zeros(3)
    elif draw.random() < 0.15:
        tensors[f"{name}.x"] = tensors.pop(name)
    elif draw.random() < 0.15:
        del tensors[name]
    else:
        tensors[name] = draw.choice(changes)()
    return tensors, metadata


def change_json(draw: random.Random, value: Any, skipped: tuple[str, ...] = ()) -> None:
    """Change one thing in a JSON object, in place."""
    here = [key for key in value if key not in skipped] if isinstance(value, dict) else list(range(len(value)))
    if not here:
        return
    key = draw.choice(here)
    if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.7:
        change_json(draw, value[key])
    elif draw.random() < 0.2:
        del value[key]
    elif draw.random() < 0.2 and isinstance(value, list):
        value.append(copy.deepcopy(value[key]))
    else:
        value[key] = draw.choice(JUNK)


def forge(path: Path, form: str, draw: random.Random) -> None:
    """Write a tensor file again, with one lie in it and checksums that are right."""
    tensors, metadata = read_tensors(path, form, check_finite=False)
    write_tensors(path, *lying(draw, tensors, metadata))


def refused_or_sound(use: Use) -> bool:
    """Whether a file was refused by an error for files; what was made of one that was not is finite."""
    try:
        made = use()
    except FILE_ERRORS:
        return True
    for one in made:
        assert not isinstance(one, torch.Tensor) or not one.is_floating_point() or bool(one.isfinite().all())
    return False


@pytest.fixture(scope="module")
def host() -> Any:
    return mmattn.attach(tiny.make("llama"), mmattn.adapters.PassageAdapter())


@pytest.fixture(scope="module")
def adapted() -> Any:
    return tiny.attach(tiny.make("llama"))


def _passages(tmp_path: Path, host: Any, adapted: Any) -> tuple[Path, str, Use]:
    cache = PassageCache(host)
    cache.add([[5, 6, 7], [8, 9], [10]], progress=False)
    cache.save(tmp_path / "file")

    def use() -> Any:
        for mapped in (False, True):
            again = PassageCache.load(host, tmp_path / "file", mapped=mapped)
            with torch.no_grad():
                numbers = list(range(len(again)))
                yield host(torch.tensor([[10, 11, 12]]), memory=again.select([numbers[:2]])).logits
            again.select([numbers], recomputed_tokens=1)

    return tmp_path / "file", "mmattn-passages", lambda: list(use())


def _bank(tmp_path: Path, host: Any, adapted: Any) -> tuple[Path, str, Use]:
    adapted.bank(tiny.memory(4)).save(tmp_path / "file")

    def use() -> Any:
        bank = adapted.load_bank(tmp_path / "file")
        there = bank.gather(torch.full((2, 1), -1), mask=torch.zeros(2, 1, dtype=torch.bool))
        with contextlib.suppress(IndexError):  # an entry that is not present was removed
            there = bank.gather(torch.tensor([[0], [1]]))
        with torch.no_grad():
            return [adapted(tiny.text(2), memory=there).logits]

    return tmp_path / "file", "mmattn-bank", use


def _memory(tmp_path: Path, host: Any, adapted: Any) -> tuple[Path, str, Use]:
    memory = tiny.memory(2, lengths=[3, 5])
    sources = [["a"] * memory.length for _ in range(2)]
    whole = mmattn.Memory(
        memory.tokens, memory.mask, torch.zeros(2, memory.length).long(), torch.rand(2, memory.length), sources
    )
    whole.save(tmp_path / "file")

    def use() -> Any:
        loaded = mmattn.Memory.load(tmp_path / "file")
        real = torch.ones(loaded.tokens.shape[:2], dtype=torch.bool) if loaded.mask is None else loaded.mask
        return [loaded.tokens.float()[real]]

    return tmp_path / "file", "mmattn-memory", use


def _traces(tmp_path: Path, host: Any, adapted: Any) -> tuple[Path, str, Use]:
    save_traces([Trace(["a", "b"], ["left", "right"], torch.rand(1, 2, 2, 2), ["layer 3"])], tmp_path)
    return tmp_path / FILE, FORMAT, lambda: [one.weights for one in load_traces(tmp_path)]


KINDS = {
    "passages": _passages,
    "bank": _bank,
    "memory": _memory,
    "traces": _traces,
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_files_that_lie(kind: str, tmp_path: Path, host: Any, adapted: Any) -> None:
    """Invariant 132. Well-signed files with one lie in them are refused as files, or are sound all the same."""
    path, form, use = KINDS[kind](tmp_path, host, adapted)
    assert not refused_or_sound(use)
    good, draw, refused = path.read_bytes(), random.Random(kind), 0
    for _ in range(60):
        path.write_bytes(good)
        forge(path, form, draw)
        refused += refused_or_sound(use)
    assert refused > 20


@pytest.mark.parametrize(
    "lie",
    {
        "negative lengths": {"lengths": torch.tensor([7, -2])},
        "no length": {"lengths": torch.tensor([0, 5])},
        "twice the same": {"lengths": torch.tensor([2, 2, 1]), "ids": torch.tensor([5, 6, 5, 6, 9])},
        "beyond the vocabulary": {"ids": torch.tensor([5, 6, 7, 8, 10**6])},
        "negative ids": {"ids": torch.tensor([5, 6, 7, 8, -1])},
        "ids in floating point": {"ids": torch.tensor([5.0, 6.5, 7, 8, 9])},
        "NaN": {"values.0": torch.full((5, 2, 8), math.nan)},
        "keys of counts": {"keys.0": torch.ones(5, 2, 8, dtype=torch.long)},
        "half of the keys in half": {"keys.0": torch.ones(5, 2, 8, dtype=torch.half)},
        "in eight bits": {"keys.0": torch.ones(5, 2, 8).to(torch.float8_e5m2), "values.0": torch.ones(5, 2, 8)},
    }.items(),
    ids=lambda lie: lie[0],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_passages_that_no_host_has_read(lie: Any, mapped: bool, tmp_path: Path, host: Any) -> None:
    """Invariant 132."""
    cache = PassageCache(host)
    cache.add([[5, 6, 7], [8, 9]], progress=False)
    cache.save(tmp_path / "file")
    tensors, metadata = read_tensors(tmp_path / "file", "mmattn-passages")
    assert {name: tensor.shape for name, tensor in tensors.items() if "." in name and name in lie[1]} == {
        name: tensor.shape for name, tensor in lie[1].items() if "." in name
    }
    write_tensors(tmp_path / "file", {**tensors, **lie[1]}, metadata)
    with pytest.raises(AdapterFileError):
        PassageCache.load(host, tmp_path / "file", mapped=mapped)


def test_checkpoints(tmp_path: Path) -> None:
    """Invariant 134. A run does not go on from a checkpoint that lies."""
    wanted = trained_parameters(small_run.run(tmp_path, max_steps=2).model)
    path = tmp_path / "checkpoints" / "checkpoint-2" / WEIGHTS
    good, draw, refused = path.read_bytes(), random.Random(7), 0
    for _ in range(25):
        path.write_bytes(good)
        forge(path, "mmattn-trained", draw)
        try:
            load_weights(wanted, read_tensors(path, trainer_module.FORMAT)[0], str(path))
        except FILE_ERRORS:
            refused += 1
    assert refused > 8


def test_style_encoders(tmp_path: Path) -> None:
    """Invariant 134. A style encoder whose settings lie is refused as a file."""
    path = tmp_path / "style.safetensors"
    StyleEncoder(StyleNetwork(), 16).save(path)
    raw, said = path.read_bytes(), rb"{\"size\": 16}"
    assert raw.count(said) == 1
    for lie in (rb"{\"size\": -1}", rb"{\"size\":9.9}", rb"{}", rb"[[[[[[", rb"\"16\""):
        path.write_bytes(raw.replace(said, lie.ljust(len(said))))
        with pytest.raises(AdapterFileError):
            StyleEncoder.load(path)
