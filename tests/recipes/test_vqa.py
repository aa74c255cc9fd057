"""The recipe vqa: its data, a short run on the real models, and what cannot be known without a picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import mmattn
from mmattn import models, pipelines, training
from tests.models.test_pretrained import need, need_espeak
from tests.recipes.runs import settings_of

RECIPE = "vqa"


@pytest.fixture(scope="module")
def recipe(recipe: SimpleNamespace) -> SimpleNamespace:
    for name in ("smollm2", "efficientnet-lite0", "easy-vqa"):
        need(name)
    return recipe


@pytest.fixture(scope="module")
def tokenizer(recipe: SimpleNamespace) -> Any:
    return pipelines.load_language_model("smollm2", "cpu")[1]


def test_without_a_picture_two_thirds_are_right(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The figures of the public split: what a model must be above."""
    data = recipe.data.load_data(tokenizer)
    assert (len(data.train), len(data.test), len(data.prompts), len(data.answers)) == (38575, 9673, 107, 13)
    assert not set(data.train.pictures) & set(data.test.pictures)
    rows = {row["name"]: row for row in recipe.train.prior_rows(data)}
    usual = rows["the usual answer to each question"]
    shares = [round(100 * usual[kind], 1) for kind in ("all", "yes or no", "shape", "colour")]
    assert shares == [66.9, 82.5, 34.3, 12.0], "of equally frequent answers the first one in the alphabet"
    assert tokenizer.decode(data.prompts[0]).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_questions_in_four_spellings(recipe: SimpleNamespace, tokenizer: Any) -> None:
    data, other = (recipe.data.load_data(tokenizer, seed=seed, ways=4) for seed in (0, 1))
    assert data.train.prompt.unique().tolist() == list(range(4 * 107)), "each question is trained in each spelling"
    assert torch.equal(data.test.prompt, other.test.prompt) and not torch.equal(data.train.prompt, other.train.prompt)
    for text, prompt in zip(data.train.text.tolist(), data.train.prompt.tolist(), strict=True):
        assert data.spelled[prompt] in recipe.data.spellings(data.texts[text])


@pytest.mark.parametrize("given", [{"adapter": {"num_heads": 3}}, {"spoken": True}])
def test_no_setting_is_dropped_beside_start(recipe: SimpleNamespace, given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="start"):
        recipe.settings.Config(start="adapter", **given)


def test_whole_answers_are_trained(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The first token of each answer, and at each eighth question the rest of it, to its end."""
    data = recipe.data.load_data(tokenizer, 173, 5, ways=4)
    texts, tokens = recipe.data.training_tokens(data)
    firsts = tokens[tokens[:, 0] < len(data.prompts)]
    assert torch.equal(firsts[:, 0], data.train.prompt) and torch.equal(firsts[:, 1], data.train.picture)
    assert torch.equal(firsts[:, 2], data.tokens[data.train.answer])
    texts_of = [tokenizer.decode([*texts[row], token]) for row, _, token in tokens.tolist()]
    whole = [text for text in texts_of if text.endswith("<|im_end|>")]
    assert len(whole) == 22 == -(-173 // 8)
    answers = [data.answers[answer].capitalize() for answer in data.train.answer[::8].tolist()]
    assert [text.split("assistant\n")[1] for text in whole] == [f"{answer}<|im_end|>" for answer in answers]
    questions = [data.texts[text].rstrip("?") for text in data.train.text[::8].tolist()]
    assert all(question in text.lower() for question, text in zip(questions, whole, strict=True))
    few = recipe.data.load_data(tokenizer, 173, 1)
    assert sorted(map(str, recipe.data.prior_rows(few)[0].values())).count("None") == 3, "two kinds have no question"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_the_shipped_adapter(recipe: SimpleNamespace, dtype: torch.dtype) -> None:
    """In any spelling nearly all are right; with the pictures of others, those that the usual answer fits."""
    pipe, rows = mmattn.pipeline("assets/vqa", device="cpu", dtype=dtype), models.load_easy_vqa("test")[::401]
    pictures = [row.picture for row in rows]

    def right(seen: list[Path], spelling: int) -> int:
        texts = [recipe.data.spellings(row.text)[spelling] for row in rows]
        return sum(answer.lower() == row.answer for answer, row in zip(pipe(seen, texts), rows, strict=True))

    assert len(rows) == 25 and right(pictures, 0) >= 24 and right(pictures, 3) >= 24
    assert right([*pictures[7:], *pictures[:7]], 0) <= 20


@pytest.mark.slow
def test_the_shipped_pipeline_answers_as_the_recipe_does(recipe: SimpleNamespace, tmp_path: Path) -> None:
    """The same first tokens, in the spellings of the recipe's test; blanks around a question change nothing."""
    pipe = mmattn.pipeline("assets/vqa", device="cpu")
    data = recipe.data.load_data(pipe.tokenizer, 5, 200, ways=4)
    memory = recipe.data.encode(pipe.encoder, data.test, tmp_path)
    with training.cached_prompts(pipe.model, data.prompts) as prompts:
        tokens = recipe.train.predict(pipe.model, prompts, data, memory)
    texts = [f" {data.spelled[prompt]} " for prompt in data.test.prompt.tolist()]
    answers = pipe([row.picture for row in data.test.rows], texts, max_new_tokens=1)
    assert answers == [text.strip() for text in pipe.tokenizer.batch_decode(tokens[:, None])]


@pytest.mark.slow
def test_the_table_of_a_pipeline(recipe: SimpleNamespace) -> None:
    head, _, *rows = recipe.ask.main("assets/vqa", 17).splitlines()
    assert "all questions" in head and [row.split("|")[1].strip() for row in rows] == ['"Is it red?"', '"is it red"']


@pytest.mark.slow
def test_the_adapter_of_a_run(recipe: SimpleNamespace, finished: Callable[[str], Path]) -> None:
    run = finished("vqa")
    assert (run / "answers.png").stat().st_size > 10_000 and (run / "loss.png").is_file()
    pipe, asked = mmattn.pipeline(run / "adapter", device="cpu"), models.load_easy_vqa("test")[0]
    data = recipe.data.load_data(pipe.tokenizer, 5, 5)
    assert [pipe.make_prompt(text) for text in data.spelled] == data.prompts
    prompt = pipe.make_prompt(asked.text)
    with training.cached_prompts(pipe.model, [prompt]) as prompts:
        logits = pipe.model(**prompts[[0]], memory=pipe.make_memory([asked.picture])).logits[:, -1]
    assert pipe(asked.picture, asked.text, max_new_tokens=1) == pipe.tokenizer.decode(logits.argmax(-1)).strip()
    model = mmattn.load(pipelines.load_language_model("smollm2", "cpu")[0], run / "adapter")
    block = model.adapter("default").block(28)
    assert block.calibration is not None and torch.isfinite(block.calibration.spread).all()


@pytest.mark.slow
def test_a_short_run_with_spoken_questions(recipe: SimpleNamespace, tmp_path: Path) -> None:
    need("whisper-base"), need_espeak()
    settings = settings_of("vqa", tmp_path)
    speech = {"voices": 1, "max_steps": 3, "adapter": settings["adapter"] | {"layers": [26]}}
    run = recipe.train.main(settings | {"train_questions": 9, "spoken": True, "speech": speech})
    content = json.loads((run / "table.json").read_text())
    rows = {row.pop("name"): row for row in content["rows"]}
    bare, neither = rows["frozen model, neither"], rows["adapters, neither"]
    assert [bare[kind] for kind in ("all", "yes or no")] == [neither[kind] for kind in ("all", "yes or no")]
    assert {f"adapters, {kind}" for kind in ("sounds shuffled", "pictures shuffled", "both right")} <= set(rows)
    assert (run / "loss.png").is_file()
    assert content["voices"] == {"train": 1, "test": 1} and "1 voices by turns" in (run / "table.md").read_text()
    lm = pipelines.load_language_model("smollm2", "cpu")[0]
    model = mmattn.load(lm, run / "speech", "speech")
    mmattn.load(lm, run / "picture", "picture")
    assert list(model.adapters) == ["speech", "picture"]


@pytest.mark.slow
def test_hidden_states_of_questions_differ_little(recipe: SimpleNamespace, tokenizer: Any) -> None:
    """The figures on the page of the gated adapter: why it is calibrated."""
    data = recipe.data.load_data(tokenizer)
    model = mmattn.attach(pipelines.load_language_model("smollm2", "cpu")[0], mmattn.GatedAdapter(112, layers=[24]))
    with training.cached_prompts(model, data.prompts) as prompts:
        states = prompts.states[:, -1]
    assert states.norm(dim=-1).median() == pytest.approx(484, rel=0.01)
    assert (states - states.mean(0)).norm(dim=-1).median() == pytest.approx(75, rel=0.01)
