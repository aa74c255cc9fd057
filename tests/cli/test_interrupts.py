"""Ctrl-C at any moment of a command: exit code 130, nothing torn, and the same command goes on."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import IO

import pytest
from datasets import load_from_disk
from PIL import Image

from mmattn.cli.app import main
from mmattn.retrieval.index import Index
from tests.cli.running import ROOT, call, interrupt_at, start

TRAIN = """\
import torch

from mmattn import training
from mmattn.storage.json_files import write_json


class Printing(training.AdapterTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        print("at", self.state.global_step, flush=True)
        return (model.weight - 1).square().sum()


def main(config):
    layer = torch.nn.Linear(3, 1)
    settings = training.OptimSettings(max_steps=config["steps"], per_device_train_batch_size=1)
    arguments = settings.arguments(training.RunSettings(out="run", device="cpu"))
    trainer = Printing(layer, arguments, data_collator=lambda rows: {"rows": rows}, train_dataset=range(7))
    try:
        training.RunFolder("run").train(trainer, "layer", progress=False)
        print("finished", flush=True)
    except KeyboardInterrupt:
        print("stopped", flush=True)
    write_json("weight.json", layer.weight.tolist())
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "config.yaml").write_text("steps: 100000000\n")
    return tmp_path


@pytest.mark.slow
def test_a_training_saves_what_it_has_and_exits_with_130(recipe: Path) -> None:
    """Invariant 88."""
    code, printed = interrupt_at(start(recipe, "train", "config.yaml"), "at 7")
    assert code == 130 and printed.endswith("stopped\n") and "Traceback" not in printed, printed
    assert (recipe / "weight.json").is_file()
    again = start(recipe, "train", "config.yaml", "steps=5")
    printed, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and printed.endswith("finished\n"), printed


@pytest.mark.slow
def test_an_index_goes_on_where_it_was(bert: Path, tmp_path: Path) -> None:
    """Invariant 88."""
    pytest.importorskip("pyarrow", reason="pyarrow is not installed; it comes with mmattn[scale]")
    texts = [f"the bluebell {number}" for number in range(12_000)]  # two shards
    (tmp_path / "lines.txt").write_text("\n".join(texts))
    words = ["index", "build", "lines.txt", "-o", "index", "--encoder", str(bert)]
    code, printed = interrupt_at(start(tmp_path, *words), "shard 2 of 2:")
    assert code == 130 and "Traceback" not in printed, printed
    assert not (tmp_path / "index").exists()
    again = start(tmp_path, *words)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "shard 2 of 2: 100%" in printed and "shard 1 of 2" not in printed, printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "lines.txt"]
    index = Index.load(tmp_path / "index")
    assert len(index) == len(texts) and index[index.ids[10_000]].text == texts[10_000]


@pytest.mark.slow
def test_an_encoding_goes_on_where_it_was(bert: Path, tmp_path: Path) -> None:
    """Invariant 88."""
    rows = [{"text": f"row {number}", "passage": f"the bluebell {number}"} for number in range(6000)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["encode", "rows.jsonl", "-o", "store", "--text-encoder", str(bert)]
    code, printed = interrupt_at(start(tmp_path, *words), "encoding, shard 2 of 2")
    assert code == 130 and "Traceback" not in printed, printed
    assert not (tmp_path / "store").exists() and list((tmp_path / "store.shards").glob("*-00000.arrow"))
    again = start(tmp_path, *words)
    printed, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "shard 1" not in printed, printed
    assert not (tmp_path / "store.shards").exists()
    store = load_from_disk(tmp_path / "store")
    assert len(store) == len(rows) and store[5999]["text"] == "row 5999"


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
    save, stops = Image.Image.save, False

    def stopped(image: Image.Image, file: IO[bytes], kind: str) -> None:
        if stops:
            file.write(b"half")
            signal.raise_signal(signal.SIGINT)
        save(image, file, kind)

    monkeypatch.setattr(Image.Image, "save", stopped)
    folder = tmp_path / "drawn"
    folder.mkdir()
    given = ("draw", "a seven", "--num-inference-steps", "2", "-o")
    stops = True
    assert call(capsys, *given, folder / "a.png")[0] == 130
    assert list(folder.iterdir()) == []
    stops = False
    assert call(capsys, *given, folder / "a.png")[:2] == (0, f"{folder / 'a.png'}\n")
    (whole,) = [path.read_bytes() for path in folder.iterdir()]
    stops = True
    assert call(capsys, *given, folder / "a.png")[0] == 130
    assert [path.read_bytes() for path in folder.iterdir()] == [whole] and whole.startswith(b"\x89PNG")
    code, _, err = call(capsys, *given, folder / "none" / "a.png")
    assert code == 2 and "the folder above does not exist" in err


SEEDS = """\
import json
import signal
from pathlib import Path

from pydantic import BaseModel


class Config(BaseModel):
    out: Path
    like: dict[str, str]
    stop: int | None = None


def main(config):
    out = Path(config["out"])
    out.mkdir(parents=True, exist_ok=True)
    print("seed", config["seed"], "begins", config["like"])
    if config["stop"] == config["seed"]:
        signal.raise_signal(signal.SIGINT)
    (out / "table.json").write_text(json.dumps({"seed": config["seed"]}))


def table(contents):
    return "table of " + " ".join(str(content["seed"]) for content in contents)
"""


class TestSeveralSeeds:
    @pytest.fixture
    def config(self, tmp_path: Path) -> Path:
        (tmp_path / "train.py").write_text(SEEDS)
        (tmp_path / "config.yaml").write_text(f"out: {tmp_path / 'run'}\nlike: {{b: 'of {{seed}}'}}\n")
        return tmp_path / "config.yaml"

    def test_one_table_of_all(self, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = call(capsys, "train", config, "--seeds", "3,5")
        assert (code, err) == (0, "") and out.splitlines()[-1] == "table of 3 5"
        assert (config.parent / "run" / "table.md").read_text() == "table of 3 5\n"
        assert sorted(path.name for path in (config.parent / "run").iterdir()) == ["seed-3", "seed-5", "table.md"]

    def test_an_interrupted_seed_ends_the_command_with_130(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, _ = call(capsys, "train", config, "stop=5", "--seeds", "3,5,7")
        assert code == 130 and [line for line in out.splitlines() if line.startswith("seed")] == [
            "seed 3 begins {'b': 'of 3'}",
            "seed 5 begins {'b': 'of 5'}",
        ]
        assert not (config.parent / "run" / "table.md").exists()

    @pytest.mark.parametrize("seeds", ["", "0 1", "1,1", "-1"])
    def test_what_is_no_seed(self, config: Path, capsys: pytest.CaptureFixture[str], seeds: str) -> None:
        code, _, err = call(capsys, "train", config, f"--seeds={seeds}")
        assert code == 2 and "takes different whole numbers with commas between them" in err


class TestHandler:
    def test_a_library_that_makes_an_error_of_it(self, recipe: Path) -> None:
        """Invariant 88: a lazy import of transformers hides the interrupt behind an error of its own."""
        (recipe / "train.py").write_text(
            "import signal\nfrom mmattn.errors import ConfigError\n\n\ndef main(config):\n    try:\n"
            "        signal.raise_signal(signal.SIGINT)\n    except KeyboardInterrupt:\n"
            "        raise ConfigError('could not import') from None\n"
        )
        with pytest.raises(SystemExit) as end:
            main(["train", str(recipe / "config.yaml")])
        assert end.value.code == 130

    def test_one_that_is_ignored_stays_ignored(self, capsys: pytest.CaptureFixture[str]) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            assert call(capsys, "ls")[0] == 0
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)
