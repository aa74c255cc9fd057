"""The diffusion recipe: what is measured of a digit, what is said of it, and both stages from beginning to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

import mmattn
from mmattn import inspect
from mmattn.cli.app import main
from mmattn.encoders.style import InkProcessor
from mmattn.errors import ConfigError, ImageError, TextError
from mmattn.pipelines import load_diffusion_host
from tests import tiny_pipeline
from tests.recipes.comparing import check_compared

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": {"channels": [8, 16, 16]},
    "sample": {"steps": 2, "each": 1, "examples": 7, "every": 2},
    "progress": False,
}


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    names = ("attributes", "data", "settings", "measure", "models", "style", "train_style", "train")
    return load_files("diffusion", *names)


@pytest.fixture(scope="module")
def data(recipe: SimpleNamespace) -> Any:
    """Training digits, held-out digits, and what can be said of them."""
    return recipe.data.load_data()


@pytest.fixture(scope="module")
def base(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage A that took three steps."""
    out = tmp_path_factory.mktemp("text")
    recipe.train.main({**SMALL, "out": str(out), "optim": {"max_steps": 3, "batch_size": 5}})
    return out


def strokes(**change: float) -> torch.Tensor:
    """A picture (1, 1, 32, 32) of one slanting stroke."""
    settings = {"thick": 2.0, "slant": 0.0} | change
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    middle = 16 + settings["slant"] * (16 - y)
    return ((x - middle).abs() < settings["thick"]).float()[None, None]


def test_measures_are_what_their_words_say(recipe: SimpleNamespace) -> None:
    def measured(ink: torch.Tensor) -> torch.Tensor:
        return recipe.attributes.INK.measure(2 * ink - 1)[0]

    plain = measured(strokes())
    assert measured(strokes(thick=4.0))[0] > 1.5 * plain[0]
    assert abs(plain[1]) < 1e-3 and measured(strokes(slant=0.4))[1] == pytest.approx(0.4, abs=0.05)
    wide = torch.cat([strokes()[..., 8:], strokes()[..., :8]], -1) + strokes()
    assert measured(wide.clamp(max=1))[2] > 1.5 * plain[2]


def test_measures_of_light_are_what_their_words_say(recipe: SimpleNamespace) -> None:
    generator = torch.Generator().manual_seed(0)
    grey = (torch.rand(1, 1, 13, 13, generator=generator) - 0.5).expand(1, 3, 13, 13)
    red = grey + torch.tensor([0.4, -0.2, -0.2])[None, :, None, None]
    dull, bright, vivid, smooth = (recipe.attributes.LIGHT.measure(one)[0] for one in (grey, grey + 0.3, red, grey / 2))
    assert torch.allclose(bright - dull, torch.tensor([0.3, 0.0, 0.0]), atol=1e-5)
    assert vivid[1] > dull[1] + 0.2 and vivid[0] == pytest.approx(float(dull[0]), abs=1e-5)
    assert smooth[2] == pytest.approx(float(dull[2]) / 2, abs=1e-5)


def test_digits_are_split_and_scaled_on_the_training_part(recipe: SimpleNamespace, data: Any) -> None:
    known, held_out, _ = data
    assert len(known) + len(held_out) == 1797 and len(held_out) == 359
    assert set(held_out.classes.tolist()) == set(range(10))
    for digit in range(10):
        own = known.measures[known.classes == digit]
        assert torch.allclose(own.mean(0), torch.zeros(3), atol=1e-4) and torch.allclose(own.std(0), torch.ones(3))
    assert known.pictures.min() == -1 and known.pictures.max() == 1


def test_sentences_say_what_is_so_in_words_the_model_has(recipe: SimpleNamespace, data: Any) -> None:
    random, (known, _, subject) = Random(0), data
    words = set(recipe.models.make_tokenizer(subject.vocabulary()).get_vocab())
    names, sentences = subject.attributes.names, []
    for measures, digit in zip(known.measures[:200], known.classes[:200].tolist(), strict=True):
        said = recipe.attributes.asked_for(names, measures, random)
        for name, sign in said.items():
            assert sign * measures[names.index(name)] > recipe.attributes.THRESHOLD
        sentences.append(subject.describe(digit, said, random))
        assert set(sentences[-1].split()) <= words
        assert not {recipe.data.NUMBERS[digit], str(digit)}.isdisjoint(sentences[-1].split())
    assert len(set(sentences)) > 100 and subject.describe(7, {"stroke": 1}, Random(3)) == "thick 7"


def test_judges_know_real_digits_they_never_saw(recipe: SimpleNamespace, data: Any) -> None:
    known, held_out, subject = data
    judge = recipe.measure.Judge(known, subject)
    assert (judge.read(held_out.pictures) == held_out.classes).float().mean() >= 0.98
    assert min(recipe.measure.similarity(held_out.measures, judge.style(held_out.pictures))) > 0.85
    asked = recipe.measure.Asked([""] * len(held_out), held_out.classes, held_out.measures.sign().long())
    found = judge.obedience(asked, held_out.pictures)
    assert found["read"] >= 0.98 and found["attribute"] == 1
    asked.signs.neg_()
    assert judge.obedience(asked, held_out.pictures)["attribute"] == 0
    assert judge.frechet(held_out.pictures) < 2 < judge.frechet(held_out.pictures[held_out.classes < 5])


def test_an_example_is_of_another_class_and_like_style(recipe: SimpleNamespace, data: Any) -> None:
    known = data[0]
    near = recipe.train_style.nearest(known, list(range(len(known))))
    assert (known.classes[near] != known.classes[:, None]).all()
    apart = (known.measures[near] - known.measures[:, None]).norm(dim=-1).mean()
    assert apart < 0.4 * torch.pdist(known.measures).mean()


def test_both_ways_of_stage_b_have_equally_many_parameters(recipe: SimpleNamespace) -> None:
    for wanted, text_dim in ((20_011, 64), (57_472, 64), (90_001, 34)):
        module = recipe.train_style.Concatenated(wanted, text_dim)
        assert abs(sum(weight.numel() for weight in module.parameters()) - wanted) < 130


def test_stage_a_leaves_models_that_read_sentences(recipe: SimpleNamespace, base: Path) -> None:
    names = {
        "config.resolved.yaml",
        "metrics.jsonl",
        "loss.png",
        "table.json",
        "table.md",
        "samples_00002.png",
        "words.png",
    }
    assert names <= {path.name for path in base.iterdir()}
    for trace in inspect.load_traces(base):
        assert (trace.words[0], trace.words[-1], trace.queries) == ("[begin]", "[end]", "sources")
        assert torch.allclose(trace.weights.sum(2), torch.ones(()), atol=1e-4), "attention sums to 1"
    rows = json.loads((base / "table.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["1", "1.1", "1.3", "2", "3", "5"]
    words = load_diffusion_host(base).prompts
    text, mask = words(["a seven", "a thick seven slanted left"])
    assert text.shape[:2] == mask.shape and mask.sum(1).tolist() == [4, 7]
    text, mask = words(["a seven", None])
    assert mask.sum(1).tolist() == [4, 0], "no sentence is nothing at all"
    with pytest.raises(TextError, match="'a purple seven' has words this model never saw"):
        words(["a seven", "a purple seven"])


def test_stage_b_and_drawing(recipe: SimpleNamespace, base: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "style"
    before = {path.name: path.read_bytes() for path in (base / "unet").iterdir()}
    optim = {"max_steps": 3, "batch_size": 5}
    recipe.train.main(
        {**SMALL, "stage": "style", "unet": str(base), "out": str(out), "optim": optim, "style": {"encoder_steps": 2}}
    )
    assert {path.name: path.read_bytes() for path in (base / "unet").iterdir()} == before
    rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert len(rows) == 11
    traces = inspect.load_traces(out)
    assert len(traces) == 8
    for words, patches in zip(traces[::2], traces[1::2], strict=True):
        assert (words.word_grid, patches.word_grid, len(patches.words)) == (None, (4, 4), 16)
        assert patches.title.startswith(words.title) and patches.word_picture != patches.picture == words.picture
        for trace in (words, patches):
            assert torch.allclose(trace.weights.sum(2), torch.ones(()), atol=1e-4), "attention sums to 1"
    # A scale of 0 is exactly no example.
    assert {**rows["decoupled, adapter_scale 0.0"], "name": ""} == {**rows["no example"], "name": ""}

    example = tmp_path / "like.png"
    Image.fromarray((255 - 255 * strokes(slant=0.3)[0, 0]).byte().numpy()).save(example)
    pictures = {}
    capsys.readouterr()
    for name, more in {
        "plain": [],
        "like": ["--like", str(example)],
        "nothing": ["--like", str(example), "--adapter-scale", "0"],
    }.items():
        picture = tmp_path / f"{name}.png"
        with pytest.raises(SystemExit) as ended:
            main(
                ["draw", "a thick seven", "--adapter", str(out / "adapter"), "--num-inference-steps", "2"]
                + ["--seed", "3", "-o", str(picture), *more]
            )
        assert ended.value.code == 0
        pictures[name] = Image.open(picture).tobytes()
        said, err = capsys.readouterr()
        assert str(picture) in said and "Loading weights" not in err
    assert pictures["nothing"] == pictures["plain"]
    assert len(pictures["plain"]) == 256**2


def test_its_runs_can_be_compared(base: Path, tmp_path: Path) -> None:
    check_compared(base, tmp_path)


def test_maps_of_words_are_the_attention_of_the_host(recipe: SimpleNamespace, base: Path) -> None:
    host = load_diffusion_host(base)
    model = mmattn.attach(host.unet).use_core()
    words, times, maps, drawn = recipe.train.word_attention(model, host, "a thick seven", 3, seed=5)
    assert words == ["[begin]", "a", "thick", "seven", "[end]"] and len(times) == 3
    assert maps.shape == (3, 5, 16, 16)
    assert torch.allclose(maps.sum(1), torch.ones(3, 16, 16), atol=1e-5), "each place attends to the words and no more"
    assert torch.equal(drawn[None], recipe.train.draw(model, host, ["a thick seven"], 3, 1.0, seed=5))


@pytest.mark.slow
def test_a_folder_in_colour_at_another_size(recipe: SimpleNamespace, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, colour in {"red_rose": (0.8, 0.1, 0.2), "blue_flag": (0.1, 0.2, 0.8), "lawn": (0.2, 0.7, 0.1)}.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(7):
            pixels = torch.rand(37, 41, 1, generator=generator) * torch.tensor(colour) * (0.5 + number / 14)
            Image.fromarray((255 * pixels).byte().numpy()).save(tmp_path / "pictures" / name / f"{number}.png")
    settings = {
        **SMALL,
        "data": {"kind": "folder", "path": str(tmp_path / "pictures"), "attributes": "light", "most": 18},
        "model": {"size": 32, "channels": [8, 8]},
        "optim": {"max_steps": 3, "batch_size": 5},
        "style": {"encoder_steps": 2},
    }
    known, held_out, subject = recipe.data.load_data(recipe.settings.DataSettings(**settings["data"]), 32)
    assert known.pictures.shape[1:] == (3, 32, 32) and len(known) == 15 and len(held_out) == 3
    assert [names[0] for names in subject.classes] == ["blue flag", "lawn", "red rose"]
    recipe.train.main({**settings, "out": str(tmp_path / "a")})
    recipe.train.main({**settings, "stage": "style", "unet": str(tmp_path / "a"), "out": str(tmp_path / "b")})
    rows = json.loads((tmp_path / "b" / "table.json").read_text())["rows"]
    assert set(rows[0]) == {"name", "brightness", "colour", "detail", "likeness", "read"} and len(rows) == 11
    assert (tmp_path / "b" / "examples.png").stat().st_size > 1000


def test_a_dataset_of_torchvision(recipe: SimpleNamespace, tmp_path: Path) -> None:
    place = tmp_path / "MNIST" / "raw"
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 60), ("t10k", 20)):
        ink = torch.zeros(count, 28, 28, dtype=torch.uint8)
        ink[:, 5:23, 9:19] = torch.randint(60, 255, (count, 18, 10), generator=generator, dtype=torch.uint8)
        labels = torch.arange(count, dtype=torch.uint8) % 10
        for kind, numbers in (("images-idx3", ink), ("labels-idx1", labels)):
            sizes = torch.tensor([0x800 + numbers.dim(), *numbers.shape], dtype=torch.int32).numpy().astype(">i4")
            (place / f"{part}-{kind}-ubyte").write_bytes(sizes.tobytes() + numbers.numpy().tobytes())
    settings = recipe.settings.DataSettings(kind="torchvision", name="MNIST", path=str(tmp_path), most=50)
    known, held_out, subject = recipe.data.load_data(settings, 16)
    assert known.pictures.shape == (50, 1, 16, 16) and len(held_out) == 12
    assert subject.classes[7] == ("seven",) and subject.attributes.names == ("stroke", "slant", "width")
    assert known.pictures.min() == -1 and known.pictures[..., 5:11, 7:9].mean() > 0
    assert recipe.data.load_data(settings, 16, 3)[0].pictures.shape == (50, 3, 16, 16)


@pytest.mark.slow
def test_a_published_stable_diffusion_stays_frozen(recipe: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    tiny_pipeline.make_pipeline(tiny_pipeline.make_tokenizer(tmp_path / "words")).save_pretrained(tmp_path / "sd")
    out = tmp_path / "run"
    recipe.train.main(
        {
            **SMALL,
            "stage": "style",
            "unet": str(tmp_path / "sd"),
            "out": str(out),
            "optim": {"max_steps": 2, "batch_size": 3},
            "style": {"encoder_steps": 2},
            "sample": {"steps": 2, "examples": 5},
        }
    )
    rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert {**rows["decoupled, adapter_scale 0.0"], "name": ""} == {**rows["no example"], "name": ""}
    host = load_diffusion_host(tmp_path / "sd")
    assert (host.size, host.channels) == (32, 3)
    model = mmattn.load(host.unet, out / "adapter").use_core()
    plain = recipe.train.draw(model, host, ["a seven"], 2, 2.0, seed=3)
    memory = mmattn.Memory(torch.randn(1, 16, 64))
    assert torch.equal(
        plain, recipe.train.draw(model, host, ["a seven"], 2, 2.0, seed=3, memory=memory, adapter_scale=0)
    )
    assert not torch.equal(plain, recipe.train.draw(model, host, ["a seven"], 2, 2.0, seed=3, memory=memory))


def test_bad_data_and_hosts(recipe: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "one" / "rose").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    for number in range(3):
        Image.new("RGB", (9, 9), (number, 0, 0)).save(tmp_path / "one" / "rose" / f"{number}.png")
    for settings, words in {
        (("kind", "folder"),): "needs data.path=FOLDER",
        (("kind", "folder"), ("path", str(tmp_path / "empty"))): "one folder of pictures per class",
        (("kind", "folder"), ("path", str(tmp_path / "one"))): "1 classes",
        (("kind", "torchvision"), ("path", str(tmp_path)), ("name", "MNISTT")): "has no 'MNISTT'",
        (("kind", "torchvision"), ("path", str(tmp_path)), ("name", "MNIST")): "data.download=true fetches it",
        (("attributes", "light"),): "must be ink for the digits",
    }.items():
        with pytest.raises(ConfigError, match=words):
            recipe.data.load_data(recipe.settings.DataSettings(**dict(settings)))
    with pytest.raises(ConfigError, match="neither a run of the recipe diffusion nor a Stable Diffusion"):
        load_diffusion_host(tmp_path / "empty")


def test_the_table_of_several_seeds(recipe: SimpleNamespace) -> None:
    contents = []
    for seed in range(3):
        row = {"name": "no example", "stroke": 0.1, "likeness": 0.2 * seed, "read": 0.9}
        training = {"decoupled": {"steps": 5, "seconds": 10 + seed}}
        contents.append({"stage": "style", "rows": [row], "judge": "It judges.", "training": training})
    text = recipe.train.table(contents)
    assert "| no example | +0.10 ± 0.00 | +0.20 ± 0.20 | 90.0 ± 0.0 % |" in " ".join(text.split())
    assert "decoupled: 5 steps in 11 ± 1 s." in text and "It judges." in text


def test_examples_are_brought_to_the_frame_of_the_digits(recipe: SimpleNamespace, data: Any) -> None:
    alike = []
    for digit in data[1].pictures[:20]:
        canvas = torch.ones(100, 140)
        canvas[20:68, 60:108] -= torch.nn.functional.interpolate((digit[None] + 1) / 2, size=(48, 48))[0, 0]
        found = InkProcessor(16)([canvas])
        assert found.shape == (1, 1, 16, 16)
        assert torch.allclose(InkProcessor(16)([1 - canvas]), found, atol=0.02), "light on dark is the same"
        alike.append(torch.corrcoef(torch.stack([found.flatten(), digit.flatten()]))[0, 1])
    assert torch.stack(alike).mean() > 0.9
    with pytest.raises(ImageError, match="shows nothing"):
        InkProcessor(16)([torch.full((9, 9), 0.5)])


def test_bad_orders_to_draw(tmp_path: Path, capsys: Any) -> None:
    for arguments, words in {
        ("draw", "a seven", "--num-inference-steps", "0"): "--num-inference-steps must",
        ("draw", "a seven", "--like", str(tmp_path / "none.png")): "there is no such file",
        ("draw", "a seven", "--adapter-scale", "nan"): "--adapter-scale must",
        ("draw", "a seven", "--guidance-scale", "inf"): "--guidance-scale must",
    }.items():
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "-o", str(tmp_path / "out.png")])
        assert ended.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out.png").exists()


def test_unknown_settings_are_errors(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(ROOT / "recipes/diffusion/config.yaml"), "optim.stepz=3", f"out={tmp_path / 'run'}"])
    assert ended.value.code == 2 and "optim.stepz" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
