"""The vision recipe: data, measures, a run from beginning to end, and what a stop leaves behind."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers.utils import logging

import mmattn
from mmattn import inspect, pipelines, training
from mmattn.cli.app import main
from mmattn.errors import ConfigError
from mmattn.recipes import find_recipe
from tests.recipes.runs import settings_of

RECIPE = "vision"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The tokenizer of the shipped language model."""
    return pipelines.load_language_model("assets/lm", "cpu")[1]


def load(recipe: SimpleNamespace, seed: int = 0, **settings: Any) -> Any:
    return recipe.data.load_data(recipe.settings.DataSettings(**settings), seed)


@pytest.fixture(scope="module")
def flora(recipe: SimpleNamespace, run_folder: Path) -> Any:
    """A drawing of each species to train on and one to measure on."""
    return load(recipe, path=str(run_folder / "drawings"), held_out=0.5)


def test_the_shipped_pipeline_captions_as_the_recipe_does(recipe: SimpleNamespace, tokenizer: Any) -> None:
    pipe, pictures = (
        mmattn.pipeline("assets/vision/adapter", device="cpu"),
        sorted((ROOT / "assets/flora").glob("*.png")),
    )
    model = mmattn.load(pipelines.load_language_model("assets/lm", "cpu")[0], ROOT / "assets/vision/adapter")
    encoder = pipelines.load_image_encoder("assets/clip", "cpu")
    captions = recipe.measure.write_captions(model.eval(), tokenizer, encoder(pictures))
    assert len(pictures) == 8 and pipe(pictures) == captions


class TestData:
    @pytest.fixture
    def photographs(self, tmp_path: Path) -> dict[str, Any]:
        """Settings of folders of 30 pictures for each of three classes, and a file that describes them."""
        classes = {}
        for place, name in enumerate(("aster", "broom", "clover")):
            (tmp_path / name).mkdir()
            for number in range(30):
                Image.new("RGB", (17, 19), (10 * place, 3 * number, 50)).save(tmp_path / name / f"{number}.png")
            classes[name] = {"name": f"the {name}", "descriptions": [f"One {name}.", f"This is the {name}."]}
        (tmp_path / "classes.json").write_text(json.dumps(classes))
        return {"path": str(tmp_path), "descriptions": str(tmp_path / "classes.json")}

    def test_a_tenth_of_each_class_is_held_out(self, recipe: SimpleNamespace, photographs: dict[str, Any]) -> None:
        data = load(recipe, **photographs)
        names = ["the aster", "the broom", "the clover"]
        assert [one.name for one in data.species] == names
        assert Counter(picture.species.name for picture in data.held_out) == dict.fromkeys(names, 3)
        assert not {p.image for p in data.held_out} & {p.image for p in data.train}
        assert len(data.train) + len(data.held_out) == 90
        assert all(Path(p.image).parent.name in data.texts[text] for p in data.train for text in p.species.texts)
        again, other = load(recipe, **photographs), load(recipe, 1, **photographs)
        assert [p.image for p in again.held_out] == [p.image for p in data.held_out]
        assert [p.image for p in other.held_out] != [p.image for p in data.held_out]

    def test_flora(self, recipe: SimpleNamespace, flora: Any) -> None:
        assert len(flora.species) == len(flora.train) == len(flora.held_out) >= 40
        assert len({picture.key for picture in (*flora.train, *flora.held_out)}) == 2 * len(flora.species)
        for picture in flora.train:
            assert all(picture.species.name.lower() in flora.texts[text].lower() for text in picture.species.texts)

    def test_wrong_data_is_named(self, recipe: SimpleNamespace, photographs: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "dock").mkdir()
        for changes, message in (
            ({"path": str(tmp_path / "nowhere")}, "no folder"),
            ({"descriptions": str(tmp_path / "nowhere.json")}, "nowhere.json"),
            ({}, "has no descriptions of the class dock"),
        ):
            with pytest.raises(ConfigError, match=message):
                load(recipe, **photographs | changes)


class TestMeasures:
    def test_the_species_word_is_in_every_description(
        self, recipe: SimpleNamespace, flora: Any, tokenizer: Any
    ) -> None:
        ids = training.encode_texts(tokenizer, flora.texts)
        for one in flora.species:
            for text in one.texts:
                span = recipe.measure.name_span(tokenizer, flora.texts[text], ids[text], one.name)
                # Entry j of the nats belongs to token j + 1 of the ids, which begin with the begin token.
                word = tokenizer.decode(ids[text][1 + span.start : 1 + span.stop])
                assert word.strip().lower() == one.name.lower(), flora.texts[text]

    def test_named_species(self, recipe: SimpleNamespace) -> None:
        named = recipe.measure.named_species
        names = ["daisy", "oxeye daisy", "rose"]
        assert named("An Oxeye daisy here.", names) == ["oxeye daisy"]
        assert named("A daisy, an oxeye daisy, a daisy.", names) == ["daisy", "oxeye daisy"]
        assert named("Primroses.", names) == []

    def test_shuffled_pictures_are_of_another_species(self, recipe: SimpleNamespace) -> None:
        data = recipe.data
        pictures = [data.Picture(None, str(i), data.Species(str(n))) for i, n in enumerate((0, 0, 1, 1, 2, 2, 2, 3))]
        for seed in range(5):
            order = recipe.measure.other_species(pictures, seed)
            assert sorted(order) == list(range(8))
            assert all(pictures[i].species != pictures[j].species for i, j in enumerate(order))

    def test_captions_are_checked_against_facts(self, recipe: SimpleNamespace) -> None:
        data = recipe.data.Data()
        for name, facts, text in (
            ("aster", {"colour": "blue", "season": "autumn"}, "The aster has a white heart."),
            ("broom", {"colour": "yellow", "season": "spring"}, "The broom."),
        ):
            data.held_out.append(recipe.data.Picture(None, name, data.add_species(name, facts, [text])))
        check = recipe.measure.check_captions
        right, true = check(data, ["The aster is yellow in autumn.", "A blue and yellow broom of spring."])
        assert right == 1.0 and true == pytest.approx(3 / 5)
        right, true = check(data, ["A broom.", "An aster and a broom."])
        assert right == 0.0 and math.isnan(true)

    def test_bits_and_perplexities_of_a_known_model(self, recipe: SimpleNamespace, flora: Any, tokenizer: Any) -> None:
        """A model that gives every token the same probability, so that the figures are known beforehand."""
        size = len(tokenizer)

        class Even:
            def __init__(self, share: float = 1.0) -> None:
                self.share = share

            def parameters(self) -> Any:
                return iter(())

            def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
                logits = torch.zeros(*input_ids.shape, size)
                logits[:, :-1].scatter_(2, input_ids[:, 1:, None], math.log(self.share))
                return SimpleNamespace(logits=logits)

        ids = training.encode_texts(tokenizer, flora.texts)
        measure = recipe.measure.Measure(flora, tokenizer, ids)
        measure.captions = lambda *_: [""] * len(flora.held_out)
        even, _ = measure.row("even", Even())
        assert even["perplexity"] == pytest.approx(size, rel=1e-4)
        better, _ = measure.row("better", Even(size - 1.0))
        each = math.log2(size / 2)  # the right token has half of all
        tokens = sum(len(ids[text]) - 1 for _, text in measure.pairs) / len(measure.pairs)
        assert recipe.measure.bits_saved(better["nats"], even["nats"]) == pytest.approx(each * tokens, rel=1e-4)
        spans = [measure.spans[text] for _, text in measure.pairs]
        length = sum(span.stop - span.start for span in spans) / len(spans)
        assert math.log(better["species_perplexity"]) == pytest.approx(length * math.log(2), rel=1e-3)
        assert better["species_accuracy"] == 0.0


@pytest.mark.slow
class TestRun:
    def test_its_files(self, run: Path) -> None:
        assert {path.name for path in run.iterdir()} == {
            "adapter", "attention.safetensors", "captions.json", "config.resolved.yaml", "loss.png", "metrics.jsonl",
            "table.json", "table.md",
        }  # fmt: skip
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [(line["model"], line["step"]) for line in lines if "loss" in line] == [("adapter", 5), ("lora", 5)]

    def test_its_traces_are_of_its_captions(self, run: Path) -> None:
        traces, captions = inspect.load_traces(run), json.loads((run / "captions.json").read_text())
        assert 0 < len(traces) <= 6 and {one.title for one in traces} <= {one["caption"] for one in captions}
        for trace in traces:
            assert trace.grid is not None and trace.picture is not None
            assert "".join(trace.words[:-1]).strip() == trace.title

    def test_its_adapter_captions(self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pictures = sorted((ROOT / "assets" / "flora").glob("*.png"))[:2]
        with pytest.raises(SystemExit) as end:
            main(["caption", *map(str, pictures), "--adapter", str(run / "adapter")])
        out, err = capsys.readouterr()
        assert not end.value.code, err
        assert "Loading weights" not in err and logging.is_progress_bar_enabled()
        assert [line.split(": ")[0] for line in out.splitlines()] == [str(picture) for picture in pictures]
        away = mmattn.pipeline(shutil.copytree(run / "adapter", tmp_path / "adapter"))
        assert away(pictures[0]) == mmattn.pipeline(run / "adapter")(pictures[0])

    def test_memories_are_encoded_once(
        self, recipe: SimpleNamespace, run: Path, flora: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("encoded again")

        monkeypatch.setattr(mmattn.OpenCLIPEncoder, "forward", refuse)
        encoder = pipelines.load_image_encoder("assets/clip", "cpu")
        options: dict[str, Any] = {"mirror": False, "progress": False}
        assert recipe.data.encode(encoder, flora.train, run.parent / "cache", **options).batch == len(flora.train)
        with pytest.raises(AssertionError, match="encoded again"):
            recipe.data.encode(encoder, flora.train[1:], run.parent / "cache", **options)

    def test_a_stop_keeps_the_adapter(
        self, recipe: SimpleNamespace, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        step = training.AdapterTrainer.training_step

        def until_three(trainer: training.AdapterTrainer, *args: Any) -> torch.Tensor:
            if trainer.state.global_step == 3:
                raise KeyboardInterrupt
            return step(trainer, *args)

        monkeypatch.setattr(training.AdapterTrainer, "training_step", until_three)
        out = recipe.train.main(settings_of("vision", run_folder) | {"out": str(tmp_path / "stopped")})
        assert "adapter: stopped after 3 steps" in capsys.readouterr().out and not (out / "table.md").exists()
        lm, _ = pipelines.load_language_model("assets/lm", "cpu")
        assert mmattn.load(lm, out / "adapter").trainable_parameters()[0] > 0


@pytest.mark.slow
def test_photographs(recipe: SimpleNamespace, shared_data: Path, tmp_path: Path) -> None:
    """After 120 steps on three species captions name the right one of most held-out photographs."""
    for name in ("sunflower", "bluebell", "windflower"):
        (tmp_path / "photographs").mkdir(exist_ok=True)
        (tmp_path / "photographs" / name).symlink_to(shared_data / "flowers12" / name)
    weights = shared_data / "mobilenet_v2_imagenet.safetensors"
    config: dict[str, Any] = {
        "out": str(tmp_path / "run"),
        "encoder": f"torchvision:mobilenet_v2:{weights}",
        "progress": False,
        "data": {"path": str(tmp_path / "photographs"), "flip": False, "cache": str(tmp_path)},
        "optim": {"max_steps": 120, "per_device_train_batch_size": 16, "learning_rate": 4e-3},
        "controls": False,
    }
    config["data"]["descriptions"] = str(find_recipe("vision").folder / "flowers12_descriptions.json")
    run: Path = recipe.train.main(config)
    rows = {row["name"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    right, shuffled = rows["adapter, right picture"], rows["adapter, shuffled pictures"]
    assert right["species_accuracy"] >= 0.8 and shuffled["species_accuracy"] <= 0.2
    assert right["perplexity"] < shuffled["perplexity"]
