"""The diffusion recipe with a transformer in place of the UNet: the same two stages, from beginning to end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image
from pydantic import ValidationError

import mmattn
from mmattn import inspect, training
from mmattn.errors import ConfigError, TextError
from mmattn.pipelines import load_diffusion_host
from mmattn.recipes import read_settings

ROOT = Path(__file__).parents[2]
SMALL = {
    "model": {"kind": "transformer", "layers": 3, "heads": 2, "head_dim": 10},
    "sample": {"steps": 2, "each": 1, "examples": 7, "every": 2},
    "optim": {"max_steps": 3, "batch_size": 5},
    "style": {"encoder_steps": 2},
    "progress": False,
}


@pytest.fixture(scope="module")
def recipe(load_files: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    """The files of the recipe."""
    return load_files("diffusion", "data", "settings", "measure", "models", "train_style", "train")


@pytest.fixture(scope="module")
def base(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage A that took three steps."""
    out = tmp_path_factory.mktemp("text")
    recipe.train.main({**SMALL, "out": str(out)})
    return out


def test_the_published_settings_make_a_transformer_of_fewer_than_three_million_parameters(
    recipe: SimpleNamespace,
) -> None:
    found = read_settings(ROOT / "recipes/diffusion/config_transformer.yaml", [])
    settings = recipe.settings.Config(**{key: value for key, value in found.items() if key != "recipe"})
    made = recipe.models.make_denoiser(settings.model)
    assert isinstance(made, SD3Transformer2DModel) and 2_000_000 < made.num_parameters() < 3_000_000
    noisy, text = torch.randn(2, 1, 16, 16), torch.randn(2, 7, 64)
    first = made(noisy, text, torch.randn(2, 64), torch.tensor([3, 900])).sample
    assert torch.equal(first, torch.zeros(2, 1, 16, 16)), "the modulations and the last layer start at 0"


def test_a_size_that_patches_do_not_fill_is_refused(recipe: SimpleNamespace) -> None:
    for given, words in {
        (("size", 18),): "18 pixels a side are no whole number of patches of 4",
        (("heads", 3), ("head_dim", 6)): "3 heads of 6 are 18 wide: a multiple of 4 is needed",
    }.items():
        with pytest.raises(ValidationError, match=words):
            recipe.settings.ModelSettings(kind="transformer", **dict(given))
        recipe.settings.ModelSettings(kind="unet", **dict(given))


def test_stage_a_leaves_a_transformer_that_reads_sentences(recipe: SimpleNamespace, base: Path) -> None:
    names = {path.name for path in base.iterdir()}
    assert {"transformer", "text", "table.md", "samples_00002.png", "loss.png"} <= names and "unet" not in names
    assert "transformer and text encoder: 3 steps" in (base / "table.md").read_text()
    host = load_diffusion_host(base)
    assert isinstance(host.unet, SD3Transformer2DModel) and (host.size, host.channels) == (16, 1)
    states, mask = host.prompts(["a seven", "a thick seven slanted left", None])
    assert states.shape == (3, 16, 64) and mask.all(), "padding is seen, as in training"
    pooled = host.inputs(["a seven", "a thick seven slanted left", None])["pooled_projections"]
    assert torch.equal(pooled, states[torch.arange(3), [3, 6, 1]]), "the state of [end]"
    assert torch.equal(states[2:], host.prompts.null())
    with pytest.raises(TextError, match="'a purple seven' has words this model never saw"):
        host.prompts(["a seven", "a purple seven"])


def test_the_text_and_its_pooled_state_reach_the_picture_and_are_guided(recipe: SimpleNamespace, base: Path) -> None:
    host = load_diffusion_host(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in host.unet.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model = recipe.models.attach_bare(host)
    assert not model.through_core

    def draw(sentence: str, guidance_scale: float = 1.0) -> torch.Tensor:
        made: torch.Tensor = recipe.train.draw(model, host, [sentence], 2, guidance_scale, seed=3)
        return made

    seven, inputs = draw("a seven"), host.inputs
    assert seven.isfinite().all() and seven.abs().max() <= 1
    assert not torch.allclose(seven, draw("a two")) and not torch.allclose(seven, draw("a seven", 3.0))
    host.inputs = lambda prompts: inputs([None] * len(prompts))  # type: ignore[method-assign]
    assert not torch.allclose(seven, draw("a seven")), "the state at the end of the sentence is read beside the others"


def test_an_example_that_is_left_out_is_no_example_in_either_way(recipe: SimpleNamespace, base: Path) -> None:
    host = load_diffusion_host(base)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in host.unet.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        concatenated = recipe.train_style.Concatenated(20_011, 64)
        noisy, memory = torch.randn(2, 1, 16, 16), mmattn.Memory(torch.randn(2, 16, 64))
    model, times, said = mmattn.attach(host.unet).use_core(), torch.tensor([3, 900]), ["a seven", None]
    (text, mask), inputs = host.prompts(said), host.inputs(said)

    def predict(sees: bool) -> torch.Tensor:
        seen = mmattn.Memory(memory.tokens, torch.full((2, 16), sees))
        found: torch.Tensor = recipe.models.predict(model, noisy, times, *concatenated(text, mask, seen), inputs)
        return found

    plain = recipe.models.predict(model, noisy, times, text, mask, inputs)
    assert plain.isfinite().all() and torch.allclose(plain, predict(False), atol=1e-5)
    assert not torch.allclose(plain, predict(True), atol=1e-2)


def test_stage_b_and_drawing(recipe: SimpleNamespace, base: Path, tmp_path: Path) -> None:
    out = tmp_path / "style"
    before = {path.name: path.read_bytes() for path in (base / "transformer").iterdir()}
    recipe.train.main({**SMALL, "stage": "style", "unet": str(base), "out": str(out)})
    assert {path.name: path.read_bytes() for path in (base / "transformer").iterdir()} == before
    rows = {row["name"]: row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert len(rows) == 11 and {"concatenated with the text", "concatenated, shuffled examples"} <= set(rows)
    # A scale of 0 is exactly no example.
    assert {**rows["decoupled, adapter_scale 0.0"], "name": ""} == {**rows["no example"], "name": ""}
    traces = inspect.load_traces(out)
    assert [trace.word_grid for trace in traces] == [(4, 4)] * 4, "of each example the attention to its patches"
    assert all(torch.allclose(trace.weights.sum(2), torch.ones(()), atol=1e-4) for trace in traces)

    pipe: Any = mmattn.pipeline(out / "adapter")
    example = Image.new("L", (31, 31), 255)
    example.paste(0, (11, 3, 17, 29))

    def draw(**given: Any) -> bytes:
        generator = torch.Generator().manual_seed(3)
        drawn: Image.Image = pipe("a thick seven", num_inference_steps=2, generator=generator, **given)
        return drawn.tobytes()

    assert draw() == draw(images=example, adapter_scale=0.0)


def test_finetune_paints_with_unets(load_files: Callable[..., SimpleNamespace], base: Path) -> None:
    finetune = load_files("finetune", "painting")
    with pytest.raises(ConfigError, match="SD3Transformer2DModel.*name a UNet"):
        finetune.painting.Painting(SimpleNamespace(unet=str(base)), training.make_accelerator(device="cpu"))
