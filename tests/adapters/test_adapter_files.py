"""Adapter folders: whole or refused, old or new and never half, and nothing in them is followed."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

import mmattn.adapters.files
from mmattn.adapters.files import (
    adapter_settings,
    check_tensors,
    load_folder,
    parse_config,
    save_folder,
)
from mmattn.adapters.gated import GatedAdapter
from mmattn.adapters.resampler import Resampler
from mmattn.adapters.settings import is_label
from mmattn.errors import AdapterFileError, ConfigError, NonFiniteError

KINDS = {"gated": GatedAdapter}
ADAPTER = GatedAdapter(memory_dim=13, layers=(1, 3), num_heads=3, head_dim=5, resampler=Resampler(num_latents=7))


def config(**changes: Any) -> dict[str, Any]:
    host = {"class": "LlamaForCausalLM", "model_type": "llama", "hidden_size": 17, "num_layers": 5}
    return {
        "format": "mmattn-adapter",
        "format_version": 1,
        "mmattn_version": "0.1.0.dev1",
        "kind": "gated",
        "adapter": adapter_settings(ADAPTER),
        "layers": [1, 3],
        "host": {**host, "fingerprint": "0123456789abcdef" * 4},
        "encoder": "OpenCLIP ViT-B-32:laion2b_s34b_b79k",
        "name": "default",
        **changes,
    }


def example() -> dict[str, torch.Tensor]:
    return {"blocks.1.gate": torch.randn(3), "blocks.1.out.weight": torch.randn(17, 15), "latents": torch.randn(7, 13)}


CARD = "---\nlibrary_name: mmattn\n---\n\n# An adapter\n"


def save(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> None:
    save_folder(folder, config=config(**changes), tensors=example() if tensors is None else tensors, card=CARD)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


class TestRoundTrip:
    def test_bit_for_bit(self, tmp_path: Path) -> None:
        tensors = example()
        save(tmp_path / "deep" / "folder", tensors)
        found, after = load_folder(tmp_path / "deep" / "folder")
        assert found == config()
        assert after.keys() == tensors.keys()
        assert all(torch.equal(after[name], tensors[name]) for name in tensors)
        assert parse_config(found, KINDS) == ADAPTER
        assert sorted(os.listdir(tmp_path / "deep" / "folder")) == FILES
        assert (tmp_path / "deep" / "folder" / "README.md").read_text().startswith(CARD)

    def test_others_can_read_the_tensors(self, tmp_path: Path) -> None:
        save(tmp_path)
        assert safetensors.torch.load_file(tmp_path / "adapter_model.safetensors").keys() == example().keys()
        assert "peft_type" not in json.loads((tmp_path / "adapter_config.json").read_text())

    def test_saving_what_was_loaded_changes_no_byte(self, tmp_path: Path) -> None:
        save(tmp_path)
        first = contents(tmp_path)
        found, tensors = load_folder(tmp_path)
        save_folder(tmp_path, config=found, tensors=tensors, card=CARD)
        assert contents(tmp_path) == first

    def test_files_of_the_user_stay(self, tmp_path: Path) -> None:
        (tmp_path / "README.md").write_text("# My project\n")
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "a.txt").write_text("mine")
        save(tmp_path)
        save(tmp_path)
        assert (tmp_path / "README.md").read_text() == "# My project\n"
        assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
        assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "notes"])

    def test_a_card_of_ours_is_replaced(self, tmp_path: Path) -> None:
        save(tmp_path)
        save_folder(tmp_path, config=config(), tensors=example(), card="# Newer")
        assert (tmp_path / "README.md").read_text().startswith("# Newer\n")

    def test_links_as_in_the_cache_of_the_hub(self, tmp_path: Path) -> None:
        save(tmp_path / "blobs")
        (tmp_path / "snapshot").mkdir()
        for name in FILES:
            (tmp_path / "snapshot" / name).symlink_to(f"../blobs/{name}")
        assert load_folder(tmp_path / "snapshot")[0] == config()


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the config in both files, checksums and all, as someone would on purpose."""
    from mmattn.files import read_tensors, write_tensors

    tensors, found = read_tensors(folder / "adapter_model.safetensors", "mmattn-adapter")
    change(found)
    write_tensors(folder / "adapter_model.safetensors", tensors, found)
    (folder / "adapter_config.json").write_text(json.dumps(found))


# What is written into the config of both files, and what the message must say.
CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda c: c.update(format_version=2), "format version 2.*update"),
    "much newer": (lambda c: c.update(format_version=10**30), "format version 1000.*update"),
    "no field": (lambda c: c.pop("layers"), "lacks: .*layers"),
    "unknown field": (lambda c: c.update(module="os"), "unknown here: .*module"),
    "unknown host field": (lambda c: c["host"].update(path="x"), "unknown here: .*path"),
    "unknown setting": (lambda c: c["adapter"].update(width=3), "unknown here: .*width"),
    "unknown nested setting": (lambda c: c["adapter"]["resampler"].update(width=3), "unknown here: .*width"),
    "PEFT": (lambda c: c.update(peft_type="LORA"), "PEFT"),
    "kind": (lambda c: c.update(kind="magic"), "'magic'.*knows 'gated'"),
    "kind is a module": (lambda c: c.update(kind="os.system"), "'kind'"),
    "heads true": (lambda c: c["adapter"].update(num_heads=True), "num_heads.*True"),
    "heads text": (lambda c: c["adapter"].update(num_heads="3"), "num_heads.*'3'"),
    "heads float": (lambda c: c["adapter"].update(num_heads=3.0), r"num_heads.*3\.0"),
    "heads null": (lambda c: c["adapter"].update(num_heads=None), "num_heads.*None"),
    "heads 0": (lambda c: c["adapter"].update(num_heads=0), "num_heads"),
    "heads list": (lambda c: c["adapter"].update(num_heads=[3]), "num_heads"),
    "dim 10**9": (lambda c: c["adapter"].update(memory_dim=10**9), "memory_dim"),
    "dim 10**6": (lambda c: c["adapter"].update(memory_dim=10**6), "memory_dim"),
    "dim -1": (lambda c: c["adapter"].update(memory_dim=-1), "memory_dim"),
    "no dim": (lambda c: c["adapter"].pop("memory_dim"), "memory_dim"),
    "latents 10**9": (lambda c: c["adapter"]["resampler"].update(num_latents=10**9), "num_latents"),
    "bool as number": (lambda c: c["adapter"].update(qk_norm=1), "qk_norm"),
    "gate": (lambda c: c["adapter"].update(gate="portal"), "gate"),
    "layers text": (lambda c: c.update(layers="13"), "layers"),
    "layers empty": (lambda c: c.update(layers=[]), "layers"),
    "layers twice": (lambda c: c.update(layers=[1, 1]), "layers"),
    "layers true": (lambda c: c.update(layers=[True]), "layers"),
    "layers beyond": (lambda c: c.update(layers=[5]), "5 layers"),
    "layers 10**5": (lambda c: c.update(layers=list(range(10**5))), "layers"),
    "adapter list": (lambda c: c.update(adapter=[1]), "adapter"),
    "host null": (lambda c: c.update(host=None), "host"),
    "host size 10**9": (lambda c: c["host"].update(hidden_size=10**9), "hidden_size"),
    "fingerprint": (lambda c: c["host"].update(fingerprint="latest"), "fingerprint"),
    "version": (lambda c: c.update(mmattn_version="../x"), "mmattn_version"),
    "version 1.0": (lambda c: c.update(format_version=1.0), "version"),
    "version true": (lambda c: c.update(format_version=True), "version"),
}

PATHS = [
    "../x",
    "..",
    "a/../b",
    "a../b",
    "/etc/passwd",
    "~/x",
    "./x",
    "a/b/c",
    "C:\\x",
    "C:x",
    "\\\\server\\x",
    "os.system",
    "os.system('true')",
    "torch.nn.Linear",
    "https://example.org/x",
    "http:example.org",
    "file:///etc/passwd",
    "hf://org/name",
    "hf:/x",
    "scheme:/x",
    "data:text/plain,x",
    "$HOME",
    "%TEMP%",
    "`id`",
    "a;b",
    "a\nb",
    "a\0b",
    "-rf",
    "",
    "x" * 1000,
]


def load_without_imports(folder: Path) -> Any:
    """Load and parse, while every import of a module that is not there yet is an error."""
    plain = builtins.__import__

    def refuse(name: str, *args: object) -> None:
        raise AssertionError(f"the loader imports {name}")

    def watched(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] not in sys.modules:
            refuse(name)
        return plain(name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib, "import_module", refuse)
        patch.setattr(builtins, "__import__", watched)
        return parse_config(load_folder(folder)[0], KINDS)


class TestConfigs:
    def test_a_good_one_imports_nothing(self, tmp_path: Path) -> None:
        save(tmp_path)
        assert load_without_imports(tmp_path) == ADAPTER

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_refused(self, tmp_path: Path, kind: str) -> None:
        change, words = CONFIGS[kind]
        save(tmp_path)
        before = psutil.Process().memory_info().rss
        with pytest.raises((AdapterFileError, ConfigError), match=words) as caught:
            edit(tmp_path, change)  # some are refused when they are written already: then as a whole file, below
            load_without_imports(tmp_path)
        if isinstance(caught.value, ConfigError):
            found = json.loads((tmp_path / "adapter_config.json").read_text())
            change(found)
            (tmp_path / "adapter_config.json").write_text(json.dumps(found))
            with pytest.raises(AdapterFileError, match=words):
                load_without_imports(tmp_path)
        assert psutil.Process().memory_info().rss - before < 200 << 20

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_refused_when_saving_too_where_the_file_would_be(self, tmp_path: Path, kind: str) -> None:
        bad = config()
        CONFIGS[kind][0](bad)
        save(tmp_path)
        before = contents(tmp_path)
        try:
            save_folder(tmp_path, config=bad, tensors=example(), card=CARD)
        except ConfigError as error:
            assert "cannot be saved" in str(error)
            assert contents(tmp_path) == before
        else:
            with pytest.raises(AdapterFileError):
                load_without_imports(tmp_path)

    @pytest.mark.parametrize("text", PATHS)
    def test_paths_addresses_and_modules(self, tmp_path: Path, text: str) -> None:
        save(tmp_path)
        good = contents(tmp_path)
        changes: list[Callable[[dict[str, Any]], object]] = [
            lambda c: c.update(encoder=text),
            lambda c: c.update(name=text),
            lambda c: c.update(kind=text),
            lambda c: c["adapter"].update(gate=text),
            lambda c: c["host"].update({"class": text}),
            lambda c: c["host"].update(model_type=text),
        ]
        for i, change in enumerate(changes):
            if text in ("os.system", "torch.nn.Linear") and i in (1, 5):
                continue  # "v1.beta" is a fair name, and names of adapters and of model types are looked up nowhere
            edit(tmp_path, change)
            with pytest.raises(AdapterFileError):
                load_without_imports(tmp_path)
            for name, raw in good.items():
                (tmp_path / name).write_bytes(raw)
        load_folder(tmp_path)

    @pytest.mark.parametrize(
        "text",
        ["ViT-B-32:laion2b_s34b_b79k", "org/model-v1.5", "TorchvisionEncoder(resnet18, layer=features.18)", "x"],
    )
    def test_fair_names(self, text: str) -> None:
        assert is_label(text)

    @pytest.mark.parametrize(
        ("raw", "words"),
        [
            (b'{"format": "mmattn-adapter", "format": "mmattn-adapter"}', "twice"),
            (b'{"adapter": NaN}', "NaN"),
            (b'{"a":' * 100_000, "deeper"),
            (b"[]", "one JSON object"),
            (b'{"format": "other"}', "other"),
            (b"", "empty"),
            (b"<html></html>", "HTML"),
            (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
            (b"\x80\x04K\x01.", "pickle"),
            (b" " * (2 << 20), "at most|text|format"),
        ],
    )
    def test_the_json_file_itself(self, tmp_path: Path, raw: bytes, words: str) -> None:
        save(tmp_path)
        (tmp_path / "adapter_config.json").write_bytes(raw)
        with pytest.raises(AdapterFileError, match=words):
            load_folder(tmp_path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda c: c["adapter"].update(num_heads=1), "'adapter'"),
            (lambda c: c.update(layers=[1, 4]), "'layers'"),
            (lambda c: c.pop("name"), "'name'"),
            (lambda c: c["adapter"].update(feed_forward=4), "'adapter'"),
        ],
    )
    def test_files_that_disagree(self, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
        save(tmp_path)
        found = config()
        change(found)
        (tmp_path / "adapter_config.json").write_text(json.dumps(found))
        with pytest.raises(AdapterFileError, match=f"disagree: {words} differ"):
            load_folder(tmp_path)

    def test_the_order_of_fields_and_white_space_are_no_disagreement(self, tmp_path: Path) -> None:
        save(tmp_path)
        found = dict(reversed(config().items()))
        (tmp_path / "adapter_config.json").write_text(json.dumps(found, indent=7))
        assert load_folder(tmp_path)[0] == config()

    def test_types_are_checked_for_an_adapter_that_does_not(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Trusting:
            width: int = 3
            rate: float = 0.5
            on: bool = False
            layers: tuple[int, ...] | None = None

        def parse(**settings: Any) -> Any:
            return parse_config({"kind": "x", "adapter": settings}, {"x": Trusting})

        assert parse(width=5, rate=2, on=True, layers=[7, 11]) == Trusting(5, 2, True, (7, 11))
        for bad in ({"width": True}, {"rate": True}, {"rate": "2"}, {"on": 1}, {"layers": [True]}, {"layers": [[1]]}):
            with pytest.raises(AdapterFileError, match=f"{next(iter(bad))} must be of type"):
                parse(**bad)

    def test_a_class_of_another_module_is_never_made(self) -> None:
        @dataclasses.dataclass(frozen=True)
        class Quiet:
            width: int = 3

        with pytest.raises(AdapterFileError, match="knows 'quiet'"):
            parse_config(config(), {"quiet": Quiet})


class TestFolders:
    def test_what_is_missing_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(AdapterFileError, match="no such folder"):
            load_folder(tmp_path / "none")
        (tmp_path / "file").write_text("x")
        with pytest.raises(AdapterFileError, match="it is a file"):
            load_folder(tmp_path / "file")
        (tmp_path / "other").mkdir()
        with pytest.raises(AdapterFileError, match="nothing"):
            load_folder(tmp_path / "other")
        for name in FILES[1:]:
            save(tmp_path / "a")
            (tmp_path / "a" / name).unlink()
            with pytest.raises(AdapterFileError, match=f"no {name}"):
                load_folder(tmp_path / "a")

    def test_a_file_in_the_place_of_the_folder(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_text("x")
        for folder in (tmp_path / "a", tmp_path / "a" / "b"):
            with pytest.raises(OSError):
                save(folder)
        assert contents(tmp_path) == {"a": b"x"}

    def test_not_finite_is_refused_before_the_old_one_is_touched(self, tmp_path: Path) -> None:
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

    def test_64_flipped_bits(self, tmp_path: Path) -> None:
        save(tmp_path)
        path = tmp_path / "adapter_model.safetensors"
        good = path.read_bytes()
        rng = random.Random(11)
        for place in rng.sample(range(len(good)), 64):
            changed = bytearray(good)
            changed[place] ^= 1 << rng.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(AdapterFileError):
                load_folder(tmp_path)

    def test_the_check_comes_before_any_value(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path)

        def refuse(found: dict[str, Any], shapes: dict[str, Any]) -> None:
            assert found == config()
            check_tensors({"latents": ((7, 14), torch.float32)}, shapes)

        monkeypatch.setattr("torch.empty", None)
        with pytest.raises(AdapterFileError, match="1 of another shape"):
            load_folder(tmp_path, check=refuse)

    def test_tensors_that_do_not_fit_are_listed_five_of_each(self) -> None:
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


# A process that saves version after version: name and values tell which.
SAVER = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from test_adapter_files import config, load_folder, save_folder
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
    here = Path(__file__).parent
    command = [sys.executable, "-c", SAVER + code, str(here), str(folder), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(here.parent.parent)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return out


class TestKilled:
    def test_at_every_step_of_a_save(self, tmp_path: Path) -> None:
        """The process ends at its first step, its second ... : the old one loads until the new one does."""
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

    def test_thirty_kills_at_random_moments(self, tmp_path: Path) -> None:
        code = """
rng = random.Random(13)
save(0)
last, moved = 0, 0
for kill in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        i = last
        while True:
            i += 1
            save(i)
    time.sleep(rng.uniform(0.01, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    now = version()
    assert now >= last, (now, last)
    moved += now > last
    last = now
save(last + 1)
assert version() == last + 1
assert sorted(os.listdir(folder)) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
print(moved)
"""
        assert int(finish(start(code, tmp_path / "a", os.environ.get("MMATTN_KILLS", "30")))) > 0

    def test_two_processes_save_twenty_times_while_a_third_loads(self, tmp_path: Path) -> None:
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
        assert int(finish(start(code, tmp_path / "a"))) > 5
        assert sorted(os.listdir(tmp_path / "a")) == FILES

    def test_a_load_ends_though_saves_never_stop(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Between the two files that a load reads, another save is tried each time; the second time it has to wait."""
        plain, tries = mmattn.adapters.files.read_header, []

        def read_header(*args: Any) -> Any:
            if not sys._getframe(1).f_code.co_name.startswith("_settle"):
                tries.append("done")
                try:
                    save(tmp_path, name=f"v{len(tries)}")
                except TimeoutError as error:
                    assert "another process has been saving" in str(error)
                    tries[-1] = "waited"
            return plain(*args)

        save(tmp_path, name="v0")
        monkeypatch.setattr(mmattn.adapters.files, "_WAIT", 0.05)
        monkeypatch.setattr(mmattn.adapters.files, "read_header", read_header)
        found, _ = load_folder(tmp_path)
        assert (found["name"], tries) == ("v1", ["done", "waited"])

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

    def test_disk_full_at_twenty_sizes(self, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
    def test_modes_follow_the_umask_and_stay(self, tmp_path: Path, umask: int, mode: int) -> None:
        old = os.umask(umask)
        try:
            save(tmp_path / "a")
        finally:
            os.umask(old)
        assert {(tmp_path / "a" / name).stat().st_mode & 0o777 for name in FILES} == {mode}
        (tmp_path / "a" / "adapter_config.json").chmod(0o600)
        save(tmp_path / "a")
        assert (tmp_path / "a" / "adapter_config.json").stat().st_mode & 0o777 == 0o600
