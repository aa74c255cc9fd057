"""From a folder to a caption by way of a store: `mmattn encode`, then the recipe, which loads no encoder any more."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, load_from_disk

from mmattn import training
from mmattn.errors import ConfigError
from tests.cli.running import call
from tests.recipes.test_finetune import FLORA, ROOT, short

RECIPE = "finetune"
CLIP = str(ROOT / "assets" / "clip")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the shipped pictures and their texts."""
    folder = tmp_path_factory.mktemp("store") / "flora"
    eye = training_encoder()
    encoded(training.read_rows(FLORA, split="train"), folder, pictures=eye)
    return folder


def encoded(rows: Any, folder: Path, **encoders: Any) -> Any:
    """Rows encoded by these encoders, which are named as the shipped one, and saved to a folder."""
    names = dict.fromkeys(encoders, "assets/clip")
    with tempfile.TemporaryDirectory() as shards:
        training.encode_dataset(rows, shards, names=names, **encoders).save_to_disk(folder)
    return load_from_disk(folder)


def training_encoder(**options: Any) -> Any:
    from mmattn.encoders import load_image_encoder

    return load_image_encoder(CLIP, **options)


def asked(folder: Path, store: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of a few steps on a store."""
    given = short(folder, **changes)
    given["data"] |= {"path": str(store)}
    return given


@pytest.mark.slow
class TestRuns:
    @pytest.mark.slow
    def test_no_encoder_is_loaded(
        self,
        recipe: SimpleNamespace,
        store: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        """The whole run, its samples, controls and traces, by what the store says of its encoder."""

        def none(*given: Any, **options: Any) -> Any:
            raise AssertionError("an encoder was loaded")

        monkeypatch.setattr(recipe.data, "load_image_encoder", none)
        monkeypatch.setattr(recipe.data, "load_text_encoder", none)
        out = recipe.train.main(asked(tmp_path, store))
        printed = capsys.readouterr().out
        assert "6 rows to train on, 2 held out; memories of width 128" in printed
        assert not (tmp_path / "cache").exists()
        lines = (out / "samples.txt").read_text().splitlines()
        assert len(lines) == 2 and all(line.split(": ")[0].endswith(".png") for line in lines)
        names = [row["name"] for row in json.loads((out / "table.json").read_text())["rows"]]
        assert len(names) == 4 and (out / "attention.safetensors").is_file()
        said = json.loads((out / "adapter" / "adapter_config.json").read_text())
        assert said["encoder"] == training_encoder().fingerprint

    def test_it_measures_what_it_would_without_the_store(
        self, recipe: SimpleNamespace, store: Path, tmp_path: Path
    ) -> None:
        """The same rows are held out, and their loss under a fresh adapter is the same."""
        found = []
        for path in (store, FLORA):
            settings = recipe.settings.Config(**asked(tmp_path, path, eval={"eval_steps": 0}))
            data = recipe.data.encode(recipe.data.read(settings, lambda line: None), settings, "cpu", nullcontext)
            found.append(data)
        first, second = found
        assert first.encoding == second.encoding
        for one, other in ((first.held_out, second.held_out), (first.rows, second.rows)):
            assert sorted(one["text"]) == sorted(other["text"])
            memories = {row["text"]: row["memory"] for row in other}
            assert all((row["memory"] == memories[row["text"]]).all() for row in one)

    @pytest.mark.slow
    def test_it_goes_on_and_refuses_another_store(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        given = asked(tmp_path, store, eval={"eval_steps": 0})
        out = recipe.train.main(given)
        weights = (out / "adapter" / "adapter_model.safetensors").read_bytes()
        shutil.rmtree(out / "checkpoints" / "checkpoint-4")
        shutil.rmtree(out / "adapter")
        (out / "table.json").unlink()
        recipe.train.main(given)
        assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == weights
        rows = training.read_rows(FLORA, split="train").select(range(6))
        encoded(rows, tmp_path / "other", pictures=training_encoder())
        shutil.rmtree(out / "checkpoints" / "checkpoint-4")
        (out / "table.json").unlink()
        with pytest.raises(ConfigError, match=r"data\.path"):
            recipe.train.main(asked(tmp_path, tmp_path / "other", eval={"eval_steps": 0}))

    def test_pooled_pictures(self, recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The adapter's folder says that its pictures are pooled, and so does who captions with it."""
        rows = training.read_rows(FLORA, split="train")
        store = encoded(rows, tmp_path / "store", pictures=training_encoder(pooled=True))
        assert len(store[0]["memory"]) == 1
        out = recipe.train.main(asked(tmp_path, tmp_path / "store", eval={"eval_steps": 0}))
        said = json.loads((out / "adapter" / "pipeline_config.json").read_text())
        assert said["encoder"] == {"name": "assets/clip", "pooling": None, "pooled": True}
        code, _, err = call(capsys, "caption", FLORA / "daffodil.png", "--adapter", out / "adapter")
        assert code == 0, err


class TestRefused:
    def test_another_encoder(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        """One under another name is loaded for its fingerprint, and may be the same."""
        check, config = recipe.data.check_encoders, recipe.settings.Config
        encoding = training.encoding_of(load_from_disk(store))
        check(config(encoder=CLIP), encoding)
        with pytest.raises(ConfigError, match="by assets/clip, and encoder=torchvision:mobilenet_v2 is another"):
            check(config(encoder="torchvision:mobilenet_v2"), encoding)
        passages = Dataset.from_dict({"text": ["It is red."], "passage": ["Roses are red."]})
        rows = encoded(passages, tmp_path / "store", passages=recipe.data.load_text_encoder(CLIP))
        encoding = training.encoding_of(rows)
        check(config(text_encoder="assets/clip"), encoding)
        with pytest.raises(ConfigError, match="text_encoder=minilm pooling=none is another"):
            check(config(), encoding)

    def test_settings_of_other_data(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        settings = asked(tmp_path, store)
        settings["data"] |= {"columns": {"text": "caption"}}
        with pytest.raises(ConfigError, match="text=caption"):
            recipe.train.main(settings)
        settings = asked(tmp_path, store, host="unet")
        with pytest.raises(ConfigError, match="image"):
            recipe.train.main(settings)


class TestTheCommand:
    def test_a_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = [FLORA, "--encoder", CLIP, "-o", tmp_path / "store", "--pooled"]
        code, _, err = call(capsys, "encode", *words)
        assert code == 0 and not (tmp_path / "store.shards").exists(), err
        rows = load_from_disk(tmp_path / "store")
        encoding = training.encoding_of(rows)
        assert len(rows) == 8 and encoding is not None and encoding.encoders["pictures"].pooled
        assert encoding.dim == 96 and rows.features["memory"].dtype == "float16"

    def test_broken_pictures_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.copytree(FLORA, tmp_path / "data")
        (tmp_path / "data" / "daffodil.png").write_bytes(b"no picture")
        words = [tmp_path / "data", "--encoder", CLIP, "-o"]
        code, out, err = call(capsys, "encode", *words, tmp_path / "store")
        assert code == 0, err
        assert "1 left out, because it cannot be used:\n" in out and "daffodil.png" in out
        code, _, err = call(
            capsys, "encode", tmp_path / "data", "--encoder", CLIP, "-o", tmp_path / "strict", "--strict"
        )
        assert code == 2 and "daffodil.png" in err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["gone"], "there is no file or folder 'gone'"),
            ([FLORA, "--columns", "text"], "--columns takes KEY=NAME, such as text=caption; got 'text'"),
            ([FLORA, "--columns", "text=caption"], "text=caption"),
            ([FLORA, "--encoder", CLIP, "--dtype", "float64"], "dtype"),
            ([FLORA, "--encoder", "nosuch"], "nosuch"),
            (["a store"], "is encoded already"),
            (["rows.jsonl"], "there is nothing to encode"),
        ],
    )
    def test_refused(
        self, words: list[Any], message: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a row without a memory"}))
        places = {"a store": store, "rows.jsonl": tmp_path / "rows.jsonl"}
        code, _, err = call(capsys, "encode", *(places.get(word, word) for word in words), "-o", tmp_path / "new")
        assert code == 2 and message in err
