"""Ctrl-C at any moment of a command: exit code 130, nothing torn, and the same command goes on."""

from __future__ import annotations

import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

from mmattn import recipes
from mmattn.cli.app import main
from mmattn.retrieval.index import Index
from tests.cli.running import ROOT, call, interrupt_at, start
from tests.stress.interrupts import interrupted_builds
from tests.tiny_texts import save_encoder

TRAIN = """\
import torch

from mmattn import training
from mmattn.storage.json_files import write_json


def main(config):
    weight = torch.zeros(3, requires_grad=True)

    def loss(step):
        print("at", step, flush=True)
        return (weight - 1).square().sum()

    fitted = training.fit([{"params": [weight], "lr": 0.1}], loss, config["steps"], progress=False)
    print("stopped" if fitted.interrupted else "finished", flush=True)
    write_json("weight.json", weight.tolist())
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text("steps: 100000000\n")
    return tmp_path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(19)
    return save_encoder(tmp_path_factory.mktemp("encoder"))


def test_a_training_saves_what_it_has_and_exits_with_130(recipe: Path) -> None:
    code, printed = interrupt_at(start(recipe, "train", "config.yaml"), "at 7")
    assert code == 130 and printed.endswith("stopped\n") and "Traceback" not in printed, printed
    assert (recipe / "weight.json").is_file()
    again = start(recipe, "train", "config.yaml", "steps=5")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and printed.endswith("finished\n"), printed


def test_an_index_goes_on_where_it_was(encoder: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")
    texts = [f"the bluebell {number}" for number in range(10_500)]  # two shards
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    words = ["index", "build", "lines.txt", "-o", "index", "--encoder", str(encoder)]
    code, printed = interrupt_at(start(tmp_path, *words), "embedding 1/2")
    assert code == 130 and "Traceback" not in printed, printed
    assert not (tmp_path / "index").exists()
    again = start(tmp_path, *words)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "embedding 1/1" in printed, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "lines.txt"]
    index = Index.load(tmp_path / "index")
    assert len(index) == len(texts) and index[index.ids[10_000]].text == texts[10_000]


def test_at_any_moment(encoder: Path, tmp_path: Path) -> None:
    """From the start of the process on; more moments: `tests.stress.interrupts`."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")
    codes = interrupted_builds(tmp_path, encoder, (0.1, 1.6))
    # A shell shows 130 for a process that SIGINT ended before its first line, too.
    assert set(codes) <= {130, -signal.SIGINT, 0}, codes


class TestCopy:
    @pytest.mark.parametrize("existed", [False, True])
    def test_half_a_copy_is_taken_away(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], existed: bool
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if existed:
            (tmp_path / "mine").mkdir()
        copy, copied = shutil.copy2, []

        def interrupted(source: str, target: str, **options: bool) -> object:
            if len(copied) == 3:
                signal.raise_signal(signal.SIGINT)
            copied.append(target)
            return copy(source, target, **options)

        with monkeypatch.context() as patch:
            patch.setattr(shutil.copytree, "__defaults__", (False, None, interrupted, False, False))
            assert call(capsys, "cp", "rag", "mine")[0] == 130
        assert len(copied) == 3
        assert [path.name for path in tmp_path.rglob("*")] == (["mine"] if existed else [])
        assert call(capsys, "cp", "rag", "mine")[0] == 0
        assert (tmp_path / "mine" / "train.py").read_bytes() == (ROOT / "recipes/rag/train.py").read_bytes()


def test_half_a_drawing_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "package" / "_recipes" / "diffusion"
    recipe.mkdir(parents=True)
    (recipe / "drawing.py").write_text(
        "import signal\n\n\ndef draw(sentence, out, **options):\n    out.write_bytes(b'half')\n"
        "    if sentence == 'stop':\n        signal.raise_signal(signal.SIGINT)\n"
        "    out.write_bytes(b'whole')\n    return out\n"
    )
    monkeypatch.setattr(recipes, "_PACKAGE", tmp_path / "package")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = tmp_path / "drawn"
    folder.mkdir()
    assert call(capsys, "draw", "stop", "-o", folder / "a.png")[0] == 130
    assert list(folder.iterdir()) == []
    assert call(capsys, "draw", "go", "-o", folder / "a.png") == (0, f"{folder / 'a.png'}\n", "")
    assert call(capsys, "draw", "stop", "-o", folder / "a.png")[0] == 130
    assert [path.read_bytes() for path in folder.iterdir()] == [b"whole"]
    code, _, err = call(capsys, "draw", "go", "-o", folder / "none" / "a.png")
    assert code == 2 and "the folder above does not exist" in err


class TestSeveralSeeds:
    def test_an_interrupted_seed_ends_the_command_with_130(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text(f"out: {tmp_path / 'run'}\n")
        begun: list[object] = []
        with pytest.raises(SystemExit) as end:
            recipes.over_seeds("", begun.append, lambda tables: "", [str(tmp_path / "config.yaml")])
        assert end.value.code == 130 and len(begun) == 1
        assert not (tmp_path / "run" / "table.md").exists()


class TestHandler:
    def test_a_command_that_catches_it(self, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (recipe / "train.py").write_text(
            "import signal\n\n\ndef main(config):\n    try:\n        signal.raise_signal(signal.SIGINT)\n"
            "    except KeyboardInterrupt:\n        print('caught')\n"
        )
        with pytest.raises(SystemExit) as end:
            main(["train", str(recipe / "config.yaml")])
        assert end.value.code == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_one_that_is_ignored_stays_ignored(self, capsys: pytest.CaptureFixture[str]) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            assert call(capsys, "ls")[0] == 0
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)

    def test_in_another_thread(self) -> None:
        codes: list[object] = []

        def run() -> None:
            try:
                main(["ls"])
            except SystemExit as end:
                codes.append(end.code)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert codes == [0]
