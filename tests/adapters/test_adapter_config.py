"""The config in an adapter folder: every field is checked, nothing in it is followed, nothing imported."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmattn.adapters.files import is_label, load_folder, parse_config
from mmattn.errors import AdapterFileError, ConfigError
from mmattn.storage.safetensors import read_tensors, write_tensors
from tests.adapters.adapter_folders import ADAPTER, KINDS, config, contents, save


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the config in both files, checksums and all, as someone would on purpose."""
    tensors, found = read_tensors(folder / "adapter_model.safetensors", "mmattn-adapter")
    change(found)
    write_tensors(folder / "adapter_model.safetensors", tensors, found)
    (folder / "adapter_config.json").write_text(json.dumps(found))


# What is written into the config of both files, and what the message must say.
CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "newer": (lambda c: c.update(format_version=2), "format version 2.*update"),
    "no field": (lambda c: c.pop("layers"), "layers: Field required"),
    "unknown field": (lambda c: c.update(module="os"), "module: Extra inputs"),
    "unknown host field": (lambda c: c["host"].update(path="x"), r"host\.path: Extra inputs"),
    "unknown setting": (lambda c: c["adapter"].update(width=3), r"adapter\.width"),
    "unknown nested setting": (lambda c: c["adapter"]["resampler"].update(width=3), r"resampler\.width"),
    "PEFT": (lambda c: c.update(peft_type="LORA"), "PEFT"),
    "kind": (lambda c: c.update(kind="magic"), "'magic'.*registered are 'gated'"),
    "kind is a module": (lambda c: c.update(kind="os.system"), "kind: "),
    "heads true": (lambda c: c["adapter"].update(num_heads=True), r"num_heads: .*valid integer"),
    "heads text": (lambda c: c["adapter"].update(num_heads="3"), r"num_heads: .*valid integer"),
    "heads float": (lambda c: c["adapter"].update(num_heads=3.0), r"num_heads: .*valid integer"),
    "heads 0": (lambda c: c["adapter"].update(num_heads=0), "num_heads"),
    "dim 10**9": (lambda c: c["adapter"].update(memory_dim=10**9), "memory_dim"),
    "dim -1": (lambda c: c["adapter"].update(memory_dim=-1), "memory_dim"),
    "no dim": (lambda c: c["adapter"].pop("memory_dim"), "memory_dim"),
    "latents 10**9": (lambda c: c["adapter"]["resampler"].update(num_latents=10**9), "num_latents"),
    "bool as number": (lambda c: c["adapter"].update(qk_norm=1), "qk_norm"),
    "gate": (lambda c: c["adapter"].update(gate="portal"), "gate"),
    "feed-forward 65": (lambda c: c["adapter"].update(feed_forward=65), "feed_forward"),
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
    "no host class": (lambda c: c["host"].pop("class"), r"host\.class: Field required"),
    "no fingerprint": (lambda c: c["host"].pop("fingerprint"), r"host\.fingerprint: Field required"),
}

PATHS = [
    "../x",
    "..",
    "a/../b",
    "/etc/passwd",
    "~/x",
    "a/b/c",
    "C:\\x",
    "C:x",
    "\\\\server\\x",
    "os.system",
    "torch.nn.Linear",
    "https://example.org/x",
    "file:///etc/passwd",
    "hf://org/name",
    "scheme:/x",
    "data:text/plain,x",
    "$HOME",
    "`id`",
    "a;b",
    "a\nb",
    "a\0b",
    "-rf",
    "",
    "x" * 1000,
]


parse_config(config(), KINDS)  # it imports pydantic, and pydantic parts of its own


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
        """Invariant 66."""
        save(tmp_path)
        assert load_without_imports(tmp_path) == ADAPTER

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_refused(self, tmp_path: Path, kind: str) -> None:
        """Invariant 65."""
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

    @pytest.mark.parametrize("text", PATHS)
    def test_paths_addresses_and_modules(self, tmp_path: Path, text: str) -> None:
        """Invariant 66."""
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
        ("setting", "words"),
        [
            ({"text": "../x"}, r"adapter\.text must be a plain name"),
            ({"outer": {"inner": {"text": "os.system"}}}, r"outer\.inner\.text must be a plain name"),
            ({"texts": ["fair", "/etc/passwd"]}, r"adapter\.texts must be a plain name"),
            ({"a/b": 3}, "no plain name: 'a/b'"),
            ({"outer": {"": 3}}, "no plain name: ''"),
            ({"number": 10**15}, r"adapter\.number must be from"),
            ({"numbers": [0] * 10**5}, "a list of 100,000"),
        ],
    )
    def test_settings_are_bounded_and_plain_whatever_a_kind_makes_of_them(
        self, tmp_path: Path, setting: dict[str, Any], words: str
    ) -> None:
        save(tmp_path)
        edit(tmp_path, lambda c: c.update(adapter=setting))
        with pytest.raises(AdapterFileError, match=words):
            load_folder(tmp_path)

    @pytest.mark.parametrize(
        "text",
        ["ViT-B-32:laion2b_s34b_b79k", "org/model-v1.5", "TorchvisionEncoder(resnet18, layer=features.18)", "x"],
    )
    def test_fair_names(self, text: str) -> None:
        assert is_label(text)

    @pytest.mark.parametrize(
        ("raw", "words"), [(b"[]", "one JSON object"), (b'{"format": "other"}', "mmattn-adapter"), (b"", "empty")]
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
            with pytest.raises(AdapterFileError, match=f"{next(iter(bad))}.*Input should be"):
                parse(**bad)
