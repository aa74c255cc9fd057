"""The vision recipe: data, measures, a run from beginning to end, and what a stop leaves behind."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
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
from mmattn.recipes import find_recipe, resolve_asset
from tests.recipes.comparing import check_compared

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    return load_files("vision", "settings", "data", "measure", "report", "train")


@pytest.fixture(scope="module")
def shipped(recipe: SimpleNamespace) -> Any:
    """The shipped language model and its tokenizer."""
    return pipelines.load_language_model("assets/lm", "cpu")


def short(out: Path, cache: Path, **optim: Any) -> dict[str, Any]:
    """Settings of a run that takes seconds."""
    data = {"kind": "flora", "train_per_species": 1, "held_out_per_species": 1, "flip": False, "cache": str(cache)}
    return {
        "out": str(out),
        "progress": False,
        "data": data,
        "adapter": {"every": 3, "num_heads": 2, "head_dim": 16, "feed_forward": 1},
        "optim": {"max_steps": 5, "batch_size": 7, "warmup_steps": 1, **optim},
        "caption": {"max_new_tokens": 11},
    }


def class_folder(folder: Path, files: int = 13, classes: tuple[str, ...] = ("aster", "broom", "clover")) -> Path:
    """One folder of small pictures per class and a file that describes them."""
    described = {}
    for place, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(files):
            Image.new("RGB", (17, 19), (10 * place, 3 * number, 50)).save(folder / name / f"{number}.png")
        described[name] = {"name": f"the {name}", "descriptions": [f"One {name}.", f"This is the {name}."]}
    (folder / "said.json").write_text(json.dumps(described))
    return folder


def load(recipe: SimpleNamespace, seed: int = 0, **settings: Any) -> Any:
    return recipe.data.load_data(recipe.settings.DataSettings(**settings), seed)


class TestData:
    def test_a_tenth_of_each_class_is_held_out(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        folder = class_folder(tmp_path, files=30)
        asked = {"kind": "folder", "path": str(folder), "descriptions": str(folder / "said.json")}
        data = load(recipe, **asked)
        assert Counter(picture.species for picture in data.held_out) == {0: 3, 1: 3, 2: 3}
        assert not {p.image for p in data.held_out} & {p.image for p in data.train}
        assert len(data.train) + len(data.held_out) == 90
        assert [one.name for one in data.species] == ["the aster", "the broom", "the clover"]
        assert all(Path(p.image).parent.name in data.texts[text] for p in data.train for text in data.texts_of(p))
        again, other = load(recipe, **asked), load(recipe, 1, **asked)
        assert [p.image for p in again.held_out] == [p.image for p in data.held_out]
        assert [p.image for p in other.held_out] != [p.image for p in data.held_out]

    def test_flora(self, recipe: SimpleNamespace) -> None:
        data = load(recipe, train_per_species=2, held_out_per_species=1)
        assert len(data.species) >= 40
        assert (len(data.train), len(data.held_out)) == (2 * len(data.species), len(data.species))
        keys = [picture.key for picture in (*data.train, *data.held_out)]
        assert len(set(keys)) == len(keys)
        for picture in data.train:
            name = data.species[picture.species].name
            assert all(name.lower() in data.texts[text].lower() for text in data.texts_of(picture))

    def test_what_is_wrong_is_named(self, recipe: SimpleNamespace, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no folder"):
            load(recipe, kind="folder", path=str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match=r"needs data\.path"):
            load(recipe, kind="folder")
        folder = class_folder(tmp_path / "a")
        with pytest.raises(ConfigError, match="file of descriptions"):
            load(recipe, kind="folder", path=str(folder))
        (folder / "dock").mkdir()
        with pytest.raises(ConfigError, match="without description: dock"):
            load(recipe, kind="folder", path=str(folder), descriptions=str(folder / "said.json"))


class TestMeasures:
    def test_the_species_word_is_found_in_every_description(self, recipe: SimpleNamespace, shipped: Any) -> None:
        _, tokenizer = shipped
        data = load(recipe, train_per_species=1, held_out_per_species=1)
        ids = training.encode_texts(tokenizer, data.texts)
        for one in data.species:
            for text in one.texts:
                span = recipe.measure.name_span(tokenizer, data.texts[text], ids[text], one.name)
                # Entry j of the nats belongs to token j + 1 of the ids, which begin with the begin token.
                found = tokenizer.decode(ids[text][1 + span.start : 1 + span.stop])
                assert found.strip().lower() == one.name.lower(), data.texts[text]

    def test_named_species(self, recipe: SimpleNamespace) -> None:
        named = recipe.measure.named_species
        names = ["daisy", "oxeye daisy", "rose"]
        assert named("An Oxeye daisy here.", names) == ["oxeye daisy"]
        assert named("A daisy, an oxeye daisy, a daisy.", names) == ["daisy", "oxeye daisy"]
        assert named("Primroses.", names) == [] == named("A daisy.", [])

    def test_shuffled_pictures_are_of_another_species(self, recipe: SimpleNamespace) -> None:
        pictures = [recipe.data.Picture(None, str(i), one) for i, one in enumerate((0, 0, 1, 1, 2, 2, 2, 3))]
        for seed in range(5):
            order = recipe.measure.other_species(pictures, seed)
            assert sorted(order) == list(range(8))
            assert all(pictures[i].species != pictures[j].species for i, j in enumerate(order))

    def test_captions_are_checked_against_facts(self, recipe: SimpleNamespace, shipped: Any) -> None:
        species = [
            recipe.data.Species("aster", {"colour": "blue", "season": "autumn"}, (0,)),
            recipe.data.Species("broom", {"colour": "yellow", "season": "spring"}, (1,)),
        ]
        texts = ["The aster has a white heart.", "The broom."]
        held_out = [recipe.data.Picture(None, str(i), i) for i in range(2)]
        data = recipe.data.Data([], held_out, texts, species)
        measure = recipe.measure.Measure(data, shipped[1], training.encode_texts(shipped[1], texts))
        right, true = measure.check(["The aster is yellow in autumn.", "A blue and yellow broom of spring."])
        assert right == 1.0 and true == pytest.approx(3 / 5)
        right, true = measure.check(["A broom.", "An aster and a broom."])
        assert right == 0.0 and math.isnan(true)

    def test_bits_and_perplexities_of_a_known_model(self, recipe: SimpleNamespace, shipped: Any) -> None:
        """A model that gives every token the same chance: the numbers can be told beforehand."""
        _, tokenizer = shipped
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

        data = load(recipe, train_per_species=1, held_out_per_species=1)
        ids = training.encode_texts(tokenizer, data.texts)
        measure = recipe.measure.Measure(data, tokenizer, ids)
        measure.captions = lambda *_: [""] * len(data.held_out)
        even, _ = measure.row("even", Even())
        assert even.perplexity == pytest.approx(size, rel=1e-4)
        better, _ = measure.row("better", Even(size - 1.0))
        each = math.log2(size / 2)  # the right token has half of all
        tokens = sum(len(ids[text]) - 1 for _, text in measure.pairs) / len(measure.pairs)
        assert recipe.measure.bits_saved(better, even) == pytest.approx(each * tokens, rel=1e-4)
        spans = [measure.spans[text] for _, text in measure.pairs]
        length = sum(span.stop - span.start for span in spans) / len(spans)
        assert math.log(better.species_perplexity) == pytest.approx(length * math.log(2), rel=1e-3)
        assert better.species_accuracy == 0.0


@pytest.fixture(scope="module")
def run(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a few steps."""
    folder = tmp_path_factory.mktemp("runs")
    return recipe.train.main(short(folder / "one", folder / "cache"))


def test_its_runs_can_be_compared(run: Path, tmp_path: Path) -> None:
    check_compared(run, tmp_path)


class TestRun:
    def test_it_leaves_everything(self, run: Path) -> None:
        found = {path.name for path in run.iterdir()}
        assert found == {
            "adapter",
            "attention.safetensors",
            "captions.json",
            "captions.png",
            "config.resolved.yaml",
            "loss.png",
            "metrics.jsonl",
            "samples_after.txt",
            "samples_before.txt",
            "table.json",
            "table.md",
        }
        assert {p.name for p in (run / "adapter").iterdir()} >= {"README.md", "adapter_config.json"}
        with Image.open(run / "captions.png") as grid:
            assert grid.width > 800 and len(grid.convert("RGB").getcolors(1 << 24)) > 500

    def test_wrong_captions_are_marked(self, recipe: SimpleNamespace, run: Path) -> None:
        lines = (run / "samples_after.txt").read_text().splitlines()
        names = [one["species"] for one in json.loads((run / "captions.json").read_text())]
        wrong = [line for line in lines if recipe.report.caption_verdict(*line.split(": ", 1)[::-1], names)]
        assert wrong, "five steps teach nothing"
        with Image.open(run / "captions.png") as grid:
            red = [
                (count, colour) for count, colour in grid.convert("RGB").getcolors(1 << 24) if colour == (179, 38, 30)
            ]
        assert red

    def test_its_traces_are_of_its_captions(self, run: Path) -> None:
        traces, captions = inspect.load_traces(run), json.loads((run / "captions.json").read_text())
        assert 0 < len(traces) <= 6 and {one.title for one in traces} <= {one["caption"] for one in captions}
        for trace in traces:
            assert trace.grid is not None and trace.picture is not None and trace.rollout is not None
            assert "".join(trace.words[:-1]).strip() == trace.title

    def test_the_table_has_its_controls(self, run: Path) -> None:
        table = json.loads((run / "table.json").read_text())
        rows = {row["name"]: row for row in table["rows"]}
        assert list(rows) == [
            "frozen LM",
            "LoRA, text only",
            "adapter, right picture",
            "adapter, shuffled pictures",
            "adapter, no picture",
        ]
        frozen, lora, right = (rows[name] for name in list(rows)[:3])
        assert table["bound_bits"] == pytest.approx(math.log2(table["species"]))
        assert abs(lora["parameters"] - right["parameters"]) <= 0.05 * right["parameters"]
        assert lora["bits_saved"] == 0 and math.isfinite(right["bits_saved"])
        silent = rows["adapter, no picture"]
        assert silent["perplexity"] == frozen["perplexity"] and silent["bits_saved"] == frozen["bits_saved"]
        assert right["perplexity"] != rows["adapter, shuffled pictures"]["perplexity"]
        text = (run / "table.md").read_text()
        assert all(name in text for name in rows) and f"= {table['bound_bits']:.2f} bits" in text

    def test_both_trained_on_the_same_steps(self, run: Path) -> None:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [(line["model"], line["step"]) for line in lines if "model" in line] == [("adapter", 5), ("lora", 5)]

    def test_run_again_it_is_left_as_it_is(
        self, recipe: SimpleNamespace, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert recipe.train.main(short(run, run.parent / "cache")) == run
        said = capsys.readouterr().out
        assert said.count("\n") == 1 and f"{run} holds the finished run" in said
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    def test_samples_before_and_after(self, run: Path) -> None:
        before, after = ((run / f"samples_{when}.txt").read_text().splitlines() for when in ("before", "after"))
        assert len(before) == len(after) == 8
        assert len({line.split(": ")[1] for line in before}) == 1, "the frozen model cannot see"

    def test_its_adapter_captions(self, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pictures = sorted((ROOT / "assets" / "flora").glob("*.png"))[:2]
        with pytest.raises(SystemExit) as end:
            main(["caption", *map(str, pictures), "--adapter", str(run / "adapter")])
        out, err = capsys.readouterr()
        assert not end.value.code, err
        assert "Loading weights" not in err and logging.is_progress_bar_enabled()
        assert [line.split(": ")[0] for line in out.splitlines()] == [str(picture) for picture in pictures]

    def test_an_adapter_away_from_its_run_is_the_same(self, run: Path, tmp_path: Path) -> None:
        picture = sorted((ROOT / "assets" / "flora").glob("*.png"))[0]
        here = mmattn.pipeline(shutil.copytree(run / "adapter", tmp_path / "adapter"))
        assert here(picture) == mmattn.pipeline(run / "adapter")(picture)
        card = (run / "adapter" / "README.md").read_text(encoding="utf-8")
        assert (run / "table.md").read_text(encoding="utf-8").strip() in card

    def test_memories_are_kept(
        self, recipe: SimpleNamespace, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def blind(*_: Any, **__: Any) -> None:
            raise AssertionError("the encoder looked again")

        monkeypatch.setattr(mmattn.OpenCLIPEncoder, "forward", blind)
        settings = recipe.settings.Config(**short(tmp_path, run.parent / "cache"))
        data = recipe.data.load_data(settings.data, settings.seed)
        encoder = pipelines.load_image_encoder(resolve_asset(settings.encoder), "cpu")
        train, held_out = recipe.train.encode_pictures(encoder, data, settings)
        assert (train.batch, held_out.batch) == (len(data.train), len(data.held_out))
        with pytest.raises(AssertionError, match="looked again"):
            recipe.train.encode_pictures(encoder, recipe.data.load_data(settings.data, 1), settings)

    def test_a_stop_keeps_the_adapter(
        self, recipe: SimpleNamespace, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken, loss = [], training.sum_nats

        def until_three(*given: Any) -> torch.Tensor:
            taken.append(1)
            if len(taken) == 4:
                raise KeyboardInterrupt
            return loss(*given)

        monkeypatch.setattr(recipe.train.training, "sum_nats", until_three)
        out = recipe.train.main(short(tmp_path / "stopped", run.parent / "cache"))
        assert not (out / "table.md").exists()
        lm, _ = pipelines.load_language_model("assets/lm", "cpu")
        assert mmattn.load(lm, out / "adapter").trainable_parameters()[0] > 0


def test_unknown_settings_are_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", str(ROOT / "recipes/vision/config.yaml"), "optim.stepz=3", f"out={tmp_path / 'run'}"])
    assert end.value.code == 2 and "optim.stepz" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tables_of_several_seeds(recipe: SimpleNamespace) -> None:
    def table(bits: float, species: float | None) -> dict[str, Any]:
        row = {"name": "seen", "perplexity": 2.0, "bits_saved": bits, "species_perplexity": 1.1}
        row |= {"species_accuracy": species, "attribute_accuracy": None, "parameters": 1234, "seconds": 60.0}
        return {"rows": [row], "species": 2, "bound_bits": 1.0, "pairs": 3, "held_out_pictures": 3}

    text = recipe.train.table([table(3.0, 0.9), table(3.4, 0.94)])
    cells = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
    assert cells == ["seen", "2.00 ± 0.00", "+3.20 ± 0.20", "1.10 ± 0.00", "92 ± 2 %", "–", "1,234", "60 ± 0"]


@pytest.mark.slow
def test_photographs(recipe: SimpleNamespace, shared_data: Path, tmp_path: Path) -> None:
    """Three species, 120 steps: already the caption names what is on most photographs it never saw."""
    for name in ("sunflower", "bluebell", "windflower"):
        (tmp_path / "photographs").mkdir(exist_ok=True)
        (tmp_path / "photographs" / name).symlink_to(shared_data / "flowers12" / name)
    weights = shared_data / "mobilenet_v2_imagenet.safetensors"
    config: dict[str, Any] = {
        "out": str(tmp_path / "run"),
        "encoder": f"torchvision:mobilenet_v2:{weights}",
        "progress": False,
        "data": {"kind": "folder", "path": str(tmp_path / "photographs"), "flip": False, "cache": str(tmp_path)},
        "optim": {"max_steps": 120, "batch_size": 16, "learning_rate": 4e-3},
        "controls": False,
    }
    config["data"]["descriptions"] = str(find_recipe("vision").folder / "flowers12_descriptions.json")
    run: Path = recipe.train.main(config)
    rows = {row["name"]: row for row in json.loads((run / "table.json").read_text())["rows"]}
    right, shuffled = rows["adapter, right picture"], rows["adapter, shuffled pictures"]
    assert right["species_accuracy"] >= 0.8 and shuffled["species_accuracy"] <= 0.2
    assert right["perplexity"] < shuffled["perplexity"]
