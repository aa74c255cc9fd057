"""Adapter folders and `mmattn.load`: the same answers come back; a bad folder is refused and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mmattn
from mmattn.adapters.files import check_tensors, load_folder
from mmattn.errors import AdapterFileError, AttachError, ConfigError, NonFiniteError
from mmattn.storage.safetensors import read_tensors, write_tensors
from mmattn.testing.case import no_trace, traces
from tests import tiny
from tests.adapters.adapter_folders import FILES, config, contents, example, save

ROWS = 3
MODEL, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.fixture(scope="module")
def one_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "adapter"
    tiny.attach(tiny.make("llama")).save_adapter(folder)
    return folder


@pytest.fixture
def saved(one_saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(one_saved, tmp_path / "adapter"))


def logits(model: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(tiny.text(ROWS), **kwargs).logits
    assert out.isfinite().all()
    return out


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Change tensors and config with right checksums in both files."""
    tensors, config = read_tensors(folder / MODEL, "mmattn-adapter")
    change(tensors, config)
    write_tensors(folder / MODEL, tensors, config)
    (folder / CONFIG).write_text(json.dumps(config))


def first(tensors: dict[str, torch.Tensor]) -> str:
    return next(name for name, value in tensors.items() if value.ndim == 2)


def flip_a_bit(folder: Path) -> None:
    raw = bytearray((folder / MODEL).read_bytes())
    raw[-3] ^= 4
    (folder / MODEL).write_bytes(raw)


BAD: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("moved")), AdapterFileError, "no such folder"),
    "no tensors": (lambda f: (f / MODEL).unlink(), AdapterFileError, f"no {MODEL}"),
    "no config": (lambda f: (f / CONFIG).unlink(), AdapterFileError, f"no {CONFIG}"),
    "cut": (lambda f: (f / MODEL).write_bytes((f / MODEL).read_bytes()[:-5]), AdapterFileError, "truncated"),
    "flipped": (flip_a_bit, AdapterFileError, "checksum"),
    "NaN": (lambda f: rewrite(f, lambda t, c: t[first(t)].fill_(float("nan"))), NonFiniteError, "NaN"),
    "missing": (lambda f: rewrite(f, lambda t, c: t.pop(first(t))), AdapterFileError, "1 missing"),
    "extra": (lambda f: rewrite(f, lambda t, c: t.update(z=torch.ones(3))), AdapterFileError, r"1 unexpected \(z\)"),
    "shape": (
        lambda f: rewrite(f, lambda t, c: t.update({first(t): t[first(t)][:-1]})),
        AdapterFileError,
        "1 of another shape",
    ),
    "dtype": (
        lambda f: rewrite(f, lambda t, c: t.update({first(t): t[first(t)].int()})),
        AdapterFileError,
        "1 of another dtype",
    ),
    "memory of 60,000": (
        lambda f: rewrite(f, lambda t, c: c["adapter"].update(memory_dim=60_000)),
        AdapterFileError,
        "of another shape",
    ),
    "layers the host does not have": (
        lambda f: rewrite(f, lambda t, c: c["adapter"].update(layers=[2, 4])),
        AdapterFileError,
        r"layers \[2, 4\] were asked for and the host has layers 0 to 2",
    ),
    "more layers at a time than the host has": (
        lambda f: rewrite(f, lambda t, c: c["adapter"].update(layers=None, every=4)),
        AdapterFileError,
        "every=4 was asked for",
    ),
    "other layers": (
        lambda f: rewrite(f, lambda t, c: c["adapter"].update(layers=[0, 1])),
        AdapterFileError,
        r"says layers \[0, 2\] and its settings give \[0, 1\]",
    ),
    "another host": (
        lambda f: rewrite(f, lambda t, c: c["host"].update(hidden_size=31)),
        AdapterFileError,
        "of width 31; this host .* width 32",
    ),
    "newer": (lambda f: rewrite(f, lambda t, c: c.update(format_version=2)), AdapterFileError, "update"),
    "kind": (lambda f: rewrite(f, lambda t, c: c.update(kind="os")), AdapterFileError, "'os'"),
}


class TestLoad:
    def test_what_was_loaded_is_saved_as_it_was(self, saved: Path, tmp_path: Path) -> None:
        """Invariant 60."""
        mmattn.load(tiny.make("llama"), saved).save_adapter(tmp_path / "again")
        for name in (MODEL, CONFIG):
            assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

    @pytest.mark.parametrize("kind", BAD)
    @pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "with an adapter"])
    def test_a_bad_folder_leaves_the_host_and_its_adapter_as_they_were(
        self, saved: Path, kind: str, fresh: bool
    ) -> None:
        """Invariant 61."""
        spoil, error, words = BAD[kind]
        model: Any = tiny.make("llama") if fresh else tiny.attach(tiny.make("llama"))
        memory = {} if fresh else {"memory": tiny.memory(ROWS)}
        want, before = logits(model, **memory), traces(model)
        spoil(saved)
        with pytest.raises(error, match=words):
            mmattn.load(model, saved, "second")
        no_trace(model, before, kind)
        assert torch.equal(logits(model, **memory), want)

    def test_one_changed_weight_of_the_host_is_said(self, saved: Path) -> None:
        """Invariant 73."""
        host = tiny.make("llama")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            mmattn.load(host, saved).unload()
        with torch.no_grad():
            next(host.parameters()).view(-1)[5] += 1e-3
        with pytest.warns(UserWarning, match="not those the adapter"):
            mmattn.load(host, saved)

    def test_a_kind_that_is_not_registered_is_not_attached(self) -> None:
        class Own(mmattn.GatedAdapter):
            kind = "own"

        with pytest.raises(AttachError, match="takes .*GatedAdapter.* got Own"):
            mmattn.attach(tiny.make("llama"), Own(memory_dim=tiny.MEMORY_DIM, every=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_host_that_is_stored_in_half_precision_is_the_one_of_the_training(
    tmp_path: Path, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    """transformers loads weights as the file has them; the training may have read the same file in float32."""
    tiny.attach(tiny.make("llama").to(dtype).float()).save_adapter(tmp_path)
    mmattn.load(tiny.make("llama").to(dtype), tmp_path)
    assert not recwarn.list
    other = tiny.make("llama").to(dtype)
    with torch.no_grad():
        other.lm_head.weight[3, 5] += 0.25
    with pytest.warns(UserWarning, match="another revision, a fine-tuned copy, or another dtype"):
        mmattn.load(other, tmp_path)
    tiny.attach(tiny.make("llama")).save_adapter(tmp_path / "whole")
    with pytest.warns(UserWarning, match="another revision, a fine-tuned copy, or another dtype"):
        mmattn.load(tiny.make("llama").to(dtype), tmp_path / "whole")


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WAYS: dict[str, Callable[[Any, torch.dtype], object]] = {
    "model.to": lambda model, dtype: model.to(dtype),
    "host.to": lambda model, dtype: model.host.to(dtype),
    "adapters.to": lambda model, dtype: model.adapters.to(dtype),
    "part of it": lambda model, dtype: model.adapter("default").memory_norm.to(dtype),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_an_adapter_in_any_precision_is_loaded_beside_a_host_in_any(
    tmp_path: Path, dtype: torch.dtype, way: str
) -> None:
    """Invariant 130: what half precision saved is the trained adapter to its rounding, beside every host."""
    memory = tiny.memory(ROWS)
    model = tiny.attach(tiny.make("llama"))
    want = logits(model, memory=memory)
    WAYS[way](model, dtype)
    model.save_adapter(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "pretrained")
    with warnings.catch_warnings():  # a host in another precision has other weights, it says
        warnings.filterwarnings("ignore", message="the weights of this")
        for there in FLOATS:
            for folder in ("adapter", "pretrained"):
                again = mmattn.load(tiny.make("llama").to(there), tmp_path / folder)
                assert {value.dtype for value in again.adapters.parameters()} == {torch.float32}
                tiny.assert_close(logits(again, memory=memory).float(), want, 0.1)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_dtype_that_is_asked_for(saved: Path, dtype: torch.dtype) -> None:
    """Invariant 130: all weights in it, gates in float32 at least."""
    model = mmattn.load(tiny.make("llama"), saved, dtype=dtype)
    for name, value in model.adapter("default").named_parameters():
        assert value.dtype == (torch.promote_types(dtype, torch.float32) if name.endswith("gate") else dtype), name
    model.save_adapter(saved)
    assert mmattn.load(tiny.make("llama"), saved, dtype="auto").adapter("default").memory_norm.weight.dtype == dtype
    whole = mmattn.load(model.unload(), saved)
    assert {value.dtype for value in whole.adapters.parameters()} == {torch.float32}


def test_the_dtype_of_a_mixed_folder_is_that_of_most_weights(saved: Path) -> None:
    """Invariant 130."""
    rewrite(saved, lambda tensors, config: tensors.update({first(tensors): tensors[first(tensors)].double()}))
    model = mmattn.load(tiny.make("llama"), saved, dtype="auto")
    assert {value.dtype for value in model.adapters.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_the_state_dict_of_a_trainer_in_any_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """Invariant 130: `transformers.Trainer` writes the state dict of the model as it is."""
    model = tiny.attach(tiny.make("llama")).to(dtype)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = mmattn.load(tiny.make("llama"), tmp_path)
    for name, value in again.adapter("default").state_dict().items():
        assert torch.equal(value, model.adapter("default").state_dict()[name].float())


def test_a_second_adapter_is_loaded_into_a_model_in_half_precision(saved: Path) -> None:
    """Invariant 130."""
    model = tiny.attach(tiny.make("llama")).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="not those the adapter"):
        mmattn.load(model, saved, "second")
    assert logits(model, memory={"second": tiny.memory(ROWS)}).dtype == torch.bfloat16
    assert {value.dtype for value in model.adapter("second").parameters()} == {torch.float32}


def test_a_weight_beyond_the_range_is_refused_and_never_infinite(tmp_path: Path) -> None:
    """Invariant 130: neither at saving in half precision nor at loading in it."""
    model = tiny.attach(tiny.make("llama"))
    with torch.no_grad():
        model.adapter("default").memory_norm.weight[3] = 70_000.0
    model.save_adapter(tmp_path)
    host = tiny.make("llama")
    before = traces(host)
    with pytest.raises(NonFiniteError, match=r"memory_norm.weight' reach 7e\+04, beyond the range of torch.float16"):
        mmattn.load(host, tmp_path, dtype=torch.float16)
    no_trace(host, before, "after it was refused")
    assert mmattn.load(host, tmp_path, dtype=torch.bfloat16).adapter("default").memory_norm.weight.isfinite().all()
    model.half()
    with pytest.raises(NonFiniteError):
        model.save_adapter(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, "half", 16])
def test_a_dtype_that_no_adapter_can_have(saved: Path, dtype: Any) -> None:
    with pytest.raises(ConfigError, match="dtype must be torch.float32"):
        mmattn.load(tiny.make("llama"), saved, dtype=dtype)


class TestRoundTrip:
    def test_files_of_the_user_stay(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("# My project\n")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("mine")
        save(tmp_path)
        save(tmp_path)
        assert (tmp_path / "README.md").read_text() == "# My project\n"
        assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "notes"])

    def test_links_as_in_the_cache_of_the_hub(self, tmp_path: Path) -> None:
        save(tmp_path / "blobs")
        (tmp_path / "snapshot").mkdir()
        for name in FILES:
            (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
        assert load_folder(tmp_path / "snapshot")[0] == config()


class TestFolders:
    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("x")
        with pytest.raises(AdapterFileError, match="it is a file"):
            load_folder(tmp_path / "file")
        (tmp_path / "other").mkdir()
        with pytest.raises(AdapterFileError, match="nothing"):
            load_folder(tmp_path / "other")

    def test_not_finite_is_refused_before_the_old_one_is_touched(self, tmp_path: Path) -> None:
        """Invariant 64."""
        save(tmp_path)
        before = contents(tmp_path)
        tensors = example()
        tensors["blocks.1.gate"][1] = float("nan")
        with pytest.raises(NonFiniteError, match=r"'blocks\.1\.gate'"):
            save(tmp_path, tensors)
        assert contents(tmp_path) == before
        with pytest.raises(NonFiniteError):
            save(tmp_path / "new", tensors)
        assert not (tmp_path / "new").exists()

    def test_the_check_comes_before_any_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path)

        def refuse(found: dict[str, Any], shapes: dict[str, Any]) -> None:
            assert found == config()
            check_tensors({"latents": ((7, 14), torch.float32)}, shapes)

        monkeypatch.setattr("torch.empty", None)
        with pytest.raises(AdapterFileError, match="1 of another shape"):
            load_folder(tmp_path, check=refuse)

    def test_tensors_that_do_not_fit_are_listed_five_of_each(self) -> None:
        """Invariant 61."""
        f32 = torch.float32
        expected = {f"a{i}": ((i, 3), f32) for i in range(7)} | {"b": ((2,), f32), "c": ((5,), f32)}
        found = {f"z{i}": torch.zeros(1) for i in range(6)} | {"b": torch.zeros(3), "c": torch.zeros(5).half()}
        with pytest.raises(AdapterFileError) as caught:
            check_tensors(expected, found)
        text = str(caught.value)
        assert "7 missing (a0; a1; a2; a3; a4; ...)" in text
        assert "6 unexpected (z0; z1; z2; z3; z4; ...)" in text
        assert "1 of another shape (b [3], needed [2])" in text
        assert "1 of another dtype (c float16, needed float32)" in text
        check_tensors({"b": ((3,), f32)}, {"b": torch.zeros(3)})
