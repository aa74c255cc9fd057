"""Any bytes and any JSON in an adapter folder: refused as an `AdapterFileError`, or what the files say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

from mmattn.adapters.files import load_folder
from mmattn.errors import AdapterFileError
from mmattn.hosts.model import adapted
from tests.stress.mutated_files import CONFIG, TENSORS, Folder, put_together, taken_apart

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
    """With right checksums, so that only the meaning of the field decides."""
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
