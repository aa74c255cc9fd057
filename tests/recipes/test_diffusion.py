"""The diffusion recipe: measures and sentences of digits, and both stages from beginning to end, with both hosts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel
from PIL import Image

import mmattn
from mmattn import inspect
from mmattn.encoders.style import InkProcessor
from mmattn.errors import ConfigError
from mmattn.pipelines import load_diffusion_host
from mmattn.recipes import find_recipe, load_recipe
from tests import tiny, tiny_pipeline
from tests.recipes.runs import DIFFUSION

RECIPE = "diffusion"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(recipe: SimpleNamespace) -> Any:
    """Training digits, held-out digits, and the scale of their measures."""
    return recipe.data.load_data()


@pytest.fixture(scope="module")
def transformer(finished: Callable[[str], Path]) -> Path:
    """The folder of a stage A with a transformer of three steps."""
    return finished("diffusion transformer")


def test_stage_a_trains_by_its_settings(recipe: SimpleNamespace) -> None:
    def train(**changed: Any) -> list[float]:
        torch.manual_seed(0)
        layer, x = torch.nn.Linear(3, 2), torch.randn(7, 3)
        optim = recipe.settings.OptimSettings(max_steps=6, warmup_steps=1, learning_rate=0.1, **changed)
        steps = recipe.models.minimise(layer, lambda: layer(x).square().mean(), optim, label="", progress=False)
        return list(steps)

    assert train() == train()
    for name, value in (
        ("adam_beta2", 0.5), ("lr_scheduler_type", "linear"), ("weight_decay", 0.5), ("max_grad_norm", 0.01)
    ):  # fmt: skip
        assert train(**{name: value}) != train(), name


def perturb(host: Any) -> None:
    """Add noise to all weights, so that layers that start at 0 do something."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for weight in host.unet.parameters():
            weight.add_(0.1 * torch.randn_like(weight))


def strokes(thick: float = 2.0, slant: float = 0.0) -> torch.Tensor:
    """A picture (1, 1, 32, 32) of one slanting stroke."""
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    return ((x - 16 - slant * (16 - y)).abs() < thick).float()[None, None]


def test_measures_match_their_words(recipe: SimpleNamespace) -> None:
    def measure(ink: torch.Tensor) -> torch.Tensor:
        return recipe.data.measure_style(2 * ink - 1)[0]

    plain = measure(strokes())
    assert measure(strokes(thick=4.0))[0] > 1.5 * plain[0]
    assert abs(plain[1]) < 1e-3 and measure(strokes(slant=0.4))[1] == pytest.approx(0.4, abs=0.05)
    wide = torch.cat([strokes()[..., 8:], strokes()[..., :8]], -1) + strokes()
    assert measure(wide.clamp(max=1))[2] > 1.5 * plain[2]
    assert recipe.data.style_words(torch.tensor([0.7, -0.9, 0.5])) == "thick, slanted left"
    assert recipe.data.style_words(torch.tensor([0.1, 0.0, -0.5])) == "as most are"


def test_digits_are_split_and_scaled_on_the_training_part(data: Any) -> None:
    train, held_out, _ = data
    assert len(train) + len(held_out) == 1797 and len(held_out) == 359
    assert set(held_out.classes.tolist()) == set(range(10))
    for digit in range(10):
        measures = train.measures[train.classes == digit]
        assert torch.allclose(measures.mean(0), torch.zeros(3), atol=1e-4)
        assert torch.allclose(measures.std(0), torch.ones(3))
    assert train.pictures.min() == -1 and train.pictures.max() == 1


def test_sentences_are_true_and_in_the_vocabulary(recipe: SimpleNamespace, data: Any) -> None:
    random, train, sentences = Random(0), data[0], []
    words = set(recipe.models.make_tokenizer(recipe.data.vocabulary()).get_vocab())
    for measures, digit in zip(train.measures[:200], train.classes[:200].tolist(), strict=True):
        signs = recipe.data.choose_attributes(measures, random)
        for name, sign in signs.items():
            assert sign * measures[list(recipe.data.WORDS).index(name)] > recipe.data.THRESHOLD
        sentences.append(recipe.data.describe(digit, signs, random))
        assert set(sentences[-1].split()) <= words
        assert not {recipe.data.NUMBERS[digit], str(digit)}.isdisjoint(sentences[-1].split())
    assert len(set(sentences)) > 100 and recipe.data.describe(7, {"stroke": 1}, Random(3)) == "thick 7"


def test_judges_are_right_about_held_out_digits(recipe: SimpleNamespace, data: Any) -> None:
    train, held_out, scale = data
    judge = recipe.measure.Judge(train, scale)
    assert (judge.read(held_out.pictures) == held_out.classes).float().mean() >= 0.98
    assert min(recipe.measure.similarity(held_out.measures, judge.style(held_out.pictures))) > 0.85
    prompts = recipe.measure.Prompts([""] * len(held_out), held_out.classes, held_out.measures.sign().long())
    figures = judge.obedience(prompts, held_out.pictures)
    assert figures["read"] >= 0.98 and figures["attribute"] == 1
    prompts.signs.neg_()
    assert judge.obedience(prompts, held_out.pictures)["attribute"] == 0
    assert judge.frechet(held_out.pictures) < 2 < judge.frechet(held_out.pictures[held_out.classes < 5])


def test_an_example_is_another_digit_in_a_similar_style(recipe: SimpleNamespace, data: Any) -> None:
    train = data[0]
    near = recipe.train_style.nearest(train, list(range(len(train))))
    assert (train.classes[near] != train.classes[:, None]).all()
    apart = (train.measures[near] - train.measures[:, None]).norm(dim=-1).mean()
    assert apart < 0.4 * torch.pdist(train.measures).mean()


@pytest.mark.parametrize(("parameters", "text_dim"), [(20_011, 64), (57_472, 64), (90_001, 34)])
def test_the_control_has_as_many_parameters(recipe: SimpleNamespace, parameters: int, text_dim: int) -> None:
    module = recipe.models.Concatenated(parameters, text_dim)
    assert abs(sum(weight.numel() for weight in module.parameters()) - parameters) < 130


@pytest.mark.slow
def test_stage_a_with_a_unet(run: Path) -> None:
    files = {"config.resolved.yaml", "metrics.jsonl", "loss.png", "table.json", "table.md", "samples.png"}
    assert files | {"words.png"} <= {path.name for path in run.iterdir()}
    for trace in inspect.load_traces(run):
        assert (trace.words[0], trace.words[-1], trace.queries) == ("[begin]", "[end]", "sources")
        assert torch.allclose(trace.weights.sum(2), torch.ones(()), atol=1e-4), "attention sums to 1"
    prompts = load_diffusion_host(run).prompts
    text, mask = prompts(["a seven", "a thick seven slanted left"])
    assert text.shape[:2] == mask.shape and mask.sum(1).tolist() == [4, 7]
    _, mask = prompts(["a seven", None])
    assert mask.sum(1).tolist() == [4, 0], "a row without a sentence reads nothing"


@pytest.mark.slow
def test_stage_a_with_a_transformer(recipe: SimpleNamespace, transformer: Path) -> None:
    assert not (transformer / "unet").exists()
    assert "transformer and text encoder: 3 steps" in (transformer / "table.md").read_text()
    host = load_diffusion_host(transformer)
    assert isinstance(host.unet, SD3Transformer2DModel) and (host.size, host.channels) == (16, 1)
    states, mask = host.prompts(["a seven", "a thick seven slanted left", None])
    assert states.shape == (3, 16, 64) and mask.all(), "padding is read, as in training"
    pooled = host.inputs(["a seven", "a thick seven slanted left", None])["pooled_projections"]
    assert torch.equal(pooled, states[torch.arange(3), [3, 6, 1]]), "the state of [end]"
    assert torch.equal(states[2:], host.prompts.null())


@pytest.mark.slow
def test_text_and_pooled_state_reach_a_transformer(recipe: SimpleNamespace, transformer: Path) -> None:
    host = load_diffusion_host(transformer)
    perturb(host)
    model = recipe.models.attach_without_adapter(host)
    assert not model.through_core

    def draw(sentence: str, guidance_scale: float = 1.0) -> torch.Tensor:
        return recipe.pictures.draw(model, host, [sentence], 2, guidance_scale, seed=3)

    seven, inputs = draw("a seven"), host.inputs
    assert seven.isfinite().all() and seven.abs().max() <= 1
    assert not torch.allclose(seven, draw("a two")) and not torch.allclose(seven, draw("a seven", 3.0))
    host.inputs = lambda prompts: inputs([None] * len(prompts))  # type: ignore[method-assign]
    assert not torch.allclose(seven, draw("a seven"))


@pytest.mark.slow
def test_a_masked_example_changes_nothing_in_the_control(recipe: SimpleNamespace, transformer: Path) -> None:
    host = load_diffusion_host(transformer)
    perturb(host)
    concatenated = recipe.models.Concatenated(20_011, 64)
    noisy, tokens = torch.randn(2, 1, 16, 16), torch.randn(2, 16, 64)
    model, times, sentences = mmattn.attach(host.unet).use_core(), torch.tensor([3, 900]), ["a seven", None]
    (text, mask), inputs = host.prompts(sentences), host.inputs(sentences)

    def predict(visible: bool) -> torch.Tensor:
        memory = mmattn.Memory(tokens, torch.full((2, 16), visible))
        return recipe.models.predict(model, noisy, times, *concatenated(text, mask, memory), inputs)

    plain = recipe.models.predict(model, noisy, times, text, mask, inputs)
    assert plain.isfinite().all() and torch.allclose(plain, predict(False), atol=1e-5)
    assert not torch.allclose(plain, predict(True), atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "transformer"])
def test_stage_b_and_drawing(
    recipe: SimpleNamespace, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stage_a, out = request.getfixturevalue({"unet": "run"}.get(kind, kind)), tmp_path / "style"
    before = {path.name: path.read_bytes() for path in (stage_a / kind).iterdir()}
    recipe.train.main({**DIFFUSION, "progress": False, "stage": "style", "unet": str(stage_a), "out": str(out)})
    assert {path.name: path.read_bytes() for path in (stage_a / kind).iterdir()} == before
    rows = {row.pop("name"): row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert len(rows) == 11 and {"concatenated with the text", "concatenated, shuffled examples"} <= set(rows)
    assert rows["decoupled, adapter_scale 0.0"] == rows["no example"]
    traces = inspect.load_traces(out)
    grids = [trace.word_grid for trace in traces]
    assert grids == ([None, (4, 4)] * 4 if kind == "unet" else [(4, 4)] * 4)
    assert all(torch.allclose(trace.weights.sum(2), torch.ones(()), atol=1e-4) for trace in traces)

    example = Image.fromarray((255 - 255 * strokes(slant=0.3)[0, 0]).byte().numpy())
    pipe: Any = mmattn.pipeline(out / "adapter", device="cpu")
    plain, off = (
        pipe("a thick seven", num_inference_steps=2, generator=torch.Generator().manual_seed(3), **more).tobytes()
        for more in ({}, {"images": example, "adapter_scale": 0.0})
    )
    assert plain == off


@pytest.mark.slow
def test_finetune_refuses_a_transformer(transformer: Path) -> None:
    painting = load_recipe(find_recipe("finetune").folder, "painting")
    with pytest.raises(ConfigError, match="SD3Transformer2DModel.*name a UNet"):
        painting.Painting(SimpleNamespace(unet=str(transformer)), SimpleNamespace(device="cpu"))


@pytest.mark.slow
def test_a_published_stable_diffusion_stays_frozen(recipe: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    tiny_pipeline.make_pipeline(tiny_pipeline.make_tokenizer(tmp_path / "words")).save_pretrained(tmp_path / "sd")
    out = tmp_path / "run"
    recipe.train.main({**DIFFUSION, "progress": False, "stage": "style", "unet": str(tmp_path / "sd"), "out": str(out)})
    rows = {row.pop("name"): row for row in json.loads((out / "table.json").read_text())["rows"]}
    assert rows["decoupled, adapter_scale 0.0"] == rows["no example"]
    host = load_diffusion_host(tmp_path / "sd")
    assert (host.size, host.channels) == (32, 3)
    model, memory = mmattn.load(host.unet, out / "adapter").use_core(), mmattn.Memory(torch.randn(1, 16, 64))

    def draw(**options: Any) -> torch.Tensor:
        return recipe.pictures.draw(model, host, ["a seven"], 2, 2.0, seed=3, **options)

    assert torch.equal(draw(), draw(memory=memory, adapter_scale=0))
    assert tiny.differs(draw(memory=memory, adapter_scale=1000), draw())  # its training was short


def test_examples_are_brought_to_the_frame_of_the_digits(data: Any) -> None:
    correlations = []
    for digit in data[1].pictures[:20]:
        canvas = torch.ones(100, 140)
        canvas[20:68, 60:108] -= torch.nn.functional.interpolate((digit[None] + 1) / 2, size=(48, 48))[0, 0]
        ink = InkProcessor(16)([canvas])
        assert ink.shape == (1, 1, 16, 16)
        assert torch.allclose(InkProcessor(16)([1 - canvas]), ink, atol=0.02), "light on dark is the same"
        correlations.append(torch.corrcoef(torch.stack([ink.flatten(), digit.flatten()]))[0, 1])
    assert torch.stack(correlations).mean() > 0.9


def test_a_folder_without_a_host(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run of the recipe diffusion and no Stable Diffusion"):
        load_diffusion_host(tmp_path)
