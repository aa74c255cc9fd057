"""Any bytes and any JSON in an adapter folder: refused as an `AdapterFileError`, or what the files say."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import mmattn
from mmattn.adapters.files import adapter_settings, load_folder
from mmattn.errors import AdapterFileError
from mmattn.hosts.model import adapted
from tests import tiny
from tests.adapters.adapter_folders import contents

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
BLANK = "0" * 64

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["gated", "chunked", "decoupled", "F32", "mmattn-adapter", "../up", "os.system"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


def taken_apart(raw: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The header of a tensor file without its metadata, what its metadata says as plain values, and the tensors."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    info = header.pop("__metadata__")
    return header, info | {name: json.loads(info[name]) for name in ("metadata", "sha256")}, raw[end:]


def put_together(header: Any, info: Any, body: bytes) -> bytes:
    """A tensor file with this header, the checksum of the header made right."""

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    if isinstance(info, dict):
        info = {name: dump(value) if name in ("metadata", "sha256") else value for name, value in info.items()}
    if isinstance(info, dict) and "header_sha256" in info:
        info = {"header_sha256": BLANK} | {name: value for name, value in info.items() if name != "header_sha256"}
    blank = dump({"__metadata__": info} | header if isinstance(header, dict) else header).encode()
    blank += b" " * (-len(blank) % 8)
    raw = blank.replace(BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)
    return len(raw).to_bytes(8, "little") + raw + body


class Folder:
    """An adapter folder that is written anew with every change, the host it is for, and what it held at first."""

    def __init__(self, place: Path) -> None:
        self.folder, self.host = place / "adapter", tiny.make("llama")
        resampler = mmattn.Resampler(num_latents=3, depth=1, num_heads=1, head_dim=5, feed_forward=0.5)
        settings = {"num_heads": 1, "head_dim": 5, "feed_forward": 0.25, "resampler": resampler}
        model = tiny.attach(self.host, **settings)
        model.save_adapter(self.folder, encoder="OpenCLIP ViT-B-32:laion2b_s34b_b79k")
        adapter = model.adapters["default"]
        model.unload()
        self.values = {key: value.detach().clone() for key, value in adapter.state_dict().items()}
        self.good = contents(self.folder)
        self.now = dict(self.good)

    def write(self, files: dict[str, bytes]) -> None:
        """Put these files there; only what differs from what is there is written."""
        for name, raw in files.items():
            if raw != self.now[name]:
                (self.folder / name).write_bytes(raw)
                self.now[name] = raw

    def load(self, settings: dict[str, Any]) -> str | None:
        """Load what is there: what is wrong with that, None if nothing."""
        with warnings.catch_warnings():
            for said in ("the weights of this", "Initializing zero-element tensors"):
                warnings.filterwarnings("ignore", said)
            model = mmattn.load(self.host, self.folder)
        adapter = model.adapter("default")
        values, found = adapter.state_dict(), adapter_settings(adapter.config)
        model.unload()
        if values.keys() != self.values.keys() or not all(torch.equal(values[x], self.values[x]) for x in values):
            return "it loaded other values"
        if not says(found, settings):
            return f"it loaded as {found}"
        return None


def says(found: Any, settings: Any) -> bool:
    """Return whether settings were loaded as a file has them; null and what it leaves out stand for the default."""
    if isinstance(found, dict) and isinstance(settings, dict):
        return all(name in found and says(found[name], value) for name, value in settings.items())
    return settings is None or (found == settings and isinstance(found, bool) == isinstance(settings, bool))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A good folder and its host; each test writes over it."""
    place = tmp_path_factory.mktemp("fuzz")
    yield Folder(place)
    shutil.rmtree(place)


def refused_or_right(folder: Folder, files: dict[str, bytes], said: dict[str, object]) -> None:
    folder.write(folder.good | files)
    try:
        problem = folder.load(said)
    except AdapterFileError:
        problem = None
    assert problem is None, problem
    assert adapted(folder.host) is None


@given(name=st.sampled_from([TENSORS, CONFIG]), raw=st.binary(max_size=300))
@settings(max_examples=100)
def test_any_bytes(folder: Folder, name: str, raw: bytes) -> None:
    folder.write(folder.good | {name: raw})
    with pytest.raises(AdapterFileError):
        load_folder(folder.folder)


@pytest.mark.slow
@given(
    name=st.sampled_from([TENSORS, CONFIG]), place=st.floats(0, 1), raw=st.binary(max_size=30), cut=st.integers(0, 30)
)
@settings(max_examples=200)
def test_any_bytes_in_the_middle(folder: Folder, name: str, place: float, raw: bytes, cut: int) -> None:
    good = folder.good[name]
    start = int(place * len(good))
    own = json.loads(folder.good[CONFIG])["adapter"]
    refused_or_right(folder, {name: good[:start] + raw + good[start + cut :]}, own)


@given(data=st.data(), value=JSON)
@settings(max_examples=300)
def test_any_value_in_any_field_of_both_configs(folder: Folder, data: st.DataObject, value: object) -> None:
    """Invariant 132: with right checksums, so that only the meaning of the field decides."""
    header, info, body = taken_apart(folder.good[TENSORS])
    config = json.loads(folder.good[CONFIG])
    part = data.draw(st.sampled_from([config, config["adapter"], config["adapter"]["resampler"], config["host"]]))
    part[data.draw(st.sampled_from(sorted(part)))] = value
    files = {TENSORS: put_together(header, info | {"metadata": config}, body), CONFIG: json.dumps(config).encode()}
    refused_or_right(folder, files, config["adapter"] if isinstance(config["adapter"], dict) else {})


@given(data=st.data(), value=JSON)
@settings(max_examples=200)
def test_any_value_in_the_header(folder: Folder, data: st.DataObject, value: object) -> None:
    header, info, body = taken_apart(folder.good[TENSORS])
    entry = data.draw(st.sampled_from([*sorted(header), None]))
    part = info if entry is None else header[entry]
    part[data.draw(st.sampled_from(sorted(part)))] = value
    own = json.loads(folder.good[CONFIG])["adapter"]
    refused_or_right(folder, {TENSORS: put_together(header, info, body)}, own)
