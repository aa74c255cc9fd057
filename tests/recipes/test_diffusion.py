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

from mmattn.cli import main
from mmattn.errors import ImageError, TextError

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": {"channels": [8, 16, 16]},
    "sample": {"steps": 2, "each": 1, "examples": 7, "every": 2},
    "progress": False,
}


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    return load_files("diffusion", "digits", "measure", "models", "style", "train_style", "train", "drawing")


@pytest.fixture(scope="module")
def data(recipe: SimpleNamespace) -> Any:
    """Training digits, held-out digits, and the scale of their measures."""
    return recipe.digits.load_digits()


@pytest.fixture(scope="module")
def base(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage A that took three steps."""
    out = tmp_path_factory.mktemp("text")
    recipe.train.main({**SMALL, "out": str(out), "optim": {"steps": 3, "batch": 5}})
    return out


def strokes(**change: float) -> torch.Tensor:
    """A picture (1, 1, 32, 32) of one slanting stroke."""
    settings = {"thick": 2.0, "slant": 0.0} | change
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    middle = 16 + settings["slant"] * (16 - y)
    return ((x - middle).abs() < settings["thick"]).float()[None, None]


def test_measures_are_what_their_words_say(recipe: SimpleNamespace) -> None:
    plain = recipe.digits.measure(strokes())[0]
    assert recipe.digits.measure(strokes(thick=4.0))[0, 0] > 1.5 * plain[0]
    assert abs(plain[1]) < 1e-3 and recipe.digits.measure(strokes(slant=0.4))[0, 1] == pytest.approx(0.4, abs=0.05)
    wide = torch.cat([strokes()[..., 8:], strokes()[..., :8]], -1) + strokes()
    assert recipe.digits.measure(wide.clamp(max=1))[0, 2] > 1.5 * plain[2]


def test_digits_are_split_and_scaled_on_the_training_part(recipe: SimpleNamespace, data: Any) -> None:
    known, held_out, _ = data
    assert len(known) + len(held_out) == 1797 and len(held_out) == 359
    assert set(held_out.digits.tolist()) == set(range(10))
    for digit in range(10):
        own = known.measures[known.digits == digit]
        assert torch.allclose(own.mean(0), torch.zeros(3), atol=1e-4) and torch.allclose(own.std(0), torch.ones(3))
    assert known.pictures.min() == -1 and known.pictures.max() == 1


def test_sentences_say_what_is_so_in_words_the_model_has(recipe: SimpleNamespace, data: Any) -> None:
    random, known = Random(0), set(recipe.digits.vocabulary())
    for measures, digit in zip(data[0].measures[:200], data[0].digits[:200].tolist(), strict=True):
        said = recipe.digits.asked_for(measures, random)
        for name, sign in said.items():
            assert sign * measures[recipe.digits.MEASURES.index(name)] > recipe.digits.THRESHOLD
        assert set(recipe.digits.describe(digit, said, random).split()) <= known


def test_judges_know_real_digits_they_never_saw(recipe: SimpleNamespace, data: Any) -> None:
    known, held_out, scale = data
    judge = recipe.measure.Judge(known, scale)
    assert (judge.read(held_out.pictures) == held_out.digits).float().mean() >= 0.98
    assert min(recipe.measure.similarity(held_out.measures, judge.style(held_out.pictures))) > 0.85
    asked = recipe.measure.Asked([""] * len(held_out), held_out.digits, held_out.measures.sign().long())
    found = judge.obedience(asked, held_out.pictures)
    assert found["digit"] >= 0.98 and found["attribute"] == 1
    asked.signs.neg_()
    assert judge.obedience(asked, held_out.pictures)["attribute"] == 0
    assert judge.frechet(held_out.pictures) < 2 < judge.frechet(held_out.pictures[held_out.digits < 5])


def test_an_example_is_another_digit_of_like_style(recipe: SimpleNamespace, data: Any) -> None:
    known = data[0]
    near = recipe.train_style.examples(known)
    assert (known.digits[near] != known.digits[:, None]).all()
    apart = (known.measures[near] - known.measures[:, None]).norm(dim=-1).mean()
    assert apart < 0.4 * torch.pdist(known.measures).mean()


def test_both_ways_of_stage_b_have_equally_many_parameters(recipe: SimpleNamespace) -> None:
    for wanted in (20_011, 57_472):
        module = recipe.train_style.Concatenated(wanted)
        assert abs(sum(weight.numel() for weight in module.parameters()) - wanted) < 130


def test_stage_a_leaves_models_that_read_sentences(recipe: SimpleNamespace, base: Path) -> None:
    names = {"config.resolved.yaml", "metrics.jsonl", "loss.png", "table.json", "table.md", "samples_00002.png"}
    assert names <= {path.name for path in base.iterdir()}
    rows = json.loads((base / "table.json").read_text())["rows"]
    assert [row["w"] for row in rows] == [0, 0.1, 0.3, 1, 2, 4]
    _, words = recipe.models.load_models(base)
    text, mask = words(["a seven", "a thick seven slanted left"])
    assert text.shape[:2] == mask.shape and mask.sum(1).tolist() == [4, 7]
    with pytest.raises(TextError, match="'a purple seven' has words this model never saw"):
        words(["a seven", "a purple seven"])


def test_stage_b_and_drawing(
    recipe: SimpleNamespace, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    out = tmp_path / "style"
    before = {path.name: path.read_bytes() for path in (base / "unet").iterdir()}
    optim = {"steps": 3, "batch": 5}
    recipe.train.main(
        {**SMALL, "stage": "style", "base": str(base), "out": str(out), "optim": optim, "style": {"encoder_steps": 2}}
    )
    assert {path.name: path.read_bytes() for path in (base / "unet").iterdir()} == before
    rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert len(rows) == 11
    # Strength 0 is exactly no example.
    assert {**rows["decoupled, strength 0.0"], "name": ""} == {**rows["no example"], "name": ""}

    assets = tmp_path / "assets" / "diffusion"
    assets.mkdir(parents=True)
    for name in ("unet", "text"):
        (assets / name).symlink_to(base / name)
    for name in ("adapter", "style.safetensors"):
        (assets / name).symlink_to(out / name)
    monkeypatch.setattr(recipe.drawing, "assets_folder", lambda: assets.parent)
    example = tmp_path / "like.png"
    Image.fromarray((255 - 255 * strokes(slant=0.3)[0, 0]).byte().numpy()).save(example)
    pictures = {}
    for name, more in {
        "plain": [],
        "like": ["--like", str(example)],
        "nothing": ["--like", str(example), "--strength", "0"],
    }.items():
        picture = tmp_path / f"{name}.png"
        with pytest.raises(SystemExit) as ended:
            main(["draw", "a thick seven", "--steps", "2", "--seed", "3", "-o", str(picture), *more])
        assert ended.value.code == 0
        pictures[name] = Image.open(picture).tobytes()
        assert str(picture) in capsys.readouterr().out
    assert pictures["nothing"] == pictures["plain"]
    assert len(pictures["plain"]) == 256**2


def test_examples_are_brought_to_the_frame_of_the_digits(recipe: SimpleNamespace, data: Any) -> None:
    alike = []
    for digit in data[1].pictures[:20]:
        canvas = torch.ones(100, 140)
        canvas[20:68, 60:108] -= torch.nn.functional.interpolate((digit[None] + 1) / 2, size=(48, 48))[0, 0]
        found = recipe.drawing.example(canvas, 16)
        assert found.shape == (1, 1, 16, 16)
        assert torch.allclose(recipe.drawing.example(1 - canvas, 16), found, atol=0.02), "light on dark is the same"
        alike.append(torch.corrcoef(torch.stack([found.flatten(), digit.flatten()]))[0, 1])
    assert torch.stack(alike).mean() > 0.9
    with pytest.raises(ImageError, match="shows nothing"):
        recipe.drawing.example(torch.full((9, 9), 0.5), 16)


def test_bad_orders_to_draw(tmp_path: Path, capsys: Any) -> None:
    for arguments, words in {
        ("draw", "a seven", "--steps", "0"): "steps must",
        ("draw", "a seven", "--like", str(tmp_path / "none.png")): "there is no such file",
        ("draw", "a seven", "--strength", "nan"): "strength must",
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
