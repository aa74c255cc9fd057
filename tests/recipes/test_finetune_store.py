"""From a folder to a caption by way of a store: `mmattn encode`, then the recipe, which loads no encoder any more."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmattn import training
from mmattn.errors import ConfigError
from tests.cli.running import call
from tests.recipes.test_finetune import FLORA, ROOT, short

CLIP = str(ROOT / "assets" / "clip")


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    return load_files("finetune", "settings", "data", "train")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the shipped pictures and their texts."""
    folder = tmp_path_factory.mktemp("store") / "flora"
    eye = training_encoder()
    rows = training.read_rows(str(FLORA))
    training.encode_rows(rows, folder, pictures=eye, encoder_names={"pictures": "assets/clip"}, contents_per_shard=3)
    return folder


def training_encoder(**options: Any) -> Any:
    from mmattn.encoders import load_image_encoder

    return load_image_encoder(CLIP, **options)


def asked(folder: Path, store: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run of a few steps on a store."""
    given = short(folder, **changes)
    given["data"] |= {"path": str(store)}
    return given


class TestRuns:
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
        assert "8 encoded rows (pictures by assets/clip, float16)" in printed
        assert "6 rows to train on, 2 held out; memories of width 128" in printed
        assert not (tmp_path / "cache").exists()
        lines = (out / "samples.txt").read_text().splitlines()
        assert len(lines) == 2 and all(line.split(": ")[0].endswith(".png") for line in lines)
        names = [row["name"] for row in json.loads((out / "table.json").read_text())["rows"]]
        assert len(names) == 4 and (out / "attention.safetensors").is_file()
        said = json.loads((out / "adapter" / "adapter_config.json").read_text())
        assert said["encoder"] == training_encoder().fingerprint
        capsys.readouterr()
        monkeypatch.undo()
        code, printed, err = call(capsys, "caption", FLORA / "daffodil.png", "--adapter", out / "adapter")
        assert code == 0 and printed.startswith(f"{FLORA / 'daffodil.png'}: "), err

    def test_it_measures_what_it_would_without_the_store(
        self, recipe: SimpleNamespace, store: Path, tmp_path: Path
    ) -> None:
        """The same rows are held out, and their loss under a fresh adapter is the same."""
        settings = [recipe.settings.Config(**asked(tmp_path, path, eval={"eval_steps": 0})) for path in (store, FLORA)]
        (first, second) = (recipe.data.read(one, lambda line: None) for one in settings)
        assert sorted(row.text for row in first.held_out) == sorted(row.text for row in second.held_out)
        assert sorted(row.text for row in first.rows) == sorted(row.text for row in second.rows)
        own = recipe.data.row_memories(settings[1], second.rows, "cpu")
        stored = recipe.data.row_memories(settings[0], first.rows, "cpu")
        assert stored.fingerprint == own.fingerprint and stored.dim == own.dim
        for row in first.held_out:
            (same,) = [other for other in second.held_out if other.text == row.text]
            assert (stored.of([row]).tokens == own.of([same]).tokens).all()

    def test_it_goes_on_and_refuses_another_store(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        given = asked(tmp_path, store, eval={"eval_steps": 0})
        out = recipe.train.main(given)
        weights = (out / "adapter" / "adapter_model.safetensors").read_bytes()
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        shutil.rmtree(out / "adapter")
        (out / "table.json").unlink()
        recipe.train.main(given)
        assert (out / "adapter" / "adapter_model.safetensors").read_bytes() == weights
        rows = list(training.read_rows(str(FLORA)))[:6]
        names = {"pictures": "assets/clip"}
        training.encode_rows(rows, tmp_path / "other", pictures=training_encoder(), encoder_names=names)
        shutil.rmtree(out / "checkpoints" / "step-00000004")
        (out / "table.json").unlink()
        with pytest.raises(ConfigError, match="lengths of the rows"):
            recipe.train.main(asked(tmp_path, tmp_path / "other", eval={"eval_steps": 0}))

    def test_pooled_pictures(self, recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """The adapter's folder says that its pictures are pooled, and so does who captions with it."""
        rows = training.read_rows(str(FLORA))
        eye = training_encoder(pooled=True)
        names = {"pictures": "assets/clip"}
        store = training.encode_rows(rows, tmp_path / "store", pictures=eye, encoder_names=names)
        assert store[0].memory.length == 1
        out = recipe.train.main(asked(tmp_path, tmp_path / "store", eval={"eval_steps": 0}))
        said = json.loads((out / "adapter" / "pipeline_config.json").read_text())
        assert said["encoder"] == {"name": "assets/clip", "pooling": None, "pooled": True}
        code, _, err = call(capsys, "caption", FLORA / "daffodil.png", "--adapter", out / "adapter")
        assert code == 0, err


class TestRefused:
    def test_another_encoder(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        """One under another name is loaded for its fingerprint, and may be the same."""
        check, config = recipe.data.check_encoders, recipe.settings.Config
        rows = training.EncodedDataset(store)
        check(config(encoder=CLIP), rows)
        with pytest.raises(ConfigError, match="by assets/clip, and encoder=torchvision:mobilenet_v2 is another"):
            check(config(encoder="torchvision:mobilenet_v2"), rows)
        passages = [training.Row("It is red.", passages=("Roses are red.",))]
        options = {"passages": recipe.data.load_text_encoder(CLIP), "encoder_names": {"passages": "assets/clip"}}
        rows = training.encode_rows(passages, tmp_path / "store", **options)
        check(config(text_encoder="assets/clip"), rows)
        with pytest.raises(ConfigError, match="text_encoder=minilm pooling=none is another"):
            check(config(), rows)

    def test_settings_of_other_data(self, recipe: SimpleNamespace, store: Path, tmp_path: Path) -> None:
        settings = asked(tmp_path, store)
        settings["data"] |= {"columns": {"text": "caption"}}
        with pytest.raises(ConfigError, match="columns only applies to a dataset"):
            recipe.train.main(settings)
        settings = asked(tmp_path, store, host="unet")
        for name in ("adapter", "caption"):
            del settings[name]
        with pytest.raises(ConfigError, match="has encoded memories, and a UNet needs the pictures"):
            recipe.train.main(settings)


class TestTheCommand:
    def test_a_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = [FLORA, "--encoder", CLIP, "-o", tmp_path / "store", "--pooled"]
        code, out, err = call(capsys, "encode", *words, "--dtype", "int8")
        assert code == 0 and "encoding contents 8/8" in err, err
        first, second = out.splitlines()
        error = training.EncodedDataset(tmp_path / "store").manifest.relative_error
        assert first == f"{FLORA}: 8 texts in captions.jsonl"
        assert second.startswith(f"EncodedDataset(rows=8, e=96, int8, shards=1) in {tmp_path / 'store'}: ")
        assert second.endswith(f"relative error {error:.1e}")
        code, _, err = call(capsys, "encode", *words)
        assert code == 2 and "(dtype=int8, now float16)" in err

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

    def test_more_rows(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        rows = [{"text": f"It is {n}.", "passage": f"The number is {n}."} for n in range(3)]
        (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (tmp_path / "b.jsonl").write_text(json.dumps(rows[1] | {"text": "Another."}))
        words = ["--text-encoder", CLIP, "-o", tmp_path / "store"]
        assert call(capsys, "encode", tmp_path / "a.jsonl", *words)[0] == 0
        code, _, err = call(capsys, "encode", tmp_path / "b.jsonl", *words)
        assert code == 2 and "or add" in err and "append=True" in err
        assert call(capsys, "encode", tmp_path / "b.jsonl", *words, "--append")[0] == 0
        store = training.EncodedDataset(tmp_path / "store")
        assert len(store) == 4 and store[3].contents == store[1].contents

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["gone"], "there is no file or folder 'gone'"),
            ([FLORA, "--columns", "text"], "--columns takes KEY=NAME, such as text=caption; got 'text'"),
            ([FLORA, "--columns", "text=caption"], "columns only applies to a dataset of Hugging Face"),
            ([FLORA, "--encoder", CLIP, "--dtype", "float64"], "dtype must be one of"),
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
